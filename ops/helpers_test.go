package ops_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// rowWidths are the values of N in the numerical tests.
var rowWidths = []int64{1, 3, 31, 127, 1000, 4097}

var floats = []dlpack.DType{dlpack.Float16, dlpack.BFloat16, dlpack.Float32, dlpack.Float64}

// companions returns the dtypes that weight, y and dout may have if x has dtype d.
func companions(d dlpack.DType) []dlpack.DType {
	if d == dlpack.Float64 {
		return []dlpack.DType{d}
	}
	return floats[:3]
}

func statistic(d dlpack.DType) dlpack.DType {
	if d == dlpack.Float64 {
		return d
	}
	return dlpack.Float32
}

// layout places rows in a larger buffer, with offset elements before them and pad elements between them. If
// flip is set, the last row comes first.
type layout struct {
	name        string
	pad, offset int64
	flip        bool
}

var layouts = []layout{
	{name: "compact"},
	{name: "strided", pad: 3, offset: 1},
	{name: "flipped", pad: 1, offset: 5, flip: true},
}

// layoutsFor returns the layouts to test. Where an op's operands differ in dtype it returns only the hardest
// one, since the conversion of elements does not depend on the layout.
func layoutsFor(uniform bool) []layout {
	if uniform {
		return layouts
	}
	return layouts[2:]
}

const guard = 77 // the value of the elements before, between and after the rows

// matrix is a tensor of rows in a buffer whose other elements are guard.
type matrix struct {
	*dlpack.Tensor
	buffer *dlpack.Tensor
	at     []int64 // index in the buffer of each row's first element
}

// newMatrix makes rows with the given values, converted to d. If values is nil, the rows are filled with
// guard too.
func newMatrix(t testing.TB, d dlpack.DType, values []float64, m, n int64, l layout) matrix {
	stride := n + l.pad
	buffer, err := dlpack.New(d, l.offset+m*stride+1)
	require.NoError(t, err)
	all := make([]float64, buffer.Len())
	for i := range all {
		all[i] = guard
	}
	require.NoError(t, buffer.SetFloat64s(all))
	x := matrix{buffer: buffer}
	first := l.offset
	if l.flip && m > 0 {
		first += (m - 1) * stride
		stride = -stride
	}
	for i := range m {
		x.at = append(x.at, first+i*stride)
	}
	x.Tensor, err = dlpack.Borrow(buffer.Data, buffer.Device, d, []int64{m, n}, []int64{stride, 1})
	require.NoError(t, err)
	x.ByteOffset = uint64(first * d.Size())
	if values != nil {
		require.NoError(t, x.SetFloat64s(values))
	}
	return x
}

// result returns the rows' elements and checks that nothing was written outside of the rows.
func (x matrix) result(t testing.TB) []float64 {
	t.Helper()
	all, err := x.buffer.Float64s()
	require.NoError(t, err)
	var values []float64
	for _, at := range x.at {
		for i := range x.Dim(1) {
			values = append(values, all[at+i])
			all[at+i] = guard
		}
	}
	for i, v := range all {
		if v != guard {
			require.Failf(t, "element outside of the rows was written", "element %d is %v", i, v)
		}
	}
	return values
}

func tensor(t testing.TB, d dlpack.DType, values []float64, dims ...int64) *dlpack.Tensor {
	t.Helper()
	v, err := dlpack.FromFloat64s(d, values, dims...)
	require.NoError(t, err)
	return v
}

func empty(t testing.TB, d dlpack.DType, dims ...int64) *dlpack.Tensor {
	t.Helper()
	v, err := dlpack.New(d, dims...)
	require.NoError(t, err)
	return v
}

func values(t testing.TB, v *dlpack.Tensor) []float64 {
	t.Helper()
	got, err := v.Float64s()
	require.NoError(t, err)
	return got
}

// view returns a tensor of another shape in v's memory, from element skip on. strides nil means compact.
func view(t testing.TB, v *dlpack.Tensor, skip int64, dims, strides []int64) *dlpack.Tensor {
	t.Helper()
	w, err := dlpack.Borrow(unsafe.Add(v.Data, skip*v.DType.Size()), v.Device, v.DType, dims, strides)
	require.NoError(t, err)
	return w
}

