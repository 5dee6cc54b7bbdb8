package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// NormForward computes y = (h - mean) * rstd * weight + bias for each row of h = x + residual. LayerNorm (Ba,
// Kiros and Hinton, 2016) has mean = mean(h) and rstd = 1 / sqrt(mean((h - mean)^2) + eps). RMSNorm (Zhang
// and Sennrich, 2019) has mean = 0 and rstd = 1 / sqrt(mean(h^2) + eps). It writes those of residual_out (h),
// mean and rstd that are present. y and residual_out may each be x or residual.
func NormForward(n *kernels.Norm, workers int) error {
	if n.Heads <= 1 {
		return normRows(n, workers)
	}
	for i := range n.Heads {
		head := n.Head(i)
		if err := normRows(&head, workers); err != nil {
			return err
		}
	}
	return nil
}

func normRows(n *kernels.Norm, workers int) error {
	o := operands{x: n.X, y: n.Y, reuseUpTo: reusedRow}
	if n.Residual.Present() {
		o.reuseUpTo = longRow // adding two bfloat16 rows again took 10 to 40 % longer than reading the sums
	}
	return run(&o, more{norm: n}, workers, normForward[float32]{}, normForward[float64]{})
}

// NormBackward computes dx = (g - mean(g) - xhat * mean(g * xhat)) * rstd + dresidual_out for each row, with
// xhat = (x - mean) * rstd and g = dout * weight. RMSNorm has a mean of 0, and no mean(g). It also computes
// those of dresidual (the same as dx), dw = sum over rows of dout * xhat, and db = sum over rows of dout that
// are present. dx may be dout or dresidual_out.
func NormBackward(n *kernels.Norm, workers int) error {
	if n.Heads <= 1 {
		return normRowsBackward(n, workers)
	}
	for i := range n.Heads {
		head := n.Head(i)
		if err := normRowsBackward(&head, workers); err != nil {
			return err
		}
	}
	return nil
}

func normRowsBackward(n *kernels.Norm, workers int) error {
	o := operands{x: n.X, dy: n.DOut, dx: n.DX, reuseUpTo: reusedRow}
	return run(&o, more{norm: n}, workers, normBackward[float32]{}, normBackward[float64]{})
}

type normForward[T float] struct{}

func (normForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.planWeight(c.norm.Weight, c.norm.WeightOffset)
	c.plan.raw = c.scalesOnly() && c.x.DType == c.y.DType && c.funcs.scaleRaw[c.x.DType] != nil
	if c.scalesOnly() && c.funcs.rmsNormRows != nil && c.takesShortRows(false) {
		c.planTogether()
	}
	if c.hasShift() {
		c.bias = perColumn[T]{Vector: c.norm.Bias}
		c.plan.biases = c.converted(&c.bias)
	}
}

func (normForward[T]) run(c *call[T]) {
	c.prepareColumns(&c.weight)
	c.prepareColumns(&c.bias)
	switch {
	case c.plan.together > 0 || c.cols <= loopedRow && c.plan.raw: // RMSNorm
		c.runStep(rmsNormStep[T]{}, c.plan.tasks)
	case c.cols <= loopedRow && c.norm.Center && c.normalizesX():
		c.runStep(layerNormStep[T]{}, c.plan.tasks)
	default:
		c.runRows()
	}
}

// rmsNormStep and layerNormStep do what runRows would do with rows of one block that normalizesX describes.
// With AVX-512 a row of 64 float32 takes 22 and 43 ns instead of 37 and 69 (Sapphire Rapids). On Zen 4
// RMSNorm takes 25 ns in this way, and 13 by rmsNormRows. A row of 64 bfloat16 takes 29 and 24 ns.
type (
	rmsNormStep[T float]   struct{}
	layerNormStep[T float] struct{}
)

