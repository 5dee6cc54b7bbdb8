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

// tokenRow is the statistics of a row, in float64.
type tokenRow struct {
	logProb, entropy, logSumSq, mean float64
	predicted                        int64
	max, logSum, depth               float64 // the state
}

func statisticsOf(z []float64, index int64) (s tokenRow) {
	s.max = math.Inf(-1)
	for i, v := range z {
		if v > s.max {
			s.max, s.predicted = v, int64(i)
		}
		s.mean += v / float64(len(z))
	}
	others, depth, squares := 0.0, 0.0, 0.0
	for i, v := range z {
		if int64(i) == s.predicted {
			continue
		}
		p := math.Exp(v - s.max)
		others, squares = others+p, squares+p*p
		if p > 0 {
			depth += p * (s.max - v)
		}
	}
	s.logSum, s.depth = math.Log1p(others), depth/(1+others)
	s.logProb = z[index] - s.max - s.logSum
	s.entropy, s.logSumSq = s.logSum+s.depth, math.Log1p(squares)-2*s.logSum
	return s
}

// gradient is that of z[j].
func (s tokenRow) gradient(z []float64, j, index int64, ofLogProb, ofEntropy float64) float64 {
	p := math.Exp(z[j] - s.max - s.logSum)
	g := -ofEntropy * p * (z[j] - s.max + s.depth)
	if p == 0 {
		g = 0
	}
	if j == index {
		return g - ofLogProb*math.Expm1(z[j]-s.max-s.logSum)
	}
	return g - ofLogProb*p
}

func TestTokenStatistics(t *testing.T) {
	const m = 5
	options := []lossOptions{{}, {temperature: 0.7}, {scale: 0.5, softcap: 3, temperature: 1.5}}
	for _, d := range floats {
		for _, n := range append(rowWidths, 140000) { // several threads share a row of 140000
			for i, o := range options {
				if n > 100000 && i == 1 {
					continue
				}
				for _, l := range layoutsFor(n < 5000) {
					t.Run(fmt.Sprintf("%v/%d/%d/%s", d, n, i, l.name), func(t *testing.T) {
						testTokenStatistics(t, d, m, n, o, l)
					})
				}
			}
		}
	}
}

func testTokenStatistics(t *testing.T, d dlpack.DType, m, n int64, o lossOptions, l layout) {
	r := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits)))
	stat := statistic(d)
	logits := random(t, r, d, m*n)
	if n > 2 {
		logits[2*n+n/2], logits[2*n+n-1] = 50, 50 // two have the maximum
		logits[3*n] = 60                          // one has nearly all of the sum
		logits[3*n+1] = math.Inf(-1)
		logits = values(t, tensor(t, d, logits, m*n))
	}
	indices := []float64{0, float64(n - 1), float64(n / 2), 0, -7}
	mask := []float64{1, 0, 1, 1, 1} // row 1 is masked, row 4 ignored
	x := newMatrix(t, d, logits, m, n, l)
	index, rowMask := tensor(t, dlpack.Int32, indices, m), tensor(t, dlpack.Int64, mask, m)
	f := ops.TokenStatisticsForward{
		Logits: x.Tensor, Index: index, RowMask: rowMask, LogProb: empty(t, stat, m), Entropy: empty(t, stat, m),
		LogSumSqProbs: empty(t, stat, m), MeanLogit: empty(t, stat, m), IsTop1: empty(t, dlpack.Bool, m),
		Predicted: empty(t, dlpack.Int64, m), State: empty(t, stat, m, 3), IgnoreIndex: ops.Some[int64](-7),
		Softcap: o.softcap,
	}
	ofLogProb, ofEntropy := []float64{1, 2, -0.5, 3, 1}, []float64{-1, 2, 0.25, 1, 1}
	b := ops.TokenStatisticsBackward{
		Logits: x.Tensor, Index: index, RowMask: rowMask, State: f.State, DLogProb: tensor(t, stat, ofLogProb, m),
		DEntropy: tensor(t, stat, ofEntropy, m), IgnoreIndex: f.IgnoreIndex, Softcap: o.softcap,
	}
	if o.scale != 0 {
		f.Scale, b.Scale = ops.Some(o.scale), ops.Some(o.scale)
	}
	if o.temperature != 0 {
		f.Temperature, b.Temperature = ops.Some(o.temperature), ops.Some(o.temperature)
	}
	require.NoError(t, f.Run(nil))
	x.result(t)
	want := map[*dlpack.Tensor][]float64{}
	size := make([]float64, m)
	for i := range m {
		s := tokenRow{predicted: -1}
		if i != 1 && i != 4 {
			z := make([]float64, n)
			for j, v := range row(logits, i, n) {
				z[j], _ = o.z(v)
			}
			s = statisticsOf(z, int64(indices[i]))
			size[i] = 2 + math.Abs(s.max) + math.Abs(s.logProb)
			if math.IsInf(size[i], 0) {
				size[i] = 1
			}
		}
		for _, of := range []struct {
			to *dlpack.Tensor
			v  float64
		}{
			{f.LogProb, s.logProb}, {f.Entropy, s.entropy}, {f.LogSumSqProbs, s.logSumSq}, {f.MeanLogit, s.mean},
		} {
			want[of.to] = append(want[of.to], of.v)
		}
		want[f.Predicted] = append(want[f.Predicted], float64(s.predicted))
		top := 0.0
		if s.predicted == int64(indices[i]) {
			top = 1
		}
		want[f.IsTop1] = append(want[f.IsTop1], top)
	}
	for _, of := range []*dlpack.Tensor{f.LogProb, f.Entropy, f.LogSumSqProbs, f.MeanLogit} {
		requireClose(t, want[of], size, values(t, of), stat, 8)
	}
	assert.Equal(t, want[f.Predicted], values(t, f.Predicted))
	assert.Equal(t, want[f.IsTop1], values(t, f.IsTop1))
	for _, v := range values(t, f.LogProb) {
		assert.False(t, v > 0, "log-probability %v", v)
	}
	for _, each := range []struct{ logProb, entropy bool }{{true, true}, {true, false}, {false, true}} {
		testTokenGradient(t, b, logits, indices, ofLogProb, ofEntropy, o, l, each.logProb, each.entropy)
	}
}

