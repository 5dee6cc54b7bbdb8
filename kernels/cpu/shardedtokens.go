package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// deepest is a distance whose exponential is 0. Its product with that is 0 too, not NaN.
const deepest = 1e4

// tokenSlice is what a slice has of a row.
type tokenSlice struct {
	max, logSum, depth, logProb, logSumSq, mean float64
	predicted                                   int64
}

func tokenSliceAt(a *kernels.ShardedTokenStatistics, slice, row int64) (s tokenSlice) {
	rows := a.Parts.Cols
	first := slice * a.Each * rows
	number := func(i int64) float64 { return scalar(a.Parts.DType, rowAt(&a.Parts, 0, int(first+i))) }
	s.max, s.logSum, s.depth = number(3*row), number(3*row+1), number(3*row+2)
	s.logProb = number(3*rows + row)
	if a.Each == 8 {
		s.logSumSq, s.mean = number(4*rows+row), number(5*rows+row)
		s.predicted = *(*int64)(unsafe.Add(rowAt(&a.Parts, 0, int(first+6*rows)), 8*row))
	}
	return s
}

// CombineTokenStatistics computes the statistics of rows from those of slices of their tokens, in float64 and
// one row after the other. With the sums r, e and q of a slice (see tokenForward), and d from its maximum to
// that of the row:
//
//	r of the row = sum exp(-d) (1 + r) - 1
//	e of the row = sum exp(-d) (e + d (1 + r))
//	q of the row = sum exp(-2 d) (1 + q) - 1
//
// The 1 is that of one of the slices with d = 0. It is left out instead of being subtracted.
func CombineTokenStatistics(a *kernels.ShardedTokenStatistics) {
	for row := range a.Parts.Cols {
		combineTokens(a, row)
	}
}

func combineTokens(a *kernels.ShardedTokenStatistics, row int64) {
	index := integerAt(&a.Index, int(row))
	isToken := index >= 0 && index < a.Classes
	if index == a.IgnoreIndex || isMasked(&a.RowMask, int(row)) {
		writeTokens(a, int(row), tokenSlice{predicted: -1}, 0, false, kernels.LeftOut)
		return
	}
	high, isUnknown := math.Inf(-1), false
	for i := range a.Ranks {
		m := tokenSliceAt(a, i, row).max
		high, isUnknown = larger(high, m), isUnknown || math.IsNaN(m)
	}
	others, e, q, mean, below, column, found := 0.0, 0.0, 0.0, 0.0, math.Inf(-1), int64(math.MaxInt64), false
	for i := range a.Ranks {
		s := tokenSliceAt(a, i, row)
		mean += s.mean
		if s.max == high || s.predicted < 0 {
			column = min(column, s.predicted)
		}
		if math.IsInf(s.logSum, -1) { // nothing but -inf, maybe the index too
			continue
		}
		d := high - s.max
		if !math.IsNaN(s.logProb) {
			below = min(s.logProb+s.logSum, 0) - d
		}
		sum := math.Exp(-d) * math.Exp(s.logSum)
		e += sum * (s.depth + min(d, deepest))
		if s.max == high && !found {
			others += math.Expm1(s.logSum)
			q += max(math.Expm1(s.logSumSq+2*s.logSum), 0)
			found = true
		} else {
			others += sum
			q += math.Exp(-2*d) * max(math.Exp(s.logSumSq+2*s.logSum), 1)
		}
	}
	if !found {
		others, q = -1, math.NaN()
	}
	if isUnknown {
		high, others, q, mean, column = math.NaN(), math.NaN(), math.NaN(), math.NaN(), -1
	}
	logSum := math.Log1p(others)
	whole := tokenSlice{
		max: high, logSum: logSum, depth: e / (1 + others), logProb: below - logSum,
		logSumSq: math.Log1p(q) - 2*logSum, mean: mean, predicted: column,
	}
	local := max(index-a.First, -1)
	if !isToken {
		whole.logProb, local = math.NaN(), kernels.InNoSlice
	}
	writeTokens(a, int(row), whole, logSum+whole.depth, column >= 0 && column == index, local)
}

// writeTokens writes what is wanted of a row.
func writeTokens(
	a *kernels.ShardedTokenStatistics, row int, s tokenSlice, entropy float64, isTop bool, local int64,
) {
	for _, of := range []struct {
		to    *kernels.Vector
		value float64
	}{
		{&a.LogProb, s.logProb}, {&a.Entropy, entropy}, {&a.LogSumSqProbs, s.logSumSq}, {&a.MeanLogit, s.mean},
	} {
		if of.to.Present() {
			put(of.to, row, of.value)
		}
	}
	if a.State.Present() {
		for i, v := range []float64{s.max, s.logSum, s.depth} {
			put(&a.State, 3*row+i, v)
		}
	}
	if a.Predicted.Present() {
		putInt64(&a.Predicted, row, s.predicted)
	}
	if a.IsTop1.Present() {
		putBool(&a.IsTop1, row, isTop)
	}
	if a.Local.Present() {
		putInt64(&a.Local, row, local)
	}
}
