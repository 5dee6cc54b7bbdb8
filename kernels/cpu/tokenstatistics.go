package cpu

import (
	"math"
	"slices"

	"github.com/gander-go/gander/kernels"
)

// Statistics of tokens' logits. They are mapped to z as in generalForward. With the row's maximum m and p =
// softmax(z):
//
//	r = sum exp(z - m) - 1, without the largest element's own 1
//	e = sum (m - z) exp(z - m)
//	q = sum exp(2 (z - m)) - 1
//	log p[t] = z[t] - m - log1p(r)
//	entropy = log1p(r) + e / (1 + r)
//	log sum p^2 = log1p(q) - 2 log1p(r)
//	dz[j] = dlog_prob ([j = t] - p[j]) - dentropy p[j] ((z[j] - m) + e / (1 + r))
//
// r, e and q are sums of numbers that are not negative, so no digits cancel.
type (
	tokenForward[T float]  struct{}
	tokenBackward[T float] struct{}
)

// TokenStatisticsForward computes the statistics that are wanted of each row.
func TokenStatisticsForward(s *kernels.TokenStatistics, workers int) error {
	o := operands{x: s.X, exponentials: true}
	m := more{ce: &s.CrossEntropy, tokens: s}
	return run(&o, m, workers, tokenForward[float32]{}, tokenForward[float64]{})
}

// TokenStatisticsBackward computes the gradient of log-probability and entropy. DX may be X.
func TokenStatisticsBackward(s *kernels.TokenStatistics, workers int) error {
	o := operands{x: s.X, dx: s.DX, exponentials: true}
	m := more{ce: &s.CrossEntropy, tokens: s}
	return run(&o, m, workers, tokenBackward[float32]{}, tokenBackward[float64]{})
}

// tokenPartial is the statistics of a block: m, r, e, q, the sum of z, and the first column that has m.
type tokenPartial struct {
	max, others, depth, squares, total float64
	column                             int
}

// rebase makes the sums those of a maximum of top, which is at least max. Below it, the element that had the
// maximum is one of the others.
func (p *tokenPartial) rebase(top float64) {
	if p.max < top {
		if f := math.Exp(p.max - top); f != 0 {
			sum := 1 + p.others
			p.depth = f * (p.depth + (top-p.max)*sum)
			p.others, p.squares = f*sum, f*f*(1+p.squares)
		} else if !math.IsNaN(p.others) {
			p.depth, p.others, p.squares = 0, 0, 0
		}
		p.max = top
	}
}

// merge adds the statistics of the columns that follow.
func (p *tokenPartial) merge(o tokenPartial) {
	if o.max > p.max {
		p.column = o.column
	}
	equal := p.max == o.max && !math.IsInf(o.max, -1)
	top := larger(p.max, o.max)
	p.rebase(top)
	o.rebase(top)
	p.others += o.others
	p.depth += o.depth
	p.squares += o.squares
	p.total += o.total
	if equal {
		p.others++
		p.squares++
	}
}

// leavesOut tells whether a row's results are 0.
func (w *worker[T]) leavesOut(row int) bool {
	return w.isMasked(row) || integerAt(&w.ce.Target, row) == w.ce.IgnoreIndex
}

func (w *worker[T]) isMasked(row int) bool { return isMasked(&w.tokens.RowMask, row) }

// isMasked tells whether a mask of rows leaves one out.
func isMasked(m *kernels.Vector, row int) bool {
	if !m.Present() {
		return false
	}
	if m.DType == kernels.Bool || m.DType == kernels.Uint8 {
		return byteAt(m, row) == 0
	}
	return integerAt(m, row) == 0
}

func (tokenForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.plan.tokens = true
}

func (tokenForward[T]) run(c *call[T]) { c.runRows() }

func (tokenForward[T]) firstPass(w *worker[T], row, lo, hi int, _ []partial) {
	if w.leavesOut(row) {
		return
	}
	partials := w.tokenPartials(row)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		partials[j/block] = w.tokenBlock(w.mapped(nil, row, j, n), w.scratch(1, j, n), w.scratch(2, j, n), j)
	}
}

// tokenPartials is the row's partial statistics.
func (w *worker[T]) tokenPartials(row int) []tokenPartial {
	if w.plan.splitRows {
		return w.splitTokens[row*w.blocks:][:w.blocks]
	}
	return w.blockTokens
}

// tokenBlock is the statistics of z, the columns from j on. exps and below are scratch space.
func (w *worker[T]) tokenBlock(z, exps, below []T, j int) (p tokenPartial) {
	high := w.funcs.max(z)
	k := max(slices.Index(z, high), 0) // a block of NaNs has no maximum
	high = z[k]
	m := finiteMax(high)
	w.funcs.without(exps, z, k)
	w.funcs.subtract(below, exps, m)
	p.max, p.column = float64(high), j+k
	p.others = w.funcs.exp(exps, exps, m)
	p.depth = w.weightedDepth(below, exps)
	if w.tokens.NeedsAll() {
		p.squares = w.funcs.dot(exps, exps)
		p.total, _ = w.funcs.moments(z, 0)
	}
	return p
}

