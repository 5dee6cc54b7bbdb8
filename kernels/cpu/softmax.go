package cpu

import (
	"math"

	"github.com/gander-go/gander/kernels"
)

// SoftmaxForward computes y = exp(x - max x) / sum exp(x - max x) for each row. y may be x. A row becomes NaN
// if it contains a NaN or +inf, or if all of it is -inf.
func SoftmaxForward(x, y kernels.Matrix, workers int) error {
	o := operands{x: x, y: y, reuseUpTo: longRow, exponentials: true}
	if x.DType == kernels.Float32 || x.DType == kernels.Float64 {
		o.reuseUpTo = math.MaxInt // y itself stores the exponentials
	}
	return run(&o, more{}, workers, softmaxForward[float32]{}, softmaxForward[float64]{})
}

// SoftmaxBackward computes dx = (dy - sum(dy * y)) * y for each row. dx may be dy or y.
func SoftmaxBackward(dy, y, dx kernels.Matrix, workers int) error {
	o := operands{x: y, dy: dy, dx: dx, reuseUpTo: reusedRow}
	return run(&o, more{}, workers, softmaxBackward[float32]{}, softmaxBackward[float64]{})
}

type softmaxForward[T float] struct{}

func (softmaxForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	if c.allAtOnce() {
		c.planTogether()
	}
}

func (softmaxForward[T]) run(c *call[T]) {
	if c.cols <= loopedRow {
		c.runStep(softmaxStep[T]{}, c.plan.tasks)
	} else {
		c.runRows()
	}
}

// softmaxStep does what runRows would do with rows of one block. With AVX-512 and calls for each row, one of
// 64 float32 takes 31 ns instead of 54 (Sapphire Rapids). On Zen 4 it takes 53 ns so, and 37 by expRows.
type softmaxStep[T float] struct{}

func (softmaxStep[T]) do(w *worker[T], task int) {
	store := w.funcs.store[w.y.DType]
	lo, hi := subrange(w.rows, task, w.tasks)
	if w.plan.together > 0 {
		w.softmaxTogether(lo, hi)
		return
	}
	for row := lo; row < hi; row++ {
		x, e := w.read(0, &w.x, row, 0, w.cols), w.output(0, &w.y, row, 0, w.cols)
		sum := w.funcs.exp(e, x, finiteMax(w.funcs.max(x)))
		store(rowAt(&w.y, row, 0), e, T(1/sum))
	}
}

func (w *worker[T]) softmaxTogether(lo, hi int) {
	store := w.funcs.store[w.y.DType]
	for i := range w.together.leftOut {
		w.together.leftOut[i] = noColumn
	}
	for from := lo; from < hi; from += w.plan.together {
		partials := w.partials[:min(w.plan.together, hi-from)]
		w.expRows(&w.x, &w.y, from, partials)
		for i := range partials {
			w.ahead = i * w.cols
			e := w.output(0, &w.y, from+i, 0, w.cols)
			store(rowAt(&w.y, from+i, 0), e, T(1/partials[i].sum))
		}
		w.ahead = 0
	}
}

// rowsOfBlock is the number of rows that have as many elements as a block in all, and so stay in the L1 cache
// while several passes go over them.
func (c *call[T]) rowsOfBlock() int { return min(block/max(c.cols, 1), maxTogether) }

// planTogether changes planRows' plan: a task has as many rows as are taken together, or more.
func (c *call[T]) planTogether() {
	c.plan.together = c.rowsOfBlock()
	c.plan.tasks = min((c.rows+c.plan.together-1)/c.plan.together, maxTasks)
}

// allAtOnce tells whether expRows serves this call.
func (c *call[T]) allAtOnce() bool {
	return c.funcs.expRows != nil && c.hasShortRows() && c.cols <= loopedRow
}

// hasShortRows tells whether functions of several rows serve rows of this length.
func (c *call[T]) hasShortRows() bool { return c.cols > 0 && c.cols%64 == 0 && c.cols <= shortBlock }

// takesShortRows tells whether an operator takes plan.together rows. Rows of float32 have the same bits one
// by one. Rows of 16 bits have others, so only their length and the call's types and options may decide.
// isRaw: there is a raw function, which takes less time for 192 elements and more. Rows of 256 float32
// that are written past the cache gain in forward passes, and lose in backward passes.
func (c *call[T]) takesShortRows(isRaw bool) bool {
	switch c.x.DType {
	case kernels.Float64:
		return false
	case kernels.Float32:
		return c.hasShortRows() && c.cols <= loopedRow && (!c.stream || c.cols <= 128)
	}
	return c.hasShortRows() && (!isRaw || c.cols <= 128)
}