func (rmsNormStep[T]) do(w *worker[T], task int) {
	weight := w.columnsOf(&w.weight, 2, 0, w.cols)
	lo, hi := subrange(w.rows, task, w.tasks)
	if w.plan.together > 0 {
		w.rmsNormTogether(lo, hi, weight)
		return
	}
	dot, scale := w.funcs.dotRaw[w.x.DType], w.funcs.scaleRaw[w.x.DType]
	for row := lo; row < hi; row++ {
		x, y := rowAt(&w.x, row, 0), rowAt(&w.y, row, 0)
		scale(y, x, weight, T(w.statistics(row, dot(x, x, w.cols), 0)), w.streams(y))
	}
}

func (w *worker[T]) rmsNormTogether(lo, hi int, weight []T) {
	rstd := &w.together.rstd
	for from := lo; from < hi; from += w.plan.together {
		n := min(w.plan.together, hi-from)
		x, y := w.readRows(0, &w.x, from, n), w.outputRows(0, &w.y, from, n)
		w.funcs.rmsNormRows(y, x, weight, w.norm.Divisor(), w.norm.Eps, n, rstd)
		w.writeRows(0, &w.y, from, n)
		for i := range n {
			w.putStatistics(from+i, rstd[i], 0)
		}
	}
}

func (layerNormStep[T]) do(w *worker[T], task int) {
	weight, bias := w.columnsOf(&w.weight, 2, 0, w.cols), w.columnsOf(&w.bias, 1, 0, w.cols)
	lo, hi := subrange(w.rows, task, w.tasks)
	for row := lo; row < hi; row++ {
		x, y := w.read(0, &w.x, row, 0, w.cols), w.output(0, &w.y, row, 0, w.cols)
		mean, squares := w.deviations(x)
		high, rest := splitFloat[T](mean)
		w.funcs.normalize(y, x, weight, bias, high, rest, T(w.statistics(row, squares, mean)))
		w.write(&w.y, row, 0, y)
	}
}

// rawStep is how many of n columns a raw function works on at a time: all, if all weights are there in T.
func (w *worker[T]) rawStep(n int) int {
	if w.weight.Present() && (w.weight.inPlace() || !w.long) {
		return n
	}
	return min(n, block)
}

// normalizesX tells whether x alone is normalized, not rounded in between, and y is all that is wanted of the
// rows.
func (c *call[T]) normalizesX() bool {
	return !c.norm.Residual.Present() && !c.norm.ResidualOut.Present() && !c.norm.RoundNormalized
}

// scalesOnly tells whether y is the product of x, rstd and the weight, and all that is wanted of the rows.
func (c *call[T]) scalesOnly() bool { return c.normalizesX() && !c.hasShift() }

// hasShift tells whether y is more than a product of h, rstd and the weight.
func (c *call[T]) hasShift() bool { return c.norm.Center || c.norm.Bias.Present() }

// firstPass: sum is the block's sum of (h - mean)^2, where mean is the block's mean, or 0 in RMSNorm.
func (normForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	for j := lo; j < hi; j += block {
		n, p := min(block, hi-j), &partials[j/block]
		if w.plan.raw {
			x := rowAt(&w.x, row, j)
			p.sum = w.funcs.dotRaw[w.x.DType](x, x, n)
			continue
		}
		h := w.normalized(row, j, n, false)
		if !w.norm.Center {
			p.sum = w.funcs.dot(h, h)
			continue
		}
		p.mean, p.sum = w.deviations(h)
	}
}

// deviations returns the mean of h and the sum of (h - mean)^2. An element is at most sqrt(n) standard
// deviations away from the mean. So with any element as the pivot, squares is at most n times what is left of
// it. float64 has the digits for that if h is float32. If h is float64, a second pass has the mean as its
// pivot.
func (w *worker[T]) deviations(h []T) (mean, sum float64) {
	pivot, passes := h[0], 1
	if native[T]() == kernels.Float64 {
		passes = 2
	}
	for range passes {
		distance, squares := w.funcs.moments(h, pivot)
		shift := distance / float64(len(h))
		mean, sum = float64(pivot)+shift, squares-distance*shift
		pivot = T(mean)
	}
	return mean, sum
}

