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

func TestL2Norm(t *testing.T) {
	const m, eps = 3, 0.5
	for _, d := range floats {
		for _, n := range append(rowWidths, 64, 140000) { // rows of 64 are taken together, 140000 is shared
			t.Run(fmt.Sprintf("%v/%d", d, n), func(t *testing.T) {
				r := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits)))
				stat := statistic(d)
				vx, vdy := random(t, r, d, m*n), random(t, r, d, m*n)
				x, dy := tensor(t, d, vx, m, n), tensor(t, d, vdy, m, n)
				y, rnorm, dx := empty(t, d, m, n), empty(t, stat, m), empty(t, d, m, n)
				wantY, wantDX, size := make([]float64, m*n), make([]float64, m*n), make([]float64, m*n)
				wantNorm := make([]float64, m)
				for i := range m {
					lo, hi := int64(i)*n, int64(i+1)*n
					squares, product, terms := eps, 0.0, 0.0
					for j := lo; j < hi; j++ {
						squares += vx[j] * vx[j]
						product += vx[j] * vdy[j]
						terms += math.Abs(vx[j] * vdy[j])
					}
					norm := 1 / math.Sqrt(squares)
					wantNorm[i] = norm
					for j := lo; j < hi; j++ {
						h := vx[j] * norm
						wantY[j] = h
						wantDX[j] = (vdy[j] - h*norm*product) * norm
						size[j] = (math.Abs(vdy[j]) + math.Abs(h*norm*terms)) * norm
					}
				}
				require.NoError(t, ops.L2NormForward{X: x, Y: y, Rnorm: rnorm, Eps: ops.Some(eps)}.Run(nil))
				requireClose(t, wantY, wantY, values(t, y), d, n)
				requireClose(t, wantNorm, wantNorm, values(t, rnorm), stat, n)
				require.NoError(t, ops.L2NormBackward{X: x, DY: dy, Rnorm: rnorm, DX: dx}.Run(nil))
				requireClose(t, wantDX, size, values(t, dx), d, n)
				require.NoError(t, ops.L2NormBackward{X: x, DY: dy, Rnorm: rnorm, DX: dy}.Run(nil))
				assert.Equal(t, values(t, dx), values(t, dy), "in place")
			})
		}
	}
}

// A row of zeros keeps the default eps, and an explicit 0 is a division by 0.
func TestL2NormOfZeros(t *testing.T) {
	x := tensor(t, dlpack.Float32, make([]float64, 4), 1, 4)
	y, rnorm := empty(t, dlpack.Float32, 1, 4), empty(t, dlpack.Float32, 1)
	require.NoError(t, ops.L2NormForward{X: x, Y: y, Rnorm: rnorm}.Run(nil))
	assert.Equal(t, make([]float64, 4), values(t, y))
	assert.InDelta(t, 1000, values(t, rnorm)[0], 1e-3)
	require.NoError(t, ops.L2NormForward{X: x, Y: y, Eps: ops.Some(0.0)}.Run(nil))
	assert.True(t, math.IsNaN(values(t, y)[0]))
}
