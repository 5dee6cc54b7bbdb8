package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// L2 normalization is an RMSNorm without a weight whose sums over a row are divided by 1 instead of N.

func (a *l2NormForward) refuse(k *check) { k.epsilon(a.Eps) }

func (a *l2NormForward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	n := kernels.Norm{X: a.X, Y: a.Y, Rstd: a.Rnorm, Eps: a.Eps, Over: 1}
	return cpu.NormForward(&n, workers())
}

func (a *l2NormForward) cuda(c *Call, ordinal int32) error {
	return c.l2norm(ordinal, a.request(), a.X, kernels.Matrix{}, a.Y, a.Rnorm, a.Eps)
}

func (a *l2NormForward) request() request {
	r := rmsNormForward{X: a.X, Y: a.Y, Choice: a.Choice}
	return r.request()
}

func (a *l2NormBackward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	n := kernels.Norm{X: a.X, DOut: a.DY, DX: a.DX, Rstd: a.Rnorm, Over: 1}
	return cpu.NormBackward(&n, workers())
}

func (a *l2NormBackward) cuda(c *Call, ordinal int32) error {
	return c.l2norm(ordinal, a.request(), a.X, a.DY, a.DX, a.Rnorm, 0)
}

func (a *l2NormBackward) request() request {
	r := rmsNormBackward{X: a.X, DOut: a.DY, DX: a.DX, Choice: a.Choice}
	return r.request()
}

// l2norm launches forward or backward.
func (c *Call) l2norm(
	ordinal int32, r request, first, second, out kernels.Matrix, rnorm kernels.Vector, eps float64,
) error {
	if first.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.rmsnorm(first, second, out, kernels.Vector{}, kernels.RMSNormOptions{Eps: float32(eps)})
	args.InvN, args.Rstd = 1, output(rnorm.Data)
	return k.launch(unsafe.Pointer(&args))
}
