package ops

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *shardedCrossEntropyCombine) refuse(k *check) {
	if p := a.Parts; p.Rows > 1 && p.Stride != p.Cols {
		k.fail(StatusLayout, "parts has rows of %d elements %d apart, expected adjacent rows; make it contiguous",
			p.Cols, p.Stride)
	}
	switch {
	case a.Classes == -1:
		a.Classes = math.MaxInt64
	case a.Classes < 1:
		k.fail(StatusOption, "classes is %d, expected how many there are in all slices, or -1 if that is unknown",
			a.Classes)
	}
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
