package ops_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

const ignored = -100 // the default of ignore_index

var plain crossEntropyOptions

// entropy is the reference result of each row. The gradient is that for an upstream gradient of 1. sizeLoss
// and sizeDX are the magnitudes from which requireClose computes its bounds. The log-sum-exp is top + logSum.
// weight is the weight of the row in a mean.
type entropy struct {
	loss, sizeLoss, top, logSum, dx, sizeDX, weight []float64
}

func crossEntropy(x, target, weight []float64, n int64) (e entropy) {
	p, sizeP := softmax(x, n)
	for i, class := range target {
		r := row(x, int64(i), n)
		top, sum := slices.Max(r), 0.0
		for _, v := range r {
			sum += math.Exp(v - top)
		}
		w, loss := 1.0, math.NaN()
		inside := class >= 0 && class < float64(n)
		switch {
		case class == ignored:
			w, loss = 0, 0
		case inside:
			if weight != nil {
				w = weight[int(class)]
			}
			loss = w * (top - r[int(class)] + math.Log(sum))
		}
		e.loss = append(e.loss, loss)
		e.sizeLoss = append(e.sizeLoss, math.Abs(loss)+math.Abs(w)*math.Log(float64(n)+1))
		e.top, e.logSum = append(e.top, top), append(e.logSum, math.Log(sum))
		e.weight = append(e.weight, w)
		for j := range n {
			hit := 0.0
			if float64(j) == class {
				hit = 1
			}
			g := w * (p[int64(i)*n+j] - hit)
			switch {
			case class == ignored:
				g = 0
			case !inside:
				g = math.NaN()
			}
			e.dx = append(e.dx, g)
			e.sizeDX = append(e.sizeDX, math.Abs(w)*(sizeP[int64(i)*n+j]+hit))
		}
	}
	return e
}

// upstream scales the reference gradient by one number per row.
func (e entropy) upstream(scale []float64, n int64) (dx, size []float64) {
	for i := range e.dx {
		s := scale[int64(i)/n]
		if e.dx[i] == 0 {
			s = 0
		}
		dx, size = append(dx, e.dx[i]*s), append(size, e.sizeDX[i]*math.Abs(s))
	}
	return dx, size
}

func sum(v []float64) (s float64) {
	for _, a := range v {
		s += a
	}
	return s
}

func TestCrossEntropy(t *testing.T) {
	const m = 6
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range floats {
		for _, dw := range companions(d) {
			for _, n := range rowWidths {
				for _, l := range layoutsFor(d == dw) {
					t.Run(fmt.Sprintf("%v/%v/%d/%s", d, dw, n, l.name), func(t *testing.T) {
						testCrossEntropy(t, r, d, dw, dlpack.Int32, m, n, l, false)
						testCrossEntropy(t, r, d, dw, dlpack.Int64, m, n, l, true)
					})
				}
			}
		}
	}
}

