package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// CrossEntropyForward computes loss = weight[t] * ((max - x[t]) + log(sum exp(x - max))) for each row. If DX
// is present it also computes dx = upstream * weight[t] * (softmax(x) - onehot(t)), divided by the
// denominator with OnePass and ReduceMean. Loss and DX are divided by Divisor. DX may be X. With
// options see generalForward.
func CrossEntropyForward(a *kernels.CrossEntropy, workers int) error {
	o := operands{x: a.X, dx: a.DX, exponentials: true}
	if a.HasOptions() {
		return run(&o, more{ce: a}, workers, generalForward[float32]{}, generalForward[float64]{})
	}
	if a.DX.Data != nil {
		o.reuseUpTo = longRow
	}
	return run(&o, more{ce: a}, workers, crossEntropyForward[float32]{}, crossEntropyForward[float64]{})
}

// CrossEntropyBackward computes dx = dloss * weight[t] * (exp(x - lse) - onehot(t)) / divisor for each row.
// DX may be X. With OnePass and the dloss that forward expected it does nothing: forward has already written
// that gradient to DX.
func CrossEntropyBackward(a *kernels.CrossEntropy, workers int) error {
	if alreadyDone(a) {
		return nil
	}
	o := operands{x: a.X, dx: a.DX, exponentials: true}
	if a.HasOptions() {
		return run(&o, more{ce: a}, workers, generalBackward[float32]{}, generalBackward[float64]{})
	}
	return run(&o, more{ce: a}, workers, crossEntropyBackward[float32]{}, crossEntropyBackward[float64]{})
}

// alreadyDone tells whether forward has made the gradient that is asked for. For NaN it need not make any.
func alreadyDone(a *kernels.CrossEntropy) bool {
	if !a.OnePass {
		return false
	}
	expected := or1(&a.Upstream)
	return !math.IsNaN(expected) && math.Float64bits(at(&a.DLoss, 0)) == math.Float64bits(expected)
}

// or1 is an optional operand of one element, which stands for 1 if it is absent.
func or1(v *kernels.Vector) float64 {
	if !v.Present() {
		return 1
	}
	return at(v, 0)
}

const noColumn = -1

// target is the class of a row.
type target struct {
	column  int
	weight  float64 // of the row's loss and gradient, and of the row in a mean
	ignored bool    // it is the ignored index; or its class has weight 0, and no option counts it all the same
	valid   bool    // it is a column
}

// targetOf returns a row's target. Where that is not a class, the weight is NaN: then a mean and all its
// gradients become NaN. The weight is 1 where the target may be in another slice of the classes. Without
// targets, which is how a log-sum-exp alone is computed, no row is ignored and no target is valid.
func (c *call[T]) targetOf(row int) target {
	if !c.ce.Target.Present() {
		return target{weight: 1}
	}
	v := integerAt(&c.ce.Target, row)
	t := target{column: int(v), weight: 1, valid: v >= 0 && v < int64(c.cols)}
	switch {
	case v == c.ce.IgnoreIndex:
		t.weight = 0
	case !t.valid && !c.ce.Slice:
		t.weight = math.NaN()
	case t.valid && c.ce.Weight.Present():
		t.weight = at(&c.ce.Weight, t.column)
	}
	if t.weight == 0 {
		t.weight = 0 // not -0, which the loss would show
		t.ignored = c.ce.LabelSmoothing == 0 && c.ce.ZLoss == 0 || v == c.ce.IgnoreIndex
	}
	return t
}

// leftOut is the column that takes no part in the row's sum, or noColumn.
func (t *target) leftOut() int {
	if t.ignored || !t.valid {
		return noColumn
	}
	return t.column
}

func (c *call[T]) logit(row, t int) float64 { return scalar(c.x.DType, rowAt(&c.x, row, t)) }

// writeTarget writes the gradient at the target, if that is in columns lo to hi.
func (w *worker[T]) writeTarget(row, lo, hi int, t target, gradient float64) {
	if t.valid && lo <= t.column && t.column < hi {
		putScalar(w.dx.DType, rowAt(&w.dx, row, t.column), gradient)
	}
}

// writeZeros writes the gradient of an ignored row, which is 0 even if x has NaNs.
func (w *worker[T]) writeZeros(row, lo, hi int) {
	clear(unsafe.Slice((*byte)(rowAt(&w.dx, row, lo)), (hi-lo)*int(w.dx.DType.Size())))
}

