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
	"github.com/gander-go/gander/ops"
)

const eps = 1e-6

// rmsnorm is the reference. weight may be nil.
func rmsnorm(x, weight []float64, n int64) (y, magnitude, rstd []float64) {
	for i := range int64(len(x)) / n {
		r := row(x, i, n)
		sum := 0.0
		for _, v := range r {
			sum += v * v
		}
		s := 1 / math.Sqrt(sum/float64(n)+eps)
		rstd = append(rstd, s)
		for j, v := range r {
			w := 1.0
			if weight != nil {
				w = weight[j]
			}
			y = append(y, v*s*w)
			magnitude = append(magnitude, math.Abs(v*s*w))
		}
	}
	return y, magnitude, rstd
}

func rmsnormGrad(x, weight, dout, rstd []float64, n int64) (dx, sizeDX, dw, sizeDW []float64) {
	dw, sizeDW = make([]float64, n), make([]float64, n)
	for i := range int64(len(x)) / n {
		rx, rd, s := row(x, i, n), row(dout, i, n), rstd[i]
		dot, size := 0.0, 0.0
		g := make([]float64, n)
		for j := range rx {
			g[j] = rd[j]
			if weight != nil {
				g[j] *= weight[j]
			}
			dot += g[j] * rx[j] * s / float64(n)
			size += math.Abs(g[j]*rx[j]*s) / float64(n)
			dw[j] += rd[j] * rx[j] * s
			sizeDW[j] += math.Abs(rd[j] * rx[j] * s)
		}
		for j := range rx {
			dx = append(dx, (g[j]-rx[j]*s*dot)*s)
			sizeDX = append(sizeDX, (math.Abs(g[j])+math.Abs(rx[j]*s)*size)*s)
		}
	}
	return dx, sizeDX, dw, sizeDW
}

func ones(n int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = 1
	}
	return v
}

func TestRMSNorm(t *testing.T) {
	const m = 5
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range floats {
		for _, dw := range companions(d) {
			for _, dy := range companions(d) {
				for _, n := range rowWidths {
					for _, l := range layoutsFor(d == dw && d == dy) {
						t.Run(fmt.Sprintf("%v/%v/%v/%d/%s", d, dw, dy, n, l.name), func(t *testing.T) {
							testRMSNorm(t, r, d, dw, dy, m, n, l)
						})
					}
				}
			}
		}
	}
}

func testRMSNorm(t *testing.T, r *rand.Rand, d, dtypeW, dtypeY dlpack.DType, m, n int64, l layout) {
	stat := statistic(d)
	vx, vw, vdout := random(t, r, d, m*n), random(t, r, dtypeW, n), random(t, r, dtypeY, m*n)
	x, dout := newMatrix(t, d, vx, m, n, l), newMatrix(t, dtypeY, vdout, m, n, l)
	for _, weighted := range []bool{true, false} {
		y, dx := newMatrix(t, dtypeY, nil, m, n, l), newMatrix(t, d, nil, m, n, l)
		rstd := empty(t, stat, m)
		var weight, dw *dlpack.Tensor
		reference := []float64(nil)
		if weighted {
			weight, dw, reference = tensor(t, dtypeW, vw, n), empty(t, dtypeW, n), vw
		}
		require.NoError(t, rmsNormForward(x.Tensor, weight, y.Tensor, rstd, eps))
		want, magnitude, wantRstd := rmsnorm(vx, reference, n)
		got := y.result(t)
		requireClose(t, want, magnitude, got, dtypeY, n)
		requireClose(t, wantRstd, wantRstd, values(t, rstd), stat, n)

		again := newMatrix(t, dtypeY, nil, m, n, l)
		require.NoError(t, rmsNormForward(x.Tensor, weight, again.Tensor, nil, eps))
		assert.Equal(t, got, again.result(t), "the same bits without rstd")
		if d == dtypeY {
			place := newMatrix(t, d, vx, m, n, l)
			require.NoError(t, rmsNormForward(place.Tensor, weight, place.Tensor, nil, eps))
			assert.Equal(t, got, place.result(t), "the same bits in place")
		}

		require.NoError(t, rmsNormBackward(x.Tensor, weight, dout.Tensor, rstd, dx.Tensor, dw))
		want, magnitude, wantDW, magnitudeDW := rmsnormGrad(vx, reference, vdout, values(t, rstd), n)
		got = dx.result(t)
		requireClose(t, want, magnitude, got, d, n)
		if weighted {
			requireClose(t, wantDW, magnitudeDW, values(t, dw), dtypeW, m)
			again = newMatrix(t, d, nil, m, n, l)
			require.NoError(t, rmsNormBackward(x.Tensor, weight, dout.Tensor, rstd, again.Tensor, nil))
			assert.Equal(t, got, again.result(t), "the same bits without dw")
		}
		if d == dtypeY {
			place := newMatrix(t, d, vdout, m, n, l)
			require.NoError(t, rmsNormBackward(x.Tensor, weight, place.Tensor, rstd, place.Tensor, nil))
			assert.Equal(t, got, place.result(t), "the same bits with dx in dout's memory")
		}
	}
	assert.Equal(t, vx, x.result(t), "x must not change")
	assert.Equal(t, vdout, dout.result(t), "dout must not change")
}

