package ops_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// maskedCall is a call of softmax with options, forward and backward, for x of shape (b, h, q, n).
type maskedCall struct {
	b, h, q, n        int64
	x, y, dx          dlpack.DType // dy has y's
	mask              *dlpack.Tensor
	scale             float64
	log, causal, zero bool
}

var negative = math.Inf(-1)

// boolean makes a bool or uint8 tensor.
func boolean(t testing.TB, d dlpack.DType, values []bool, dims ...int64) *dlpack.Tensor {
	v := empty(t, d, dims...)
	bytes := unsafe.Slice((*byte)(v.Data), v.Len())
	for i, set := range values {
		if set {
			bytes[i] = 1
		}
	}
	return v
}

// addends is what a mask adds to each element of (b, h, q, n).
func (c *maskedCall) addends(t testing.TB) []float64 {
	all := make([]float64, c.b*c.h*c.q*c.n)
	if c.mask == nil {
		return all
	}
	m := c.mask
	var added []float64
	if m.DType != dlpack.Bool && m.DType != dlpack.Uint8 {
		added = values(t, m)
	}
	shape := []int64{c.b, c.h, c.q, c.n}
	for i := range all {
		offset, logical, rest := int64(0), int64(0), int64(i)
		size := int64(1)
		for d := 3; d >= 0; d-- {
			at := rest % shape[d]
			rest /= shape[d]
			if k := d - 4 + m.Rank(); k >= 0 {
				if m.Dim(k) > 1 {
					offset += at * m.Stride(k)
					logical += at * size
				}
				size *= m.Dim(k)
			}
		}
		switch {
		case added != nil:
			all[i] = added[logical]
		case *(*byte)(unsafe.Add(m.Data, offset)) == 0:
			all[i] = negative
		}
	}
	return all
}

// reference computes y and dx, with the magnitudes of the terms of dx, and tells which elements are masked.
func (c *maskedCall) reference(
	t testing.TB, x, y, dy []float64,
) (wantY, wantDX, size []float64, masked []bool) {
	wantY, wantDX, size = make([]float64, len(x)), make([]float64, len(x)), make([]float64, len(x))
	masked = make([]bool, len(x))
	adds := c.addends(t)
	for r := range c.b * c.h * c.q {
		h := make([]float64, c.n)
		high, sum, taken := negative, 0.0, 0
		for j := range c.n {
			i := r*c.n + j
			add := adds[i]
			if masked[i] = add == negative || c.causal && j > r%c.q; masked[i] {
				h[j] = negative
				continue
			}
			h[j] = x[i]*c.scale + add
			high, taken = max(high, h[j]), taken+1
		}
		for j := range c.n {
			if !masked[r*c.n+j] {
				sum += math.Exp(h[j] - high)
			}
		}
		total, magnitude := 0.0, 0.0
		for j := range c.n {
			i := r*c.n + j
			switch {
			case taken == 0 && !c.zero:
				wantY[i] = math.NaN()
			case masked[i] && c.log:
				wantY[i] = negative
			case masked[i]:
			case c.log:
				wantY[i] = h[j] - high - math.Log(sum)
			default:
				wantY[i] = math.Exp(h[j]-high) / sum
			}
			if masked[i] {
				continue
			}
			weight := y[i]
			if c.log {
				weight = 1
			}
			total += dy[i] * weight
			magnitude += math.Abs(dy[i] * weight)
		}
		for j := range c.n {
			if i := r*c.n + j; !masked[i] {
				p := y[i]
				wantDX[i] = c.scale * (dy[i] - total) * p
				if c.log {
					p = math.Exp(y[i])
					wantDX[i] = c.scale * (dy[i] - p*total)
				}
				size[i] = c.scale * (math.Abs(dy[i]) + p*magnitude)
			}
		}
	}
	return wantY, wantDX, size, masked
}

