package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// Statistics of tokens' logits map them as cross-entropy does, and share its operands.

func (a *tokenStatisticsForward) refuse(k *check) {
	k.logitMap(a.Scale, a.Softcap, a.Temperature)
	switch {
	case a.Classes != -1:
		firstOf(k, a.First, countOf(k, a.Classes))
	case a.First != 0:
		k.fail(StatusOption, "first is %d without classes, expected 0; set classes, of all slices", a.First)
	}
}

func (a *tokenStatisticsForward) spec() kernels.TokenStatistics {
	s := kernels.TokenStatistics{
		CrossEntropy: kernels.CrossEntropy{
			X: a.Logits, Target: a.Index, IgnoreIndex: a.IgnoreIndex,
			Slice: a.Classes != -1, Map: kernels.MapLogits(a.Scale, a.Softcap, a.Temperature),
		},
		RowMask: a.RowMask, LogProb: a.LogProb, Entropy: a.Entropy, LogSumSqProbs: a.LogSumSqProbs,
		MeanLogit: a.MeanLogit, IsTop1: a.IsTop1, Predicted: a.Predicted, First: a.First, Classes: a.Classes,
	}
	if !s.Slice {
		s.Classes = a.Logits.Cols
	}
	s.SetState(a.State)
	return s
}

func (a *tokenStatisticsForward) host() error {
	if s := a.spec(); s.X.Rows > 0 && s.WantsAny() {
		return cpu.TokenStatisticsForward(&s, workers())
	}
	return nil
}

func (a *tokenStatisticsForward) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.X.Rows == 0 || !s.WantsAny() {
		return nil
	}
	r := a.request(&s)
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.tokenStatistics(&s, &r)
	args.TargetLogits = k.at(k.plan.scratch.logits)
	args.LogProb, args.Entropy = output(s.LogProb.Data), output(s.Entropy.Data)
	args.LogSumSqProbs, args.MeanLogit = output(s.LogSumSqProbs.Data), output(s.MeanLogit.Data)
	args.IsTop1, args.Predicted = output(s.IsTop1.Data), output(s.Predicted.Data)
	return k.launch(unsafe.Pointer(&args))
}

func (a *tokenStatisticsForward) request(s *kernels.TokenStatistics) request {
	r := request{
		op: kernels.TokenStatisticsForward, Choice: a.Choice, x: a.Logits.DType, layout: layoutOf(true, a.Logits),
		m: a.Logits.Rows, n: a.Logits.Cols,
	}
	if s.NeedsAll() {
		r.op = kernels.AllTokenStatisticsForward
	}
	return r
}

func (a *tokenStatisticsBackward) refuse(k *check) {
	k.logitMap(a.Scale, a.Softcap, a.Temperature)
	if !a.DLogProb.Present() && !a.DEntropy.Present() && a.Logits.Rows > 0 {
		k.fail(StatusNull, "dlog_prob and dentropy are NULL, expected one of them, or both")
	}
}

func (a *tokenStatisticsBackward) spec() kernels.TokenStatistics {
	s := kernels.TokenStatistics{
		CrossEntropy: kernels.CrossEntropy{
			X: a.Logits, Target: a.Index, IgnoreIndex: a.IgnoreIndex, DX: a.DLogits, Slice: a.Slice,
			Map: kernels.MapLogits(a.Scale, a.Softcap, a.Temperature),
		},
		RowMask: a.RowMask, DLogProb: a.DLogProb, DEntropy: a.DEntropy,
	}
	s.SetState(a.State)
	return s
}

func (a *tokenStatisticsBackward) host() error {
	if a.Logits.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.TokenStatisticsBackward(&s, workers())
}

func (a *tokenStatisticsBackward) cuda(c *Call, ordinal int32) error {
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
	args := k.tokenStatistics(&s, &r)
	args.DLogProb, args.DLogProbStride = input(s.DLogProb.Data), s.DLogProb.Stride
	args.DEntropy, args.DEntropyStride = input(s.DEntropy.Data), s.DEntropy.Stride
	return k.launch(unsafe.Pointer(&args))
}

func (a *tokenStatisticsBackward) request() request {
	return request{
		op: kernels.TokenStatisticsBackward, Choice: a.Choice, x: a.Logits.DType,
		layout: layoutOf(true, a.Logits, a.DLogits), m: a.Logits.Rows, n: a.Logits.Cols,
	}
}

// tokenStatistics fills in the arguments that forward and backward share.
func (k *cudaCall) tokenStatistics(s *kernels.TokenStatistics, r *request) kernels.TokenStatisticsArgs {
	args := kernels.TokenStatisticsArgs{
		GeneralCrossEntropyArgs: k.generalCrossEntropy(&s.CrossEntropy, r), Depth: output(s.Depth.Data),
		RowMask: input(s.RowMask.Data), RowMaskStride: s.RowMask.Stride,
		RowMaskBytes: int32(s.RowMask.DType.Size()), First: s.First, Classes: s.Classes,
	}
	if s.Slice {
		args.Slice = 1
	}
	return args
}