func testTokenGradient(
	t *testing.T, b ops.TokenStatisticsBackward, logits, indices, ofLogProb, ofEntropy []float64, o lossOptions,
	l layout, logProb, entropy bool,
) {
	d, m, n := b.Logits.DType, b.Logits.Dim(0), b.Logits.Dim(1)
	if !logProb {
		b.DLogProb = nil
	}
	if !entropy {
		b.DEntropy = nil
	}
	want, size := make([]float64, m*n), make([]float64, m*n)
	_, steepest := o.z(0) // below a cap the derivative is a difference of numbers near 1
	for i := range m {
		if i == 1 || i == 4 {
			continue
		}
		z, slope := make([]float64, n), make([]float64, n)
		for j, v := range row(logits, i, n) {
			z[j], slope[j] = o.z(v)
		}
		index := int64(indices[i])
		s := statisticsOf(z, index)
		g, h := ofLogProb[i], ofEntropy[i]
		if !logProb {
			g = 0
		}
		if !entropy {
			h = 0
		}
		for j := range n {
			p := math.Exp(z[j] - s.max - s.logSum)
			want[i*n+j] = slope[j] * s.gradient(z, j, index, g, h)
			if p > 0 {
				depth := math.Abs(z[j]-s.max) + s.depth + 1
				size[i*n+j] = p * (1 + math.Abs(s.max)) * (math.Abs(g) + math.Abs(h)*depth) * depth * steepest
			}
			if j == index {
				size[i*n+j] += math.Abs(g) * steepest
			}
		}
	}
	dx := newMatrix(t, d, nil, m, n, l)
	b.DLogits = dx.Tensor
	require.NoError(t, b.Run(nil))
	got := dx.result(t)
	requireClose(t, want, size, got, d, 8)
	if logProb && entropy {
		over := newMatrix(t, d, logits, m, n, l)
		b.Logits, b.DLogits = over.Tensor, over.Tensor
		require.NoError(t, b.Run(nil))
		assert.Equal(t, got, over.result(t), "in place")
	}
}

func TestTokenStatisticsOfSpecialRows(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	rows := []float64{
		-inf, -inf, -inf,
		1, inf, 2,
		1, nan, 2,
		1, -inf, -inf, // all is certain
		1, 2, 3, // the index is no class
	}
	const m = 5
	f := ops.TokenStatisticsForward{
		Logits: tensor(t, dlpack.Float32, rows, m, 3), Index: tensor(t, dlpack.Int64, []float64{0, 0, 0, 0, 3}, m),
		LogProb: empty(t, dlpack.Float32, m), Entropy: empty(t, dlpack.Float32, m),
		LogSumSqProbs: empty(t, dlpack.Float32, m), Predicted: empty(t, dlpack.Int64, m),
		IsTop1: empty(t, dlpack.Bool, m), State: empty(t, dlpack.Float32, m, 3),
	}
	require.NoError(t, f.Run(nil))
	logProb, entropy := values(t, f.LogProb), values(t, f.Entropy)
	for i := range 3 {
		assert.True(t, math.IsNaN(logProb[i]) && math.IsNaN(entropy[i]), "row %d", i)
		assert.True(t, math.IsNaN(values(t, f.LogSumSqProbs)[i]), "row %d", i)
	}
	assert.Equal(t, []float64{0, 0}, []float64{logProb[3], entropy[3]})
	assert.True(t, math.IsNaN(logProb[4]) && entropy[4] > 0.8, "entropy needs no index")
	assert.Equal(t, []float64{0, -1, -1, 0, 2}, values(t, f.Predicted))
	assert.Equal(t, []float64{1, 0, 0, 1, 0}, values(t, f.IsTop1))

	b := ops.TokenStatisticsBackward{
		Logits: f.Logits, Index: f.Index, State: f.State,
		DLogProb: tensor(t, dlpack.Float32, []float64{1, 1, 1, 1, 1}, m),
		DLogits:  empty(t, dlpack.Float32, m, 3),
	}
	require.NoError(t, b.Run(nil))
	dx := values(t, b.DLogits)
	assert.Equal(t, []float64{0, 0, 0}, dx[9:12])
	for _, v := range dx[12:] {
		assert.True(t, math.IsNaN(v), "the index is no class")
	}
	b.DLogProb, b.DEntropy = nil, b.DLogProb
	require.NoError(t, b.Run(nil))
	for _, v := range values(t, b.DLogits)[9:] {
		assert.False(t, math.IsNaN(v), "entropy needs no index")
	}
}

