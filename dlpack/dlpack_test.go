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
	notes, err := os.ReadFile("VENDOR.md")
	require.NoError(t, err)
	assert.Contains(t, string(notes), hex.EncodeToString(sum[:]))
	assert.Contains(t, string(header), "#define DLPACK_MAJOR_VERSION 1")
	assert.Contains(t, string(header), "#define DLPACK_MINOR_VERSION 3")
}

func TestLayout(t *testing.T) {
	var tensor dlpack.Tensor
	var managed dlpack.Managed
	var versioned dlpack.ManagedVersioned
	assert.EqualValues(t, 48, unsafe.Sizeof(tensor))
	assert.EqualValues(t, 64, unsafe.Sizeof(managed))
	assert.EqualValues(t, 80, unsafe.Sizeof(versioned))
	assert.Equal(t, []uintptr{0, 8, 16, 20, 24, 32, 40}, []uintptr{
		unsafe.Offsetof(tensor.Data), unsafe.Offsetof(tensor.Device), unsafe.Offsetof(tensor.NDim),
		unsafe.Offsetof(tensor.DType), unsafe.Offsetof(tensor.Shape), unsafe.Offsetof(tensor.Strides),
		unsafe.Offsetof(tensor.ByteOffset)})
	assert.Equal(t, []uintptr{0, 8, 16, 24, 32}, []uintptr{
		unsafe.Offsetof(versioned.Version), unsafe.Offsetof(versioned.Context),
		unsafe.Offsetof(versioned.Deleter), unsafe.Offsetof(versioned.Flags),
		unsafe.Offsetof(versioned.Tensor)})
	assert.Equal(t, []uintptr{0, 48, 56}, []uintptr{
		unsafe.Offsetof(managed.Tensor), unsafe.Offsetof(managed.Context),
		unsafe.Offsetof(managed.Deleter)})
}

// ints returns a value for a Shape or Strides field: a pointer to the first of the numbers.
func ints(v ...int64) *int64 { return unsafe.SliceData(v) }

var (
	buffer [64]byte // the data of the tensors below
	cpu    = dlpack.Device{Type: dlpack.CPU}
	valid  = dlpack.Tensor{
		Data: unsafe.Pointer(&buffer), Device: cpu, NDim: 2, DType: dlpack.Float32, Shape: ints(2, 3),
	}
)