func testCrossEntropy(
	t *testing.T, r *rand.Rand, d, dtypeW, index dlpack.DType, m, n int64, l layout, weighted bool,
) {
	stat := statistic(d)
	vx, vt := random(t, r, d, m*n), make([]float64, m)
	for i := range vt {
		vt[i] = float64(r.Int64N(n))
	}
	vt[1] = ignored
	var vw []float64
	var weight *dlpack.Tensor
	if weighted {
		vw = random(t, r, dtypeW, n)
		for i := range vw {
			vw[i] = math.Abs(vw[i])
		}
		weight = tensor(t, dtypeW, vw, n)
	}
	x, target := newMatrix(t, d, vx, m, n, l), tensor(t, index, vt, m)
	want := crossEntropy(vx, vt, vw, n)

	o := plain
	loss, lse, denominator := empty(t, stat, m), empty(t, stat, 2, m), empty(t, stat)
	dx := newMatrix(t, d, nil, m, n, l)
	require.NoError(t, crossEntropyForward(x.Tensor, target, weight, loss, lse, dx.Tensor, denominator, o))
	requireClose(t, want.loss, want.sizeLoss, values(t, loss), stat, n)
	gotDX := dx.result(t)
	requireClose(t, want.dx, want.sizeDX, gotDX, d, n)
	requireClose(t, []float64{sum(want.weight)}, []float64{sum(want.weight)}, values(t, denominator), stat, m)
	parts := values(t, lse)
	requireClose(t, want.top, want.top, parts[:m], stat, n)
	requireClose(t, want.logSum, ones(int(m)), parts[m:], stat, n)

	// Only the loss, and the log-sum-exp as one number.
	alone, whole := empty(t, stat, m), empty(t, stat, m)
	require.NoError(t, crossEntropyForward(x.Tensor, target, weight, alone, whole, nil, nil, o))
	requireClose(t, want.loss, want.sizeLoss, values(t, alone), stat, n)
	for i, v := range values(t, whole) {
		assert.InDelta(t, want.top[i]+want.logSum[i], v, ulp(stat, v)*(16+2*math.Sqrt(float64(n))))
	}

	// Reduced losses.
	counted := slices.DeleteFunc(slices.Clone(want.sizeLoss), math.IsNaN)
	total, mean := empty(t, stat), empty(t, stat, 1)
	o.Reduction = kernels.ReduceSum
	require.NoError(t, crossEntropyForward(x.Tensor, target, weight, total, nil, nil, nil, o))
	requireClose(t, []float64{sum(want.loss)}, []float64{sum(counted)}, values(t, total), stat, n)
	o.Reduction = kernels.ReduceMean
	require.NoError(t, crossEntropyForward(x.Tensor, target, weight, mean, nil, nil, denominator, o))
	divisor := sum(want.weight)
	requireClose(t, []float64{sum(want.loss) / divisor}, []float64{sum(counted) / divisor}, values(t, mean),
		stat, n)

	// Backward with an upstream gradient per row and both forms of lse; with a single one; with that of a
	// mean.
	vd := random(t, r, stat, m)
	o.Reduction = kernels.ReduceNone
	scaled, size := want.upstream(vd, n)
	for _, form := range []*dlpack.Tensor{lse, whole} {
		grad := newMatrix(t, d, nil, m, n, l)
		require.NoError(t, crossEntropyBackward(x.Tensor, target, weight, tensor(t, stat, vd, m), form, nil,
			grad.Tensor, o))
		// As one number, the log-sum-exp has fewer digits after the point if the logits are large.
		requireClose(t, scaled, addScaled(size, vd, want.top, n), grad.result(t), d, n)
	}
	three := slices.Repeat([]float64{3}, int(m))
	scaled, size = want.upstream(three, n)
	for name, dloss := range map[string]*dlpack.Tensor{
		"single":   tensor(t, stat, three[:1]),
		"repeated": view(t, tensor(t, stat, three[:1], 1), 0, []int64{m}, []int64{0}),
		"strided": view(t, tensor(t, stat, slices.Repeat([]float64{3, 0}, int(m)), 2*m), 0,
			[]int64{m}, []int64{2}),
	} {
		grad := newMatrix(t, d, nil, m, n, l)
		err := crossEntropyBackward(x.Tensor, target, weight, dloss, lse, nil, grad.Tensor, o)
		require.NoError(t, err, name)
		requireClose(t, scaled, size, grad.result(t), d, n)
	}
	o.Reduction = kernels.ReduceMean
	scaled, size = want.upstream(slices.Repeat([]float64{3 / divisor}, int(m)), n)
	grad := newMatrix(t, d, nil, m, n, l)
	require.NoError(t, crossEntropyBackward(x.Tensor, target, weight, tensor(t, stat, three[:1]), lse,
		denominator, grad.Tensor, o))
	requireClose(t, scaled, size, grad.result(t), d, n)

	// With dx in x's memory, backward and forward.
	assert.Equal(t, vx, x.result(t), "x must not change")
	place := newMatrix(t, d, vx, m, n, l)
	require.NoError(t, crossEntropyBackward(place.Tensor, target, weight, tensor(t, stat, three[:1]), lse,
		denominator, place.Tensor, o))
	assert.Equal(t, grad.result(t), place.result(t))
	o.Reduction = kernels.ReduceNone
	require.NoError(t, crossEntropyForward(x.Tensor, target, weight, alone, nil, x.Tensor, nil, o))
	assert.Equal(t, gotDX, x.result(t))
}

// TestCrossEntropyOnePass: with one_pass, forward writes the gradient of the reduced loss to dx. Backward
// leaves that if dloss is 1, and otherwise computes the gradient again.
func TestCrossEntropyOnePass(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, d := range floats {
		for _, reduction := range []kernels.Reduction{kernels.ReduceMean, kernels.ReduceSum} {
			// Tasks of one row, tasks of several rows, and rows that several threads share.
			for _, shape := range [][2]int64{{1, 1}, {7, 33}, {700, 130}, {2, 131100}} {
				if shape[1] > 1000 && d != dlpack.Float32 {
					// 16-bit types run float32's code after conversion. The reference is no more exact than
					// float64.
					continue
				}
				for _, weighted := range []bool{false, true} {
					name := fmt.Sprintf("%v/%d/%v/weighted=%v", d, reduction, shape, weighted)
					t.Run(name, func(t *testing.T) {
						testOnePass(t, r, d, reduction, shape[0], shape[1], weighted)
					})
				}
			}
		}
	}
}