// combine writes what is wanted of a row.
func (tokenForward[T]) combine(w *worker[T], row int, _ []partial) (none rowStats) {
	s := &w.tokens
	write := func(v *kernels.Vector, value float64) {
		if v.Present() {
			put(v, row, value)
		}
	}
	state := []*kernels.Vector{&w.ce.Max, &w.ce.LogSum, &s.Depth}
	if w.leavesOut(row) {
		for _, v := range []*kernels.Vector{&s.LogProb, &s.Entropy, &s.LogSumSqProbs, &s.MeanLogit} {
			write(v, 0)
		}
		for _, v := range state {
			if write(v, 0); w.ce.Slice {
				write(v, math.NaN())
			}
		}
		w.writePredicted(row, -1, false)
		return none
	}
	all := w.tokenPartials(row)
	p := all[0]
	for _, o := range all[1:] {
		p.merge(o)
	}
	if math.IsNaN(p.others) || math.IsInf(p.max, 1) {
		p.column = -1
	}
	nothing := math.IsInf(p.max, -1) && !math.IsNaN(p.others)
	if math.IsInf(p.max, 0) {
		p.others, p.squares = math.NaN(), math.NaN()
	}
	logSum, depth, logProb := math.Log1p(p.others), p.depth/(1+p.others), math.NaN()
	column := integerAt(&w.ce.Target, row) - s.First
	if 0 <= column && column < int64(w.cols) {
		logProb = (w.mappedLogit(row, int(column)) - p.max) - logSum
	}
	write(&s.LogProb, logProb)
	write(&s.Entropy, logSum+depth)
	write(&s.LogSumSqProbs, math.Log1p(p.squares)-2*logSum)
	write(&s.MeanLogit, p.total/float64(s.Classes))
	if nothing {
		logSum = math.Inf(-1)
	}
	for i, v := range []float64{p.max, logSum, depth} {
		write(state[i], v)
	}
	if p.column < 0 {
		w.writePredicted(row, -1, false)
	} else {
		w.writePredicted(row, s.First+int64(p.column), int64(p.column) == column)
	}
	return none
}

func (w *worker[T]) writePredicted(row int, predicted int64, isTop bool) {
	if w.tokens.Predicted.Present() {
		putInt64(&w.tokens.Predicted, row, predicted)
	}
	if w.tokens.IsTop1.Present() {
		putBool(&w.tokens.IsTop1, row, isTop)
	}
}

func (tokenForward[T]) secondPass(*worker[T], int, int, int, []partial, rowStats) {}

func (tokenBackward[T]) plan(c *call[T], workers int)                   { c.planRows(workers) }
func (tokenBackward[T]) run(c *call[T])                                 { c.runRows() }
func (tokenBackward[T]) firstPass(*worker[T], int, int, int, []partial) {}

// combine: dz = exp(z - a) (c - d (z - a)) / sum, and b at the index, before dx is written over x.
func (tokenBackward[T]) combine(w *worker[T], row int, _ []partial) rowStats {
	ofLogProb, ofEntropy := w.upstreams(row)
	high, depth := at(&w.ce.Max, row), at(&w.tokens.Depth, row)
	s := rowStats{a: high, c: -ofLogProb - ofEntropy*depth, d: ofEntropy}
	if t := w.targetOf(row); t.valid {
		below := w.mappedLogit(row, t.column) - high
		log := below - at(&w.ce.LogSum, row)
		s.b = ofLogProb * -math.Expm1(log)
		if p := math.Exp(log); p != 0 {
			s.b -= ofEntropy * p * (below + depth)
		}
	}
	return s
}

// upstreams is the gradients of a row's log-probability and entropy. Both are 0 where it is left out.
func (w *worker[T]) upstreams(row int) (ofLogProb, ofEntropy float64) {
	if w.leavesOut(row) {
		return 0, 0
	}
	if w.tokens.DLogProb.Present() {
		ofLogProb = at(&w.tokens.DLogProb, row)
		inNoSlice := integerAt(&w.ce.Target, row) == kernels.InNoSlice
		if !w.targetOf(row).valid && (!w.ce.Slice || inNoSlice) {
			ofLogProb = math.NaN()
		}
	}
	if w.tokens.DEntropy.Present() {
		ofEntropy = at(&w.tokens.DEntropy, row)
	}
	return ofLogProb, ofEntropy
}

func (tokenBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	ofLogProb, ofEntropy := w.upstreams(row)
	if ofLogProb == 0 && ofEntropy == 0 {
		w.writeZeros(row, lo, hi)
		return
	}
	t, isMapped, scale := w.targetOf(row), w.ce.Map != (kernels.LogitMap{}), math.Exp(-at(&w.ce.LogSum, row))
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		slope, below := w.scratch(1, j, n), w.scratch(2, j, n)
		z, dx := w.mapped(slope, row, j, n), w.output(0, &w.dx, row, j, n)
		w.funcs.subtract(below, z, T(s.a))
		w.funcs.expScale(dx, z, T(s.a), T(scale))
		for i, p := range dx {
			// Where p is 0, z - m may be -inf. A NaN in c makes all of the row NaN.
			dx[i] = T(float64(p) * (s.c - s.d*max(float64(below[i]), -deepest)))
		}
		if k := t.column - j; t.valid && 0 <= k && k < n {
			dx[k] = T(s.b)
		}
		if isMapped {
			w.funcs.multiply(dx, dx, slope, 1)
		}
		w.write(&w.dx, row, j, dx)
	}
}
