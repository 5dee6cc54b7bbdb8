package ops_test

import (
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

// softmax is the reference. The magnitude of an output p is p * max(1, max x - x), because a relative error e
// of x - max x changes p by p * (max x - x) * e.
func softmax(x []float64, n int64) (y, magnitude []float64) {
	for i := range int64(len(x)) / n {
		r := row(x, i, n)
		top, sum := slices.Max(r), 0.0
		for _, v := range r {
			sum += math.Exp(v - top)
		}
		for _, v := range r {
			p := math.Exp(v-top) / sum
			y = append(y, p)
			magnitude = append(magnitude, p*max(1, top-v))
		}
	}
	return y, magnitude
}

func softmaxGrad(dy, y []float64, n int64) (dx, magnitude []float64) {
	for i := range int64(len(y)) / n {
		a, b := row(dy, i, n), row(y, i, n)
		dot, size := 0.0, 0.0
		for j := range a {
			dot += a[j] * b[j]
			size += math.Abs(a[j] * b[j])
		}
		for j := range a {
			dx = append(dx, (a[j]-dot)*b[j])
			magnitude = append(magnitude, (math.Abs(a[j])+size)*math.Abs(b[j]))
		}
	}
	return dx, magnitude
}

func TestSoftmax(t *testing.T) {
	const m = 5
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range floats {
		for _, n := range rowWidths {
			for _, l := range layouts {
				t.Run(fmt.Sprintf("%v/%d/%s", d, n, l.name), func(t *testing.T) {
					vx := random(t, r, d, m*n)
					x, y := newMatrix(t, d, vx, m, n, l), newMatrix(t, d, nil, m, n, l)
					require.NoError(t, softmaxForward(x.Tensor, y.Tensor))
					want, magnitude := softmax(vx, n)
					got := y.result(t)
					requireClose(t, want, magnitude, got, d, n)
					assert.Equal(t, vx, x.result(t), "x must not change")

					require.NoError(t, softmaxForward(x.Tensor, x.Tensor))
					assert.Equal(t, got, x.result(t), "the same bits in place")

					vdy := random(t, r, d, m*n)
					dy, dx := newMatrix(t, d, vdy, m, n, l), newMatrix(t, d, nil, m, n, l)
					require.NoError(t, softmaxBackward(dy.Tensor, y.Tensor, dx.Tensor))
					want, magnitude = softmaxGrad(vdy, got, n)
					gotDX := dx.result(t)
					requireClose(t, want, magnitude, gotDX, d, n)
					require.NoError(t, softmaxBackward(dy.Tensor, y.Tensor, dy.Tensor))
					assert.Equal(t, gotDX, dy.result(t), "the same bits with dx in dy's memory")
				})
			}
		}
	}
}

func TestSoftmaxSpecialRows(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, d := range floats {
		x := tensor(t, d, []float64{
			-inf, -inf, -inf, // torch: NaN
			-inf, 0, 0,
			inf, 0, 0, // torch: NaN, because inf - inf is NaN and so is the sum
			nan, 0, 0,
			10000, 10000, -inf,
		}, 5, 3)
		y := empty(t, d, 5, 3)
		require.NoError(t, softmaxForward(x, y))
		got := values(t, y)
		for i, w := range []float64{nan, nan, nan, 0, 0.5, 0.5, nan, nan, nan, nan, nan, nan, 0.5, 0.5, 0} {
			assert.Truef(t, got[i] == w || math.IsNaN(w) && math.IsNaN(got[i]),
				"%v: element %d is %v, expected %v", d, i, got[i], w)
		}
	}
}

// The rows may form any number of leading dimensions, and a single row may have rank 1.
func TestLeadingDimensions(t *testing.T) {
	vx := random(t, rand.New(rand.NewPCG(3, 4)), dlpack.Float32, 24)
	want, magnitude := softmax(vx, 4)
	for _, dims := range [][]int64{{6, 4}, {2, 3, 4}, {1, 6, 1, 4}, {2, 1, 3, 4}} {
		x, y := tensor(t, dlpack.Float32, vx, dims...), empty(t, dlpack.Float32, dims...)
		x.Strides = nil
		require.NoError(t, softmaxForward(x, y))
		requireClose(t, want, magnitude, values(t, y), dlpack.Float32, 4)
	}
	x, y := tensor(t, dlpack.Float32, vx[:4], 4), empty(t, dlpack.Float32, 1, 4)
	require.NoError(t, softmaxForward(x, y))
	requireClose(t, want[:4], magnitude[:4], values(t, y), dlpack.Float32, 4)

	// One row repeated with stride 0. Then x and y as slices of the columns of one buffer.
	repeated := view(t, x, 0, []int64{3, 4}, []int64{0, 1})
	y = empty(t, dlpack.Float32, 3, 4)
	require.NoError(t, softmaxForward(repeated, y))
	requireClose(t, slices.Repeat(want[:4], 3), slices.Repeat(magnitude[:4], 3), values(t, y),
		dlpack.Float32, 4)

	both := tensor(t, dlpack.Float32, vx, 3, 8)
	left := view(t, both, 0, []int64{3, 4}, []int64{8, 1})
	right := view(t, both, 4, []int64{3, 4}, []int64{8, 1})
	want, magnitude = softmax(values(t, left), 4)
	require.NoError(t, softmaxForward(left, right))
	requireClose(t, want, magnitude, values(t, right), dlpack.Float32, 4)
}

func TestNoRows(t *testing.T) {
	for _, dims := range [][]int64{{0, 4}, {2, 0, 4}} {
		x, y := empty(t, dlpack.Float16, dims...), empty(t, dlpack.Float16, dims...)
		require.NoError(t, softmaxForward(x, y))
		require.NoError(t, softmaxBackward(x, x, y))
		rstd := empty(t, dlpack.Float32, 0)
		require.NoError(t, rmsNormForward(x, nil, y, rstd, 1e-6))
		require.NoError(t, rmsNormBackward(x, nil, x, rstd, y, nil))
		weight, dw := empty(t, dlpack.Float32, 4), tensor(t, dlpack.Float32, []float64{1, 2, 3, 4}, 4)
		require.NoError(t, rmsNormBackward(x, weight, x, rstd, y, dw))
		assert.Equal(t, []float64{0, 0, 0, 0}, values(t, dw), "a sum over no rows")
	}
}

// Rows that are not there need no workspace, however long they would be.
func TestNoLongRows(t *testing.T) {
	x, y := empty(t, dlpack.Float32, 0, 1<<62), empty(t, dlpack.Float32, 0, 1<<62)
	require.NoError(t, softmaxForward(x, y))
	require.NoError(t, softmaxBackward(x, x, y))
	loss := tensor(t, dlpack.Float32, []float64{7})
	o := crossEntropyOptions{Reduction: kernels.ReduceMean}
	target := empty(t, dlpack.Int64, 0)
	require.NoError(t, crossEntropyForward(x, target, nil, loss, nil, nil, nil, o))
	assert.True(t, math.IsNaN(values(t, loss)[0]))
	require.NoError(t, loss.SetFloat64s([]float64{7}))
	soft := ops.SoftCrossEntropyForward{X: x, Target: x, Loss: loss, Reduction: ops.ReduceSum}
	require.NoError(t, soft.Run(nil))
	assert.Zero(t, values(t, loss)[0])
}

// The number of threads does not change the bits. The operands are large enough for several threads.
func TestThreadsDoNotChangeBits(t *testing.T) {
	const m, n = 600, 1023
	vx := random(t, rand.New(rand.NewPCG(5, 6)), dlpack.Float32, m*n)
	x, weight := tensor(t, dlpack.Float32, vx, m, n), tensor(t, dlpack.Float32, vx[:n], n)
	run := func(threads int) [3][]float64 {
		ops.SetNumThreads(threads)
		defer ops.SetNumThreads(0)
		y, dx := empty(t, dlpack.Float32, m, n), empty(t, dlpack.Float32, m, n)
		rstd, dw := empty(t, dlpack.Float32, m), empty(t, dlpack.Float32, n)
		require.NoError(t, softmaxForward(x, y))
		require.NoError(t, rmsNormForward(x, weight, dx, rstd, 1e-6))
		require.NoError(t, rmsNormBackward(x, weight, y, rstd, dx, dw))
		return [3][]float64{values(t, y), values(t, dx), values(t, dw)}
	}
	one := run(1)
	assert.Equal(t, one, run(0))
	assert.Equal(t, one, run(2))
}