// combine: a is rstd, b is the mean.
func (normForward[T]) combine(w *worker[T], row int, partials []partial) rowStats {
	mean, squares := 0.0, total(partials)
	if w.norm.Center {
		mean = w.mean(partials)
		for i, p := range partials {
			d := p.mean - mean
			squares += d * d * w.blockSize(i)
		}
	}
	return rowStats{a: w.statistics(row, squares, mean), b: mean}
}

// statistics returns a row's rstd, given its sum of (h - mean)^2, and writes those of rstd and mean that are
// wanted.
func (w *worker[T]) statistics(row int, squares, mean float64) (rstd float64) {
	rstd = 1 / math.Sqrt(squares/w.norm.Divisor()+w.norm.Eps)
	w.putStatistics(row, rstd, mean)
	return rstd
}

func (w *worker[T]) putStatistics(row int, rstd, mean float64) {
	if w.norm.Rstd.Present() {
		put(&w.norm.Rstd, row, rstd)
	}
	if w.norm.Mean.Present() {
		put(&w.norm.Mean, row, mean)
	}
}

// mean is the row's mean, given those of its blocks. That of one block is taken as it is: multiplied by the
// length it may overflow.
func (c *call[T]) mean(partials []partial) float64 {
	if len(partials) == 1 {
		return partials[0].mean
	}
	sum := 0.0
	for i, p := range partials {
		sum += p.mean * c.blockSize(i)
	}
	return sum / float64(c.cols)
}

// blockSize is the number of elements of a row's block i.
func (c *call[T]) blockSize(i int) float64 { return float64(min(block, c.cols-i*block)) }

func (normForward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	mean, rest := splitFloat[T](s.b)
	out := &w.norm.ResidualOut
	if w.plan.raw {
		step := w.rawStep(hi - lo)
		for j := lo; j < hi; j += step {
			weight := w.columnsOf(&w.weight, 2, j, min(step, hi-j))
			y := rowAt(&w.y, row, j)
			w.funcs.scaleRaw[w.x.DType](y, rowAt(&w.x, row, j), weight, T(s.a), w.streams(y))
		}
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		h := w.normalized(row, j, n, true)
		if out.Present() && !w.sumInResidualOut() {
			w.funcs.store[out.DType](rowAt(out, row, j), h, 1)
		}
		y, weight, rstd := w.output(0, &w.y, row, j, n), w.columnsOf(&w.weight, 2, j, n), T(s.a)
		if w.rounds(&w.x) {
			w.roundTo(y, h, rstd, w.x.DType)
			h, rstd = y, 1
		}
		if w.hasShift() {
			w.funcs.normalize(y, h, weight, w.columnsOf(&w.bias, 1, j, n), mean, rest, rstd)
		} else {
			w.funcs.multiply(y, h, weight, rstd)
		}
		w.write(&w.y, row, j, y)
	}
}

// rounds tells whether normalized rows are rounded to the type of m, which is x or dx. LayerNorm has no such
// option.
func (c *call[T]) rounds(m *kernels.Matrix) bool {
	return c.norm.RoundNormalized && m.DType != native[T]()
}

// roundTo computes dst = src * scale, rounded to t. dst may be src.
func (w *worker[T]) roundTo(dst, src []T, scale T, t kernels.DType) {
	stored := unsafe.Pointer(unsafe.SliceData(w.rounded))
	w.funcs.store[t](stored, src, scale)
	w.funcs.load[t](dst, stored)
}

// roundsSum tells whether h is rounded to another type than that it is computed in.
func (c *call[T]) roundsSum() bool { return c.norm.X.Present() && c.norm.SumType() != native[T]() }