// Rescale computes DX = X * (DLoss / Upstream). With OnePass DX is X, and nothing is done if the two are
// equal.
func Rescale(a *kernels.CrossEntropy, workers int) error {
	if alreadyDone(a) {
		return nil
	}
	return run(&operands{x: a.X, dx: a.DX}, more{ce: a}, workers, rescale[float32]{}, rescale[float64]{})
}

type rescale[T float] struct{}

func (rescale[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (rescale[T]) run(c *call[T]) {
	c.upstream = at(&c.ce.DLoss, 0) / or1(&c.ce.Upstream)
	c.runRows()
}

func (rescale[T]) firstPass(*worker[T], int, int, int, []partial) {}

func (rescale[T]) combine(*worker[T], int, []partial) rowStats { return rowStats{} }

func (rescale[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, _ rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		y := w.output(0, &w.dx, row, j, n)
		for i, x := range w.read(0, &w.x, row, j, n) {
			y[i] = x * T(w.upstream)
		}
		w.write(&w.dx, row, j, y)
	}
}

type crossEntropyForward[T float] struct{}

func (crossEntropyForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	if c.cols > block {
		return
	}
	c.planTogether()
	if c.cols > loopedRow {
		c.plan.together = 0
	}
}

// lossTasks are those that add up losses and weights.
func (c *call[T]) lossTasks() int {
	if c.plan.splitRows {
		return min(c.rows, maxTasks)
	}
	return c.plan.tasks
}

func (crossEntropyForward[T]) run(c *call[T]) {
	c.divisor, c.upstream = or1(&c.ce.Divisor), or1(&c.ce.Upstream)
	if c.ce.OnePass && c.ce.Reduction == kernels.ReduceMean && c.dx.Data != nil {
		clear(c.losses[:])
		c.runStep(weightsStep[T]{}, c.lossTasks())
		_, c.divisor = c.totals()
	}
	clear(c.losses[:])
	if c.plan.together > 0 {
		c.runStep(crossEntropyStep[T]{}, c.lossTasks())
	} else {
		c.runRows()
	}
	c.writeTotal()
}

// writeTotal writes the sum or mean of the rows' losses, and the denominator of a mean.
func (c *call[T]) writeTotal() {
	loss, weight := c.totals()
	switch c.ce.Reduction {
	case kernels.ReduceSum:
		put(&c.ce.Loss, 0, loss/c.divisor)
	case kernels.ReduceMean:
		put(&c.ce.Loss, 0, loss/weight)
	}
	if c.ce.Denominator.Present() {
		put(&c.ce.Denominator, 0, weight)
	}
}

// totals adds up the tasks' sums of losses and weights.
func (c *call[T]) totals() (loss, weight float64) {
	for i := range c.losses {
		loss += c.losses[i].loss
		weight += c.losses[i].weight
	}
	return loss, weight
}

// weightsStep adds up the weights of each task's rows, in the same order as crossEntropyForward does.
type weightsStep[T float] struct{}

func (weightsStep[T]) do(w *worker[T], task int) {
	lo, hi := subrange(w.rows, task, w.tasks)
	for row := lo; row < hi; row++ {
		w.losses[task].weight += w.targetOf(row).weight
	}
}

// crossEntropyStep does what runRows would do with rows of one block, one pass after the other over some
// rows. The float64 logarithm and exponentials of one row depend on one another. Those of different rows
// share vectors, or overlap in the processor. On Zen 4 a row of 64 float32 takes 66 ns and with the gradient
// 95 by expRows, expAll and log1pAll, and 122 and 156 with calls for each row.
type crossEntropyStep[T float] struct{}

func (crossEntropyStep[T]) do(w *worker[T], task int) {
	w.task = task
	lo, hi := subrange(w.rows, task, w.tasks)
	for from := lo; from < hi; from += w.plan.together {
		n := min(w.plan.together, hi-from)
		var targets [maxTogether]target
		for i := range n {
			targets[i] = w.targetOf(from + i)
			w.together.leftOut[i] = targets[i].leftOut()
		}
		if w.allAtOnce() {
			w.expRows(&w.x, &w.dx, from, w.partials[:n])
		} else {
			for i := range n {
				w.ahead = i * w.cols
				w.expOthers(from+i, 0, w.cols, targets[i], w.partials[i:][:1])
			}
			w.ahead = 0
		}
		sums := w.sumsOf(from, targets[:n], w.partials[:n])
		for i := range n {
			s := w.lossOf(from+i, targets[i], sums[i], w.together.logs[i])
			if w.dx.Data != nil {
				w.ahead = i * w.cols
				w.writeGradient(from+i, 0, w.cols, targets[i], w.partials[i:][:1], s)
			}
		}
		w.ahead = 0
	}
}

// skipped rows are ignored ones that are not even read, because nobody wants their log-sum-exp.
func (w *worker[T]) skipped(t target) bool { return t.ignored && !w.ce.Max.Present() }

func (crossEntropyForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	w.expOthers(row, lo, hi, w.targetOf(row), partials)
}

// expOthers computes the exponentials of columns lo to hi, without the target's. It leaves partials of a
// skipped row as they are.
func (w *worker[T]) expOthers(row, lo, hi int, t target, partials []partial) {
	if !w.skipped(t) {
		w.expBlocks(&w.x, &w.dx, row, lo, hi, t.leftOut(), partials)
	}
}

// targetSum is the sum of a row's exp(x - high), where high is the maximum, and the target's part of it.
// Without others the loss is 0, and the smaller their sum is, the smaller is the loss: 1 + others would keep
// only those digits of it that are above the rounding error of 1. So where the target's exponential is 1, the
// sum of the others is saved, as a negative number.
type targetSum struct {
	high, logit, others, exponential, saved float64

	highest bool // the logit is the maximum
}

// belowHigh is exactly 0 where the logit is the maximum.
func belowHigh(logit, high float64) float64 { return logit - finiteMax(high) }

// rowSum is the sum that was saved.
func rowSum(saved float64) float64 {
	if math.Signbit(saved) {
		return 1 - saved
	}
	return saved
}

// atTarget is the gradient of the loss with respect to the target's logit, which is minus the others' share
// of the sum.
func (s *targetSum) atTarget() float64 {
	minusOthers := s.saved
	if !math.Signbit(s.saved) {
		minusOthers = s.exponential - s.saved // one of them is 1, so no digits are lost
	}
	return minusOthers / rowSum(s.saved)
}

// sumsOf combines the partials of rows, from one on, with their targets. A row has as many partials as there
// are blocks. w.together.logs receives the logarithm of each row's sum.
func (w *worker[T]) sumsOf(from int, targets []target, partials []partial) []targetSum {
	n := len(targets)
	sums, exps, logs := w.together.sums[:n], w.together.exps[:n], w.together.logs[:n]
	for i := range targets {
		s, t := &sums[i], &targets[i]
		if w.skipped(*t) {
			*s, exps[i] = targetSum{others: 1}, 0
			continue
		}
		s.high, s.others = logSumExp(partials[i*w.blocks:][:w.blocks])
		if w.isInfinite(from+i, s.high) {
			s.others = math.Inf(1)
		}
		if t.leftOut() == noColumn {
			exps[i] = 0
			continue
		}
		top := s.high
		s.logit = w.mappedLogit(from+i, t.column)
		s.high = larger(top, s.logit)
		exps[i] = belowHigh(s.logit, s.high)
		if s.highest = exps[i] == 0; s.highest {
			exps[i] = top - s.high
		}
	}
	w.funcs.expAll(exps)
	for i := range targets {
		s, t := &sums[i], &targets[i]
		switch {
		case w.skipped(*t) || t.leftOut() == noColumn:
			s.saved = s.others
		case s.highest:
			s.exponential, s.saved = 1, -s.others*exps[i]
		case exps[i] == 1:
			s.exponential, s.saved = 1, -s.others
		default:
			s.exponential, s.saved = exps[i], s.others+exps[i]
		}
		if logs[i] = -s.saved; !math.Signbit(s.saved) {
			logs[i] = s.saved - 1
		}
	}
	w.funcs.log1pAll(logs)
	return sums
}

// isInfinite tells whether a row's log-sum-exp is +inf. The exponential of its maximum, relative to that, is
// NaN, as are those of NaNs, so the row is read again. A loss is NaN in both cases.
func (w *worker[T]) isInfinite(row int, high float64) bool {
	if w.ce.Target.Present() || !math.IsInf(high, 1) {
		return false
	}
	for j := 0; j < w.cols; j += block {
		for _, v := range w.read(1, &w.x, row, j, min(block, w.cols-j)) {
			if v != v {
				return false
			}
		}
	}
	return true
}

// combine: a is the maximum, b the factor of the exponentials, c the gradient at the target.
func (crossEntropyForward[T]) combine(w *worker[T], row int, partials []partial) rowStats {
	targets := [1]target{w.targetOf(row)}
	sums := w.sumsOf(row, targets[:], partials)
	return w.lossOf(row, targets[0], sums[0], w.together.logs[0])
}

// lossOf adds up a row's loss, writes what is saved of the row, and returns what combine does.
func (w *worker[T]) lossOf(row int, t target, sum targetSum, logSum float64) (stats rowStats) {
	loss, gradient := 0.0, w.upstream*t.weight/w.divisor
	switch {
	case w.skipped(t):
	case t.leftOut() == noColumn:
		w.writeLSE(row, sum.high, logSum, sum.saved)
		loss, stats = t.weight, rowStats{a: sum.high, b: gradient, c: gradient} // 0 or NaN
	default:
		w.writeLSE(row, sum.high, logSum, sum.saved)
		loss = t.weight * ((sum.high - sum.logit) + logSum)
		if w.dx.Data != nil {
			stats = rowStats{a: sum.high, b: gradient / rowSum(sum.saved), c: gradient * sum.atTarget()}
		}
	}
	w.addLoss(row, loss, t.weight)
	return stats
}

// addLoss adds a row's loss and weight to the sums of its task, and writes the loss if each row's is wanted.
func (w *worker[T]) addLoss(row int, loss, weight float64) {
	w.losses[w.task].loss += loss
	w.losses[w.task].weight += weight
	if w.ce.Reduction == kernels.ReduceNone && w.ce.Loss.Present() {
		put(&w.ce.Loss, row, loss/w.divisor)
	}
}

// writeLSE writes the log-sum-exp, in one part or two. With OnePass the second part is what is saved of the
// sum.
func (w *worker[T]) writeLSE(row int, high, logSum, saved float64) {
	switch {
	case w.ce.LogSum.Present() && w.ce.OnePass:
		put(&w.ce.Max, row, high)
		put(&w.ce.LogSum, row, saved)
	case w.ce.LogSum.Present():
		put(&w.ce.Max, row, high)
		put(&w.ce.LogSum, row, logSum)
	case w.ce.Max.Present():
		put(&w.ce.Max, row, high+logSum)
	}
}

func (crossEntropyForward[T]) secondPass(w *worker[T], row, lo, hi int, partials []partial, s rowStats) {
	if w.dx.Data != nil {
		w.writeGradient(row, lo, hi, w.targetOf(row), partials, s)
	}
}

func (w *worker[T]) writeGradient(row, lo, hi int, t target, partials []partial, s rowStats) {
	if t.ignored {
		w.writeZeros(row, lo, hi)
		return
	}
	w.rescale(&w.x, &w.dx, row, lo, hi, partials, s.a, s.b)
	w.writeTarget(row, lo, hi, t, s.c)
}

type crossEntropyBackward[T float] struct{}

func (crossEntropyBackward[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (crossEntropyBackward[T]) run(c *call[T]) {
	c.divisor = or1(&c.ce.Divisor)
	c.runRows()
}

func (crossEntropyBackward[T]) firstPass(*worker[T], int, int, int, []partial) {}

// combine: as in the forward pass, except that a is the log-sum-exp if it was stored as one number.
func (crossEntropyBackward[T]) combine(w *worker[T], row int, _ []partial) rowStats {
	t := w.targetOf(row)
	if t.ignored {
		return rowStats{}
	}
	logit := math.NaN()
	if t.valid {
		logit = w.logit(row, t.column)
	}
	gradient := at(&w.ce.DLoss, row) * t.weight / w.divisor
	high, logSum := at(&w.ce.Max, row), 0.0
	if w.ce.LogSum.Present() {
		logSum = at(&w.ce.LogSum, row)
	}
	if w.ce.OnePass && w.ce.LogSum.Present() { // as in forward
		w.together.exps[0] = belowHigh(logit, high)
		w.funcs.expAll(w.together.exps[:1])
		s := targetSum{exponential: w.together.exps[0], saved: logSum}
		return rowStats{a: high, b: gradient / rowSum(s.saved), c: gradient * s.atTarget()}
	}
	loss := (high - logit) + logSum
	return rowStats{a: high, b: gradient * math.Exp(-logSum), c: gradient * math.Expm1(-loss)}
}

func (crossEntropyBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	t := w.targetOf(row)
	if t.ignored {
		w.writeZeros(row, lo, hi)
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		dx := w.output(0, &w.dx, row, j, n)
		w.funcs.expScale(dx, w.read(0, &w.x, row, j, n), T(s.a), T(s.b))
		w.write(&w.dx, row, j, dx)
	}
	w.writeTarget(row, lo, hi, t, s.c)
}
