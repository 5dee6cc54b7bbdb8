package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// RMSNormOptions are the scalar options of RMSNorm.
type RMSNormOptions struct {
	Eps          float64 // not used by backward
	WeightOffset float64 // added to each weight
}

// RMSNormForward computes y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) for each row (Zhang and
// Sennrich, 2019). An absent weight means ones. rstd is written unless it is absent. y may be x.
func RMSNormForward(x kernels.Matrix, weight kernels.Vector, y kernels.Matrix, rstd kernels.Vector,
	norm RMSNormOptions, workers int) error {
	o := operands{x: x, weight: weight, y: y, rstd: rstd, norm: norm, reuseUpTo: reusedRow}
	return run(&o, workers, rmsNormForward[float32]{}, rmsNormForward[float64]{})
}

// RMSNormBackward computes dx = (g - h * mean(g * h)) * rstd for each row, with h = x * rstd and
// g = dout * weight. Unless dw is absent it also computes dw = sum over rows of dout * h. dx may be dout.
func RMSNormBackward(x kernels.Matrix, weight kernels.Vector, dout kernels.Matrix, rstd kernels.Vector,
	dx kernels.Matrix, dw kernels.Vector, norm RMSNormOptions, workers int) error {
	o := operands{x: x, weight: weight, dy: dout, rstd: rstd, dx: dx, dw: dw, norm: norm}
	o.reuseUpTo = reusedRow
	return run(&o, workers, rmsNormBackward[float32]{}, rmsNormBackward[float64]{})
}

type rmsNormForward[T float] struct{}

func (rmsNormForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.plan.weights = c.weightElements()
}

func (rmsNormForward[T]) run(c *call[T]) {
	c.prepareWeight()
	c.runRows()
}

func (rmsNormForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	for j := lo; j < hi; j += block {
		x := w.read(0, &w.x, row, j, min(block, hi-j))
		partials[j/block].sum = w.funcs.dot(x, x)
	}
}

// combine: a is rstd.
func (rmsNormForward[T]) combine(w *worker[T], row int, partials []partial) rowStats {
	rstd := 1 / math.Sqrt(total(partials)/float64(w.cols)+w.norm.Eps)
	if w.rstd.Present() {
		put(&w.rstd, row, rstd)
	}
	return rowStats{a: rstd}
}

func (rmsNormForward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		x := w.reread(0, &w.x, row, j, n)
		y := w.output(0, &w.y, row, j, n)
		w.funcs.multiply(y, x, w.weightBlock(j, n), T(s.a))
		w.write(&w.y, row, j, y)
	}
}

// weightIsNative tells whether the weight can be used in place.
func (c *call[T]) weightIsNative() bool {
	return c.weight.DType == native[T]() && c.norm.WeightOffset == 0
}

// loadWeight converts weights to T and adds the offset.
func (c *call[T]) loadWeight(to []T, from unsafe.Pointer) {
	if c.weight.DType == native[T]() {
		copy(to, unsafe.Slice((*T)(from), len(to)))
	} else {
		c.funcs.load[c.weight.DType](to, from)
	}
	for i := range to {
		to[i] += T(c.norm.WeightOffset)
	}
}

// weightElements is how much of the weight is converted once for all rows. Long rows convert it block by
// block.
func (c *call[T]) weightElements() int {
	switch {
	case !c.weight.Present():
		return min(c.cols, block)
	case !c.weightIsNative() && !c.long:
		return c.cols
	}
	return 0
}

func (c *call[T]) prepareWeight() {
	switch {
	case !c.weight.Present():
		for i := range c.weights {
			c.weights[i] = 1
		}
	case len(c.weights) > 0:
		c.loadWeight(c.weights, c.weight.Data)
	}
}

func (w *worker[T]) weightBlock(j, n int) []T {
	if !w.weight.Present() {
		return w.weights[:n]
	}
	p := unsafe.Add(w.weight.Data, j*int(w.weight.DType.Size()))
	switch {
	case w.weightIsNative():
		return unsafe.Slice((*T)(p), n)
	case !w.long:
		return w.weights[j : j+n]
	}
	s := w.scratch(2, j, n)
	w.loadWeight(s, p)
	return s
}