// Backward of slices of the tokens gives the slices of the gradient. In a row whose index is in the other
// slice, the index adds nothing.
func TestTokenStatisticsBackwardOfSlices(t *testing.T) {
	const m, n, cut = 5, 21, 8
	for _, d := range floats {
		stat := statistic(d)
		x := tensor(t, d, random(t, rand.New(rand.NewPCG(1, 2)), d, m*n), m, n)
		indices := []float64{0, cut, 3, n - 1, cut - 1}
		index, mask := tensor(t, dlpack.Int64, indices, m), tensor(t, dlpack.Bool, []float64{1, 1, 0, 1, 1}, m)
		state, want, got := empty(t, stat, m, 3), empty(t, d, m, n), empty(t, d, m, n)
		f := ops.TokenStatisticsForward{Logits: x, Index: index, RowMask: mask, State: state}
		require.NoError(t, f.Run(nil))
		b := ops.TokenStatisticsBackward{
			Logits: x, Index: index, RowMask: mask, State: state, DLogits: want,
			DLogProb: tensor(t, stat, []float64{1, 2, -0.5, 3, 1}, m),
			DEntropy: tensor(t, stat, []float64{-1, 2, 0.25, 1, 1}, m),
		}
		require.NoError(t, b.Run(nil))
		b.Slice = true
		for _, columns := range [][2]int64{{0, cut}, {cut, n}} {
			first, size := columns[0], columns[1]-columns[0]
			local := make([]float64, m)
			for i, c := range indices {
				local[i] = c - float64(first)
			}
			part := func(v *dlpack.Tensor) *dlpack.Tensor {
				return view(t, v, first, []int64{m, size}, []int64{n, 1})
			}
			b.Logits, b.DLogits, b.Index = part(x), part(got), tensor(t, dlpack.Int32, local, m)
			require.NoError(t, b.Run(nil))
		}
		assert.Equal(t, values(t, want), values(t, got), "%v", d)
	}
}

func TestTokenStatisticsRefusals(t *testing.T) {
	x, index := empty(t, dlpack.Float32, 2, 3), empty(t, dlpack.Int64, 2)
	state, dx := empty(t, dlpack.Float32, 2, 3), empty(t, dlpack.Float32, 2, 3)
	require.NoError(t, ops.TokenStatisticsForward{Logits: x, Index: index}.Run(nil), "nothing is wanted")
	err := ops.TokenStatisticsBackward{Logits: x, Index: index, State: state, DLogits: dx}.Run(nil)
	assert.ErrorContains(t, err, "dlog_prob and dentropy are NULL, expected one of them, or both")
	err = ops.TokenStatisticsForward{Logits: x, Index: index, LogProb: empty(t, dlpack.Float32, 2),
		Temperature: ops.Some(0.0)}.Run(nil)
	assert.ErrorContains(t, err, "temperature is 0, expected 1e-18 to 1e+18")
	err = ops.TokenStatisticsForward{Logits: x, Index: index, Predicted: empty(t, dlpack.Int32, 2)}.Run(nil)
	assert.ErrorContains(t, err, "predicted has dtype int32, expected int64; convert it")
	err = ops.TokenStatisticsForward{Logits: x, Index: index, RowMask: empty(t, dlpack.Float32, 2),
		Entropy: empty(t, dlpack.Float32, 2)}.Run(nil)
	assert.ErrorContains(t, err, "row_mask has dtype float32, expected int32, int64, bool or uint8; convert it")
	assert.NoError(t, ops.TokenStatisticsForward{Logits: empty(t, dlpack.Float32, 0, 3),
		Index: empty(t, dlpack.Int64, 0), Entropy: empty(t, dlpack.Float32, 0)}.Run(nil))
}
