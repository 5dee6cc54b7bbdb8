package ops_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// softRow is what the loss of a row of class probabilities is made of, in float64.
type softRow struct {
	z, slope, v         []float64
	max, logSum, weight float64
	magnitude           float64 // the sum of the magnitudes of v
	loss, size          float64 // and the sum of the magnitudes of its terms
}

// compensated is a sum, and what it has lost to rounding (Neumaier). Many equal terms err to one side.
type compensated struct{ sum, lost float64 }

func (c *compensated) add(v float64) {
	sum := c.sum + v
	if math.Abs(c.sum) >= math.Abs(v) {
		c.lost += (c.sum - sum) + v
	} else {
		c.lost += (v - sum) + c.sum
	}
	c.sum = sum
}

func softRowOf(x, q, weight []float64, o lossOptions) (s softRow) {
	s.max = math.Inf(-1)
	s.z, s.slope, s.v = make([]float64, len(x)), make([]float64, len(x)), make([]float64, len(x))
	var weights, others compensated
	top := 0
	for j := range x {
		s.z[j], s.slope[j] = o.z(x[j])
		if s.z[j] > s.max {
			s.max, top = s.z[j], j
		}
		s.v[j] = (1-o.smoothing)*q[j] + o.smoothing/float64(len(x))
		if weight != nil {
			s.v[j] *= weight[j]
		}
		weights.add(s.v[j])
		s.magnitude += math.Abs(s.v[j])
	}
	for j, z := range s.z {
		if j != top {
			others.add(math.Exp(z - s.max))
		}
	}
	s.weight, s.logSum = weights.sum+weights.lost, math.Log1p(others.sum+others.lost)
	loss := compensated{sum: s.weight * s.logSum}
	for j, z := range s.z {
		if s.v[j] != 0 {
			loss.add(s.v[j] * (s.max - z))
			s.size += math.Abs(s.v[j]) * (math.Abs(s.max) + math.Abs(z) + s.logSum)
		}
	}
	lse := s.max + s.logSum
	s.loss = loss.sum + loss.lost + o.zLoss*lse*lse
	s.size += o.zLoss * (math.Abs(s.max) + s.logSum) * (math.Abs(s.max) + s.logSum)
	return s
}

// gradient is that of x[j], and the magnitude of its terms. Below a cap z has errors of the cap's size.
func (s softRow) gradient(j int64, o lossOptions) (dx, size float64) {
	p := math.Exp(s.z[j] - s.max - s.logSum)
	of := 2 * o.zLoss * (s.max + s.logSum)
	rest := s.weight + of
	_, steepest := o.z(0)
	if size = math.Abs(s.v[j]) * steepest; p > 0 {
		size += p * (s.magnitude + math.Abs(of)) * (1 + math.Abs(s.max) + math.Abs(s.z[j]-s.max)) * steepest
	}
	if p > 0.75 { // without the difference of p and 1
		return s.slope[j] * ((rest - s.v[j]) + rest*math.Expm1(s.z[j]-s.max-s.logSum)), size
	}
	return s.slope[j] * (rest*p - s.v[j]), size
}

func TestSoftCrossEntropy(t *testing.T) {
	options := []lossOptions{
		{}, {smoothing: 0.1}, {zLoss: 1e-2, temperature: 0.7}, {scale: 0.5, softcap: 3, smoothing: 0.2},
	}
	for _, d := range floats {
		for _, n := range append(rowWidths, 140000) { // several threads share a row of 140000
			for i, o := range options {
				for k, of := range companions(d) {
					if of != d && (i+k == 2 || n > 1000) || n > 100000 && i != 3 {
						continue
					}
					for _, l := range layoutsFor(of == d && n < 5000) {
						t.Run(fmt.Sprintf("%v/%v/%d/%d/%s", d, of, n, i, l.name), func(t *testing.T) {
							testSoftCrossEntropy(t, d, of, n, o, i%2 == 1, l)
						})
					}
				}
			}
		}
	}
}

// softTargets are five rows of class probabilities: of one class alone, of two, of all, of none, and numbers
// that are no probabilities.
func softTargets(t *testing.T, d dlpack.DType, r *rand.Rand, n int64) []float64 {
	q := make([]float64, 5*n)
	q[0], q[n+n/2] = 1, 0.75
	q[n+n-1] += 0.25
	for j := range n {
		q[2*n+j] = 2 * r.Float64() / float64(n)
		q[4*n+j] = r.Float64() - 0.5
	}
	return values(t, tensor(t, d, q, 5*n))
}