// normalized is n elements of h, the rows that forward normalizes. Without a residual that is x. The second
// pass adds the residual again unless it finds the first pass's sums, in residual_out or in scratch space. So
// it may overwrite x and the residual block by block.
func (w *worker[T]) normalized(row, j, n int, again bool) []T {
	if !w.norm.Residual.Present() && !w.roundsSum() {
		if again {
			return w.reread(0, &w.x, row, j, n)
		}
		return w.read(0, &w.x, row, j, n)
	}
	h := w.scratch(0, j, n)
	if w.sumInResidualOut() {
		h = view[T](&w.norm.ResidualOut, row, j, n)
	}
	if again && (w.reuse || w.sumInResidualOut()) {
		return h
	}
	x := w.read(0, &w.x, row, j, n)
	if w.norm.Residual.Present() {
		w.funcs.sum(h, x, w.read(1, &w.norm.Residual, row, j, n))
		x = h
	}
	if w.roundsSum() {
		w.roundTo(h, x, 1, w.norm.SumType())
	}
	return h
}

// sumInResidualOut tells whether residual_out holds x + residual without rounding.
func (c *call[T]) sumInResidualOut() bool {
	out := &c.norm.ResidualOut
	return c.norm.Residual.Present() && out.Present() && out.DType == native[T]()
}

// perColumn is a vector of N numbers that all rows use: the weight or the bias.
type perColumn[T float] struct {
	kernels.Vector
	absent float64 // what each number is if the vector is absent
	offset float64 // added to each number of a vector that is present
	values []T     // the numbers in T, or a block of absent ones; see converted
}

func (c *call[T]) planWeight(v kernels.Vector, offset float64) {
	c.weight = perColumn[T]{Vector: v, absent: 1, offset: offset}
	c.plan.weights = c.converted(&c.weight)
}

// inPlace tells whether the vector can be used where it lies.
func (v *perColumn[T]) inPlace() bool { return v.DType == native[T]() && v.offset == 0 }

// load converts numbers to T and adds the offset.
func (c *call[T]) load(v *perColumn[T], to []T, from unsafe.Pointer) {
	if v.DType == native[T]() {
		copy(to, unsafe.Slice((*T)(from), len(to)))
	} else {
		c.funcs.load[v.DType](to, from)
	}
	if v.offset == 0 {
		return
	}
	for i := range to {
		to[i] += T(v.offset)
	}
}

// converted is how much of a vector is converted once for all rows. Long rows convert it block by block.
func (c *call[T]) converted(v *perColumn[T]) int {
	switch {
	case !v.Present():
		return min(c.cols, block)
	case !v.inPlace() && !c.long:
		return c.cols
	}
	return 0
}

func (c *call[T]) prepareColumns(v *perColumn[T]) {
	switch {
	case !v.Present():
		for i := range v.values {
			v.values[i] = T(v.absent)
		}
	case len(v.values) > 0:
		c.load(v, v.values, v.Data)
	}
}

// columnsOf is numbers j to j+n-1 of a vector, in numbered scratch space if a long row has to convert them.
func (w *worker[T]) columnsOf(v *perColumn[T], number, j, n int) []T {
	if !v.Present() {
		return v.values[:n]
	}
	p := unsafe.Add(v.Data, j*int(v.DType.Size()))
	switch {
	case v.inPlace():
		return unsafe.Slice((*T)(p), n)
	case !w.long:
		return v.values[j : j+n]
	}
	s := w.scratch(number, j, n)
	w.load(v, s, p)
	return s
}

type normBackward[T float] struct{}

func (normBackward[T]) plan(c *call[T], workers int) {
	vectors := 0 // that are summed over rows
	for _, v := range [...]*kernels.Vector{&c.norm.DW, &c.norm.DB} {
		if v.Present() {
			vectors++
		}
	}
	raw := c.hasRawGradient()
	together := c.isRMSNormGradient() && c.funcs.rmsNormGradRows != nil && c.takesShortRows(raw)
	switch {
	case vectors == 0:
		c.planRows(workers)
		if together {
			c.planTogether()
		}
	case !c.long:
		sums := partialSums(c.rows, vectors*c.cols)
		c.plan = plan{tasks: max(sums, c.blocks), sums: sums}
	default:
		c.plan = plan{splitRows: true, tasks: max(c.rows*c.chunks(), c.blocks), columns: vectors * block}
	}
	c.plan.vectors = vectors
	switch {
	case together:
		c.plan.together, c.plan.two = c.rowsOfBlock(), c.dy.DType != native[T]() || c.dx.DType != native[T]()
	case raw:
		c.plan.raw = true
		if c.norm.DW.Present() {
			c.plan.recent = c.cols
		}
	}
	c.planWeight(c.norm.Weight, c.norm.WeightOffset)
}

