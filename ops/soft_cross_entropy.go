package ops

import (
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// Cross-entropy with class probabilities maps logits as cross-entropy does, and shares its options.

func (a *softCrossEntropyForward) refuse(k *check) {
	k.lossOptions(a.LabelSmoothing, a.ZLoss, a.Scale, a.Softcap, a.Temperature)
	k.divisor(a.Divisor, a.Reduction)
}

func (a *softCrossEntropyForward) spec() kernels.SoftCrossEntropy {
	s := kernels.SoftCrossEntropy{
		CrossEntropy: kernels.CrossEntropy{
			X: a.X, Weight: a.Weight, Divisor: a.Divisor, Reduction: a.Reduction,
			LabelSmoothing: a.LabelSmoothing, ZLoss: a.ZLoss,
			Map: kernels.MapLogits(a.Scale, a.Softcap, a.Temperature), Loss: a.Loss,
		},
		Probabilities: a.Target,
	}
	s.SetState(a.State)
	return s
}

func (a *softCrossEntropyForward) host() error {
	if s := a.spec(); s.X.Rows > 0 || s.HasTotal() {
		return cpu.SoftCrossEntropyForward(&s, workers())
	}
	return nil
}

func (a *softCrossEntropyForward) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.X.Rows == 0 && !s.HasTotal() {
		return nil
	}
	r := a.request(&s)
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.softCrossEntropy(&s, &r)
	switch {
	case !s.HasTotal():
		args.Loss, args.LossStride = output(s.Loss.Data), s.Loss.Stride
	case k.plan.singleCTATotal:
		args.Total, args.SingleCTATotal = output(s.Loss.Data), 1
	default:
		args.Total, args.RowLosses = output(s.Loss.Data), k.at(k.plan.scratch.rowLosses)
	}
	return k.launch(unsafe.Pointer(&args))
}

func (a *softCrossEntropyForward) request(s *kernels.SoftCrossEntropy) request {
	r := request{
		op: kernels.SoftCrossEntropyForward, Choice: a.Choice, x: a.X.DType,
		layout: layoutOf(aligned(a.Weight), a.X, a.Target), total: s.HasTotal(), m: a.X.Rows, n: a.X.Cols,
	}
	if a.Target.DType != a.X.DType && a.X.Rows > 0 {
		r.layout = policy.MixedTypes
	}
	return r
}

func (a *softCrossEntropyBackward) refuse(k *check) {
	k.lossOptions(a.LabelSmoothing, a.ZLoss, a.Scale, a.Softcap, a.Temperature)
	k.divisor(a.Divisor, a.Reduction)
}

func (a *softCrossEntropyBackward) spec() kernels.SoftCrossEntropy {
	s := kernels.SoftCrossEntropy{
		CrossEntropy: kernels.CrossEntropy{
			X: a.X, Weight: a.Weight, Divisor: a.Divisor, Reduction: a.Reduction,
			LabelSmoothing: a.LabelSmoothing, ZLoss: a.ZLoss,
			Map: kernels.MapLogits(a.Scale, a.Softcap, a.Temperature), DLoss: a.DLoss, DX: a.DX,
		},
		Probabilities: a.Target,
	}
	s.SetState(a.State)
	return s
}

func (a *softCrossEntropyBackward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.SoftCrossEntropyBackward(&s, workers())
}

func (a *softCrossEntropyBackward) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.X.Rows == 0 {
		return nil
	}
	r := a.request()
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.softCrossEntropy(&s, &r)
	args.Dloss, args.DlossStride = input(s.DLoss.Data), s.DLoss.Stride
	if s.Reduction == kernels.ReduceMean {
		args.InverseRows = 1 / float32(s.X.Rows)
	}
	return k.launch(unsafe.Pointer(&args))
}

func (a *softCrossEntropyBackward) request() request {
	return request{
		op: kernels.SoftCrossEntropyBackward, Choice: a.Choice, x: a.X.DType,
		layout: layoutOf(aligned(a.Weight), a.X, a.Target, a.DX), m: a.X.Rows, n: a.X.Cols,
	}
}

// softCrossEntropy fills in the arguments that forward and backward share.
func (k *cudaCall) softCrossEntropy(s *kernels.SoftCrossEntropy, r *request) kernels.SoftCrossEntropyArgs {
	args := kernels.SoftCrossEntropyArgs{
		GeneralCrossEntropyArgs: k.generalCrossEntropy(&s.CrossEntropy, r),
		TargetWeight:            output(s.TargetWeight.Data), InverseRows: 1,
	}
	args.Rows = k.rows(s.X, s.Probabilities, s.DX)
	return args
}