// run runs both operators, and compares them with the reference. Masked elements of all inputs are NaN.
func (c *maskedCall) run(t *testing.T, l layout) {
	r := rand.New(rand.NewPCG(5, uint64(c.n)))
	m := c.b * c.h * c.q
	vx, vdy := random(t, r, c.x, m*c.n), random(t, r, c.y, m*c.n)
	zeros := make([]float64, m*c.n)
	_, _, _, masked := c.reference(t, vx, zeros, zeros)
	poison := func(v []float64) {
		for i := range v {
			if masked[i] {
				v[i] = math.NaN()
			}
		}
	}
	poison(vx)
	poison(vdy)
	whole := func(v matrix) *dlpack.Tensor { // (b, h, q, n)
		stride := v.Stride(0)
		if m == 1 {
			stride = c.n
		}
		w, err := dlpack.Borrow(v.Data, v.Device, v.DType, []int64{c.b, c.h, c.q, c.n},
			[]int64{stride * c.q * c.h, stride * c.q, stride, 1})
		require.NoError(t, err)
		w.ByteOffset = v.ByteOffset
		return w
	}
	x, y := newMatrix(t, c.x, vx, m, c.n, l), newMatrix(t, c.y, nil, m, c.n, l)
	require.NoError(t, ops.MaskedSoftmaxForward{X: whole(x), Mask: c.mask, Y: whole(y),
		Scale: ops.Some(c.scale), Log: c.log, Causal: c.causal, MaskedZero: c.zero}.Run(nil))
	gotY := y.result(t)
	vy := append([]float64{}, gotY...)
	poison(vy)
	wantY, wantDX, size, _ := c.reference(t, vx, vy, vdy)
	magnitude := make([]float64, len(wantY))
	for i, v := range wantY {
		magnitude[i] = 1 + math.Abs(v)
		if !c.log {
			magnitude[i] = math.Abs(v) * (1 + 8*math.Abs(c.scale))
		}
	}
	requireClose(t, wantY, magnitude, gotY, c.y, c.n)

	dy, dx := newMatrix(t, c.y, vdy, m, c.n, l), newMatrix(t, c.dx, nil, m, c.n, l)
	read := newMatrix(t, c.y, vy, m, c.n, l)
	require.NoError(t, ops.MaskedSoftmaxBackward{DY: whole(dy), Y: whole(read), Mask: c.mask, DX: whole(dx),
		Scale: ops.Some(c.scale), Log: c.log, Causal: c.causal}.Run(nil))
	requireClose(t, wantDX, size, dx.result(t), c.dx, c.n)
}

// masksOf makes masks of every type, shape and stride for x of shape (b, h, q, n). Every fourth row of the
// larger ones is masked whole.
func masksOf(t testing.TB, d dlpack.DType, b, h, q, n int64) map[string]*dlpack.Tensor {
	r := rand.New(rand.NewPCG(3, uint64(n)))
	bools := func(dims ...int64) []bool {
		size := int64(1)
		for _, d := range dims {
			size *= d
		}
		v := make([]bool, size)
		last := dims[len(dims)-1]
		for i := range v {
			v[i] = r.IntN(3) > 0 && int64(i)/last%4 != 3
		}
		return v
	}
	added := func(d dlpack.DType, dims ...int64) *dlpack.Tensor {
		v := bools(dims...)
		numbers := make([]float64, len(v))
		for i := range v {
			if numbers[i] = r.NormFloat64(); !v[i] {
				numbers[i] = negative
			}
		}
		return tensor(t, d, numbers, dims...)
	}
	masks := map[string]*dlpack.Tensor{
		"none":           nil,
		"bool (B,1,Q,N)": boolean(t, dlpack.Bool, bools(b, 1, q, n), b, 1, q, n),
		"bool (B,H,1,N)": boolean(t, dlpack.Bool, bools(b, h, 1, n), b, h, 1, n),
		"uint8 (Q,N)":    boolean(t, dlpack.Uint8, bools(q, n), q, n),
		"bool (N)":       boolean(t, dlpack.Bool, bools(n), n),
		"bool (Q,1)":     boolean(t, dlpack.Bool, bools(q, 1), q, 1),
		"bool ()":        boolean(t, dlpack.Bool, []bool{true}),
		"bool strided": view(t, boolean(t, dlpack.Bool, bools(q, n+3), q, n+3), 1, []int64{b, 1, q, n},
			[]int64{0, 0, n + 3, 1}),
	}
	for _, m := range companions(d) {
		masks[fmt.Sprintf("%v (B,1,Q,N)", m)] = added(m, b, 1, q, n)
		masks[fmt.Sprintf("%v (H,1,1)", m)] = added(m, h, 1, 1)
	}
	return masks
}

