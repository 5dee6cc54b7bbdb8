package dlpack_test

import (
	"crypto/sha256"
	"encoding/hex"
	"math"
	"math/big"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
)

func TestVendoredHeader(t *testing.T) {
	header, err := os.ReadFile("dlpack.h")
	require.NoError(t, err)
	sum := sha256.Sum256(header)
	page, err := os.ReadFile("VENDOR.md")
	require.NoError(t, err)
	assert.Contains(t, string(page), hex.EncodeToString(sum[:]))
	assert.Contains(t, string(header), "#define DLPACK_MAJOR_VERSION 1")
	assert.Contains(t, string(header), "#define DLPACK_MINOR_VERSION 3")
}

func TestLayout(t *testing.T) {
	var v dlpack.Tensor
	var m dlpack.Managed
	var w dlpack.ManagedVersioned
	assert.EqualValues(t, 48, unsafe.Sizeof(v))
	assert.EqualValues(t, 64, unsafe.Sizeof(m))
	assert.EqualValues(t, 80, unsafe.Sizeof(w))
	assert.Equal(t, []uintptr{0, 8, 16, 20, 24, 32, 40}, []uintptr{
		unsafe.Offsetof(v.Data), unsafe.Offsetof(v.Device), unsafe.Offsetof(v.NDim), unsafe.Offsetof(v.DType),
		unsafe.Offsetof(v.Shape), unsafe.Offsetof(v.Strides), unsafe.Offsetof(v.ByteOffset)})
	assert.Equal(t, []uintptr{0, 8, 16, 24, 32}, []uintptr{
		unsafe.Offsetof(w.Version), unsafe.Offsetof(w.Context), unsafe.Offsetof(w.Deleter),
		unsafe.Offsetof(w.Flags),
		unsafe.Offsetof(w.Tensor)})
	assert.Equal(t, []uintptr{0, 48, 56}, []uintptr{
		unsafe.Offsetof(m.Tensor), unsafe.Offsetof(m.Context), unsafe.Offsetof(m.Deleter)})
}

// ints returns the array that a Shape or Strides field points to.
func ints(v ...int64) *int64 { return unsafe.SliceData(v) }

var (
	cell  [64]byte
	host  = dlpack.Device{Type: dlpack.CPU}
	valid = dlpack.Tensor{
		Data: unsafe.Pointer(&cell), Device: host, NDim: 2, DType: dlpack.Float32, Shape: ints(2, 3),
	}
)

func TestValidateRefuses(t *testing.T) {
	const most = math.MaxInt64
	cases := []struct {
		name    string
		edit    func(*dlpack.Tensor)
		want    error
		message string
	}{
		{"rank", func(v *dlpack.Tensor) { v.NDim = -1 }, dlpack.ErrShape, "ndim is -1, expected 0 to 64"},
		{"high rank", func(v *dlpack.Tensor) { v.NDim = 65 }, dlpack.ErrShape, "ndim is 65, expected 0 to 64"},
		{"shape", func(v *dlpack.Tensor) { v.Shape = nil }, dlpack.ErrNull, "shape is NULL with ndim 2"},
		{"bits", func(v *dlpack.Tensor) { v.DType.Bits = 0 }, dlpack.ErrDType, "0 bits in 1 lanes"},
		{"lanes", func(v *dlpack.Tensor) { v.DType.Lanes = 0 }, dlpack.ErrDType, "32 bits in 0 lanes"},
		{"dimension", func(v *dlpack.Tensor) { v.Shape = ints(2, -3) }, dlpack.ErrShape, "dimension 1 is -3"},
		{"count", func(v *dlpack.Tensor) { v.Shape = ints(1<<32, 1<<32) }, dlpack.ErrShape, "more than 2^63 bytes"},
		{"bytes", func(v *dlpack.Tensor) { v.Shape = ints(1<<31, 1<<30) }, dlpack.ErrShape, "more than 2^63 bytes"},
		{"data", func(v *dlpack.Tensor) { v.Data = nil }, dlpack.ErrNull,
			"data is NULL, expected the address of 24 bytes"},
		{"stride", func(v *dlpack.Tensor) { v.Strides = ints(most, 1) }, dlpack.ErrLayout, "beyond 64 bits"},
		{"negative", func(v *dlpack.Tensor) { v.Strides = ints(math.MinInt64, 1) }, dlpack.ErrLayout,
			"beyond 64 bits"},
		{"two strides", func(v *dlpack.Tensor) { v.Strides = ints(1<<60, 1<<60) }, dlpack.ErrLayout,
			"beyond 64 bits"},
		{"below zero", func(v *dlpack.Tensor) { v.Strides = ints(-1<<58, 1) }, dlpack.ErrLayout, "address space"},
		{"byte_offset", func(v *dlpack.Tensor) { v.ByteOffset = math.MaxUint64 }, dlpack.ErrLayout,
			"byte_offset 18446744073709551615"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			v := valid
			c.edit(&v)
			err := v.Validate()
			require.ErrorIs(t, err, c.want)
			assert.ErrorContains(t, err, c.message)
		})
	}
	require.ErrorIs(t, (*dlpack.Tensor)(nil).Validate(), dlpack.ErrNull)
}

