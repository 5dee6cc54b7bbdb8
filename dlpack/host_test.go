package dlpack_test

import (
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
)

func TestNew(t *testing.T) {
	v, err := dlpack.FromFloat64s(dlpack.Float32, []float64{1, 2, 3, 4, 5, 6}, 2, 3)
	require.NoError(t, err)
	require.NoError(t, v.Validate())
	assert.Zero(t, uintptr(v.Data)%256)
	assert.Equal(t, [6]float32{1, 2, 3, 4, 5, 6}, *(*[6]float32)(v.Pointer()))

	column, err := dlpack.Borrow(unsafe.Add(v.Data, 4), v.Device, v.DType, []int64{2}, []int64{3})
	require.NoError(t, err)
	got, err := column.Float64s()
	require.NoError(t, err)
	assert.Equal(t, []float64{2, 5}, got)

	empty, err := dlpack.New(dlpack.Int64, 0, 4)
	require.NoError(t, err)
	assert.Nil(t, empty.Data)
	got, err = empty.Float64s()
	require.NoError(t, err)
	assert.Empty(t, got)

	scalar, err := dlpack.FromFloat64s(dlpack.Int32, []float64{-100})
	require.NoError(t, err)
	got, err = scalar.Float64s()
	require.NoError(t, err)
	assert.Equal(t, []float64{-100}, got)
}

func TestHostRefusals(t *testing.T) {
	v, err := dlpack.New(dlpack.Float32, 2, 3)
	require.NoError(t, err)
	assert.ErrorContains(t, v.SetFloat64s([]float64{1}), "1 values, expected 6")

	_, err = dlpack.FromFloat64s(dlpack.Float32, []float64{1}, 2)
	require.ErrorIs(t, err, dlpack.ErrShape)
	_, err = dlpack.New(dlpack.Float32, -1)
	require.ErrorIs(t, err, dlpack.ErrShape)
	_, err = dlpack.New(dlpack.Float32, make([]int64, 65)...)
	require.ErrorIs(t, err, dlpack.ErrShape)
	_, err = dlpack.New(dlpack.Float32, 1<<50)
	require.ErrorIs(t, err, dlpack.ErrMemory)
	_, err = dlpack.Borrow(nil, cpu, dlpack.Float32, []int64{2}, nil)
	require.ErrorIs(t, err, dlpack.ErrNull)
	_, err = dlpack.Borrow(v.Data, cpu, dlpack.Float32, []int64{2}, []int64{1, 1})
	require.ErrorIs(t, err, dlpack.ErrLayout)

	v.Device = dlpack.Device{Type: dlpack.CUDA}
	_, err = v.Float64s()
	require.ErrorIs(t, err, dlpack.ErrDevice, "device memory must not be read")
	v.Device, v.DType = cpu, dlpack.DType{Bits: 8, Lanes: 1} // int8
	_, err = v.Float64s()
	require.ErrorIs(t, err, dlpack.ErrDType)
	v.DType.Bits = 0
	require.ErrorIs(t, v.SetFloat64s(nil), dlpack.ErrDType)
}

func TestBoolsAsNumbers(t *testing.T) {
	v, err := dlpack.FromFloat64s(dlpack.Bool, []float64{0, 1, -3}, 3)
	require.NoError(t, err)
	got, err := v.Float64s()
	require.NoError(t, err)
	assert.Equal(t, []float64{0, 1, 1}, got)
}

// rounded returns v as a tensor of one element stores it, and the element's bits.
func rounded(t *testing.T, d dlpack.DType, v float64) (float64, uint16) {
	x, err := dlpack.FromFloat64s(d, []float64{v})
	require.NoError(t, err)
	got, err := x.Float64s()
	require.NoError(t, err)
	return got[0], *(*uint16)(x.Data)
}