// hasRawGradient tells whether RMSNorm's gradient can be computed from rows as they lie in memory. It does
// not depend on which of dw and db are wanted, so that dx has the same bits with and without them.
func (c *call[T]) hasRawGradient() bool {
	t := c.x.DType
	return !c.long && c.isRMSNormGradient() && c.dy.DType == t && c.dx.DType == t &&
		c.funcs.rmsNormGradRaw[t] != nil
}

// isRMSNormGradient tells whether dx is the gradient of an RMSNorm, to which nothing is added, and nothing is
// rounded on the way.
func (c *call[T]) isRMSNormGradient() bool {
	n := &c.norm
	return !n.Center && !n.RoundNormalized && !n.DResidualOut.Present() && !n.DResidual.Present()
}

func (normBackward[T]) run(c *call[T]) {
	c.prepareColumns(&c.weight)
	switch {
	case c.plan.vectors == 0 && c.plan.together > 0:
		c.runStep(rmsNormGradStep[T]{}, c.plan.tasks)
	case c.plan.vectors == 0:
		c.runRows()
	case !c.long:
		c.runStep(rowsAndSumsStep[T]{}, c.plan.sums)
		c.runStep(addSumsStep[T]{}, c.blocks)
	default:
		c.splitFirstPass()
		c.runStep(columnsStep[T]{}, c.blocks)
	}
}

// partialSums is how many rows of partial sums of dw and db are computed. Each is a task, so there should be
// enough for all workers. They should also be a small part of the memory traffic, and fit in 32 MiB.
func partialSums(rows, cols int) int { return max(1, min(64, rows/8, 4<<20/cols)) }

// firstPass: sum is the block's sum of g * (x - mean), mean is its mean of g, and max its sum of x - mean.
func (normBackward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	for j := lo; j < hi; j += block {
		n, p := min(block, hi-j), &partials[j/block]
		weight := w.columnsOf(&w.weight, 2, j, n)
		if w.plan.raw {
			p.sum = w.funcs.dot3Raw[w.x.DType](rowAt(&w.x, row, j), rowAt(&w.dy, row, j), weight)
			continue
		}
		x, dout := w.centered(row, j, n, false), w.read(1, &w.dy, row, j, n)
		if w.norm.Center {
			p.max, p.mean, p.sum = w.funcs.sumsAndDot3(x, dout, weight)
			p.mean /= float64(n)
		} else {
			p.sum = w.funcs.dot3(x, dout, weight)
		}
	}
}

// combine: xhat is (x - mean) * a + d, with the mean that was saved. dx is (g - (x - mean) * b - c) * a.
func (normBackward[T]) combine(w *worker[T], row int, partials []partial) rowStats {
	rstd, sum := at(&w.norm.Rstd, row), total(partials)
	if !w.norm.Center {
		return rowStats{a: rstd, b: rstd * rstd * sum / w.norm.Divisor()}
	}
	g, rest := w.mean(partials), w.meanRest(row, partials)
	b := rstd * rstd * (sum/float64(w.cols) - rest*g)
	return rowStats{a: rstd, b: b, c: g - rest*b, d: -rest * rstd}
}

