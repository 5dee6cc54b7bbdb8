package ops

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

func (a *rmsNormForward) refuse(k *check) {
	k.epsilon(a.Eps)
	a.WeightOffset = k.weightOffset(a.WeightOffset, a.Weight)
	if what := a.general(); what != "" {
		k.onlyAuto(&a.Choice, what)
	}
}

// general names what makes a call a normCall, or returns "".
func (a *rmsNormForward) general() string {
	if what := a.extra(); what != "" {
		return what
	}
	return generalWeight(a.Weight, a.X)
}

func (a *rmsNormForward) norm() normCall {
	return normCall{Choice: a.Choice, Norm: kernels.Norm{
		X: a.X, Weight: a.Weight, Bias: a.Bias, Residual: a.Residual, Y: a.Y, ResidualOut: a.ResidualOut,
		Rstd: a.Rstd, Eps: a.Eps, WeightOffset: a.WeightOffset, RoundNormalized: a.RoundNormalized,
		Heads: headsOf(a.Weight, a.X),
	}}
}

func (a *rmsNormBackward) refuse(k *check) {
	a.WeightOffset = k.weightOffset(a.WeightOffset, a.Weight)
	if what := a.general(); what != "" {
		k.onlyAuto(&a.Choice, what)
	}
}

// general names what makes a call a normCall, or returns "".
func (a *rmsNormBackward) general() string {
	what := a.extra()
	switch {
	case what != "":
		return what
	case a.DX.DType != a.X.DType:
		return "a dx of another dtype than x"
	}
	return generalWeight(a.Weight, a.X)
}

func (a *rmsNormBackward) norm() normCall {
	return normCall{Choice: a.Choice, backward: true, Norm: kernels.Norm{
		X: a.X, Weight: a.Weight, DOut: a.DOut, DResidualOut: a.DResidualOut, Rstd: a.Rstd, DX: a.DX,
		DResidual: a.DResidual, DW: a.DW, DB: a.DB, WeightOffset: a.WeightOffset,
		RoundNormalized: a.RoundNormalized, Heads: headsOf(a.Weight, a.X),
	}}
}

// generalWeight names what about the weight makes a call a normCall, or returns "".
func generalWeight(weight kernels.Vector, x kernels.Matrix) string {
	if weight.Len > x.Cols {
		return "a weight for each head"
	}
	return ""
}

// noOffset is -0. Added to a weight it changes no bit, while -0 + 0 is 0.
var noOffset = math.Copysign(0, -1)

// weightOffset checks the option and returns the number to add to each weight.
func (k *check) weightOffset(offset float64, weight kernels.Vector) float64 {
	k.finite("weight_offset", offset)
	switch {
	case offset == 0:
		return noOffset
	case !weight.Present():
		k.fail(StatusOption, "weight_offset is %v without a weight, expected 0; pass the weight or drop "+
			"weight_offset", offset)
	}
	return offset
}

func (a *rmsNormForward) host() error {
	n := a.norm()
	return n.host()
}

func (a *rmsNormForward) cuda(c *Call, ordinal int32) error {
	if a.general() != "" {
		n := a.norm()
		return n.cuda(c, ordinal)
	}
	if a.X.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, a.request())
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.rmsnorm(a.X, kernels.Matrix{}, a.Y, a.Weight, a.options())
	args.Rstd = output(a.Rstd.Data)
	return k.launch(unsafe.Pointer(&args))
}

func (a *rmsNormForward) request() request {
	return request{
		op: kernels.RMSNormForward, Choice: a.Choice, x: a.X.DType, m: a.X.Rows, n: a.X.Cols,
		layout:      layoutOf(aligned(a.Weight), a.X, a.Y),
		wideWeights: a.Weight.Present() && a.Weight.DType == kernels.Float32 && a.X.DType != kernels.Float32,
	}
}

func (a *rmsNormBackward) host() error {
	n := a.norm()
	return n.host()
}

func (a *rmsNormBackward) cuda(c *Call, ordinal int32) error {
	if a.general() != "" {
		n := a.norm()
		return n.cuda(c, ordinal)
	}
	if a.X.Rows == 0 && !a.DW.Present() {
		return nil
	}
	k, err := c.start(ordinal, a.request())
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.rmsnorm(a.X, a.DOut, a.DX, a.Weight, a.options())
	args.Rstd, args.Dw, args.DwType = output(a.Rstd.Data), output(a.DW.Data), int32(a.DW.DType)
	args.DwPartial, args.Partials = k.at(k.plan.scratch.dwPartial), k.plan.partials
	return k.launch(unsafe.Pointer(&args))
}

func (a *rmsNormBackward) request() request {
	layout := layoutOf(aligned(a.Weight), a.X, a.DOut, a.DX)
	if a.DOut.DType != a.X.DType {
		layout = policy.MixedTypes
	}
	return request{
		op: kernels.RMSNormBackward, Choice: a.Choice, x: a.X.DType, layout: layout, dw: a.DW.Present(),
		m: a.X.Rows, n: a.X.Cols,
	}
}

// rmsnorm fills in the arguments that forward and backward share.
func (k *cudaCall) rmsnorm(
	first, second, out kernels.Matrix, weight kernels.Vector, o kernels.RMSNormOptions,
) kernels.RMSNormArgs {
	return kernels.RMSNormArgs{
		Rows: k.rows(first, second, out), Weight: input(weight.Data), WeightType: int32(weight.DType),
		Options: o, InvN: 1 / float32(first.Cols),
	}
}
