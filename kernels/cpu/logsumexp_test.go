package cpu

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// TestInfiniteLogits: the log-sum-exp of a row with +inf is +inf, unless there is a NaN, and its gradient is
// exp(x - inf): NaN at +inf and 0 elsewhere. In cross-entropy, loss and gradient of such a row are NaN.
func TestInfiniteLogits(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	// The numbers at the start, in the middle and at the end of a row. The last one counts where they coincide.
	rows := [][3]float64{{0, 1, inf}, {inf, 0, 1}, {1, inf, 0}, {inf, inf, inf}, {-inf, inf, -inf}, {0, 0, 0},
		{inf, 0, nan}, {nan, inf, 1}, {0, nan, inf}, {-inf, -inf, -inf}, {nan, 0, 0}, {6e4, inf, -6e4}}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			for _, n := range []int{1, 2, 3, 17, 64, 128, 192, 256, 1000, block, block + 7, longRow + 70} {
				for _, filling := range []float64{-2, -inf} {
					x := newMatrix(dtype, len(rows), n, 0, 0).fill(func(_, _ int) float64 { return filling })
					for i, row := range rows {
						x.set(i, 0, row[0])
						x.set(i, n/2, row[1])
						x.set(i, n-1, row[2])
					}
					t.Run(fmt.Sprintf("%v/%d/%v", dtype, n, filling), func(t *testing.T) { checkInfiniteLogits(t, x) })
				}
			}
		}
	})
}

func checkInfiniteLogits(t *testing.T, x matrix) {
	m, stat, workers := int(x.Rows), statistics(x.DType), 1
	if x.Cols > longRow {
		workers = 4 // which share a row
	}
	nine := func(int) float64 { return 9 }
	lse, loss := newVector(stat, m, nine), newVector(stat, m, nine)
	upstream := newVector(stat, m, func(int) float64 { return 0.5 })
	dx := newMatrix(x.DType, m, int(x.Cols), 0, 0)
	same := func(want, got float64) bool {
		return want == got || math.Abs(want-got) <= 1e-2*math.Abs(want) || math.IsNaN(want) && math.IsNaN(got)
	}

	a := kernels.CrossEntropy{X: x.Matrix, Max: lse}
	require.NoError(t, CrossEntropyForward(&a, workers))
	a = kernels.CrossEntropy{X: x.Matrix, Max: lse, DLoss: upstream, DX: dx.Matrix}
	require.NoError(t, CrossEntropyBackward(&a, workers))
	for i := range m {
		top, sum := math.Inf(-1), 0.0
		for _, v := range x.row(i) {
			top = max(top, v) // NaN if one of them is
		}
		for _, v := range x.row(i) {
			sum += math.Exp(v - top)
		}
		want := top
		if !math.IsInf(top, 0) {
			want = top + math.Log(sum)
		}
		require.True(t, same(want, at(&lse, i)), "row %d: %v, expected %v", i, at(&lse, i), want)
		got := dx.row(i)
		for j, v := range x.row(i) {
			if gradient := 0.5 * math.Exp(v-want); !same(gradient, got[j]) {
				require.Failf(t, "dx", "row %d, column %d: %v, expected %v", i, j, got[j], gradient)
			}
		}
	}

	a = kernels.CrossEntropy{X: x.Matrix, Target: newTargets(make([]int64, m)...), IgnoreIndex: -100, Loss: loss,
		DX: dx.Matrix}
	require.NoError(t, CrossEntropyForward(&a, workers))
	for i := range m {
		if math.IsInf(maximum(x.row(i)), 1) {
			require.True(t, math.IsNaN(at(&loss, i)), "loss of row %d: %v", i, at(&loss, i))
			require.False(t, slices.ContainsFunc(dx.row(i), func(v float64) bool { return v == v }), "dx of row %d", i)
		}
	}
}