// meanRest is what the row's mean has lost when forward rounded it to float32: the mean of what x deviates
// from it. In a row whose deviations are small beside its mean it is much of them. It is 0 if it is more than
// rounding explains: then the mean is not that of x, or too small for its rounding to matter.
func (w *worker[T]) meanRest(row int, partials []partial) float64 {
	sum := 0.0
	for _, p := range partials {
		sum += p.max
	}
	rest := sum / float64(w.cols)
	if native[T]() == kernels.Float64 || !(math.Abs(rest) <= math.Abs(at(&w.norm.Mean, row))*0x1p-23) {
		return 0
	}
	return rest
}

func (normBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	added, copied := &w.norm.DResidualOut, &w.norm.DResidual
	if w.plan.raw {
		w.rawGradient(row, lo, hi, s)
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		x, dout := w.centered(row, j, n, true), w.reread(1, &w.dy, row, j, n)
		xhat, rstd, rest := x, s.a, s.d
		if w.dw != nil && w.rounds(&w.dx) {
			xhat, rstd = w.rounded[w.blockRoom:][:n], 1
			w.roundTo(xhat, x, T(s.a), w.dx.DType)
		}
		switch from := j - w.sumFrom; {
		case w.dw != nil && w.db != nil:
			w.funcs.addBoth(w.dw[from:][:n], w.db[from:][:n], xhat, dout, rstd, rest)
		case w.dw != nil:
			w.funcs.addProduct(w.dw[from:][:n], xhat, dout, rstd, rest)
		case w.db != nil:
			w.funcs.accumulate(w.db[from:][:n], dout)
		}
		dx, weight := w.output(1, &w.dx, row, j, n), w.columnsOf(&w.weight, 2, j, n)
		if added.Present() {
			g := w.scratch(1, j, n) // not dx, which may be dresidual_out
			w.funcs.normGrad(g, x, weight, dout, s.b, s.c, s.a)
			w.funcs.sum(dx, g, w.read(2, added, row, j, n))
		} else {
			w.funcs.normGrad(dx, x, weight, dout, s.b, s.c, s.a)
		}
		if copied.Present() {
			w.funcs.store[copied.DType](rowAt(copied, row, j), dx, 1)
		}
		w.write(&w.dx, row, j, dx)
	}
}

// rawGradient is the second pass where hasRawGradient.
func (w *worker[T]) rawGradient(row, lo, hi int, s rowStats) {
	step := w.rawStep(hi - lo)
	if w.db != nil {
		step = min(step, block)
	}
	for j := lo; j < hi; j += step {
		n := min(step, hi-j)
		var sums []T
		if w.dw != nil {
			sums = w.recent[j:][:n]
		}
		if w.db != nil {
			w.funcs.accumulate(w.db[j:][:n], w.read(1, &w.dy, row, j, n))
		}
		w.funcs.rmsNormGradRaw[w.x.DType](rowAt(&w.dx, row, j), rowAt(&w.x, row, j), rowAt(&w.dy, row, j),
			w.columnsOf(&w.weight, 2, j, n), sums, T(s.b), T(s.a))
	}
}

// centered is n elements of x - mean, which RMSNorm has in x. The second pass finds them in scratch space if
// the row is short enough.
func (w *worker[T]) centered(row, j, n int, again bool) []T {
	if !w.norm.Center {
		if again {
			return w.reread(0, &w.x, row, j, n)
		}
		return w.read(0, &w.x, row, j, n)
	}
	d := w.scratch(0, j, n)
	if !again || !w.reuse {
		w.funcs.subtract(d, w.read(0, &w.x, row, j, n), T(at(&w.norm.Mean, row)))
	}
	return d
}

// rowsAndSumsStep processes a range of rows, and adds up their contribution to dw and db.
type rowsAndSumsStep[T float] struct{}

func (rowsAndSumsStep[T]) do(w *worker[T], task int) {
	size := w.plan.vectors * w.cols
	sums := w.sums[task*size : (task+1)*size]
	clear(sums)
	w.setSums(sums, 0, w.cols)
	clear(w.recent)
	lo, hi := subrange(w.rows, task, w.tasks)
	if w.plan.together > 0 {
		w.rmsNormGradTogether(lo, hi)
		return
	}
	for row := lo; row < hi; row++ {
		w.row(row)
		if len(w.recent) > 0 && ((row-lo)%recentRows == recentRows-1 || row == hi-1) {
			w.funcs.accumulate(w.dw, w.recent)
			clear(w.recent)
		}
	}
}