// random returns normally distributed numbers, rounded to d. About one in 64 is an outlier, ten times as
// large.
func random(t testing.TB, r *rand.Rand, d dlpack.DType, n int64) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = r.NormFloat64()
		if r.IntN(64) == 0 {
			v[i] *= 10
		}
	}
	return values(t, tensor(t, d, v, n))
}

// ulp returns the distance between adjacent numbers of type d near v.
func ulp(d dlpack.DType, v float64) float64 {
	bits, least := 52, -1022
	switch d {
	case dlpack.Float16:
		bits, least = 10, -14
	case dlpack.BFloat16:
		bits, least = 7, -126
	case dlpack.Float32:
		bits, least = 23, -126
	}
	exponent := least
	if v != 0 {
		exponent = max(exponent, math.Ilogb(v))
	}
	return math.Ldexp(1, exponent-bits)
}

// requireClose compares got with a reference. The bound is one ulp of the output type, and the error of n
// operations in the accumulator's precision on terms of the given total magnitude. The rounding errors of n
// operations grow with the square root of n, as in a random walk. The constant 16 covers the rest, such as
// the error of the exponential.
func requireClose(t testing.TB, want, magnitude, got []float64, d dlpack.DType, n int64) {
	t.Helper()
	require.Len(t, got, len(want))
	unit := 0x1p-24
	if d == dlpack.Float64 {
		unit = 0x1p-53
	}
	relative := unit * (16 + 2*math.Sqrt(float64(n)))
	for i, w := range want {
		if math.IsNaN(w) || math.IsInf(w, 0) {
			if w != got[i] && !(math.IsNaN(w) && math.IsNaN(got[i])) {
				require.Failf(t, "not the expected special value",
					"element %d is %v, expected %v", i, got[i], w)
			}
			continue
		}
		// An output below the smallest normal float32 may be flushed to zero.
		bound := ulp(d, w) + relative*math.Abs(magnitude[i]) + 0x1p-126
		if !(math.Abs(got[i]-w) <= bound) {
			require.Failf(t, "not close", "element %d is %v, expected %v within %v", i, got[i], w, bound)
		}
	}
}

// row returns row i of row-major rows of n.
func row(v []float64, i, n int64) []float64 { return v[i*n : (i+1)*n] }

// The operators, with their operands in order.

func softmaxForward(x, y *dlpack.Tensor) error { return ops.SoftmaxForward{X: x, Y: y}.Run(nil) }

func softmaxBackward(dy, y, dx *dlpack.Tensor) error {
	return ops.SoftmaxBackward{DY: dy, Y: y, DX: dx}.Run(nil)
}

func rmsNormForward(x, weight, y, rstd *dlpack.Tensor, eps float64) error {
	return ops.RMSNormForward{X: x, Weight: weight, Y: y, Rstd: rstd, Eps: ops.Some(eps)}.Run(nil)
}

func rmsNormBackward(x, weight, dout, rstd, dx, dw *dlpack.Tensor) error {
	return ops.RMSNormBackward{X: x, Weight: weight, DOut: dout, Rstd: rstd, DX: dx, DW: dw}.Run(nil)
}

type crossEntropyOptions struct {
	IgnoreIndex ops.Optional[int64]
	Reduction   kernels.Reduction
	OnePass     bool
	Slice       bool

	Divisor, Upstream *dlpack.Tensor
}

func crossEntropyForward(
	x, target, weight, loss, lse, dx, denominator *dlpack.Tensor, o crossEntropyOptions,
) error {
	return ops.CrossEntropyForward{
		X: x, Target: target, Weight: weight, Divisor: o.Divisor, Upstream: o.Upstream,
		Loss: loss, LSE: lse, DX: dx, Denominator: denominator,
		IgnoreIndex: o.IgnoreIndex, Reduction: o.Reduction, OnePass: o.OnePass,
	}.Run(nil)
}

func crossEntropyBackward(
	x, target, weight, dloss, lse, denominator, dx *dlpack.Tensor, o crossEntropyOptions,
) error {
	return ops.CrossEntropyBackward{
		X: x, Target: target, Weight: weight, DLoss: dloss, LSE: lse, Divisor: o.Divisor, Upstream: o.Upstream,
		Denominator: denominator, DX: dx,
		IgnoreIndex: o.IgnoreIndex, Reduction: o.Reduction, OnePass: o.OnePass, Slice: o.Slice,
	}.Run(nil)
}
