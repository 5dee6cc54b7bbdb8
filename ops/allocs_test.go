//go:build !race

// Not under the race detector: there sync.Pool drops objects at random, and the CPU operators have to
// allocate new ones.

package ops_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func TestTinyCallsDoNotAllocate(t *testing.T) {
	const m, n = 2, 8
	d := dlpack.Float32
	x, y, dx := empty(t, d, m, n), empty(t, d, m, n), empty(t, d, m, n)
	weight, dw, rstd := empty(t, d, n), empty(t, d, n), empty(t, d, m)
	target, loss, lse := empty(t, dlpack.Int64, m), empty(t, d, m), empty(t, d, 2, m)
	one := empty(t, d)
	for name, call := range map[string]func() error{
		"softmax_forward":  func() error { return softmaxForward(x, y) },
		"softmax_backward": func() error { return softmaxBackward(x, y, dx) },
		"rmsnorm_forward":  func() error { return rmsNormForward(x, weight, y, rstd, 1e-6) },
		"rmsnorm_backward": func() error { return rmsNormBackward(x, weight, y, rstd, dx, dw) },
		"masked_softmax_forward": func() error {
			return ops.MaskedSoftmaxForward{X: x, Mask: weight, Y: y, Causal: true}.Run(nil)
		},
		"masked_softmax_backward": func() error {
			scale := ops.Some(0.5)
			return ops.MaskedSoftmaxBackward{DY: x, Y: y, Mask: weight, DX: dx, Scale: scale, Causal: true}.Run(nil)
		},
		"cross_entropy_forward": func() error {
			return crossEntropyForward(x, target, weight, loss, lse, dx, one, plain)
		},
		"cross_entropy_backward": func() error {
			return crossEntropyBackward(x, target, weight, loss, lse, nil, dx, plain)
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				if err := call(); err != nil {
					panic(err)
				}
			}))
		})
	}
}
