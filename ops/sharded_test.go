package ops_test

import (
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

// partsOf computes what each slice of the classes contributes to m rows. x is (m, n); sizes add up to n.
func partsOf(
	t *testing.T, d dlpack.DType, x, target, weight []float64, m, n int64, sizes []int64,
) *dlpack.Tensor {
	var parts []float64
	first := int64(0)
	for _, size := range sizes {
		weights := make([]float64, m)
		if size == 0 {
			parts = append(parts, slices.Repeat([]float64{math.Inf(-1)}, int(2*m))...)
			parts = append(parts, slices.Repeat([]float64{math.NaN()}, int(m))...)
		} else {
			local := make([]float64, m)
			for i := range local {
				local[i] = target[i] - float64(first)
				if c := int64(local[i]); c >= 0 && c < size && weight != nil {
					weights[i] = weight[c+first]
				}
			}
			slice := view(t, tensor(t, d, x, m, n), first, []int64{m, size}, []int64{n, 1})
			loss, lse := empty(t, d, m), empty(t, d, 2, m)
			o := plain
			o.IgnoreIndex = ops.Some(ignored - first)
			classes := tensor(t, dlpack.Int64, local, m)
			require.NoError(t, crossEntropyForward(slice, classes, nil, loss, lse, nil, nil, o))
			parts = append(parts, append(values(t, lse), values(t, loss)...)...)
		}
		if weight != nil {
			parts = append(parts, weights...)
		}
		first += size
	}
	each := int64(3)
	if weight != nil {
		each++
	}
	return tensor(t, d, parts, int64(len(sizes)), each, m)
}

// TestShardedCrossEntropy compares with the loss of whole rows, of which some are special.
func TestShardedCrossEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 22))
	const n = 24
	for _, m := range []int64{1, 7, 300} {
		for _, d := range []dlpack.DType{dlpack.Float32, dlpack.Float64} {
			x := random(t, r, d, m*n)
			target, weight := make([]float64, m), make([]float64, n)
			for i := range weight {
				weight[i] = float64(i%3) / 2 // of some classes 0
			}
			for i := range target {
				target[i] = float64(r.IntN(n))
			}
			if m > 1 {
				target[1] = ignored
				for j := range int64(n) {
					x[2*n+j] = 0            // of a certain target
					x[3*n+j] = math.Inf(-1) // a whole row
					if j < 7 || j >= 16 {   // whole slices, with the target and without
						x[4*n+j] = math.Inf(-1)
					}
				}
				target[2], x[2*n+3], target[4] = 3, 40, 20
				x[5*n+8] = math.NaN()
			}
			for _, reduction := range []kernels.Reduction{kernels.ReduceNone, kernels.ReduceMean, kernels.ReduceSum} {
				for _, w := range [][]float64{nil, weight} {
					var classWeight *dlpack.Tensor
					if w != nil {
						classWeight = tensor(t, d, w, n)
					}
					invalid := reduction == kernels.ReduceNone && m > 6
					if m > 6 {
						target[6] = 5
					}
					if invalid {
						target[6] = n
					}
					o := plain
					o.Reduction = reduction
					count := m
					if reduction != kernels.ReduceNone {
						count = 1
					}
					loss, lse, total := empty(t, d, count), empty(t, d, 2, m), empty(t, d, 1)
					require.NoError(t, crossEntropyForward(tensor(t, d, x, m, n), tensor(t, dlpack.Int64, target, m),
						classWeight, loss, lse, nil, total, o))

					for _, sizes := range [][]int64{{n}, {7, 9, 8}, {7, 0, 16, 1}} {
						got := ops.ShardedCrossEntropyCombine{
							Parts:  partsOf(t, d, x, target, w, m, n, sizes),
							Target: tensor(t, dlpack.Int64, target, m),
							Max:    empty(t, d, m), LogSum: empty(t, d, m), Weights: empty(t, d, m), Denominator: empty(t, d),
							Classes: ops.Some[int64](n), Mean: reduction == kernels.ReduceMean,
							Weighted: w != nil,
						}
						if to := empty(t, d, count); reduction == kernels.ReduceNone {
							got.Losses = to
						} else {
							got.Loss = to
						}
						require.NoError(t, got.Run(nil))
						result := got.Loss
						if result == nil {
							result = got.Losses
						}
						near(t, values(t, loss), values(t, result), d)
						near(t, values(t, total), values(t, got.Denominator), d)
						parts := values(t, lse)
						if invalid {
							parts[m+6] = math.NaN()
						}
						near(t, parts[:m], values(t, got.Max), d)
						near(t, parts[m:], values(t, got.LogSum), d)
						if m > 1 && w == nil { // a certain row's loss and gradient have as many digits as others
							assert.InEpsilon(t, parts[m+2], values(t, got.LogSum)[2], 8*ulp(d, 1))
							if reduction == kernels.ReduceNone {
								assert.InEpsilon(t, values(t, loss)[2], values(t, result)[2], 8*ulp(d, 1))
							}
						}
						for i, v := range values(t, got.Weights) {
							want := 1.0
							switch class := target[i]; {
							case class == ignored:
								want = 0
							case class == n:
								want = math.NaN()
							case w != nil:
								want = w[int(class)]
							}
							near(t, []float64{want}, []float64{v}, d)
						}
					}
				}
			}
		}
	}
}

// near compares numbers, some of which are special.
func near(t *testing.T, want, got []float64, d dlpack.DType) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		if math.IsNaN(want[i]) || math.IsInf(want[i], 0) {
			assert.True(t, want[i] == got[i] || math.IsNaN(want[i]) && math.IsNaN(got[i]), "%d: %v, expected %v", i,
				got[i], want[i])
			continue
		}
		assert.InDelta(t, want[i], got[i], 8*ulp(d, want[i])+4*ulp(d, 1), "%d", i)
	}
}

func TestShardedCrossEntropyRefuses(t *testing.T) {
	type combine = ops.ShardedCrossEntropyCombine
	f := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	for message, spoil := range map[string]func(o *combine){
		"parts has dtype float16, expected float32 or float64": func(o *combine) {
			o.Parts = empty(t, dlpack.Float16, 2, 3, 5)
		},
		"parts has shape (3, 4, 5), expected (3, 3, 5): three numbers of each of N rows": func(o *combine) {
			o.Parts = f(3, 4, 5)
		},
		"parts has shape (4, 3, 5), expected (4, 4, 5): four numbers of each of N rows": func(o *combine) {
			o.Parts, o.Weighted = f(4, 3, 5), true
		},
		"parts has rows of 5 elements 7 apart, expected adjacent rows": func(o *combine) {
			o.Parts = view(t, f(64), 0, []int64{2, 3, 5}, []int64{21, 7, 1})
		},
		"target has shape (4,), expected (5,): one for each column of parts": func(o *combine) {
			o.Target = empty(t, dlpack.Int64, 4)
		},
		"classes is 0, expected": func(o *combine) { o.Classes = ops.Some[int64](0) },
		"max is NULL":            func(o *combine) { o.Max = nil },
	} {
		o := combine{
			Parts: f(2, 3, 5), Target: empty(t, dlpack.Int64, 5), Loss: f(), Max: f(5), LogSum: f(5),
			Classes: ops.Some[int64](9),
		}
		require.NoError(t, o.Run(nil))
		spoil(&o)
		assert.ErrorContains(t, o.Run(nil), message)
	}
}
