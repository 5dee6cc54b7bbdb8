package cpu

import (
	"math"

	"github.com/gander-go/gander/kernels"
)

// CombineSlices computes the loss and the log-sum-exp of rows from those of slices of their classes, in
// float64 and one row after the other: there are few numbers beside those of the slices.
//
// The loss of a row is that of the slice with the target, as a class among the slices, plus that of the
// target within its slice. Neither is negative, so the sum loses no digits.
func CombineSlices(a *kernels.ShardedCrossEntropy) {
	each := int64(3)
	if a.Weighted {
		each++
	}
	rows := a.Target.Len
	var sum, denominator float64
	for row := range rows {
		part := func(slice, i int64) float64 {
			return scalar(a.Parts.DType, rowAt(&a.Parts, int(slice*each+i), int(row)))
		}
		target := integerAt(&a.Target, int(row))
		ignored, valid := target == a.IgnoreIndex, target >= 0 && target < a.Classes
		high, within, weight, owner := math.Inf(-1), 0.0, 0.0, int64(-1)
		for i := range a.Ranks {
			high = larger(high, part(i, 0))
			if loss := part(i, 2); !math.IsNaN(loss) {
				owner, within = i, loss
			}
			if a.Weighted {
				weight += part(i, 3)
			}
		}
		switch {
		case ignored:
			weight = 0
		case !valid:
			weight = math.NaN()
		case !a.Weighted:
			weight = 1
		}
		// Without an owner the slice of the target is all -inf, or has a NaN.
		others, logit := 0.0, math.Inf(-1)
		for i := range a.Ranks {
			v := part(i, 0) - finiteMax(high) + part(i, 1)
			if i == owner {
				logit = v
			} else {
				others += math.Exp(v)
			}
		}
		own := math.Exp(logit)
		logSum := math.Log(others + own)
		among := logSum - logit
		if own > others { // neither log1p nor logit is negative
			among = math.Log1p(others / own)
			logSum = logit + among
		}
		loss := 0.0
		if weight != 0 {
			loss = weight * (among + within)
		}
		sum += loss
		denominator += weight
		if !ignored && !valid {
			logSum = math.NaN()
		}
		for _, o := range []struct {
			to    *kernels.Vector
			value float64
		}{{&a.Losses, loss}, {&a.Weights, weight}, {&a.Max, high}, {&a.LogSum, logSum}} {
			if o.to.Present() {
				put(o.to, int(row), o.value)
			}
		}
	}
	if a.Mean {
		sum /= denominator
	}
	if a.Loss.Present() {
		put(&a.Loss, 0, sum)
	}
	if a.Denominator.Present() {
		put(&a.Denominator, 0, denominator)
	}
}