func TestMaskedSoftmax(t *testing.T) {
	for _, d := range floats {
		for _, n := range []int64{1, 31, 501} { // TestMaskedSoftmaxInPlace has rows of several blocks
			b, h, q := int64(2), int64(3), int64(5)
			for name, mask := range masksOf(t, d, b, h, q, n) {
				for _, log := range []bool{false, true} {
					for _, causal := range []bool{false, true} {
						c := maskedCall{b: b, h: h, q: q, n: n, x: d, y: d, dx: d, mask: mask, scale: 0.7, log: log,
							causal: causal, zero: n%2 == 0}
						t.Run(fmt.Sprintf("%v %d %s log=%t causal=%t", d, n, name, log, causal), func(t *testing.T) {
							c.run(t, layouts[int(n)%len(layouts)])
						})
					}
				}
			}
		}
	}
}

// Types of y and dx that differ from x's.
func TestMaskedSoftmaxTypes(t *testing.T) {
	for _, x := range floats[:3] {
		for _, y := range floats[:3] {
			for _, dx := range floats[:3] {
				c := maskedCall{b: 1, h: 1, q: 5, n: 101, x: x, y: y, dx: dx, scale: -1.5, causal: true,
					log: dx == dlpack.Float32}
				c.run(t, layouts[1])
			}
		}
	}
}

// A row is NaN if those of its elements that take part have a NaN or +inf, or are all -inf. It is what the
// option says only if it is masked whole.
func TestMaskedSoftmaxOfSpecialRows(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	x := tensor(t, dlpack.Float32, []float64{
		1, nan, 2, 1, inf, 2, negative, negative, nan, negative, 0, inf, nan, inf, 3,
	}, 5, 3)
	mask := boolean(t, dlpack.Bool, []bool{
		true, true, false, true, true, true, true, true, false, true, true, false, false, false, false,
	}, 5, 3)
	for _, log := range []bool{false, true} {
		for _, zero := range []bool{false, true} {
			y := empty(t, dlpack.Float32, 5, 3)
			require.NoError(t, ops.MaskedSoftmaxForward{X: x, Mask: mask, Y: y, Log: log,
				MaskedZero: zero}.Run(nil))
			got, none, whole := values(t, y), 0.0, nan
			if log {
				none = negative
			}
			if zero {
				whole = none
			}
			requireClose(t, []float64{nan, nan, nan, nan, nan, nan, nan, nan, nan, none, none + 1, none,
				whole, whole, whole}[:9], make([]float64, 9), got[:9], dlpack.Float32, 3)
			one := 1.0
			if log {
				one = 0
			}
			requireClose(t, []float64{none, one, none, whole, whole, whole}, make([]float64, 6), got[9:],
				dlpack.Float32, 3)
		}
	}
}

func TestMaskedSoftmaxInPlace(t *testing.T) {
	for _, d := range floats {
		r := rand.New(rand.NewPCG(1, 2))
		vx, vdy := random(t, r, d, 3*5000), random(t, r, d, 3*5000)
		x, y := tensor(t, d, vx, 3, 5000), empty(t, d, 3, 5000)
		forward := func(x, y *dlpack.Tensor) error {
			return ops.MaskedSoftmaxForward{X: x, Y: y, Scale: ops.Some(2.0), Causal: true}.Run(nil)
		}
		require.NoError(t, forward(x, y))
		require.NoError(t, forward(x, x))
		assert.Equal(t, values(t, y), values(t, x), d)
		dy, dx := tensor(t, d, vdy, 3, 5000), empty(t, d, 3, 5000)
		backward := func(dy, y, dx *dlpack.Tensor) error {
			return ops.MaskedSoftmaxBackward{DY: dy, Y: y, DX: dx, Scale: ops.Some(2.0), Causal: true}.Run(nil)
		}
		require.NoError(t, backward(dy, y, dx))
		require.NoError(t, backward(dy, y, y))
		assert.Equal(t, values(t, dx), values(t, y), d)
		require.NoError(t, backward(dy, x, dy))
		assert.Equal(t, values(t, dx), values(t, dy), d)
	}
}