func testSoftCrossEntropy(t *testing.T, d, of dlpack.DType, n int64, o lossOptions, weighted bool, l layout) {
	const m = 5
	r, stat := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits))), statistic(d)
	logits, q := random(t, r, d, m*n), softTargets(t, of, r, n)
	if n > 2 {
		logits[0] = 20 // nearly certain
		logits[2*n+1], logits[2*n+2] = 9, 9
		logits[n] = math.Inf(-1) // where q is 0
		q[n] = 0
		if o.smoothing != 0 {
			logits[n] = -30
		}
		logits = values(t, tensor(t, d, logits, m*n))
	}
	var weight []float64
	x, target := newMatrix(t, d, logits, m, n, l), newMatrix(t, of, q, m, n, l)
	f := ops.SoftCrossEntropyForward{
		X: x.Tensor, Target: target.Tensor, State: empty(t, stat, m, 3), LabelSmoothing: o.smoothing,
		ZLoss: o.zLoss, Softcap: o.softcap,
	}
	if weighted {
		weight = make([]float64, n)
		for j := range weight {
			weight[j] = float64(j%5) / 2
		}
		f.Weight = tensor(t, companions(d)[0], weight, n)
	}
	if o.scale != 0 {
		f.Scale = ops.Some(o.scale)
	}
	if o.temperature != 0 {
		f.Temperature = ops.Some(o.temperature)
	}
	rows := make([]softRow, m)
	want, size, state := make([]float64, m), make([]float64, m), make([]float64, 3*m)
	sum, sizes := 0.0, 0.0
	for i := range int64(m) {
		s := softRowOf(row(logits, i, n), row(q, i, n), weight, o)
		rows[i], want[i], size[i] = s, s.loss, s.size
		sum, sizes = sum+s.loss, sizes+s.size
		copy(state[3*i:], []float64{s.max, s.logSum, s.weight})
	}
	divisor := tensor(t, stat, []float64{4})
	of2 := []float64{1, -2, 0.5, 3, 1}
	for _, c := range []struct {
		reduction ops.Reduction
		divisor   *dlpack.Tensor
		by        float64
	}{
		{ops.ReduceNone, nil, 1}, {ops.ReduceNone, divisor, 4}, {ops.ReduceSum, divisor, 4},
		{ops.ReduceMean, nil, m},
	} {
		f.Reduction, f.Divisor, f.Loss = c.reduction, c.divisor, empty(t, stat)
		losses, magnitudes, upstream := []float64{sum / c.by}, []float64{sizes / c.by}, []float64{2, 2, 2, 2, 2}
		dloss := tensor(t, stat, upstream[:1], 1)
		if c.reduction == ops.ReduceNone {
			f.Loss, losses, magnitudes = empty(t, stat, m), make([]float64, m), make([]float64, m)
			for i := range losses {
				losses[i], magnitudes[i] = want[i]/c.by, size[i]/c.by
			}
			upstream = of2
			dloss = tensor(t, stat, of2, m)
		}
		require.NoError(t, f.Run(nil))
		requireClose(t, losses, magnitudes, values(t, f.Loss), stat, n)
		got := values(t, f.State)
		for i, v := range state {
			assert.InDelta(t, v, got[i], 1e-4*(1+math.Abs(v)), "state %d", i)
		}
		x.result(t)

		gradients, terms := make([]float64, m*n), make([]float64, m*n)
		for i := range int64(m) {
			for j := range n {
				g, s := rows[i].gradient(j, o)
				gradients[i*n+j], terms[i*n+j] = upstream[i]*g/c.by, math.Abs(upstream[i])*s/c.by
			}
		}
		dx := newMatrix(t, d, nil, m, n, l)
		b := ops.SoftCrossEntropyBackward{
			X: x.Tensor, Target: target.Tensor, Weight: f.Weight, DLoss: dloss, State: f.State, Divisor: c.divisor,
			DX: dx.Tensor, Reduction: f.Reduction, LabelSmoothing: o.smoothing, ZLoss: o.zLoss, Scale: f.Scale,
			Softcap: o.softcap, Temperature: f.Temperature,
		}
		require.NoError(t, b.Run(nil))
		result := dx.result(t)
		requireClose(t, gradients, terms, result, d, 8)
		over := newMatrix(t, d, logits, m, n, l)
		b.X, b.DX = over.Tensor, over.Tensor
		require.NoError(t, b.Run(nil))
		assert.Equal(t, result, over.result(t), "in place")
	}
}

