package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// float is a type that rows are computed in: float64 for float64 input, float32 for other input.
type float interface{ float32 | float64 }

// native is the DType of T. Rows of that type are computed on in place, without conversion.
func native[T float]() kernels.DType {
	var z T
	if unsafe.Sizeof(z) == 4 {
		return kernels.Float32
	}
	return kernels.Float64
}

func widenFloat16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	magnitude := uint32(h&0x7fff) << 13
	switch {
	case magnitude >= 0x7c00<<13: // infinity, NaN
		magnitude += 224 << 23
	case magnitude < 1<<23: // subnormal: 2^-14 * (1 + m/1024) - 2^-14 is exact
		magnitude = math.Float32bits(math.Float32frombits(magnitude+113<<23) - 0x1p-14)
	default:
		magnitude += 112 << 23
	}
	return math.Float32frombits(sign | magnitude)
}

func narrowFloat16(f float32) uint16 {
	u := math.Float32bits(f)
	sign := uint16(u>>16) & 0x8000
	switch magnitude := u & 0x7fffffff; {
	case magnitude > 0x7f800000:
		return sign | 0x7e00
	case magnitude >= 143<<23: // 65536 and above; smaller values that round up to it become infinity below
		return sign | 0x7c00
	case magnitude < 113<<23:
		// Subnormal in float16. Adding 0.5 rounds to a multiple of 2^-24, whose factor the low bits then
		// hold.
		return sign | uint16(math.Float32bits(math.Float32frombits(magnitude)+0.5)-126<<23)
	default:
		return sign | uint16((magnitude+0xfff+magnitude>>13&1-112<<23)>>13)
	}
}

func widenBFloat16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

func narrowBFloat16(f float32) uint16 {
	u := math.Float32bits(f)
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16)&0x8000 | 0x7fc0
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// rowAt returns the address of element j of a row.
func rowAt(m *kernels.Matrix, row, j int) unsafe.Pointer {
	return unsafe.Add(m.Data, (row*int(m.Stride)+j)*int(m.DType.Size()))
}

// at reads element i of a vector of any floating-point type.
func at(v *kernels.Vector, i int) float64 {
	p := unsafe.Add(v.Data, i*int(v.Stride*v.DType.Size()))
	return scalar(v.DType, p)
}

func put(v *kernels.Vector, i int, f float64) {
	p := unsafe.Add(v.Data, i*int(v.Stride*v.DType.Size()))
	putScalar(v.DType, p, f)
}

func byteAt(v *kernels.Vector, i int) byte { return *(*byte)(unsafe.Add(v.Data, i*int(v.Stride))) }

func putBool(v *kernels.Vector, i int, b bool) { *(*bool)(unsafe.Add(v.Data, i*int(v.Stride))) = b }

func putInt64(v *kernels.Vector, i int, n int64) {
	*(*int64)(unsafe.Add(v.Data, i*int(v.Stride*v.DType.Size()))) = n
}

func integerAt(v *kernels.Vector, i int) int64 {
	p := unsafe.Add(v.Data, i*int(v.Stride*v.DType.Size()))
	if v.DType == kernels.Int32 {
		return int64(*(*int32)(p))
	}
	return *(*int64)(p)
}

func scalar(t kernels.DType, p unsafe.Pointer) float64 {
	switch t {
	case kernels.Float16:
		return float64(widenFloat16(*(*uint16)(p)))
	case kernels.BFloat16:
		return float64(widenBFloat16(*(*uint16)(p)))
	case kernels.Float32:
		return float64(*(*float32)(p))
	default:
		return *(*float64)(p)
	}
}

func putScalar(t kernels.DType, p unsafe.Pointer, f float64) {
	switch t {
	case kernels.Float16:
		*(*uint16)(p) = narrowFloat16(float32(f))
	case kernels.BFloat16:
		*(*uint16)(p) = narrowBFloat16(float32(f))
	case kernels.Float32:
		*(*float32)(p) = float32(f)
	default:
		*(*float64)(p) = f
	}
}