// A row of zeros has a finite result, because eps is added under the root.
func TestRMSNormZeroRow(t *testing.T) {
	x, y, rstd := empty(t, dlpack.Float32, 1, 7), empty(t, dlpack.Float32, 1, 7), empty(t, dlpack.Float32, 1)
	require.NoError(t, rmsNormForward(x, nil, y, rstd, 1e-4))
	assert.Equal(t, make([]float64, 7), values(t, y))
	assert.InEpsilon(t, 100, values(t, rstd)[0], 1e-6)
}

// dout is one row repeated with stride 0. Autograd passes expanded gradients in this form.
func TestRMSNormExpandedGradient(t *testing.T) {
	const m, n = 4, 33
	r := rand.New(rand.NewPCG(7, 8))
	vx, vdout := random(t, r, dlpack.Float32, m*n), random(t, r, dlpack.Float32, n)
	x, weight := tensor(t, dlpack.Float32, vx, m, n), tensor(t, dlpack.Float32, ones(n), n)
	dout := view(t, tensor(t, dlpack.Float32, vdout, n), 0, []int64{m, n}, []int64{0, 1})
	y, rstd := empty(t, dlpack.Float32, m, n), empty(t, dlpack.Float32, m)
	require.NoError(t, rmsNormForward(x, weight, y, rstd, eps))
	dx, dw := empty(t, dlpack.Float32, m, n), empty(t, dlpack.Float32, n)
	require.NoError(t, rmsNormBackward(x, weight, dout, rstd, dx, dw))
	want, magnitude, wantDW, magnitudeDW := rmsnormGrad(vx, nil, values(t, dout), values(t, rstd), n)
	requireClose(t, want, magnitude, values(t, dx), dlpack.Float32, n)
	requireClose(t, wantDW, magnitudeDW, values(t, dw), dlpack.Float32, m)
}

// With weight_offset the results are those of the weights weight + offset. The gradient of both is the same.
// An offset of 0 changes no bit, even of a weight of -0.
func TestRMSNormWeightOffset(t *testing.T) {
	for _, n := range []int64{5, 1000, 132000} { // in long rows the weight is converted block by block
		for _, d := range floats {
			for _, dw := range companions(d) {
				if n > 1000 && d != dlpack.BFloat16 && d != dw { // the weight is converted in the same way
					continue
				}
				const m, offset = 2, 0.5
				r := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits)))
				x, dout := tensor(t, d, random(t, r, d, m*n), m, n), tensor(t, d, random(t, r, d, m*n), m, n)
				w := random(t, r, dlpack.Float16, n)
				for i := range w {
					w[i] = math.Mod(math.Round(w[i]*16), 64) / 16 // w + offset is exact in every dtype
				}
				moved := make([]float64, n)
				for i := range w {
					moved[i] = w[i] + offset
				}
				w[0] = math.Copysign(0, -1)
				moved[0] = offset
				results := func(weight []float64, offset float64) (all [][]float64) {
					v, y, rstd := tensor(t, dw, weight, n), empty(t, d, m, n), empty(t, statistic(d), m)
					dx, dweight := empty(t, d, m, n), empty(t, dw, n)
					require.NoError(t, ops.RMSNormForward{
						X: x, Weight: v, Y: y, Rstd: rstd, Eps: ops.Some(eps), WeightOffset: offset,
					}.Run(nil))
					require.NoError(t, ops.RMSNormBackward{
						X: x, Weight: v, DOut: dout, Rstd: rstd, DX: dx, DW: dweight, WeightOffset: offset,
					}.Run(nil))
					return [][]float64{values(t, y), values(t, rstd), values(t, dx), values(t, dweight)}
				}
				want, got, without := results(moved, 0), results(w, offset), results(w, 0)
				for i := range want {
					assert.True(t, slices.Equal(want[i], got[i]),
						"result %d of %v, weight %v, n %d", i, d, dw, n)
				}
				assert.True(t, math.Signbit(without[0][0]) != math.Signbit(values(t, x)[0]), "-0 stays -0")
			}
		}
	}
	x, y, w := empty(t, dlpack.Float32, 1, 4), empty(t, dlpack.Float32, 1, 4), empty(t, dlpack.Float32, 4)
	err := ops.RMSNormForward{X: x, Y: y, WeightOffset: 1}.Run(nil)
	require.ErrorContains(t, err, "weight_offset is 1 without a weight, expected 0")
	err = ops.RMSNormForward{X: x, Weight: w, Y: y, WeightOffset: math.NaN()}.Run(nil)
	require.ErrorContains(t, err, "weight_offset is NaN, expected a finite number")
	err = ops.RMSNormForward{X: x, Weight: w, Y: y, WeightOffset: -1e39}.Run(nil)
	require.ErrorContains(t, err, "weight_offset is -1e+39, expected a number that float32 holds")
	x, y, w = empty(t, dlpack.Float64, 1, 4), empty(t, dlpack.Float64, 1, 4), empty(t, dlpack.Float64, 4)
	require.NoError(t, ops.RMSNormForward{X: x, Weight: w, Y: y, WeightOffset: -1e39}.Run(nil))
}