func TestSoftCrossEntropyOfCertainRows(t *testing.T) {
	// The others' share is 2^-36 of each: far below the digits of 1 - p in float32.
	z := 36 * math.Ln2
	x := tensor(t, dlpack.Float32, []float64{z, 0, 0}, 1, 3)
	q := tensor(t, dlpack.Float32, []float64{1, 0, 0}, 1, 3)
	f := ops.SoftCrossEntropyForward{
		X: x, Target: q, Loss: empty(t, dlpack.Float32, 1), State: empty(t, dlpack.Float32, 1, 3),
	}
	require.NoError(t, f.Run(nil))
	others := math.Exp(-values(t, x)[0])
	assert.InEpsilon(t, 2*others, values(t, f.Loss)[0], 1e-5)
	b := ops.SoftCrossEntropyBackward{
		X: x, Target: q, DLoss: tensor(t, dlpack.Float32, []float64{1}, 1), State: f.State,
		DX: empty(t, dlpack.Float32, 1, 3),
	}
	require.NoError(t, b.Run(nil))
	for i, want := range []float64{-2 * others, others, others} {
		assert.InEpsilon(t, want, values(t, b.DX)[i], 1e-5)
	}
}

func TestSoftCrossEntropyOfSpecialRows(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	rows := []float64{
		-inf, -inf, -inf, // no class
		1, inf, 2,
		1, nan, 2,
		1, -inf, -inf, // certain, as the target is
		1, -inf, 1, // the target has a class that cannot be
		-inf, -inf, -inf, // no class, and none in the target
	}
	q := []float64{1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0}
	const m = 6
	f := ops.SoftCrossEntropyForward{
		X: tensor(t, dlpack.Float32, rows, m, 3), Target: tensor(t, dlpack.Float32, q, m, 3),
		Loss: empty(t, dlpack.Float32, m), State: empty(t, dlpack.Float32, m, 3),
		Reduction: ops.ReduceNone,
	}
	require.NoError(t, f.Run(nil))
	loss := values(t, f.Loss)
	for _, i := range []int{0, 1, 2, 5} {
		assert.True(t, math.IsNaN(loss[i]), "row %d", i)
	}
	assert.Equal(t, []float64{0, inf}, loss[3:5])
	b := ops.SoftCrossEntropyBackward{
		X: f.X, Target: f.Target, DLoss: tensor(t, dlpack.Float32, []float64{1, 1, 1, 1, 1, 1}, m), State: f.State,
		DX: empty(t, dlpack.Float32, m, 3), Reduction: f.Reduction,
	}
	require.NoError(t, b.Run(nil))
	dx := values(t, b.DX)
	for i, v := range dx {
		assert.Equal(t, i < 9 || i >= 15, math.IsNaN(v), "element %d is %v", i, v)
	}
	assert.Equal(t, []float64{0, 0, 0, 0.5, -1, 0.5}, dx[9:15])
}

func TestSoftCrossEntropyWithoutRows(t *testing.T) {
	f := ops.SoftCrossEntropyForward{
		X: empty(t, dlpack.Float32, 0, 3), Target: empty(t, dlpack.Float32, 0, 3), Loss: empty(t, dlpack.Float32),
		Weight: empty(t, dlpack.Float16, 3), Reduction: ops.ReduceMean,
	}
	require.NoError(t, f.Run(nil))
	assert.True(t, math.IsNaN(values(t, f.Loss)[0]))
	f.Reduction = ops.ReduceSum
	require.NoError(t, f.Run(nil))
	assert.Equal(t, []float64{0}, values(t, f.Loss))
}

func TestSoftCrossEntropyRefusals(t *testing.T) {
	x, q, loss := empty(t, dlpack.Float32, 2, 3), empty(t, dlpack.BFloat16, 2, 3), empty(t, dlpack.Float32)
	for want, f := range map[string]ops.SoftCrossEntropyForward{
		"target has shape (2,), expected (2, 3) as x":        {Target: empty(t, dlpack.Float32, 2)},
		"target has dtype int64, expected float16":           {Target: empty(t, dlpack.Int64, 2, 3)},
		"label_smoothing is 2, expected 0 to 1":              {Target: q, LabelSmoothing: 2},
		"z_loss is -1, expected a finite number":             {Target: q, ZLoss: -1},
		"softcap is -1, expected":                            {Target: q, Softcap: -1},
		"divisor is given with reduction mean, expected sum": {Target: q, Divisor: empty(t, dlpack.Float32, 1)},
	} {
		f.X, f.Loss, f.Reduction = x, loss, ops.ReduceMean
		assert.ErrorContains(t, f.Run(nil), want)
	}
	z := ops.SoftCrossEntropyForward{
		X: x, Target: q, Loss: loss, Reduction: ops.ReduceMean, ZLoss: 1,
		Weight: tensor(t, dlpack.Float32, []float64{1, 1, 1}, 3),
	}
	assert.NoError(t, z.Run(nil), "a mean is over rows, whatever the weights")
	b := ops.SoftCrossEntropyBackward{
		X: x, Target: x, DLoss: loss, State: empty(t, dlpack.Float32, 2, 3), DX: x,
	}
	assert.ErrorContains(t, b.Run(nil), "overlap")
}
