package ops

import (
	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// choose returns the plan of the first row of a policy that the algorithm may take, that is
// meant for such rows, and whose regime serves them: nil where there is none.
func (q *query) choose(rows []policy.Row) *plan {
	algorithm := q.Algorithm
	// x * rstd is nearly 1 in rows this short. Its rounding errs to one side, which shows in a sum. The
	// kernel that goes by columns does without that product.
	if q.dw && q.n < 4 && algorithm == Auto {
		algorithm = Arbitrary
	}
	for i := range rows {
		if row := &rows[i]; row.Takes(int32(algorithm)) && q.meant(row) {
			if p := regimes[row.Regime](q, row); p != nil {
				p.row = row
				return p
			}
		}
	}
	return nil
}

// meant tells whether a row of the policy is for such rows on such a device.
func (q *query) meant(row *policy.Row) bool {
	sms := q.facts.SMs
	switch m := q.expected(); {
	case q.vectors <= row.Over, row.UpTo > 0 && q.vectors > row.UpTo:
		return false
	case m < row.From.On(sms), row.Below.N > 0 && m >= row.Below.On(sms):
		return false
	case row.NoClusters && q.maxCluster > 1, !row.TakesType(q.x), row.WideWeights && !q.wideWeights,
		!row.IsFor(deviceOf(q.facts)):
		return false
	}
	size := q.m * q.vectors * 16
	return size >= row.MinKiB<<10*int64(sms) && (row.MaxKiB == 0 || size <= row.MaxKiB<<10*int64(sms))
}

// deviceOf names the policy of a device.
func deviceOf(f *driver.Facts) policy.Device {
	const fast = 4100 // GB/s
	measured := f.Major == 9 && f.SMs == 132
	switch {
	case measured && f.MemoryGBs > fast:
		return policy.H200
	case f.MemoryGBs > fast:
		return policy.OtherFast
	case measured && f.MemoryGBs > 3000:
		return policy.H100
	}
	return policy.Other
}

// operator is the policy's name for what is asked.
func (r *request) operator() policy.Operator {
	switch r.op {
	case kernels.SoftmaxForward:
		return policy.SoftmaxForward
	case kernels.SoftmaxBackward:
		return policy.SoftmaxBackward
	case kernels.RMSNormForward:
		return policy.RMSNormForward
	case kernels.CrossEntropyForward:
		return policy.CrossEntropyForward
	case kernels.CrossEntropyForwardDX:
		return policy.CrossEntropyForwardDX
	case kernels.GeneralCrossEntropyForward:
		return policy.GeneralCrossEntropyForward
	case kernels.GeneralCrossEntropyForwardDX:
		return policy.GeneralCrossEntropyForwardDX
	case kernels.TokenStatisticsForward:
		return policy.TokenStatisticsForward
	case kernels.AllTokenStatisticsForward:
		return policy.AllTokenStatisticsForward
	case kernels.SoftCrossEntropyForward:
		return policy.SoftCrossEntropyForward
	case kernels.CrossEntropyBackward, kernels.Rescale, kernels.GeneralCrossEntropyBackward,
		kernels.TokenStatisticsBackward, kernels.SoftCrossEntropyBackward, kernels.GLUForward,
		kernels.GLUBackward:
		return policy.CrossEntropyBackward
	case kernels.NormForward:
		return policy.NormForward
	case kernels.NormBackward:
		return policy.NormBackward
	case kernels.MaskedSoftmaxForward:
		return policy.MaskedSoftmaxForward
	case kernels.MaskedSoftmaxBackward:
		return policy.MaskedSoftmaxBackward
	case kernels.LayerNormForward:
		return policy.LayerNormForward
	case kernels.LayerNormBackward:
		return policy.LayerNormBackward
	case kernels.RMSNormResidualForward:
		return policy.RMSNormResidualForward
	case kernels.RMSNormResidualBackward:
		return policy.RMSNormResidualBackward
	}
	if r.dw {
		return policy.RMSNormBackward
	}
	return policy.RMSNormBackwardDX
}

// layoutOf tells where the rows of operands lie; whole is what else has to hold for aligned rows.
func layoutOf(whole bool, first kernels.Matrix, others ...kernels.Matrix) policy.Layout {
	whole = whole && vectorRows(first)
	for _, m := range others {
		whole = whole && vectorRows(m) && m.DType == first.DType
	}
	switch {
	case whole:
		return policy.Aligned
	case sameOffset(first, others...):
		return policy.SameOffset
	}
	return policy.MixedOffsets
}