// expRows does what expBlocks does for each of plan.together rows, or fewer, without the columns in
// w.together.leftOut.
func (w *worker[T]) expRows(x, y *kernels.Matrix, from int, partials []partial) {
	src, dst := w.readRows(0, x, from, len(partials)), strided{}
	if w.reuse {
		dst = w.outputRows(0, y, from, len(partials))
	}
	w.funcs.expRows(dst.first, src.first, w.cols, len(partials), dst.stride, src.stride, &w.together.leftOut[0],
		&partials[0])
}

func (softmaxForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	w.expBlocks(&w.x, &w.y, row, lo, hi, noColumn, partials)
}

func (softmaxForward[T]) combine(_ *worker[T], _ int, partials []partial) rowStats {
	high, sum := logSumExp(partials)
	return rowStats{a: high, b: 1 / sum}
}

func (softmaxForward[T]) secondPass(w *worker[T], row, lo, hi int, partials []partial, s rowStats) {
	w.rescale(&w.x, &w.y, row, lo, hi, partials, s.a, s.b)
}

// expBlocks computes the exponentials of each block relative to the block's own maximum. So one read of x and
// one exponential per element suffice: rescale corrects for the row's maximum. With w.reuse it stores the
// exponentials for rescale, in y or in scratch space. Column `except` takes no part, unless it is noColumn.
func (w *worker[T]) expBlocks(x, y *kernels.Matrix, row, lo, hi, except int, partials []partial) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		v := w.read(0, x, row, j, n)
		var dst []T
		if w.reuse {
			dst = w.output(0, y, row, j, n)
		} else if w.funcs.expSum == nil {
			dst = w.scratch(0, j, n)
		}
		p, k := &partials[j/block], except-j
		switch {
		case k < 0 || k >= n:
			high := w.funcs.max(v)
			p.max, p.sum = float64(high), w.expSum(dst, v, finiteMax(high))
		case n <= shortBlock:
			p.max, p.sum = w.expWithout(dst, v, w.scratch(1, j, n), k)
		default:
			p.max, p.sum = w.expAround(dst, v, k)
		}
	}
}

// shortBlock: in a block of at most as many elements, a copy without one element costs less than two parts,
// whose lengths no branch predictor knows.
const shortBlock = 256

// expWithout returns the maximum of v without v[k], and the sum of exp(v - max) without it. It stores the
// exponentials in dst unless that is nil, but leaves dst[k] as it is. dst may be v, others is overwritten.
func (w *worker[T]) expWithout(dst, v, others []T, k int) (high, sum float64) {
	top := w.funcs.without(others, v, k)
	if dst == nil {
		return float64(top), w.expSum(nil, others, finiteMax(top))
	}
	left := dst[k]
	sum = w.expSum(dst, others, finiteMax(top))
	dst[k] = left
	return float64(top), sum
}

// expAround does what expWithout does, in two parts.
func (w *worker[T]) expAround(dst, v []T, k int) (high, sum float64) {
	top := larger(w.funcs.max(v[:k]), w.funcs.max(v[k+1:]))
	sum = w.expSum(dst, v[:k], finiteMax(top))
	if dst != nil {
		dst = dst[k+1:]
	}
	return float64(top), sum + w.expSum(dst, v[k+1:], finiteMax(top))
}

// expSum returns the sum of exp(v - m), and stores the exponentials in dst unless that is nil.
func (w *worker[T]) expSum(dst, v []T, m T) float64 {
	if dst == nil {
		return w.funcs.expSum(v, m)
	}
	return w.funcs.exp(dst[:len(v)], v, m)
}

// finiteMax is what is subtracted from a block with the given maximum: 0 if that is -inf. The exponentials of
// a block of -inf are then 0 rather than NaN, which is right for a row whose other blocks are finite.
func finiteMax[T float](high T) T {
	if float64(high) < -math.MaxFloat64 {
		return 0
	}
	return high
}

// logSumExp combines the blocks into the row's maximum and its sum of exp(x - max).
func logSumExp(partials []partial) (high, sum float64) {
	high = math.Inf(-1)
	for _, p := range partials {
		high = larger(high, p.max)
	}
	for _, p := range partials {
		sum += p.sum * expDiff(p.max, high)
	}
	return high, sum
}

// expDiff is exp(from - to). It is 1 for equal arguments, also if both are -inf.
func expDiff(from, to float64) float64 {
	if from == to {
		return 1
	}
	return math.Exp(from - to)
}

// rescale writes gain * exp(x - high), where high is the row's maximum, from the exponentials of expBlocks.
func (w *worker[T]) rescale(x, y *kernels.Matrix, row, lo, hi int, partials []partial, high, gain float64) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		p := partials[j/block]
		c := T(gain * expDiff(p.max, high))
		e := w.output(0, y, row, j, n)
		if w.reuse {
			w.funcs.store[y.DType](rowAt(y, row, j), e, c)
			continue
		}
		w.funcs.expScale(e, w.read(0, x, row, j, n), finiteMax(T(p.max)), c)
		w.write(y, row, j, e)
	}
}

