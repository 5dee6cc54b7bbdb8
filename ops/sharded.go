package ops

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *shardedCrossEntropyCombine) refuse(k *check) {
	adjacent(k, &a.Parts)
	a.Classes = countOf(k, a.Classes)
}

// each is how many numbers of a row each slice has.
func (a *shardedCrossEntropyCombine) each() int64 {
	if a.Weighted {
		return 4
	}
	return 3
}

func (a *shardedCrossEntropyCombine) spec() kernels.ShardedCrossEntropy {
	return kernels.ShardedCrossEntropy{
		Parts: a.Parts, Ranks: a.Parts.Rows / a.each(), Weighted: a.Weighted,
		Target: a.Target, Classes: a.Classes, IgnoreIndex: a.IgnoreIndex, Mean: a.Mean,
		Losses: a.Losses, Max: a.Max, LogSum: a.LogSum, Weights: a.Weights,
		Loss: a.Loss, Denominator: a.Denominator,
	}
}

func (a *shardedCrossEntropyCombine) host() error {
	s := a.spec()
	cpu.CombineSlices(&s)
	return nil
}

func (a *shardedCrossEntropyCombine) request() request {
	return request{
		op: kernels.CombineSlices, Choice: a.Choice, x: kernels.Float32, layout: policy.MixedOffsets,
		total: a.Loss.Present() || a.Denominator.Present(), m: a.Parts.Cols, n: a.Classes,
	}
}

func (a *shardedCrossEntropyCombine) cuda(c *Call, ordinal int32) error {
	s, r := a.spec(), a.request()
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.CrossEntropyArgs{
		Rows: kernels.Rows{
			A: input(s.Parts.Data), AStride: a.each() * s.Parts.Cols, M: s.Parts.Cols, N: s.Classes,
		},
		Ranks:  s.Ranks,
		Target: input(s.Target.Data), TargetStride: s.Target.Stride, TargetType: int32(s.Target.DType),
		IgnoreIndex: s.IgnoreIndex,
		Loss:        output(s.Losses.Data), Max: output(s.Max.Data), LogSum: output(s.LogSum.Data),
		Weights: output(s.Weights.Data), Total: output(s.Loss.Data), Denominator: output(s.Denominator.Data),
	}
	if s.Mean {
		args.Mean = 1
	}
	if r.total {
		args.RowLosses = k.at(k.plan.scratch.rowLosses)
	}
	return k.launch(unsafe.Pointer(&args))
}

func (a *shardedTokenStatisticsCombine) refuse(k *check) {
	adjacent(k, &a.Parts)
	a.Classes = countOf(k, a.Classes)
	firstOf(k, a.First, a.Classes)
	for _, o := range []struct {
		name string
		v    *kernels.Vector
	}{
		{"log_sum_sq_probs", &a.LogSumSqProbs}, {"mean_logit", &a.MeanLogit}, {"is_top1", &a.IsTop1},
		{"predicted", &a.Predicted},
	} {
		if a.Narrow && o.v.Present() {
			k.fail(StatusOption, "%s is given with narrow, expected NULL; pass all parts", o.name)
		}
	}
}

func (a *shardedTokenStatisticsCombine) spec() kernels.ShardedTokenStatistics {
	each := int64(8)
	if a.Narrow {
		each = 4
	}
	return kernels.ShardedTokenStatistics{
		Parts: a.Parts, Ranks: a.Parts.Rows / each, Each: each, Index: a.Index, RowMask: a.RowMask,
		IgnoreIndex: a.IgnoreIndex, First: a.First, Classes: a.Classes, LogProb: a.LogProb, Entropy: a.Entropy,
		LogSumSqProbs: a.LogSumSqProbs, MeanLogit: a.MeanLogit, IsTop1: a.IsTop1, Predicted: a.Predicted,
		State: a.State, Local: a.Local,
	}
}

func (a *shardedTokenStatisticsCombine) host() error {
	s := a.spec()
	cpu.CombineTokenStatistics(&s)
	return nil
}

func (a *shardedTokenStatisticsCombine) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.Parts.Cols == 0 {
		return nil
	}
	k, err := c.start(ordinal, request{
		op: kernels.CombineTokenStatistics, x: kernels.Float32, layout: policy.MixedOffsets, m: s.Parts.Cols,
		n: s.Classes,
	})
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.TokenStatisticsArgs{
		RowMask: input(s.RowMask.Data), RowMaskStride: s.RowMask.Stride,
		RowMaskBytes: int32(s.RowMask.DType.Size()), First: s.First, Classes: s.Classes,
		LogProb: output(s.LogProb.Data), Entropy: output(s.Entropy.Data),
		LogSumSqProbs: output(s.LogSumSqProbs.Data), MeanLogit: output(s.MeanLogit.Data),
		IsTop1: output(s.IsTop1.Data), Predicted: output(s.Predicted.Data), Local: output(s.Local.Data),
	}
	args.Rows = kernels.Rows{
		A: input(s.Parts.Data), AStride: s.Each * s.Parts.Cols, M: s.Parts.Cols, N: s.Classes,
	}
	args.Ranks, args.Max, args.IgnoreIndex = s.Ranks, output(s.State.Data), s.IgnoreIndex
	args.Target, args.TargetStride = input(s.Index.Data), s.Index.Stride
	args.TargetType = int32(s.Index.DType)
	return k.launch(unsafe.Pointer(&args))
}

// adjacent refuses parts of slices with anything between them.
func adjacent(k *check, parts *kernels.Matrix) {
	if parts.Rows > 1 && parts.Stride != parts.Cols {
		k.fail(StatusLayout, "parts has rows of %d elements %d apart, expected adjacent rows; make it contiguous",
			parts.Cols, parts.Stride)
	}
}

// countOf is how many classes there are in all slices: any number if that is unknown.
func countOf(k *check, classes int64) int64 {
	switch {
	case classes == -1:
		return math.MaxInt64
	case classes < 1:
		k.fail(StatusOption, "classes is %d, expected how many there are in all slices, or -1 if that is unknown",
			classes)
	}
	return classes
}

// firstOf refuses what is not the number of a class. A slice without classes begins behind all others.
func firstOf(k *check, first, classes int64) {
	if first < 0 || first > classes {
		k.fail(StatusOption, "first is %d, expected at least 0 and at most classes, %d", first, classes)
	}
}