func TestValidateRefuses(t *testing.T) {
	cases := []struct {
		name    string
		edit    func(*dlpack.Tensor)
		want    error
		message string
	}{
		{"negative rank", func(v *dlpack.Tensor) { v.NDim = -1 }, dlpack.ErrShape,
			"ndim is -1, expected 0 to 64"},
		{"high rank", func(v *dlpack.Tensor) { v.NDim = 65 }, dlpack.ErrShape,
			"ndim is 65, expected 0 to 64"},
		{"no shape", func(v *dlpack.Tensor) { v.Shape = nil }, dlpack.ErrNull, "shape is NULL with ndim 2"},
		{"no bits", func(v *dlpack.Tensor) { v.DType.Bits = 0 }, dlpack.ErrDType, "0 bits in 1 lanes"},
		{"no lanes", func(v *dlpack.Tensor) { v.DType.Lanes = 0 }, dlpack.ErrDType, "32 bits in 0 lanes"},
		{"negative dimension", func(v *dlpack.Tensor) { v.Shape = ints(2, -3) }, dlpack.ErrShape,
			"dimension 1 is -3"},
		{"element count overflows", func(v *dlpack.Tensor) { v.Shape = ints(1<<32, 1<<32) }, dlpack.ErrShape,
			"more than 2^63 bytes"},
		{"byte count overflows", func(v *dlpack.Tensor) { v.Shape = ints(1<<31, 1<<30) }, dlpack.ErrShape,
			"more than 2^63 bytes"},
		{"no data", func(v *dlpack.Tensor) { v.Data = nil }, dlpack.ErrNull,
			"data is NULL, expected the address of 24 bytes"},
		{"large stride", func(v *dlpack.Tensor) { v.Strides = ints(math.MaxInt64, 1) }, dlpack.ErrLayout,
			"beyond 64 bits"},
		{"negative stride", func(v *dlpack.Tensor) { v.Strides = ints(math.MinInt64, 1) }, dlpack.ErrLayout,
			"beyond 64 bits"},
		{"sum of two strides", func(v *dlpack.Tensor) { v.Strides = ints(1<<60, 1<<60) }, dlpack.ErrLayout,
			"beyond 64 bits"},
		{"address below zero", func(v *dlpack.Tensor) { v.Strides = ints(-1<<58, 1) }, dlpack.ErrLayout,
			"address space"},
		{"large byte_offset", func(v *dlpack.Tensor) { v.ByteOffset = math.MaxUint64 }, dlpack.ErrLayout,
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
			v.Data, v.Strides = unsafe.Pointer(&buffer[16]), ints(-4, 1)
		},
		"strides of 0":      func(v *dlpack.Tensor) { v.Strides = ints(0, 0) },
		"rank 0":            func(v *dlpack.Tensor) { v.NDim, v.Shape = 0, nil },
		"no elements":       func(v *dlpack.Tensor) { v.Data, v.Shape = nil, ints(0, 3) },
		"no elements, huge": func(v *dlpack.Tensor) { v.Data, v.Shape = nil, ints(math.MaxInt64, 0) },
		"large stride of a dimension of size 1": func(v *dlpack.Tensor) {
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
		"NULL strides mean compact row-major strides")
	assert.EqualValues(t, 24, v.Len())
	v.Strides = ints(1, 2, 6)
	assert.Equal(t, []int64{1, 2, 6}, []int64{v.Stride(0), v.Stride(1), v.Stride(2)})
	v.ByteOffset = 8
	assert.Equal(t, unsafe.Pointer(&buffer[8]), v.Pointer())
	v.Data = nil
	assert.Nil(t, v.Pointer(), "NULL data stays NULL with a byte_offset")
	scalar := dlpack.Tensor{DType: dlpack.Float32, Data: unsafe.Pointer(&buffer)}
	assert.EqualValues(t, 1, scalar.Len())
	assert.Empty(t, scalar.Dims())
}

func TestImport(t *testing.T) {
	m := dlpack.ManagedVersioned{Version: dlpack.Version{Major: 1, Minor: 9}, Tensor: valid}
	v, err := m.Import()
	require.NoError(t, err, "a newer minor version is compatible: it only adds enumerators")
	assert.Same(t, &m.Tensor, v)

	m.Version.Major = 2
	m.Tensor.NDim = -1
	_, err = m.Import()
	require.ErrorIs(t, err, dlpack.ErrVersion, "the version is checked first")
	assert.ErrorContains(t, err, "it is 2.9, expected 1.x; ask the producer for version 1")

	unversioned := dlpack.Managed{Tensor: valid}
	v, err = unversioned.Import()
	require.NoError(t, err)
	assert.Same(t, &unversioned.Tensor, v)

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
		"int32": dlpack.Int32, "int64": dlpack.Int64, "uint8": dlpack.Uint8, "bool": dlpack.Bool,
		"float32 x 4 lanes":        {Code: 2, Bits: 32, Lanes: 4},
		"opaque":                   {Code: 3, Bits: 8, Lanes: 1},
		"float8_e4m3fn":            {Code: 10, Bits: 8, Lanes: 1},
		"float4_e2m1fn x 2 lanes":  {Code: 17, Bits: 4, Lanes: 2},
		"DLPack code 18 of 8 bits": {Code: 18, Bits: 8, Lanes: 1},
		"complex64":                {Code: 5, Bits: 64, Lanes: 1},
	} {
		assert.Equal(t, want, d.String())
	}
	for want, d := range map[string]dlpack.Device{
		"cpu": cpu, "cuda_host": {Type: dlpack.CUDAHost}, "cuda:1": {Type: dlpack.CUDA, ID: 1},
		"cuda_managed:0": {Type: dlpack.CUDAManaged}, "device type 8:2": {Type: 8, ID: 2},
	} {
		assert.Equal(t, want, d.String())
	}
}

// FuzzTensor imports arbitrary tensors, as a faulty producer could send them. If Import accepts a tensor, its
// size in bytes and the addresses of its elements must not overflow. big.Int computes what is expected.
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
			seed.strides[0], seed.strides[1], seed.offset, seed.data, seed.strided)
	}
	f.Fuzz(func(t *testing.T, major uint32, rank int32, code, width uint8, lanes uint16, d0, d1, s0, s1 int64,
		offset uint64, hasData, hasStrides bool) {
		shape, strides := make([]int64, dlpack.MaxRank), make([]int64, dlpack.MaxRank)
		for i := range shape {
			shape[i], strides[i] = 1, s0
		}
		shape[0], shape[1], strides[1] = d0, d1, s1
		m := dlpack.ManagedVersioned{Version: dlpack.Version{Major: major}, Tensor: dlpack.Tensor{
			Device: cpu, NDim: rank, DType: dlpack.DType{Code: code, Bits: width, Lanes: lanes},
			Shape: &shape[0], ByteOffset: offset,
		}}
		if hasData {
			m.Tensor.Data = unsafe.Pointer(&buffer)
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
		total := new(big.Int).Set(size)
		low := new(big.Int)                           // the lowest byte, relative to Data + ByteOffset
		high := new(big.Int).Sub(size, big.NewInt(1)) // the highest byte
		for i := range v.Rank() {
			total.Mul(total, big.NewInt(v.Dim(i)))
			if v.Dim(i) < 2 {
				continue
			}
			extent := new(big.Int).Mul(big.NewInt(v.Dim(i)-1), big.NewInt(v.Stride(i)))
			extent.Mul(extent, size)
			if extent.Sign() < 0 {
				low.Add(low, extent)
			} else {
				high.Add(high, extent)
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
