package ops

import (
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// DefaultIgnoreIndex is the field's habit. It is not the zero value of CrossEntropyOptions, which ignores
// class 0.
const DefaultIgnoreIndex = -100

// CrossEntropyOptions are the options of both directions.
type CrossEntropyOptions struct {
	IgnoreIndex int64 // rows with this target count for nothing
	Reduction   kernels.Reduction
	// OnePass lets both directions share one pass over x: forward's dx is the gradient of the reduced loss,
	// and backward, given that dx, makes it again only where dloss is not 1. It needs a reduction.
	OnePass bool
}

// CrossEntropyForward computes loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the
// row's log-sum-exp. A row whose target is IgnoreIndex has loss 0 and gradient 0; a target outside [0, N)
// makes the row's loss and gradient NaN, and nothing is read with it.
//
//   - x: (M, N), float16, bfloat16 or float32, on the host also float64.
//   - target: M elements of int32 or int64, one fixed stride apart.
//   - weight: (N) or nil; float16, bfloat16 or float32, float64 exactly where x is.
//   - loss: M elements with ReduceNone, else one: their sum, or the sum over that of the counted rows'
//     weights, which is NaN where no row counts.
//   - lse: M elements, or (2, M), which receives the maximum and log(sum exp(x - max)) apart, or nil.
//   - dx: (M, N) of x's dtype or nil: weight[t] * (softmax(x) - onehot(t)), the gradient of the sum of the
//     losses, or with OnePass that of the reduced loss. dx may be x.
//   - denominator: one element or nil: the mean's denominator, written with any reduction.
//
// loss, lse and denominator are contiguous and float32, or float64 where x is.
func CrossEntropyForward(c *Call, x, target, weight, loss, lse, dx, denominator *dlpack.Tensor,
	o CrossEntropyOptions) error {
	k := check{op: "cross_entropy_forward"}
	var a kernels.CrossEntropy
	k.crossEntropy(&a, x, target, weight, o)
	stat := statistic(a.X.DType)
	if o.Reduction == kernels.ReduceNone {
		a.Loss = k.compact("loss", loss, stat, a.X.Rows, perRow+" with reduction none")
	} else {
		a.Loss = k.compact("loss", loss, stat, 1, "one sum or mean for all rows")
	}
	k.output()
	if lse != nil {
		k.lse(&a, lse, stat)
		k.output()
	}
	if dx != nil {
		a.DX = k.rowsLike("dx", dx, only(a.X.DType), "x", a.X)
		k.output("x")
	}
	if denominator != nil {
		a.Denominator = k.compact("denominator", denominator, stat, 1, "one for all rows")
		k.output()
	}
	k.chosen(c, kernels.CrossEntropyForward)
	switch {
	case k.err != nil:
		return k.err
	case a.X.Rows == 0 && !a.Loss.Present() && !a.Denominator.Present():
		return nil
	case !k.device.Host():
		return c.orDefault().cudaCrossEntropyForward(k.device.ID, &a)
	}
	cpu.CrossEntropyForward(&a, workers())
	return nil
}

// CrossEntropyBackward computes dx = dloss * weight[t] * (softmax(x) - onehot(t)), over denominator with
// ReduceMean. dloss has M elements one fixed stride apart, which may be 0, or one element for all rows;
// lse is as forward wrote it; denominator is required with ReduceMean and else nil; dx has x's shape and
// dtype and may be x. Otherwise the operands are those of CrossEntropyForward.
func CrossEntropyBackward(c *Call, x, target, weight, dloss, lse, denominator, dx *dlpack.Tensor,
	o CrossEntropyOptions) error {
	k := check{op: "cross_entropy_backward"}
	var a kernels.CrossEntropy
	k.crossEntropy(&a, x, target, weight, o)
	stat := statistic(a.X.DType)
	if o.OnePass || dloss != nil && dloss.Validate() == nil && dloss.Len() == 1 {
		a.DLoss = k.vector("dloss", dloss, stat, 1, "")
		a.DLoss.Stride = 0
	} else {
		a.DLoss = k.vector("dloss", dloss, stat, a.X.Rows, perRow+", or a single one for all")
	}
	k.lse(&a, lse, stat)
	switch {
	case o.Reduction == kernels.ReduceMean:
		a.Denominator = k.compact("denominator", denominator, stat, 1, "one for all rows")
	case denominator != nil:
		k.fail(StatusOption, "denominator is given with another reduction than mean, expected NULL; drop it or say mean")
	}
	a.DX = k.rowsLike("dx", dx, only(a.X.DType), "x", a.X)
	if o.OnePass {
		k.output() // x is read again
	} else {
		k.output("x")
	}
	k.chosen(c, kernels.CrossEntropyBackward)
	switch {
	case k.err != nil:
		return k.err
	case a.X.Rows == 0:
		return nil
	case !k.device.Host():
		return c.orDefault().cudaCrossEntropyBackward(k.device.ID, &a)
	}
	cpu.CrossEntropyBackward(&a, workers())
	return nil
}

// crossEntropy checks what both directions read.
func (k *check) crossEntropy(a *kernels.CrossEntropy, x, target, weight *dlpack.Tensor, o CrossEntropyOptions) {
	a.IgnoreIndex, a.Reduction, a.OnePass = o.IgnoreIndex, o.Reduction, o.OnePass
	if o.OnePass && o.Reduction == kernels.ReduceNone {
		k.fail(StatusOption, "one_pass is set with reduction none, expected mean or sum; leave it 0")
	}
	if o.Reduction < kernels.ReduceNone || o.Reduction > kernels.ReduceSum {
		k.fail(StatusOption, "reduction is %d, expected none (0), mean (1) or sum (2)", o.Reduction)
	}
	a.X = k.rows("x", x, anyFloat)
	a.Target = k.vector("target", target, anyIndex, a.X.Rows, perRow)
	if weight != nil {
		a.Weight = k.weights("weight", weight, companion(a.X.DType), a.X.Cols)
	}
}

// lse checks the log-sum-exp of the rows, M elements whole or (2, M) in two parts.
func (k *check) lse(a *kernels.CrossEntropy, t *dlpack.Tensor, stat types) {
	m := a.X.Rows
	if k.err != nil || t == nil || t.NDim < 2 || t.Validate() != nil || t.Dim(0) != 2 || t.Len() != 2*m || m == 0 {
		a.Max = k.compact("lse", t, stat, m, perRow+", or (2, M)")
		return
	}
	d, ok := k.operand("lse", t, stat)
	if !ok {
		return
	}
	part := *t
	part.NDim--
	part.Shape = unsafe.SliceData(t.Dims()[1:])
	if t.Strides != nil {
		part.Strides = unsafe.SliceData(unsafe.Slice(t.Strides, t.NDim)[1:])
	}
	if stride, ok := collapse(&part, part.Rank()); m > 1 && (!ok || stride != 1) {
		k.fail(StatusLayout, "lse has strides %s, expected adjacent elements in each of its two parts; make it contiguous",
			strides(t))
	}
	a.Max = kernels.Vector{Data: t.Pointer(), DType: d, Len: m, Stride: 1}
	a.LogSum = a.Max
	a.LogSum.Data = unsafe.Add(a.Max.Data, t.Stride(0)*d.Size())
	k.add(span{"lse", d, int64(uintptr(t.Pointer())), 2, m, t.Stride(0)})
}
