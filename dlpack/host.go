package dlpack

import (
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// alignment is that of allocated memory, as DLPack requires.
const alignment = 256

// maxBytes is more than any host has. Larger requests could crash an allocator.
const maxBytes = 1 << 46

// Borrow makes a tensor of memory that the caller owns. nil strides mean compact and row-major. The memory
// must stay valid while the tensor is used.
func Borrow(data unsafe.Pointer, d Device, t DType, shape, strides []int64) (*Tensor, error) {
	if strides != nil && len(strides) != len(shape) {
		return nil, fmt.Errorf("%w: %d strides, expected one for each of %d dimensions", ErrLayout, len(strides),
			len(shape))
	}
	v := &Tensor{
		Data: data, Device: d, NDim: int32(min(len(shape), MaxRank+1)), DType: t,
		Shape:   unsafe.SliceData(slices.Clone(shape)),
		Strides: unsafe.SliceData(slices.Clone(strides)),
	}
	if err := v.Validate(); err != nil {
		return nil, err
	}
	return v, nil
}

// New makes a compact tensor of zeros on the Go heap. The garbage collector frees it, so C must not keep it
// after a call returns.
func New(t DType, shape ...int64) (*Tensor, error) {
	bytes, err := compact(t, shape)
	if err != nil {
		return nil, err
	}
	dims := make([]int64, 2*len(shape)) // shape, then strides
	v := &Tensor{
		Device: Device{Type: CPU}, NDim: int32(len(shape)), DType: t,
		Shape: unsafe.SliceData(dims), Strides: unsafe.SliceData(dims[len(shape):]),
	}
	v.setCompact(shape)
	if bytes > 0 {
		v.Data = unsafe.Pointer(unsafe.SliceData(make([]byte, bytes+alignment-1)))
		v.Data = unsafe.Add(v.Data, -uintptr(v.Data)%alignment)
	}
	return v, nil
}

// FromFloat64s makes a tensor as New does, with elements in row-major order.
func FromFloat64s(t DType, values []float64, shape ...int64) (*Tensor, error) {
	v, err := New(t, shape...)
	if err != nil {
		return nil, err
	}
	if err := v.SetFloat64s(values); err != nil {
		return nil, err
	}
	return v, nil
}

// Number are the element types that Go has too.
type Number interface {
	float32 | float64 | int32 | int64 | uint8 | bool
}

// FromSlice makes a compact tensor of the elements of values, which both share from then on. Without a shape
// it has one dimension. Like New's, C must not keep it after a call returns.
func FromSlice[T Number](values []T, shape ...int64) (*Tensor, error) {
	if shape == nil {
		shape = []int64{int64(len(values))}
	}
	v, err := Borrow(unsafe.Pointer(unsafe.SliceData(values)), Device{Type: CPU}, dtypeOf[T](), shape, nil)
	if err == nil && v.Len() != int64(len(values)) {
		return nil, fmt.Errorf("%w: %d values, expected %d for shape %v", ErrShape, len(values), v.Len(), shape)
	}
	return v, err
}

func dtypeOf[T Number]() DType {
	switch any(*new(T)).(type) {
	case float32:
		return Float32
	case float64:
		return Float64
	case int32:
		return Int32
	case int64:
		return Int64
	case uint8:
		return Uint8
	}
	return Bool
}

// compact checks a shape and returns the bytes of its elements.
func compact(t DType, shape []int64) (uint64, error) {
	v := Tensor{NDim: int32(min(len(shape), MaxRank+1)), DType: t, Shape: unsafe.SliceData(shape)}
	bytes, err := v.bytes()
	if err == nil && bytes > maxBytes {
		err = fmt.Errorf("%w: %d bytes, expected at most %d", ErrMemory, bytes, int64(maxBytes))
	}
	return bytes, err
}

// setCompact fills the arrays that Shape and Strides point to.
func (t *Tensor) setCompact(shape []int64) {
	copy(t.Dims(), shape)
	strides, stride := unsafe.Slice(t.Strides, t.NDim), int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= shape[i]
	}
}

// Float64s returns the elements of a host tensor in row-major order. A bool is 0 or 1.
func (t *Tensor) Float64s() ([]float64, error) { return elements[float64](t) }

// Float32s is Float64s, rounded to float32.
func (t *Tensor) Float32s() ([]float32, error) { return elements[float32](t) }

func elements[T float32 | float64](t *Tensor) ([]T, error) {
	c, err := t.codec()
	if err != nil {
		return nil, err
	}
	values := make([]T, 0, t.Len())
	t.each(func(p unsafe.Pointer) { values = append(values, T(c.load(p))) })
	return values, nil
}