// rmsNormGradStep does what runRows would do with rows for rmsNormGradRows. With AVX-512 one of 64 float32
// takes 22 ns instead of 69, one of 64 bfloat16 32 instead of 50 (Zen 4).
type rmsNormGradStep[T float] struct{}

func (rmsNormGradStep[T]) do(w *worker[T], task int) {
	lo, hi := subrange(w.rows, task, w.tasks)
	w.rmsNormGradTogether(lo, hi)
}

func (w *worker[T]) rmsNormGradTogether(lo, hi int) {
	rstd, weight := &w.together.rstd, w.columnsOf(&w.weight, 2, 0, w.cols)
	for from := lo; from < hi; from += w.plan.together {
		n := min(w.plan.together, hi-from)
		for i := range n {
			rstd[i] = at(&w.norm.Rstd, from+i)
		}
		x, dy, dx := w.readRows(0, &w.x, from, n), w.readRows(1, &w.dy, from, n), w.outputRows(1, &w.dx, from, n)
		if w.db != nil {
			for i := range n {
				w.funcs.accumulate(w.db, unsafe.Slice((*T)(dy.row(i)), w.cols))
			}
		}
		w.funcs.rmsNormGradRows(dx, x, dy, weight, w.norm.Divisor(), w.dw, n, rstd)
		w.writeRows(1, &w.dx, from, n)
	}
}

// recentRows is how many rows of 16-bit elements are summed in T before they are added to dw. So few
// additions round less than the elements were rounded.
const recentRows = 16

// setSums makes dw and db the sums of n columns from column from on. sums has room for those of them that are
// present.
func (w *worker[T]) setSums(sums []float64, from, n int) {
	w.dw, w.db, w.sumFrom = nil, nil, from
	if w.norm.DW.Present() {
		w.dw, sums = sums[:n], sums[n:]
	}
	if w.norm.DB.Present() {
		w.db = sums[:n]
	}
}

// addSumsStep adds up one block of columns of the partial sums.
type addSumsStep[T float] struct{}

func (addSumsStep[T]) do(w *worker[T], task int) {
	lo := task * block
	hi := min(lo+block, w.cols)
	size := w.plan.vectors * w.cols
	for i := size; i < len(w.sums); i += size {
		for v := 0; v < size; v += w.cols {
			w.funcs.add(w.sums[v+lo:v+hi], w.sums[i+v+lo:i+v+hi])
		}
	}
	w.setSums(w.sums[:size], 0, w.cols)
	w.writeSums(&w.norm.DW, w.dw, lo, hi)
	w.writeSums(&w.norm.DB, w.db, lo, hi)
}

// columnsStep runs the second pass of all rows on one block of columns. So long rows need no partial sums of
// their length.
type columnsStep[T float] struct{}

func (columnsStep[T]) do(w *worker[T], task int) {
	lo := task * block
	hi := min(lo+block, w.cols)
	clear(w.columns)
	w.setSums(w.columns, lo, hi-lo)
	for row := range w.rows {
		w.op.secondPass(w, row, lo, hi, nil, w.splitStats[row])
	}
	w.writeSums(&w.norm.DW, w.dw, lo, hi)
	w.writeSums(&w.norm.DB, w.db, lo, hi)
}

// writeSums stores the sums of columns lo to hi-1, a block at most.
func (w *worker[T]) writeSums(v *kernels.Vector, sums []float64, lo, hi int) {
	if !v.Present() {
		return
	}
	s := w.scratch(0, 0, hi-lo)
	for i := range s {
		s[i] = T(sums[lo-w.sumFrom+i])
	}
	w.funcs.store[v.DType](unsafe.Add(v.Data, lo*int(v.DType.Size())), s, 1)
}
