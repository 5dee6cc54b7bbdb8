package ops

import (
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// normOperands is what plans of norms with options depend on, beside the shape.
type normOperands struct {
	second  int8 // bytes of an element of the residual, or of the gradient of y; 0 for none
	third   bool // backward: there is a gradient of residual_out
	sums    int8 // backward: how many of dw and db are wanted
	compact bool // the inputs' rows have no gaps
	bulk    bool // the inputs' rows are whole 16-byte vectors: bulk copies take them

	heads int64 // backward: rows of the weight
}

// hash keeps the plans of a model's norms apart, which differ in their operands only.
func (o normOperands) hash() uint64 {
	h := uint64(o.second)<<28 ^ uint64(o.sums)<<32
	for i, set := range [...]bool{o.third, o.compact, o.bulk} {
		if set {
			h ^= 1 << (36 + i)
		}
	}
	return h ^ uint64(o.heads)<<40
}

// forwardCUDA enqueues a forward call on a device.
func (n *normCall) forwardCUDA(c *Call, ordinal int32) error {
	k, err := c.start(ordinal, n.forwardRequest())
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.norm(&n.Norm, n.X, n.Residual, n.Y)
	args.Bias, args.BiasType = input(n.Bias.Data), int32(n.Bias.DType)
	args.Z, args.ZStride, args.ZType = operand(n.ResidualOut)
	args.Eps = float32(n.Eps)
	args.SumType = int32(n.SumType())
	return k.launch(unsafe.Pointer(&args))
}

func (n *normCall) forwardRequest() request {
	r := request{
		op: kernels.NormForward, Choice: n.Choice, x: n.X.DType, m: n.X.Rows, n: n.X.Cols,
		layout: normLayout(n.X, n.Weight, n.Bias, n.Residual, n.Y, n.ResidualOut),
	}
	if n.Residual.Present() {
		r.norm.second = int8(n.Residual.DType.Size())
	}
	if t := n.SumType(); t != kernels.Float32 && (t != n.X.DType || t != n.Residual.DType) {
		r.layout = policy.MixedOffsets // only kernels for these round to any type
	}
	switch residual, sum := n.Residual.Present(), n.ResidualOut.Present(); {
	case n.Center && !residual && !sum && n.ofOneType(&r, n.Y):
		r.op = kernels.LayerNormForward
	case !n.Center && residual && sum && !n.Bias.Present() &&
		n.ofOneType(&r, n.Y, n.Residual, n.ResidualOut):
		r.op = kernels.RMSNormResidualForward
	}
	return r
}

// ofOneType reports whether the rows of a call are aligned, its vectors and the given matrices have the type
// of x, and it has none of the options that cuda/aligned_norm.cuh leaves to cuda/norm.cuh.
func (n *normCall) ofOneType(r *request, others ...kernels.Matrix) bool {
	same := r.layout == policy.Aligned && n.Heads == 1 && !n.RoundNormalized && n.WeightOffset == 0
	for _, m := range others {
		same = same && m.DType == n.X.DType
	}
	for _, v := range []kernels.Vector{n.Weight, n.Bias} {
		same = same && (!v.Present() || v.DType == n.X.DType)
	}
	return same
}

// backwardCUDA enqueues a backward call on a device.
func (n *normCall) backwardCUDA(c *Call, ordinal int32) error {
	k, err := c.start(ordinal, n.backwardRequest())
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.norm(&n.Norm, n.X, n.DOut, n.DX)
	more, stride, kind := operand(n.DResidualOut)
	args.C, args.CStride, args.CType = kernels.Input(more), stride, kind
	args.Z, args.ZStride, args.ZType = operand(n.DResidual)
	args.Dw, args.DwType = output(n.DW.Data), int32(n.DW.DType)
	args.Db, args.DbType = output(n.DB.Data), int32(n.DB.DType)
	args.PartialSums, args.Partials = k.at(k.plan.scratch.dwPartial), k.plan.partials
	return k.launch(unsafe.Pointer(&args))
}

func (n *normCall) backwardRequest() request {
	r := request{
		op: kernels.NormBackward, Choice: n.Choice, x: n.X.DType, m: n.X.Rows, n: n.X.Cols,
		layout: normLayout(n.X, n.Weight, kernels.Vector{}, n.DOut, n.DResidualOut, n.DX, n.DResidual),
	}
	r.norm = normOperands{
		second: int8(n.DOut.DType.Size()), third: n.DResidualOut.Present(),
		compact: n.X.Stride == n.X.Cols && n.DOut.Stride == n.X.Cols,
		bulk:    vectorRows(n.X) && vectorRows(n.DOut), heads: n.Heads,
	}
	if n.DResidualOut.Present() {
		r.norm.compact = r.norm.compact && n.DResidualOut.Stride == n.X.Cols
		r.norm.bulk = r.norm.bulk && vectorRows(n.DResidualOut) && n.DResidualOut.DType == n.X.DType
	}
	for _, v := range []kernels.Vector{n.DW, n.DB} {
		if v.Present() {
			r.norm.sums++
		}
	}
	switch {
	case n.DResidual.Present(), r.norm.sums == 0:
	case n.Center && !n.DResidualOut.Present() && n.ofOneType(&r, n.DOut, n.DX):
		r.op = kernels.LayerNormBackward
	case !n.Center && n.DResidualOut.Present() && !n.DB.Present() &&
		n.ofOneType(&r, n.DOut, n.DX, n.DResidualOut):
		r.op = kernels.RMSNormResidualBackward
	}
	return r
}

// operand is how kernels take a matrix that not all calls have.
func operand(m kernels.Matrix) (address kernels.Output, stride int64, kind int32) {
	return output(m.Data), m.Stride, int32(m.DType)
}

// norm fills in the arguments that forward and backward share.
func (k *cudaCall) norm(n *kernels.Norm, first, second, out kernels.Matrix) kernels.NormArgs {
	args := kernels.NormArgs{
		Rows: k.rows(first, second, out), Weight: input(n.Weight.Data), WeightType: int32(n.Weight.DType),
		Mean: output(n.Mean.Data), Rstd: output(n.Rstd.Data),
		WeightOffset: float32(n.WeightOffset), InvN: 1 / float32(n.Divisor()), Heads: int32(n.Heads),
	}
	if n.Center {
		args.Center = 1
	}
	if n.RoundNormalized {
		args.RoundNormalized = 1
	}
	return args
}

// normLayout tells whether each row of the operands is made of whole vectors of x's elements, which are
// aligned to 16 bytes, or to all their bytes if they have fewer in the operand's type.
func normLayout(x kernels.Matrix, weight, bias kernels.Vector, others ...kernels.Matrix) policy.Layout {
	elements := 16 / x.DType.Size()
	whole := func(data unsafe.Pointer, stride int64, t kernels.DType) bool {
		unit := uintptr(min(16, elements*t.Size()))
		return uintptr(data)%unit == 0 && stride*t.Size()%int64(unit) == 0
	}
	aligned := x.Cols%elements == 0 && whole(x.Data, x.Stride, x.DType) &&
		whole(weight.Data, 0, weight.DType) && whole(bias.Data, 0, bias.DType)
	for _, m := range others {
		aligned = aligned && (!m.Present() || whole(m.Data, m.Stride, m.DType))
	}
	if aligned {
		return policy.Aligned
	}
	return policy.MixedOffsets
}