func TestRounding(t *testing.T) {
	inf := math.Inf(1)
	cases := []struct {
		d    dlpack.DType
		v    float64
		bits uint16
	}{
		{dlpack.Float16, 1, 0x3c00}, {dlpack.Float16, -2, 0xc000}, {dlpack.Float16, 65504, 0x7bff},
		{dlpack.Float16, 65519.99, 0x7bff}, {dlpack.Float16, 65520, 0x7c00}, {dlpack.Float16, 1e300, 0x7c00},
		{dlpack.Float16, 1 + 0x1p-11, 0x3c00}, {dlpack.Float16, 1 + 3*0x1p-11, 0x3c02},
		{dlpack.Float16, 1 + 0x1p-11 + 0x1p-40, 0x3c01}, // rounded to float32 first, this would be a tie
		{dlpack.Float16, 0x1p-24, 0x0001}, {dlpack.Float16, 0x1p-25, 0x0000}, {dlpack.Float16, 0x1.8p-25, 0x0001},
		{dlpack.Float16, 0x1p-14 - 0x1p-26, 0x0400}, {dlpack.Float16, 5e-324, 0}, {dlpack.Float16, -inf, 0xfc00},
		{dlpack.Float16, 2 - 0x1p-12, 0x4000}, {dlpack.Float16, math.Copysign(0, -1), 0x8000},
		{dlpack.BFloat16, 1, 0x3f80}, {dlpack.BFloat16, 1 + 0x1p-8, 0x3f80},
		{dlpack.BFloat16, 1 + 3*0x1p-8, 0x3f82},
		{dlpack.BFloat16, 1 + 0x1p-8 + 0x1p-40, 0x3f81}, {dlpack.BFloat16, math.MaxFloat32, 0x7f80},
		{dlpack.BFloat16, 0x1p-133, 0x0001}, {dlpack.BFloat16, inf, 0x7f80},
	}
	for _, c := range cases {
		_, bits := rounded(t, c.d, c.v)
		assert.Equalf(t, c.bits, bits, "%v of %x", c.d, c.v)
	}
	for _, d := range []dlpack.DType{dlpack.Float16, dlpack.BFloat16, dlpack.Float32, dlpack.Float64} {
		v, _ := rounded(t, d, math.NaN())
		assert.True(t, math.IsNaN(v), d)
	}
}

// Every 16-bit pattern must survive the conversion to float64 and back.
func TestSmallFloatsRoundTrip(t *testing.T) {
	for _, d := range []dlpack.DType{dlpack.Float16, dlpack.BFloat16} {
		x, err := dlpack.New(d, 1<<16)
		require.NoError(t, err)
		patterns := unsafe.Slice((*uint16)(x.Data), 1<<16)
		for i := range patterns {
			patterns[i] = uint16(i)
		}
		values, err := x.Float64s()
		require.NoError(t, err)
		y, err := dlpack.FromFloat64s(d, values, 1<<16)
		require.NoError(t, err)
		for i, p := range unsafe.Slice((*uint16)(y.Data), 1<<16) {
			if !math.IsNaN(values[i]) {
				require.Equal(t, uint16(i), p)
			}
		}
		if d == dlpack.BFloat16 {
			for i, v := range values {
				if !math.IsNaN(v) {
					require.Equal(t, float64(math.Float32frombits(uint32(i)<<16)), v)
				}
			}
		}
	}
}

func TestFromSlice(t *testing.T) {
	values := []float32{1, 2, 3, 4, 5, 6}
	v, err := dlpack.FromSlice(values, 2, 3)
	require.NoError(t, err)
	assert.Equal(t, dlpack.Float32, v.DType)
	assert.Equal(t, []int64{2, 3}, v.Dims())
	values[5] = 7 // which both share
	got, err := v.Float32s()
	require.NoError(t, err)
	assert.Equal(t, values, got)
	require.NoError(t, v.SetFloat64s([]float64{0, 1, 0, 1, 0, 1}))
	assert.Equal(t, []float32{0, 1, 0, 1, 0, 1}, values)

	flat, err := dlpack.FromSlice([]bool{true, false})
	require.NoError(t, err)
	assert.Equal(t, dlpack.Bool, flat.DType)
	assert.Equal(t, []int64{2}, flat.Dims())
	for _, d := range []struct {
		want dlpack.DType
		got  func() (*dlpack.Tensor, error)
	}{
		{dlpack.Float64, func() (*dlpack.Tensor, error) { return dlpack.FromSlice([]float64{}) }},
		{dlpack.Int32, func() (*dlpack.Tensor, error) { return dlpack.FromSlice([]int32{1}) }},
		{dlpack.Int64, func() (*dlpack.Tensor, error) { return dlpack.FromSlice([]int64{1}) }},
		{dlpack.Uint8, func() (*dlpack.Tensor, error) { return dlpack.FromSlice([]uint8{1}) }},
	} {
		v, err := d.got()
		require.NoError(t, err)
		assert.Equal(t, d.want, v.DType)
	}

	_, err = dlpack.FromSlice(values, 2, 4)
	assert.ErrorIs(t, err, dlpack.ErrShape)
	assert.ErrorContains(t, err, "6 values, expected 8 for shape [2 4]")
	_, err = dlpack.FromSlice(values, -1)
	assert.ErrorIs(t, err, dlpack.ErrShape)
}