func testOnePass(t *testing.T, r *rand.Rand, d dlpack.DType, reduction kernels.Reduction, m, n int64,
	weighted bool) {
	stat := statistic(d)
	vx, vt := random(t, r, d, m*n), make([]float64, m)
	for i := range vt {
		vt[i] = float64(r.Int64N(n))
		if i%5 == 1 {
			vt[i] = ignored
		}
	}
	var vw []float64
	var weight *dlpack.Tensor
	if weighted {
		vw = random(t, r, d, n)
		for i := range vw {
			vw[i] = math.Abs(vw[i])
		}
		weight = tensor(t, d, vw, n)
	}
	x, target := tensor(t, d, vx, m, n), tensor(t, dlpack.Int64, vt, m)
	want := crossEntropy(vx, vt, vw, n)
	divisor := 1.0
	if reduction == kernels.ReduceMean {
		divisor = sum(want.weight)
	}
	gradient := func(dloss float64) (dx, size []float64) {
		return want.upstream(slices.Repeat([]float64{dloss / divisor}, int(m)), n)
	}

	o := crossEntropyOptions{Reduction: reduction, OnePass: true}
	loss, lse, denominator := empty(t, stat), empty(t, stat, 2, m), empty(t, stat)
	dx := newMatrix(t, d, nil, m, n, layouts[1])
	require.NoError(t, crossEntropyForward(x, target, weight, loss, lse, dx.Tensor, denominator, o))
	total := sum(want.loss) / divisor
	requireClose(t, []float64{total}, []float64{sum(want.sizeLoss) / divisor}, values(t, loss), stat, n)
	weights := sum(want.weight)
	requireClose(t, []float64{weights}, []float64{weights}, values(t, denominator), stat, m)
	right, size := gradient(1)
	requireClose(t, right, size, dx.result(t), d, n)

	// Without a denominator, and with dx in x's memory.
	place := tensor(t, d, vx, m, n)
	require.NoError(t, crossEntropyForward(place, target, weight, loss, lse, place, nil, o))
	assert.Equal(t, dx.result(t), values(t, place))

	if reduction == kernels.ReduceSum {
		denominator = nil
	}
	for _, dloss := range []float64{1, -0.75, 0} {
		backward := func(dx *dlpack.Tensor) {
			dloss := tensor(t, stat, []float64{dloss})
			err := crossEntropyBackward(x, target, weight, dloss, lse, denominator, dx, o)
			require.NoError(t, err)
		}
		given := newMatrix(t, d, slices.Repeat([]float64{mark}, int(m*n)), m, n, layouts[1])
		backward(given.Tensor)
		if dloss == 1 {
			assert.Equal(t, slices.Repeat([]float64{mark}, int(m*n)), given.result(t),
				"dx must not be written")
			continue
		}
		right, size := gradient(dloss)
		requireClose(t, right, size, given.result(t), d, n)
	}
}

// TestDivisorAndUpstream: losses and gradients are divided by the divisor, and forward's gradient is the one
// that backward computes for that upstream gradient. Rows that are ignored stay 0, even with a divisor of 0.
func TestDivisorAndUpstream(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	const m, n = 7, 33
	for _, d := range floats {
		stat := statistic(d)
		vx, vt := random(t, r, d, m*n), make([]float64, m)
		for i := range vt {
			vt[i] = float64(r.Int64N(n))
		}
		vt[2] = ignored
		x, target := tensor(t, d, vx, m, n), tensor(t, dlpack.Int64, vt, m)
		want := crossEntropy(vx, vt, nil, n)
		for _, reduction := range []kernels.Reduction{kernels.ReduceNone, kernels.ReduceSum} {
			o := crossEntropyOptions{Reduction: reduction,
				Divisor: tensor(t, stat, []float64{3}), Upstream: tensor(t, stat, []float64{-0.75})}
			loss, lse, dx := empty(t, stat), empty(t, stat, 2, m), empty(t, d, m, n)
			losses, sizes := []float64{sum(want.loss) / 3}, []float64{sum(want.sizeLoss) / 3}
			if reduction == kernels.ReduceNone {
				loss, losses, sizes = empty(t, stat, m), slices.Clone(want.loss), slices.Clone(want.sizeLoss)
				for i := range losses {
					losses[i], sizes[i] = losses[i]/3, sizes[i]/3
				}
			}
			require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, dx, nil, o))
			requireClose(t, losses, sizes, values(t, loss), stat, n)
			right, size := want.upstream(slices.Repeat([]float64{-0.25}, m), n)
			requireClose(t, right, size, values(t, dx), d, n)

			o.Upstream = nil
			dloss := tensor(t, stat, []float64{-0.75})
			require.NoError(t, crossEntropyBackward(x, target, nil, dloss, lse, nil, dx, o))
			requireClose(t, right, size, values(t, dx), d, n)
			if reduction == kernels.ReduceSum { // what forward has made for this dloss stays
				o.Upstream, o.OnePass = dloss, true
				require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, dx, nil, o))
				requireClose(t, right, size, values(t, dx), d, n)
				given := tensor(t, d, slices.Repeat([]float64{mark}, m*n), m, n)
				require.NoError(t, crossEntropyBackward(x, target, nil, dloss, lse, nil, given, o))
				assert.Equal(t, slices.Repeat([]float64{mark}, m*n), values(t, given), "dx must not be written")
				for _, other := range []*dlpack.Tensor{nil, tensor(t, stat, []float64{math.NaN()})} {
					given := tensor(t, d, slices.Repeat([]float64{mark}, m*n), m, n)
					o.Upstream = other
					require.NoError(t, crossEntropyBackward(x, target, nil, dloss, lse, nil, given, o))
					requireClose(t, right, size, values(t, given), d, n)
					if other != nil { // NaN is not taken for what NaN has made
						require.NoError(t, crossEntropyBackward(x, target, nil, other, lse, nil, given, o))
						assert.True(t, math.IsNaN(values(t, given)[0]))
					}
				}
			}
			o.OnePass, o.Upstream, o.Divisor = false, nil, tensor(t, stat, []float64{0})
			require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, dx, nil, o))
			assert.Equal(t, make([]float64, n), values(t, dx)[2*n:3*n])
			assert.True(t, math.IsInf(values(t, dx)[0], 0))
			require.NoError(t, crossEntropyBackward(x, target, nil, dloss, lse, nil, dx, o))
			assert.Equal(t, make([]float64, n), values(t, dx)[2*n:3*n])
			assert.True(t, math.IsInf(values(t, dx)[0], 0))
		}
	}
}