// SetFloat64s sets the elements of a host tensor in row-major order, each rounded to the nearest value of
// the dtype, ties to even. Integers take the truncated value, and a bool is whether it is another than 0.
func (t *Tensor) SetFloat64s(values []float64) error {
	c, err := t.codec()
	if err != nil {
		return err
	}
	if int64(len(values)) != t.Len() {
		return fmt.Errorf("%w: %d values, expected %d", ErrShape, len(values), t.Len())
	}
	i := 0
	t.each(func(p unsafe.Pointer) { c.store(p, values[i]); i++ })
	return nil
}

// each calls f with the address of each element in row-major order.
func (t *Tensor) each(f func(unsafe.Pointer)) {
	size := t.DType.Size()
	var walk func(dim int, p unsafe.Pointer)
	walk = func(dim int, p unsafe.Pointer) {
		if dim == t.Rank() {
			f(p)
			return
		}
		step := t.Stride(dim) * size
		for i := range t.Dim(dim) {
			walk(dim+1, unsafe.Add(p, i*step))
		}
	}
	if t.Len() > 0 {
		walk(0, t.Pointer())
	}
}

// codec reads and writes one element.
type codec struct {
	load  func(unsafe.Pointer) float64
	store func(unsafe.Pointer, float64)
}

// nativeCodec is for types that Go has.
func nativeCodec[T float32 | float64 | int32 | int64 | uint8]() codec {
	return codec{
		load:  func(p unsafe.Pointer) float64 { return float64(*(*T)(p)) },
		store: func(p unsafe.Pointer, v float64) { *(*T)(p) = T(v) },
	}
}

// float16Codec is for 16-bit formats.
func float16Codec(f format) codec {
	return codec{
		load:  func(p unsafe.Pointer) float64 { return f.decode(*(*uint16)(p)) },
		store: func(p unsafe.Pointer, v float64) { *(*uint16)(p) = f.encode(v) },
	}
}

var codecs = map[DType]codec{
	Float16:  float16Codec(format{mantissa: 10, bias: 15}),
	BFloat16: float16Codec(format{mantissa: 7, bias: 127}),
	Float32:  nativeCodec[float32](),
	Float64:  nativeCodec[float64](),
	Int32:    nativeCodec[int32](),
	Int64:    nativeCodec[int64](),
	Uint8:    nativeCodec[uint8](),
	Bool: {
		load: func(p unsafe.Pointer) float64 {
			if *(*bool)(p) {
				return 1
			}
			return 0
		},
		store: func(p unsafe.Pointer, v float64) { *(*bool)(p) = v != 0 },
	},
}

// format is a binary floating-point format of 16 bits.
type format struct{ mantissa, bias int }

// encode rounds directly from float64. Rounding to float32 first could round twice.
func (f format) encode(v float64) uint16 {
	sign := uint16(math.Float64bits(v) >> 48 & 0x8000)
	infinity := uint16(2*f.bias+1) << f.mantissa
	switch {
	case math.IsNaN(v):
		return sign | infinity | 1<<(f.mantissa-1)
	case math.IsInf(v, 0):
		return sign | infinity
	case v == 0:
		return sign
	}
	lowest := 1 - f.bias // exponent of the smallest normal and of all subnormal numbers
	exponent := max(math.Ilogb(v), lowest)
	if exponent > f.bias {
		return sign | infinity
	}
	units := uint16(math.RoundToEven(math.Ldexp(math.Abs(v), f.mantissa-exponent)))
	// units includes the hidden bit of a normal number, which adds 1 to the exponent field, as it should. A
	// carry out of the mantissa increments the exponent, possibly to infinity.
	return sign | (uint16(exponent-lowest)<<f.mantissa + units)
}

func (f format) decode(h uint16) float64 {
	mantissa, exponent := int(h)&(1<<f.mantissa-1), int(h&0x7fff)>>f.mantissa
	var v float64
	switch {
	case exponent == 2*f.bias+1 && mantissa != 0:
		return math.NaN()
	case exponent == 2*f.bias+1:
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(float64(mantissa), 1-f.bias-f.mantissa)
	default:
		v = math.Ldexp(float64(mantissa|1<<f.mantissa), exponent-f.bias-f.mantissa)
	}
	if h&0x8000 != 0 {
		v = -v
	}
	return v
}

// codec returns the codec of t's dtype, or an error if t is not a valid host tensor of such a dtype.
func (t *Tensor) codec() (codec, error) {
	if err := t.Validate(); err != nil {
		return codec{}, err
	}
	if !t.Device.Host() {
		return codec{}, fmt.Errorf("%w: it is on %v, expected host memory; copy it to the host first",
			ErrDevice, t.Device)
	}
	if c, ok := codecs[t.DType]; ok {
		return c, nil
	}
	return codec{}, fmt.Errorf(
		"%w: %v, expected float16, bfloat16, float32, float64, int32, int64, uint8 or bool", ErrDType, t.DType)
}
