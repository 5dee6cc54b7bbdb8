package ops

import (
	"math"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// normCall is a LayerNorm, or an RMSNorm with operands that the kernels of rmsnorm.go do not have.
type normCall struct {
	kernels.Norm
	Choice
	backward bool
}

func (n *normCall) host() error {
	switch {
	case n.empty():
		return nil
	case n.backward:
		return cpu.NormBackward(&n.Norm, workers())
	}
	return cpu.NormForward(&n.Norm, workers())
}

func (n *normCall) cuda(c *Call, ordinal int32) error {
	if n.empty() {
		return nil
	}
	if n.backward {
		return n.backwardCUDA(c, ordinal)
	}
	return n.forwardCUDA(c, ordinal)
}

// empty reports whether there is nothing to write. Sums over no rows are written, as zeros.
func (n *normCall) empty() bool {
	return n.X.Rows == 0 && !n.DW.Present() && !n.DB.Present()
}

// epsilon checks the option eps.
func (k *check) epsilon(eps float64) {
	if !(eps >= 0) || math.IsInf(eps, 1) {
		k.fail(StatusOption, "eps is %v, expected a finite number of 0 or more", eps)
	}
	k.finite("eps", eps)
}

// onlyAuto refuses the choice of an algorithm for an RMSNorm that has no other than Auto. what makes it one.
func (k *check) onlyAuto(c *Choice, what string) {
	if c.Algorithm != Auto && !c.IfServed {
		k.fail(StatusUnsupported, "algorithm is %q with %s, expected %q, the only one there; leave it out",
			c.Algorithm, what, Auto)
	}
	c.Algorithm = Auto
}

// headsOf is the number of heads that a weight has rows for.
func headsOf(weight kernels.Vector, x kernels.Matrix) int64 { return max(1, weight.Len/max(x.Cols, 1)) }

func (a *layerNormForward) refuse(k *check) { k.epsilon(a.Eps) }

func (a *layerNormForward) norm() normCall {
	return normCall{Choice: a.Choice, Norm: kernels.Norm{
		X: a.X, Weight: a.Weight, Bias: a.Bias, Residual: a.Residual, Y: a.Y, ResidualOut: a.ResidualOut,
		Mean: a.Mean, Rstd: a.Rstd, Eps: a.Eps, WeightOffset: noOffset, Center: true, Heads: headsOf(a.Weight, a.X),
	}}
}

func (a *layerNormForward) host() error {
	n := a.norm()
	return n.host()
}

func (a *layerNormForward) cuda(c *Call, ordinal int32) error {
	n := a.norm()
	return n.cuda(c, ordinal)
}

func (a *layerNormBackward) norm() normCall {
	return normCall{Choice: a.Choice, backward: true, Norm: kernels.Norm{
		X: a.X, Weight: a.Weight, DOut: a.DOut, DResidualOut: a.DResidualOut, Mean: a.Mean, Rstd: a.Rstd,
		DX: a.DX, DResidual: a.DResidual, DW: a.DW, DB: a.DB, WeightOffset: noOffset,
		Center: true, Heads: headsOf(a.Weight, a.X),
	}}
}

func (a *layerNormBackward) host() error {
	n := a.norm()
	return n.host()
}

func (a *layerNormBackward) cuda(c *Call, ordinal int32) error {
	n := a.norm()
	return n.cuda(c, ordinal)
}