// TestOnePassWithoutWeight: all rows are ignored or have weight 0. The denominator is 0, and so is the
// gradient.
func TestOnePassWithoutWeight(t *testing.T) {
	for name, class := range map[string]float64{"ignored": ignored, "weight 0": 1} {
		x := empty(t, dlpack.Float32, 3, 4)
		target := tensor(t, dlpack.Int64, []float64{class, class, class}, 3)
		weight := tensor(t, dlpack.Float32, []float64{1, 0, 1, 1}, 4)
		loss, denominator := empty(t, dlpack.Float32), tensor(t, dlpack.Float32, []float64{mark})
		dx := tensor(t, dlpack.Float32, slices.Repeat([]float64{mark}, 12), 3, 4)
		o := crossEntropyOptions{Reduction: kernels.ReduceMean, OnePass: true}
		err := crossEntropyForward(x, target, weight, loss, nil, dx, denominator, o)
		require.NoError(t, err, name)
		assert.True(t, math.IsNaN(values(t, loss)[0]), name)
		assert.Equal(t, []float64{0}, values(t, denominator), name)
		assert.Equal(t, make([]float64, 12), values(t, dx), name)
	}
}

// addScaled adds to size the error of a gradient that comes from a rounded log-sum-exp of about top.
func addScaled(size, scale, top []float64, n int64) []float64 {
	v := slices.Clone(size)
	for i := range v {
		v[i] += math.Abs(scale[int64(i)/n]) * math.Abs(top[int64(i)/n]) * 2
	}
	return v
}

func TestTargetsOutOfRange(t *testing.T) {
	const n = 5
	vt := []float64{-1, n, 2, math.MinInt32, math.MaxInt32, ignored}
	m := int64(len(vt))
	for _, index := range []dlpack.DType{dlpack.Int32, dlpack.Int64} {
		for _, d := range floats {
			stat := statistic(d)
			x := tensor(t, d, random(t, rand.New(rand.NewPCG(3, 4)), d, m*n), m, n)
			weight := tensor(t, d, ones(n), n)
			loss, lse, dx := empty(t, stat, m), empty(t, stat, 2, m), empty(t, d, m, n)
			o := plain
			target := tensor(t, index, vt, m)
			want := crossEntropy(values(t, x), vt, nil, n)
			require.NoError(t, crossEntropyForward(x, target, weight, loss, lse, dx, nil, o))
			requireClose(t, want.loss, want.sizeLoss, values(t, loss), stat, n)
			requireClose(t, want.dx, want.sizeDX, values(t, dx), d, n)
			one := tensor(t, stat, []float64{1})
			require.NoError(t, crossEntropyBackward(x, target, weight, one, lse, nil, dx, o))
			requireClose(t, want.dx, want.sizeDX, values(t, dx), d, n)
			total := empty(t, stat)
			o.Reduction = kernels.ReduceSum
			require.NoError(t, crossEntropyForward(x, target, nil, total, nil, nil, nil, o))
			assert.True(t, math.IsNaN(values(t, total)[0]), "one invalid target makes the sum NaN")
		}
	}
}

// An int64 target whose low 32 bits would be in range is still out of range.
func TestTargetsAreNotTruncated(t *testing.T) {
	x, target := empty(t, dlpack.Float32, 1, 4), tensor(t, dlpack.Int64, []float64{1 << 32}, 1)
	loss := empty(t, dlpack.Float32, 1)
	require.NoError(t, crossEntropyForward(x, target, nil, loss, nil, nil, nil, plain))
	assert.True(t, math.IsNaN(values(t, loss)[0]))
}

func TestAllRowsIgnored(t *testing.T) {
	for name, m := range map[string]int64{"ignored": 3, "no rows": 0} {
		t.Run(name, func(t *testing.T) {
			x := empty(t, dlpack.Float32, m, 4)
			target := tensor(t, dlpack.Int64, slices.Repeat([]float64{ignored}, int(m)), m)
			loss := tensor(t, dlpack.Float32, []float64{7})
			denominator := tensor(t, dlpack.Float32, []float64{7})
			dx, lse := empty(t, dlpack.Float32, m, 4), empty(t, dlpack.Float32, 2, m)
			o := crossEntropyOptions{Reduction: kernels.ReduceMean}
			require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, dx, denominator, o))
			assert.True(t, math.IsNaN(values(t, loss)[0]), "a mean over no rows is NaN, as in torch")
			assert.Equal(t, []float64{0}, values(t, denominator))
			assert.Equal(t, make([]float64, 4*m), values(t, dx))
			require.NoError(t, crossEntropyBackward(x, target, nil, loss, lse, denominator, dx, o))
			assert.Equal(t, make([]float64, 4*m), values(t, dx),
				"the gradient of an ignored row is 0 whatever the divisor")

			o.Reduction = kernels.ReduceSum
			require.NoError(t, crossEntropyForward(x, target, nil, loss, nil, nil, nil, o))
			assert.Equal(t, []float64{0}, values(t, loss))

			o.Reduction = kernels.ReduceNone
			rows := empty(t, dlpack.Float32, m)
			require.NoError(t, crossEntropyForward(x, target, nil, rows, nil, nil, denominator, o))
			assert.Equal(t, []float64{0}, values(t, denominator))
			require.NoError(t, crossEntropyForward(x, target, nil, rows, nil, nil, nil, o))
			assert.Equal(t, make([]float64, m), values(t, rows))
		})
	}
}