type softmaxBackward[T float] struct{}

func (softmaxBackward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	if c.funcs.softmaxGradRows != nil && c.takesShortRows(c.funcs.softmaxGradRaw[c.x.DType] != nil) {
		c.planTogether()
		c.plan.two = c.x.DType != native[T]()
	}
}

func (softmaxBackward[T]) run(c *call[T]) {
	t := c.x.DType
	isRaw := c.funcs.dotRaw[t] != nil && c.funcs.softmaxGradRaw[t] != nil
	if c.plan.together > 0 || isRaw && !c.plan.splitRows {
		c.runStep(softmaxGradStep[T]{}, c.plan.tasks)
	} else {
		c.runRows()
	}
}

// softmaxGradStep does what runRows would do with rows as they lie in memory. With AVX-512 and calls for each
// row, a row of 64 float32 takes 17 ns instead of 26 (Sapphire Rapids). On Zen 4 it takes 25 ns so, and 12 by
// softmaxGradRows. There one of 64 bfloat16 takes 23 ns instead of 30.
type softmaxGradStep[T float] struct{}

func (softmaxGradStep[T]) do(w *worker[T], task int) {
	lo, hi := subrange(w.rows, task, w.tasks)
	if w.plan.together > 0 {
		w.softmaxGradTogether(lo, hi)
		return
	}
	dot, grad := w.funcs.dotRaw[w.x.DType], w.funcs.softmaxGradRaw[w.x.DType]
	step := block
	if w.stream { // each call would wait for the store buffer
		step = w.cols
	}
	for row := lo; row < hi; row++ {
		sum := 0.0
		for j := 0; j < w.cols; j += block {
			sum += dot(rowAt(&w.dy, row, j), rowAt(&w.x, row, j), min(block, w.cols-j))
		}
		d, rest := splitFloat[float32](sum)
		// From the last block to the first: what the sum read last is still in the L1 cache. On Zen 4 a row of
		// 4096 float32 takes 744 ns instead of 786.
		for j := (w.cols - 1) / step * step; j >= 0; j -= step {
			dx := rowAt(&w.dx, row, j)
			grad(dx, rowAt(&w.dy, row, j), rowAt(&w.x, row, j), min(step, w.cols-j), d, rest, w.streams(dx))
		}
	}
}

func (w *worker[T]) softmaxGradTogether(lo, hi int) {
	for from := lo; from < hi; from += w.plan.together {
		n := min(w.plan.together, hi-from)
		dy, y, dx := w.readRows(0, &w.dy, from, n), w.readRows(1, &w.x, from, n), w.outputRows(0, &w.dx, from, n)
		w.funcs.softmaxGradRows(dx.first, dy.first, y.first, w.cols, n, dx.stride, dy.stride, y.stride)
		w.writeRows(0, &w.dx, from, n)
	}
}

func (softmaxBackward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	raw := w.funcs.dotRaw[w.x.DType]
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		if raw != nil {
			partials[j/block].sum = raw(rowAt(&w.dy, row, j), rowAt(&w.x, row, j), n)
			continue
		}
		partials[j/block].sum = w.funcs.dot(w.read(0, &w.dy, row, j, n), w.read(1, &w.x, row, j, n))
	}
}

func (softmaxBackward[T]) combine(_ *worker[T], _ int, partials []partial) rowStats {
	return rowStats{a: total(partials)}
}

func total(partials []partial) float64 {
	sum := 0.0
	for _, p := range partials {
		sum += p.sum
	}
	return sum
}

func (softmaxBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	d, rest := splitFloat[T](s.a)
	if raw := w.funcs.softmaxGradRaw[w.x.DType]; raw != nil {
		dx := rowAt(&w.dx, row, lo)
		raw(dx, rowAt(&w.dy, row, lo), rowAt(&w.x, row, lo), hi-lo, float32(d), float32(rest), w.streams(dx))
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		dy, y := w.reread(0, &w.dy, row, j, n), w.reread(1, &w.x, row, j, n)
		dx := w.output(0, &w.dx, row, j, n)
		w.funcs.softmaxGrad(dx, dy, y, d, rest)
		w.write(&w.dx, row, j, dx)
	}
}

// splitFloat rounds d to hi and the remainder to lo. Without lo, dy - d would lose precision where dy is
// close to d.
func splitFloat[T float](d float64) (hi, lo T) {
	hi = T(d)
	if rest := d - float64(hi); math.Abs(rest) < math.MaxFloat32 { // false for an infinity and a NaN
		lo = T(rest)
	}
	return hi, lo
}
