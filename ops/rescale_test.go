package ops_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// TestRescale: x is multiplied by dloss / upstream, in place or not. In place nothing is written if they are
// equal.
func TestRescale(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for _, d := range floats {
		stat := statistic(d)
		for _, shape := range [][2]int64{{0, 4}, {1, 1}, {5, 37}, {300, 129}, {1, 70000}} {
			m, n := shape[0], shape[1]
			vx := random(t, r, d, m*n)
			x, y := tensor(t, d, vx, m, n), empty(t, d, m, n)
			for _, upstream := range []*dlpack.Tensor{nil, tensor(t, stat, []float64{2})} {
				expected := 1.0
				if upstream != nil {
					expected = 2
				}
				for _, factor := range []float64{1, -0.375} {
					right, size := make([]float64, m*n), make([]float64, m*n)
					for i, v := range vx {
						right[i], size[i] = v*factor, max(v*factor, -v*factor)
					}
					place := tensor(t, d, vx, m, n)
					dloss := tensor(t, stat, []float64{factor * expected})
					for _, to := range [][2]*dlpack.Tensor{{x, y}, {place, place}} {
						require.NoError(t, ops.RescaleGradient{X: to[0], DLoss: dloss, Upstream: upstream, Y: to[1]}.Run(nil))
						requireClose(t, right, size, values(t, to[1]), d, 1)
					}
					if factor == 1 {
						assert.Equal(t, vx, values(t, place))
					}
				}
			}
		}
	}
	x := tensor(t, dlpack.Float32, slices.Repeat([]float64{1}, 6), 2, 3)
	err := ops.RescaleGradient{X: x, DLoss: empty(t, dlpack.Float32, 2), Y: x}.Run(nil)
	assert.ErrorContains(t, err, "rescale_gradient: dloss has shape (2,), which is 2 elements, expected 1")
}