// lossOptions are those of a row's loss. scale, softcap and temperature are 0 for their defaults.
type lossOptions struct{ smoothing, zLoss, scale, softcap, temperature float64 }

// z is a mapped logit and its derivative.
func (o lossOptions) z(x float64) (z, slope float64) {
	scale, temperature := cmp.Or(o.scale, 1), cmp.Or(o.temperature, 1)
	if o.softcap == 0 {
		return x * scale / temperature, scale / temperature
	}
	t := math.Tanh(scale * x / o.softcap)
	return o.softcap * t / temperature, (1 - t*t) * scale / temperature
}

func (o lossOptions) forward(f ops.CrossEntropyForward) ops.CrossEntropyForward {
	f.LabelSmoothing, f.ZLoss, f.Softcap = o.smoothing, o.zLoss, o.softcap
	if o.scale != 0 {
		f.Scale = ops.Some(o.scale)
	}
	if o.temperature != 0 {
		f.Temperature = ops.Some(o.temperature)
	}
	return f
}

func (o lossOptions) backward(b ops.CrossEntropyBackward) ops.CrossEntropyBackward {
	f := o.forward(ops.CrossEntropyForward{})
	b.LabelSmoothing, b.ZLoss, b.Softcap = o.smoothing, o.zLoss, o.softcap
	b.Scale, b.Temperature = f.Scale, f.Temperature
	return b
}

// general is the reference of these options: the loss of each row, its gradient, and their magnitudes.
func general(x, target, weight []float64, n int64, o lossOptions) (loss, sizeLoss, dx, sizeDX []float64) {
	total := 0.0
	for _, w := range weight {
		total += w
	}
	_, steepest := o.z(0)
	for i, class := range target {
		r, slopes, sum := slices.Clone(row(x, int64(i), n)), make([]float64, n), 0.0
		most := 0.0 // of the numbers that are rounded
		for j, v := range r {
			if !math.IsInf(v, 0) {
				most = max(most, math.Abs(v)*cmp.Or(o.scale, 1)/cmp.Or(o.temperature, 1))
			}
			r[j], slopes[j] = o.z(v)
		}
		if o == (lossOptions{smoothing: o.smoothing, zLoss: o.zLoss}) {
			most = 0 // nothing maps them
		}
		top := slices.Max(r)
		for _, v := range r {
			sum += math.Exp(v - top)
		}
		lse := top + math.Log(sum)
		inside := class >= 0 && class < float64(n)
		own, all, size := 0.0, 0.0, 0.0
		if inside {
			own = (1 - o.smoothing) * weight[int(class)]
		}
		nothing := class == ignored || inside && own == 0 && o.smoothing == 0 && o.zLoss == 0
		for j, v := range r {
			depth := lse - v
			if weight[j] != 0 {
				all += weight[j] * depth
				size += weight[j] * (depth + 1)
			}
			p, share := math.Exp(v-top)/sum, o.smoothing/float64(n)
			g, hit := own*p+share*(total*p-weight[j])+2*o.zLoss*lse*p, 0.0
			if float64(j) == class {
				g -= own
				hit = own
			}
			switch {
			case nothing:
				g = 0
			case !inside:
				g = math.NaN()
			}
			size := hit + share*weight[j]
			if p > 0 {
				size += p * (own + share*total + 2*o.zLoss*math.Abs(lse)) * (1 + math.Abs(v-top) + 4*most)
			}
			dx, sizeDX = append(dx, g*slopes[j]), append(sizeDX, size*steepest) // 1 - tanh^2 loses digits
		}
		l := o.smoothing/float64(n)*all + o.zLoss*lse*lse
		size = o.smoothing/float64(n)*size + o.zLoss*lse*lse + (1+2*o.zLoss*math.Abs(lse))*2*most
		switch {
		case nothing:
			l = 0
		case !inside:
			l = math.NaN()
		case own != 0:
			l += own * (lse - r[int(class)])
			size += own * (lse - r[int(class)] + 1)
		}
		loss, sizeLoss = append(loss, l), append(sizeLoss, size)
	}
	return loss, sizeLoss, dx, sizeDX
}

func TestLossOptions(t *testing.T) {
	const m = 6
	r := rand.New(rand.NewPCG(5, 6))
	for _, d := range floats {
		for _, n := range append(rowWidths, 140000) { // several threads share a row of 140000
			for _, o := range []lossOptions{
				{smoothing: 0.1}, {smoothing: 1}, {zLoss: 0.01}, {scale: 0.3, temperature: 1.7}, {softcap: 2},
				{smoothing: 0.1, zLoss: 0.1, scale: 1.5, softcap: 30, temperature: 0.7},
			} {
				for _, weighted := range []bool{false, true} {
					if n == 140000 && (d.Bits != 32 || o.smoothing != 0.1) {
						continue // it is slow, and adds nothing
					}
					t.Run(fmt.Sprintf("%v/%d/%v/%t", d, n, o, weighted), func(t *testing.T) {
						testLossOptions(t, r, d, m, n, o, weighted)
					})
				}
			}
		}
	}
}

