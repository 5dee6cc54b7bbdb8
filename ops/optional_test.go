package ops_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// An option that is not set has the table's default, and a 0 that is set is 0.
func TestOptionsThatAreNotZeroByDefault(t *testing.T) {
	const m, n = 2, 4
	d := dlpack.Float64
	x := tensor(t, d, []float64{1, 2, 3, 4, -4e-4, 2e-4, 1e-4, 3e-4}, m, n)
	target := tensor(t, dlpack.Int64, []float64{0, 2}, m)
	parts := tensor(t, d, []float64{4, 4, 1, 2, 5, 6}, 3, 2)
	compute := func(run func(y, dx *dlpack.Tensor) error, dims ...int64) []float64 {
		y, dx := empty(t, d, dims...), empty(t, d, dims...)
		require.NoError(t, run(y, dx))
		return append(values(t, y), values(t, dx)...)
	}
	masked := func(scale ops.Optional[float64]) []float64 {
		return compute(func(y, dx *dlpack.Tensor) error {
			if err := (ops.MaskedSoftmaxForward{X: x, Y: y, Scale: scale}).Run(nil); err != nil {
				return err
			}
			return ops.MaskedSoftmaxBackward{DY: x, Y: y, DX: dx, Scale: scale}.Run(nil)
		}, m, n)
	}
	norms := func(eps ops.Optional[float64]) []float64 {
		return compute(func(y, dx *dlpack.Tensor) error {
			if err := (ops.RMSNormForward{X: x, Y: y, Eps: eps}).Run(nil); err != nil {
				return err
			}
			return ops.LayerNormForward{X: x, Y: dx, Eps: eps}.Run(nil)
		}, m, n)
	}
	losses := func(ignored ops.Optional[int64]) []float64 {
		return compute(func(y, dx *dlpack.Tensor) error {
			return ops.CrossEntropyForward{X: x, Target: target, Loss: y, LSE: dx, IgnoreIndex: ignored}.Run(nil)
		}, m)
	}
	gradients := func(ignored ops.Optional[int64]) []float64 {
		return compute(func(y, dx *dlpack.Tensor) error {
			lse := empty(t, d, m)
			err := ops.CrossEntropyForward{X: x, Target: target, Loss: empty(t, d, m), LSE: lse, DX: y,
				IgnoreIndex: ignored}.Run(nil)
			if err != nil {
				return err
			}
			return ops.CrossEntropyBackward{X: x, Target: target, DLoss: lse, LSE: lse, DX: dx,
				IgnoreIndex: ignored}.Run(nil)
		}, m, n)
	}
	combined := func(ignored, classes ops.Optional[int64]) []float64 {
		return compute(func(y, dx *dlpack.Tensor) error {
			return ops.ShardedCrossEntropyCombine{Parts: parts, Target: target, Max: empty(t, d, m), LogSum: dx,
				Losses: y, IgnoreIndex: ignored, Classes: classes}.Run(nil)
		}, m)
	}
	var number ops.Optional[float64]
	var integer ops.Optional[int64]

	assert.Equal(t, masked(ops.Some(1.0)), masked(number))
	assert.Equal(t, []float64{.25, .25, .25, .25, .25, .25, .25, .25, 0, 0, 0, 0, 0, 0, 0, 0},
		masked(ops.Some(0.0)))
	assert.Equal(t, norms(ops.Some(1e-6)), norms(number))
	assert.InDelta(t, 1/7.5, norms(ops.Some(0.0))[0]*norms(ops.Some(0.0))[0], 1e-12)
	assert.Greater(t, norms(ops.Some(0.0))[7], 2*norms(number)[7])

	assert.Equal(t, losses(ops.Some[int64](-100)), losses(integer))
	assert.NotZero(t, losses(integer)[0], "class 0 counts")
	assert.Zero(t, losses(ops.Some[int64](0))[0])
	assert.Equal(t, gradients(ops.Some[int64](-100)), gradients(integer))
	assert.NotContains(t, gradients(integer), 0.0)
	assert.Equal(t, make([]float64, n), gradients(ops.Some[int64](0))[:n])
	assert.Equal(t, make([]float64, n), gradients(ops.Some[int64](0))[m*n:][:n])

	assert.Equal(t, combined(ops.Some[int64](-100), ops.Some[int64](-1)), combined(integer, integer))
	assert.NotZero(t, combined(integer, integer)[0])
	assert.Zero(t, combined(ops.Some[int64](0), integer)[0])
}