type rmsNormBackward[T float] struct{}

func (rmsNormBackward[T]) plan(c *call[T], workers int) {
	switch {
	case !c.dw.Present():
		c.planRows(workers)
	case !c.long:
		sums := partialSums(c.rows, c.cols)
		c.plan = plan{tasks: max(sums, c.blocks), sums: sums}
	default:
		c.plan = plan{splitRows: true, tasks: max(c.rows*c.chunks(), c.blocks), columns: block}
	}
	c.plan.weights = c.weightElements()
}

func (rmsNormBackward[T]) run(c *call[T]) {
	c.prepareWeight()
	switch {
	case !c.dw.Present():
		c.runRows()
	case !c.long:
		c.runStep(rowsAndSumsStep[T]{}, c.plan.sums)
		c.runStep(addSumsStep[T]{}, c.blocks)
	default:
		c.splitFirstPass()
		c.runStep(columnsStep[T]{}, c.blocks)
	}
}

// partialSums is how many rows of partial sums of dw are computed. Each is a task, so there should be enough
// for all workers. They should also be a small part of the memory traffic, and fit in 32 MiB.
func partialSums(rows, cols int) int { return max(1, min(64, rows/8, 4<<20/cols)) }

func (rmsNormBackward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		x, dout := w.read(0, &w.x, row, j, n), w.read(1, &w.dy, row, j, n)
		partials[j/block].sum = w.funcs.dot3(x, dout, w.weightBlock(j, n))
	}
}

// combine: a is rstd, b is rstd * mean(g * h).
func (rmsNormBackward[T]) combine(w *worker[T], row int, partials []partial) rowStats {
	rstd := at(&w.rstd, row)
	return rowStats{a: rstd, b: rstd * rstd * total(partials) / float64(w.cols)}
}

func (rmsNormBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		x, dout := w.reread(0, &w.x, row, j, n), w.reread(1, &w.dy, row, j, n)
		if w.dw.Present() {
			w.funcs.addProduct(w.sum[j-w.sumFrom:][:n], x, dout, s.a)
		}
		dx := w.output(1, &w.dx, row, j, n)
		w.funcs.rmsNormGrad(dx, x, w.weightBlock(j, n), dout, s.b, s.a)
		w.write(&w.dx, row, j, dx)
	}
}

// rowsAndSumsStep processes a range of rows, and adds up their contribution to dw.
type rowsAndSumsStep[T float] struct{}

func (rowsAndSumsStep[T]) do(w *worker[T], task int) {
	w.sum, w.sumFrom = w.sums[task*w.cols:(task+1)*w.cols], 0
	clear(w.sum)
	lo, hi := subrange(w.rows, task, w.tasks)
	for row := lo; row < hi; row++ {
		w.row(row)
	}
}

// addSumsStep adds up one block of columns of the partial sums.
type addSumsStep[T float] struct{}

func (addSumsStep[T]) do(w *worker[T], task int) {
	lo := task * block
	hi := min(lo+block, w.cols)
	for i := w.cols; i < len(w.sums); i += w.cols {
		w.funcs.add(w.sums[lo:hi], w.sums[i+lo:i+hi])
	}
	w.writeDW(lo, w.sums[lo:hi])
}

// columnsStep runs the second pass of all rows on one block of columns. So long rows need no partial sums of
// their length.
type columnsStep[T float] struct{}

func (columnsStep[T]) do(w *worker[T], task int) {
	lo := task * block
	hi := min(lo+block, w.cols)
	w.sum, w.sumFrom = w.columns[:hi-lo], lo
	clear(w.sum)
	for row := range w.rows {
		w.op.secondPass(w, row, lo, hi, nil, w.splitStats[row])
	}
	w.writeDW(lo, w.sum)
}

// writeDW stores the sums of one block of columns from lo on.
func (w *worker[T]) writeDW(lo int, sum []float64) {
	s := w.scratch(0, 0, len(sum))
	for i := range s {
		s[i] = T(sum[i])
	}
	w.funcs.store[w.dw.DType](unsafe.Add(w.dw.Data, lo*int(w.dw.DType.Size())), s, 1)
}