func testLossOptions(
	t *testing.T, r *rand.Rand, d dlpack.DType, m, n int64, o lossOptions, weighted bool,
) {
	stat := statistic(d)
	vx, vt, vd := random(t, r, d, m*n), make([]float64, m), make([]float64, m)
	for i := range vt {
		vt[i], vd[i] = float64(r.Int64N(n)), 0.5+r.Float64()
	}
	vt[1], vt[2] = ignored, float64(n)
	vw := ones(int(n))
	var weight *dlpack.Tensor
	if weighted {
		for i := range vw {
			vw[i] = float64(i%4) / 4 // exact in all types
		}
		vw[int(vt[3])] = 0 // with smoothing and with the z-loss the row counts all the same
		if vw[0] = 0; n > 1 {
			vx[3*n] = math.Inf(-1)
		}
		weight = tensor(t, d, vw, n)
	}
	vx = values(t, tensor(t, d, vx, m, n)) // rounded
	loss, sizeLoss, dx, sizeDX := general(vx, vt, vw, n, o)
	x, target := tensor(t, d, vx, m, n), tensor(t, dlpack.Int64, vt, m)
	gotLoss, lse, gotDX := empty(t, stat, m), empty(t, stat, 2, m), empty(t, d, m, n)
	forward := o.forward(ops.CrossEntropyForward{X: x, Target: target, Weight: weight, Loss: gotLoss, LSE: lse,
		DX: gotDX})
	require.NoError(t, forward.Run(nil))
	requireClose(t, loss, sizeLoss, values(t, gotLoss), stat, n)
	requireClose(t, dx, sizeDX, values(t, gotDX), d, n)
	dloss := tensor(t, stat, vd, m)
	vd = values(t, dloss)
	for i := range dx {
		dx[i], sizeDX[i] = dx[i]*vd[int64(i)/n], sizeDX[i]*vd[int64(i)/n]
	}
	backward := o.backward(ops.CrossEntropyBackward{X: x, Target: target, Weight: weight, DLoss: dloss,
		LSE: lse, DX: x})
	require.NoError(t, backward.Run(nil)) // in place
	requireClose(t, dx, sizeDX, values(t, x), d, n)
}

// A mean is over the weights of the targets alone, and its gradient in one pass is that of backward.
func TestLossOptionsOfMean(t *testing.T) {
	const m, n = 5, 33
	r := rand.New(rand.NewPCG(7, 8))
	vx, vt := random(t, r, dlpack.Float64, m*n), []float64{0, 1, ignored, 2, 32}
	for _, o := range []lossOptions{
		{smoothing: 0.2}, {zLoss: 0.2}, {smoothing: 0.1, zLoss: 0.1, scale: 2, softcap: 3, temperature: 1.5},
	} {
		vw := ones(n)
		x, target := tensor(t, dlpack.Float64, vx, m, n), tensor(t, dlpack.Int32, vt, m)
		var weight *dlpack.Tensor
		if o.zLoss == 0 {
			vw = random(t, r, dlpack.Float64, n)
			for i := range vw {
				vw[i] = math.Abs(vw[i])
			}
			weight = tensor(t, dlpack.Float64, vw, n)
		}
		losses, _, dx, _ := general(vx, vt, vw, n, o)
		weights := vw[0] + vw[1] + vw[2] + vw[32]
		loss, gotDX, denominator := empty(t, dlpack.Float64, 1), empty(t, dlpack.Float64, m, n),
			empty(t, dlpack.Float64, 1)
		lse := empty(t, dlpack.Float64, 2, m)
		forward := o.forward(ops.CrossEntropyForward{X: x, Target: target, Weight: weight, Loss: loss, DX: gotDX,
			LSE: lse, Denominator: denominator, Reduction: kernels.ReduceMean, OnePass: true})
		require.NoError(t, forward.Run(nil))
		assert.InDelta(t, sum(losses)/weights, values(t, loss)[0], 1e-13)
		assert.InDelta(t, weights, values(t, denominator)[0], 1e-13)
		for i, v := range values(t, gotDX) {
			require.InDelta(t, dx[i]/weights, v, 1e-14)
		}
		// For another upstream gradient than expected, backward makes it again from what forward has kept.
		backward := o.backward(ops.CrossEntropyBackward{X: x, Target: target, Weight: weight, DX: gotDX, LSE: lse,
			DLoss: tensor(t, dlpack.Float64, []float64{3}, 1), Denominator: denominator,
			Reduction: kernels.ReduceMean, OnePass: true})
		require.NoError(t, backward.Run(nil))
		for i, v := range values(t, gotDX) {
			require.InDelta(t, 3*dx[i]/weights, v, 1e-13)
		}
	}
}