func TestMaskedSoftmaxRefusals(t *testing.T) {
	f32 := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	bools := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Bool, dims...) }
	x := f32(2, 3, 2, 3, 4)
	forward := func(change func(*ops.MaskedSoftmaxForward)) error {
		o := ops.MaskedSoftmaxForward{X: x, Y: f32(2, 3, 2, 3, 4)}
		change(&o)
		return o.Run(nil)
	}
	for _, c := range []struct {
		change  func(o *ops.MaskedSoftmaxForward)
		status  ops.Status
		message string
	}{
		{func(o *ops.MaskedSoftmaxForward) { o.Scale = ops.Some(math.NaN()) }, ops.StatusOption,
			"scale is NaN, expected a finite number"},
		{func(o *ops.MaskedSoftmaxForward) { o.Scale = ops.Some(-1e39) }, ops.StatusOption,
			"scale is -1e+39, expected a number that float32 holds"},
		{func(o *ops.MaskedSoftmaxForward) { o.Mask = bools(3, 3) }, ops.StatusShape,
			"mask has shape (3, 3), expected one that broadcasts to (2, 3, 2, 3, 4), the shape of x"},
		{func(o *ops.MaskedSoftmaxForward) { o.Mask = bools(1, 2, 3, 2, 3, 4) }, ops.StatusShape,
			"expected one that broadcasts"},
		{func(o *ops.MaskedSoftmaxForward) { o.Mask = empty(t, dlpack.Int32, 4) }, ops.StatusDType,
			"mask has dtype int32, expected float16, bfloat16, float32, bool or uint8"},
		{func(o *ops.MaskedSoftmaxForward) { o.Mask = empty(t, dlpack.Float64, 4) }, ops.StatusDType,
			"mask has dtype float64"},
		{func(o *ops.MaskedSoftmaxForward) { o.X = bools(2, 4) }, ops.StatusDType, "x has dtype bool, expected"},
		{func(o *ops.MaskedSoftmaxForward) { o.Mask = view(t, bools(8), 0, []int64{4}, []int64{2}) },
			ops.StatusLayout, "mask has stride 2 in its last dimension, expected 1"},
		{func(o *ops.MaskedSoftmaxForward) {
			o.Mask = view(t, bools(100), 0, []int64{2, 1, 2, 1, 4}, []int64{8, 8, 4, 4, 1})
		}, ops.StatusLayout, "expected leading dimensions that collapse into 3 or fewer; expand it"},
		{func(o *ops.MaskedSoftmaxForward) {
			o.Mask = view(t, o.Y, 0, []int64{3, 4}, nil)
		}, ops.StatusOverlap, "y overlaps mask"},
		{func(o *ops.MaskedSoftmaxForward) { o.X, o.Y, o.Causal = f32(4), f32(4), true }, ops.StatusShape,
			"causal is set for x of rank 1, expected rank 2 or more"},
	} {
		var e *ops.Error
		require.ErrorAs(t, forward(c.change), &e)
		assert.Equal(t, c.status, e.Status, e.Message)
		assert.Contains(t, e.Message, c.message)
	}
	// Three strides are served, whatever they are.
	require.NoError(t, forward(func(o *ops.MaskedSoftmaxForward) {
		o.Mask = view(t, bools(100), 0, []int64{2, 3, 1, 3, 4}, []int64{36, 12, 0, 4, 1})
	}))
	require.NoError(t, ops.MaskedSoftmaxForward{X: f32(0, 3, 4), Mask: bools(0, 1, 4), Y: f32(0, 3, 4),
		Causal: true}.Run(nil))
}