func TestValidateAccepts(t *testing.T) {
	for name, edit := range map[string]func(*dlpack.Tensor){
		"compact": func(*dlpack.Tensor) {},
		"strides": func(v *dlpack.Tensor) { v.Strides = ints(4, 1) },
		"negative stride": func(v *dlpack.Tensor) {
			v.Data, v.Strides = unsafe.Pointer(&cell[16]), ints(-4, 1)
		},
		"repeated":          func(v *dlpack.Tensor) { v.Strides = ints(0, 0) },
		"rank 0":            func(v *dlpack.Tensor) { v.NDim, v.Shape = 0, nil },
		"no elements":       func(v *dlpack.Tensor) { v.Data, v.Shape = nil, ints(0, 3) },
		"no elements, huge": func(v *dlpack.Tensor) { v.Data, v.Shape = nil, ints(math.MaxInt64, 0) },
		"stride of one, ignored": func(v *dlpack.Tensor) {
			v.Shape, v.Strides = ints(1, 3), ints(math.MaxInt64, 1)
		},
		"byte_offset": func(v *dlpack.Tensor) { v.ByteOffset = 8 },
	} {
		t.Run(name, func(t *testing.T) {
			v := valid
			edit(&v)
			assert.NoError(t, v.Validate())
		})
	}
}

func TestAccessors(t *testing.T) {
	v := valid
	v.NDim, v.Shape = 3, ints(2, 3, 4)
	assert.Equal(t, 3, v.Rank())
	assert.Equal(t, []int64{2, 3, 4}, v.Dims())
	assert.Equal(t, []int64{12, 4, 1}, []int64{v.Stride(0), v.Stride(1), v.Stride(2)},
		"NULL strides are compact")
	assert.EqualValues(t, 24, v.Len())
	v.Strides = ints(1, 2, 6)
	assert.Equal(t, []int64{1, 2, 6}, []int64{v.Stride(0), v.Stride(1), v.Stride(2)})
	v.ByteOffset = 8
	assert.Equal(t, unsafe.Pointer(&cell[8]), v.Pointer())
	v.Data = nil
	assert.Nil(t, v.Pointer(), "byte_offset does not make an address of NULL")
	scalar := dlpack.Tensor{DType: dlpack.Float32, Data: unsafe.Pointer(&cell)}
	assert.EqualValues(t, 1, scalar.Len())
	assert.Empty(t, scalar.Dims())
}

func TestImport(t *testing.T) {
	m := dlpack.ManagedVersioned{Version: dlpack.Version{Major: 1, Minor: 9}, Tensor: valid}
	v, err := m.Import()
	require.NoError(t, err, "a newer minor version only adds enumerators")
	assert.Same(t, &m.Tensor, v)

	m.Version.Major = 2
	m.Tensor.NDim = -1
	_, err = m.Import()
	require.ErrorIs(t, err, dlpack.ErrVersion, "the version comes before anything else")
	assert.ErrorContains(t, err, "it is 2.9, expected 1.x; ask the producer for version 1")

	u := dlpack.Managed{Tensor: valid}
	v, err = u.Import()
	require.NoError(t, err)
	assert.Same(t, &u.Tensor, v)

	_, err = (*dlpack.ManagedVersioned)(nil).Import()
	require.ErrorIs(t, err, dlpack.ErrNull)
	_, err = (*dlpack.Managed)(nil).Import()
	require.ErrorIs(t, err, dlpack.ErrNull)
}

func TestImportDoesNotAllocate(t *testing.T) {
	m := dlpack.ManagedVersioned{Version: dlpack.Version{Major: 1}, Tensor: valid}
	m.Tensor.Strides = ints(4, 1)
	var sum int64
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		v, err := m.Import()
		if err != nil {
			panic(err)
		}
		sum += v.Len() + v.Stride(0) + int64(uintptr(v.Pointer()))
	}))
}

