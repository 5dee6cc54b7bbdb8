package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// Log-sum-exp runs the kernels of cross-entropy without a target. Forward then computes only the log-sum-exp,
// and backward leaves out the target's term of the gradient.

func (a *logSumExpForward) spec() kernels.CrossEntropy {
	return kernels.CrossEntropy{X: a.X, Max: a.LSE}
}

func (a *logSumExpForward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.CrossEntropyForward(&s, workers())
}

func (a *logSumExpForward) cuda(c *Call, ordinal int32) error {
	return c.logSumExp(ordinal, a.spec(), a.request())
}

func (a *logSumExpForward) request() request {
	return request{
		op: kernels.CrossEntropyForward, Choice: a.Choice, x: a.X.DType, layout: layoutOf(true, a.X),
		m: a.X.Rows, n: a.X.Cols,
	}
}

func (a *logSumExpBackward) spec() kernels.CrossEntropy {
	return kernels.CrossEntropy{X: a.X, DLoss: a.DLSE, Max: a.LSE, DX: a.DX}
}

func (a *logSumExpBackward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.CrossEntropyBackward(&s, workers())
}

func (a *logSumExpBackward) cuda(c *Call, ordinal int32) error {
	return c.logSumExp(ordinal, a.spec(), a.request())
}

func (a *logSumExpBackward) request() request {
	return request{
		op: kernels.CrossEntropyBackward, Choice: a.Choice, x: a.X.DType, layout: layoutOf(true, a.X, a.DX),
		m: a.X.Rows, n: a.X.Cols,
	}
}

// logSumExp launches forward or backward.
func (c *Call) logSumExp(ordinal int32, s kernels.CrossEntropy, r request) error {
	if s.X.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.crossEntropy(&s)
	args.TargetLogits = k.at(k.plan.scratch.logits)
	args.Dloss, args.DlossStride = input(s.DLoss.Data), s.DLoss.Stride
	return k.launch(unsafe.Pointer(&args))
}
