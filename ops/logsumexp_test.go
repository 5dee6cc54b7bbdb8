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

func TestLogSumExp(t *testing.T) {
	const m = 3
	for _, d := range floats {
		for _, n := range append(rowWidths, 140000) { // several threads share a row of 140000
			t.Run(fmt.Sprintf("%v/%d", d, n), func(t *testing.T) {
				r := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits)))
				stat := statistic(d)
				vx, vd := random(t, r, d, m*n), []float64{1, -0.5, 0}
				x, lse, dlse := tensor(t, d, vx, m, n), empty(t, stat, m), tensor(t, stat, vd, m)
				want, size := make([]float64, m), make([]float64, m)
				wantDX, sizeDX := make([]float64, m*n), make([]float64, m*n)
				for i := range m {
					row := vx[int64(i)*n : int64(i+1)*n]
					top, sum := math.Inf(-1), 0.0
					for _, v := range row {
						top = max(top, v)
					}
					for _, v := range row {
						sum += math.Exp(v - top)
					}
					want[i], size[i] = top+math.Log(sum), math.Abs(top)+1
					for j, v := range row {
						p := vd[i] * math.Exp(v-want[i])
						wantDX[int64(i)*n+int64(j)] = p
						sizeDX[int64(i)*n+int64(j)] = (2 + math.Abs(want[i])) * math.Abs(p)
					}
				}
				require.NoError(t, ops.LogSumExpForward{X: x, LSE: lse}.Run(nil))
				requireClose(t, want, size, values(t, lse), stat, 4)
				dx := empty(t, d, m, n)
				require.NoError(t, ops.LogSumExpBackward{X: x, DLSE: dlse, LSE: lse, DX: dx}.Run(nil))
				requireClose(t, wantDX, sizeDX, values(t, dx), d, 4)
				require.NoError(t, ops.LogSumExpBackward{X: x, DLSE: dlse, LSE: lse, DX: x}.Run(nil))
				assert.Equal(t, values(t, dx), values(t, x), "in place")
			})
		}
	}
}

func TestLogSumExpOfInfinities(t *testing.T) {
	inf := math.Inf(1)
	x := tensor(t, dlpack.Float32, []float64{-inf, -inf, -inf, 1, 0, math.NaN()}, 3, 2)
	lse := empty(t, dlpack.Float32, 3)
	require.NoError(t, ops.LogSumExpForward{X: x, LSE: lse}.Run(nil))
	got := values(t, lse)
	assert.Equal(t, []float64{-inf, 1}, got[:2])
	assert.True(t, math.IsNaN(got[2]))
	x, lse = empty(t, dlpack.Float32, 0, 4), empty(t, dlpack.Float32, 0)
	require.NoError(t, ops.LogSumExpForward{X: x, LSE: lse}.Run(nil))
}