func TestNames(t *testing.T) {
	for want, d := range map[string]dlpack.DType{
		"float16": dlpack.Float16, "bfloat16": dlpack.BFloat16,
		"float32": dlpack.Float32, "float64": dlpack.Float64,
		"int32": dlpack.Int32, "int64": dlpack.Int64, "uint8": {Code: 1, Bits: 8, Lanes: 1},
		"float32 x 4 lanes": {Code: 2, Bits: 32, Lanes: 4}, "dtype code 6 of 8 bits": {Code: 6, Bits: 8, Lanes: 1},
	} {
		assert.Equal(t, want, d.String())
	}
	for want, d := range map[string]dlpack.Device{
		"cpu": host, "cuda_host": {Type: dlpack.CUDAHost}, "cuda:1": {Type: dlpack.CUDA, ID: 1},
		"cuda_managed:0": {Type: dlpack.CUDAManaged}, "device type 8:2": {Type: 8, ID: 2},
	} {
		assert.Equal(t, want, d.String())
	}
}

// FuzzTensor imports arbitrary tensors, as a broken producer could send. Computations on a tensor that Import
// accepts must not overflow.
func FuzzTensor(f *testing.F) {
	for _, seed := range []struct {
		major       uint32
		rank        int32
		code, width uint8
		lanes       uint16
		shape       [2]int64
		strides     [2]int64
		offset      uint64
		data        bool
		strided     bool
	}{
		{1, 2, 2, 32, 1, [2]int64{2, 3}, [2]int64{3, 1}, 0, true, true},
		{1, 0, 2, 16, 1, [2]int64{}, [2]int64{}, 4, true, false},
		{1, 1, 4, 16, 1, [2]int64{}, [2]int64{}, 0, false, true},
		{2, -1, 0, 0, 0, [2]int64{-1, 0}, [2]int64{}, 0, false, true},
		{1, 2, 2, 64, 1, [2]int64{1 << 31, 1 << 31}, [2]int64{1, 1}, 0, true, false},
		{1, 2, 2, 64, 1, [2]int64{2, 2}, [2]int64{math.MinInt64, math.MaxInt64}, 0, true, true},
		{1, 2, 2, 64, 1, [2]int64{9, 9}, [2]int64{-1, -9}, 1 << 63, true, true},
		{1, 65, 2, 255, 65535, [2]int64{1, 1}, [2]int64{}, math.MaxUint64, true, true},
	} {
		f.Add(seed.major, seed.rank, seed.code, seed.width, seed.lanes, seed.shape[0], seed.shape[1],
			seed.strides[0],
			seed.strides[1], seed.offset, seed.data, seed.strided)
	}
	f.Fuzz(func(t *testing.T, major uint32, rank int32, code, width uint8, lanes uint16, d0, d1, s0, s1 int64,
		offset uint64, hasData, hasStrides bool) {
		shape, strides := make([]int64, dlpack.MaxRank), make([]int64, dlpack.MaxRank)
		for i := range shape {
			shape[i], strides[i] = 1, s0
		}
		shape[0], shape[1], strides[1] = d0, d1, s1
		m := dlpack.ManagedVersioned{Version: dlpack.Version{Major: major}, Tensor: dlpack.Tensor{
			Device: host, NDim: rank, DType: dlpack.DType{Code: code, Bits: width, Lanes: lanes},
			Shape: &shape[0], ByteOffset: offset,
		}}
		if hasData {
			m.Tensor.Data = unsafe.Pointer(&cell)
		}
		if hasStrides {
			m.Tensor.Strides = &strides[0]
		}
		v, err := m.Import()
		if err != nil {
			return
		}
		require.EqualValues(t, 1, major)
		require.GreaterOrEqual(t, v.Len(), int64(0))
		if v.Len() == 0 {
			return
		}
		size := big.NewInt(v.DType.Size())
		total, low := new(big.Int).Set(size), new(big.Int)
		high := new(big.Int).Sub(size, big.NewInt(1))
		for i := range v.Rank() {
			total.Mul(total, big.NewInt(v.Dim(i)))
			if v.Dim(i) < 2 {
				continue
			}
			reach := new(big.Int).Mul(big.NewInt(v.Dim(i)-1), big.NewInt(v.Stride(i)))
			reach.Mul(reach, size)
			if reach.Sign() < 0 {
				low.Add(low, reach)
			} else {
				high.Add(high, reach)
			}
		}
		require.Equal(t, total.Int64(), v.Len()*v.DType.Size())
		require.True(t, total.IsInt64())
		base := new(big.Int).SetUint64(uint64(uintptr(v.Data)))
		base.Add(base, new(big.Int).SetUint64(offset))
		require.GreaterOrEqual(t, low.Add(low, base).Sign(), 0, "an address below zero")
		require.True(t, high.Add(high, base).IsInt64(), "an address beyond 64 bits")
	})
}