func TestLossOptionsRefuse(t *testing.T) {
	x, target := tensor(t, dlpack.Float32, []float64{1, 2}, 1, 2), tensor(t, dlpack.Int64, []float64{1}, 1)
	weight, loss := tensor(t, dlpack.Float32, []float64{1, 2}, 2), empty(t, dlpack.Float32, 1)
	forward := ops.CrossEntropyForward{X: x, Target: target, Loss: loss}
	inf := math.Inf(1)
	for option, c := range map[string]struct {
		set  func(f *ops.CrossEntropyForward, v float64)
		bad  []float64
		said string
	}{
		"z_loss": {func(f *ops.CrossEntropyForward, v float64) { f.ZLoss = v },
			[]float64{-1, inf, math.NaN(), 1e39}, "at least 0"},
		"scale": {func(f *ops.CrossEntropyForward, v float64) { f.Scale = ops.Some(v) },
			[]float64{-1, 0, inf, math.NaN(), 1e-40}, "1e-18 to 1e+18"},
		"softcap": {func(f *ops.CrossEntropyForward, v float64) { f.Softcap = v },
			[]float64{-1, inf, math.NaN(), 1e30}, "or 0 for none"},
		"temperature": {func(f *ops.CrossEntropyForward, v float64) { f.Temperature = ops.Some(v) },
			[]float64{-1, 0, inf, math.NaN()}, "1e-18 to 1e+18"},
	} {
		for _, v := range c.bad {
			f := forward
			c.set(&f, v)
			err := f.Run(nil)
			require.ErrorContains(t, err, fmt.Sprintf("%s is %v, expected", option, v))
			require.ErrorContains(t, err, c.said)
		}
	}
	b := ops.CrossEntropyBackward{X: x, Target: target, DLoss: loss, LSE: loss, DX: x, Slice: true,
		LabelSmoothing: 0.5}
	require.ErrorContains(t, b.Run(nil), "label_smoothing is 0.5 with slice")
	forward.ZLoss, forward.Weight, forward.Reduction = 1, weight, kernels.ReduceMean
	require.ErrorContains(t, forward.Run(nil), "z_loss is 1 with weight and reduction mean")
}

func TestCrossEntropyInfinities(t *testing.T) {
	inf := math.Inf(1)
	x := tensor(t, dlpack.Float32, []float64{
		-inf, 0, 0, // a masked class that is not the target
		-inf, 0, 0, // the target is masked: an infinite loss
		-inf, -inf, -inf, // torch: NaN
		10000, 10000, 10000,
	}, 4, 3)
	target, loss := tensor(t, dlpack.Int64, []float64{1, 0, 1, 2}, 4), empty(t, dlpack.Float32, 4)
	require.NoError(t, crossEntropyForward(x, target, nil, loss, nil, nil, nil, plain))
	got := values(t, loss)
	assert.InDelta(t, math.Log(2), got[0], 1e-6)
	assert.Equal(t, inf, got[1])
	assert.True(t, math.IsNaN(got[2]))
	assert.InDelta(t, math.Log(3), got[3], 1e-6)
}

// Targets have the leading dimensions of x, with any fixed stride. Losses may have them too.
func TestCrossEntropyLeadingDimensions(t *testing.T) {
	vx, vt := random(t, rand.New(rand.NewPCG(5, 6)), dlpack.Float32, 24), []float64{0, 1, 2, 3, 2, 1}
	x := tensor(t, dlpack.Float32, vx, 2, 3, 4)
	spread := tensor(t, dlpack.Int64, vt, 6)
	want := crossEntropy(vx, vt, nil, 4)
	for name, target := range map[string]*dlpack.Tensor{
		"as x": view(t, spread, 0, []int64{2, 3}, nil),
		"flipped": view(t, tensor(t, dlpack.Int64, []float64{1, 2, 3, 2, 1, 0}, 6), 5,
			[]int64{2, 3}, []int64{-3, -1}),
	} {
		loss, lse := empty(t, dlpack.Float32, 2, 3), empty(t, dlpack.Float32, 2, 2, 3)
		dx := empty(t, dlpack.Float32, 2, 3, 4)
		require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, nil, nil, plain), name)
		requireClose(t, want.loss, want.sizeLoss, values(t, loss), dlpack.Float32, 4)
		one := tensor(t, dlpack.Float32, []float64{1})
		require.NoError(t, crossEntropyBackward(x, target, nil, one, lse, nil, dx, plain), name)
		requireClose(t, want.dx, want.sizeDX, values(t, dx), dlpack.Float32, 4)
	}

	// As many elements are not enough: (2, 3) and (3, 2) have other rows.
	loss, long := empty(t, dlpack.Float32, 6), empty(t, dlpack.Float32, 2, 10)
	for _, dims := range [][]int64{{6}, {3, 2}, {2, 3, 1}} {
		err := crossEntropyForward(x, view(t, spread, 0, dims, nil), nil, loss, nil, nil, nil, plain)
		require.ErrorContains(t, err, "expected (2, 3), the leading dimensions of x")
	}

	// The two parts of lse may be slices of a larger tensor.
	cut := view(t, long, 1, []int64{2, 6}, []int64{10, 1})
	target := view(t, spread, 0, []int64{2, 3}, nil)
	require.NoError(t, crossEntropyForward(x, target, nil, loss, cut, nil, nil, plain))
	parts := values(t, long)
	requireClose(t, want.top, want.top, parts[1:7], dlpack.Float32, 4)
	requireClose(t, want.logSum, ones(6), parts[11:17], dlpack.Float32, 4)
	assert.Equal(t, []float64{0, 0, 0, 0}, []float64{parts[0], parts[7], parts[10], parts[17]})
}

// A log-sum-exp of 2 M + 1 elements holds both parts and the denominator, so that backward needs no other
// statistics.
func TestCrossEntropyPackedStatistics(t *testing.T) {
	for _, m := range []int64{0, 1, 3} {
		x := tensor(t, dlpack.Float32, random(t, rand.New(rand.NewPCG(7, 8)), dlpack.Float32, 4*m), m, 4)
		target := tensor(t, dlpack.Int64, []float64{1, ignored, 2}[:m], m)
		one, loss := tensor(t, dlpack.Float32, []float64{1}), empty(t, dlpack.Float32)
		apart, packed := empty(t, dlpack.Float32, 2, m), empty(t, dlpack.Float32, 2*m+1)
		denominator := empty(t, dlpack.Float32)
		o := crossEntropyOptions{Reduction: kernels.ReduceMean}
		require.NoError(t, crossEntropyForward(x, target, nil, loss, apart, nil, denominator, o))
		require.NoError(t, crossEntropyForward(x, target, nil, loss, packed, nil, nil, o))
		assert.Equal(t, append(values(t, apart), values(t, denominator)...), values(t, packed))

		want, got := empty(t, dlpack.Float32, m, 4), empty(t, dlpack.Float32, m, 4)
		require.NoError(t, crossEntropyBackward(x, target, nil, one, apart, denominator, want, o))
		require.NoError(t, crossEntropyBackward(x, target, nil, one, packed, nil, got, o))
		assert.Equal(t, values(t, want), values(t, got))

		err := crossEntropyForward(x, target, nil, loss, packed, nil, denominator, o)
		require.ErrorContains(t, err, "denominator is given, and lse has room for it too")
		o.Reduction = kernels.ReduceSum // ignores the denominator
		require.NoError(t, crossEntropyBackward(x, target, nil, one, packed, nil, got, o))
	}
}

// Backward of slices of the classes gives the slices of the gradient. In a row whose target is in the other
// slice nothing is subtracted, and its weight is 1.
func TestCrossEntropyBackwardOfSlices(t *testing.T) {
	const m, n, cut = 5, 11, 4
	for _, d := range []dlpack.DType{dlpack.Float16, dlpack.BFloat16, dlpack.Float32, dlpack.Float64} {
		stat := dlpack.Float32
		if d == dlpack.Float64 {
			stat = d
		}
		x := tensor(t, d, random(t, rand.New(rand.NewPCG(1, 2)), d, m*n), m, n)
		classes := []float64{0, cut, ignored, n - 1, cut - 1}
		dloss, loss := tensor(t, stat, []float64{1, 2, 3, 4, 0.5}, m), empty(t, stat)
		lse, want := empty(t, stat, 2*m+1), empty(t, d, m, n)
		for _, reduction := range []kernels.Reduction{kernels.ReduceSum, kernels.ReduceMean} {
			o := crossEntropyOptions{Reduction: reduction}
			target := tensor(t, dlpack.Int64, classes, m)
			require.NoError(t, crossEntropyForward(x, target, nil, loss, lse, nil, nil, o))
			require.NoError(t, crossEntropyBackward(x, target, nil, dloss, lse, nil, want, o))

			got := empty(t, d, m, n)
			o.Slice = true
			for _, columns := range [][2]int64{{0, cut}, {cut, n}} {
				first, size := columns[0], columns[1]-columns[0]
				local := make([]float64, m)
				for i, c := range classes {
					local[i] = c - float64(first)
				}
				o.IgnoreIndex = ops.Some(ignored - first)
				part := func(v *dlpack.Tensor) *dlpack.Tensor {
					return view(t, v, first, []int64{m, size}, []int64{n, 1})
				}
				require.NoError(t, crossEntropyBackward(
					part(x), tensor(t, dlpack.Int32, local, m), nil, dloss, lse, nil, part(got), o))
			}
			assert.Equal(t, values(t, want), values(t, got), "%v", d)
		}

		// Class weights apply to the slice's own targets.
		o := crossEntropyOptions{Slice: true}
		target := tensor(t, dlpack.Int64, []float64{0, 99, ignored, -1, 1}, m)
		twice := tensor(t, stat, []float64{2, 2, 4, 1, 1}, m)
		weight := make([]float64, n)
		for i := range weight {
			weight[i] = 2
		}
		lse = tensor(t, stat, make([]float64, m), m)
		got := empty(t, d, m, n)
		one := tensor(t, stat, []float64{1, 2, 2, 1, 0.5}, m)
		require.NoError(t, crossEntropyBackward(x, target, tensor(t, d, weight, n), one, lse, nil, got, o))
		require.NoError(t, crossEntropyBackward(x, target, nil, twice, lse, nil, want, o))
		assert.Equal(t, values(t, want), values(t, got), "%v", d)
	}
}
