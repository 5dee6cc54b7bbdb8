package cpu

import "math"

// Cross-entropy with label smoothing e (Szegedy et al., "Rethinking the Inception Architecture for Computer
// Vision", 2016): of C classes of weights w, whose sum is W,
//
//	loss = (1 - e) w[t] (lse - x[t]) + e / C sum w[c] (lse - x[c])
//	dx[c] = (1 - e) w[t] (p[c] - [c = t]) + e / C (W p[c] - w[c])
//
// Both sums are of numbers that are not negative, so no digits cancel. The target is not left out of the sum
// of exponentials: with smoothing, neither the loss nor the gradient of a certain target is near 0.
type (
	smoothedForward[T float]  struct{ crossEntropyForward[T] }
	smoothedBackward[T float] struct{ crossEntropyBackward[T] }
)

func (smoothedForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.planWeight(c.ce.Weight, 0)
}

func (o smoothedForward[T]) run(c *call[T]) {
	c.prepareClassWeights()
	o.crossEntropyForward.run(c)
}

func (smoothedBackward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.planWeight(c.ce.Weight, 0)
}

func (o smoothedBackward[T]) run(c *call[T]) {
	c.prepareClassWeights()
	o.crossEntropyBackward.run(c)
}

// prepareClassWeights computes the sums of the class weights of each block.
func (c *call[T]) prepareClassWeights() {
	c.prepareColumns(&c.weight)
	c.classWeights, c.blockWeights = float64(c.cols), nil
	if !c.weight.Present() {
		return
	}
	c.classWeights, c.blockWeights = 0, make([]float64, c.blocks)
	for j := range c.cols {
		v := at(&c.ce.Weight, j)
		c.classWeights += v
		c.blockWeights[j/block] += v
	}
}

// firstPass: the block's maximum, its sum of exp(x - max), and as the mean its sum of w (max - x).
func (smoothedForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	if w.skipped(w.targetOf(row)) {
		return
	}
	for j := lo; j < hi; j += block {
		n, p := min(block, hi-j), &partials[j/block]
		x, below := w.read(0, &w.x, row, j, n), w.scratch(1, j, n)
		high := w.funcs.max(x)
		p.max, p.sum = float64(high), w.funcs.exp(below, x, finiteMax(high))
		if w.weight.Present() {
			w.funcs.subtract(below, x, finiteMax(high))
			p.mean = w.weightedDepth(below, w.columnsOf(&w.weight, 2, j, n))
		} else {
			sum, _ := w.funcs.moments(x, finiteMax(high))
			p.mean = -sum
		}
	}
}

// weightedDepth is minus the sum of x * weight. A weight of 0 counts for nothing, even if x is infinite.
func (w *worker[T]) weightedDepth(x, weight []T) float64 {
	sum := -w.funcs.dot(x, weight)
	if !math.IsNaN(sum) {
		return sum
	}
	sum = 0
	for i, v := range x {
		if weight[i] != 0 {
			sum -= float64(v) * float64(weight[i])
		}
	}
	return sum
}

// combine: see smoothed.
func (smoothedForward[T]) combine(w *worker[T], row int, partials []partial) (stats rowStats) {
	t, loss := w.targetOf(row), 0.0
	if !w.skipped(t) {
		high, sum := logSumExp(partials)
		logSum := math.Log(sum)
		w.writeLSE(row, high, logSum, sum)
		if !t.ignored {
			loss = w.smoothedLoss(row, t, high, logSum, partials)
			stats = w.smoothed(t, w.upstream/w.divisor, high, 1/sum)
		}
	}
	w.addLoss(row, loss, t.weight)
	return stats
}

func (w *worker[T]) smoothedLoss(row int, t target, high, logSum float64, partials []partial) float64 {
	if !t.valid {
		return math.NaN()
	}
	depth := w.classWeights * logSum
	for i, p := range partials {
		weight := w.blockSize(i)
		if w.blockWeights != nil {
			weight = w.blockWeights[i]
		}
		depth += p.mean + weight*(finiteMax(high)-finiteMax(p.max))
	}
	e := w.ce.LabelSmoothing
	loss := e / float64(w.cols) * depth
	if own := (1 - e) * t.weight; own != 0 {
		loss += own * ((high - w.logit(row, t.column)) + logSum)
	}
	return loss
}

// smoothed is what the second pass needs: dx = exp(x - a) b - d w, and at the target less by c. scale is 1 /
// sum exp(x - high).
func (w *worker[T]) smoothed(t target, gradient, high, scale float64) rowStats {
	e := w.ce.LabelSmoothing
	own, others := gradient*(1-e)*t.weight, gradient*e/float64(w.cols)
	return rowStats{a: high, b: (own + others*w.classWeights) * scale, c: own, d: others}
}

func (smoothedForward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	if w.dx.Data != nil {
		w.writeSmoothed(row, lo, hi, s)
	}
}

func (smoothedBackward[T]) combine(w *worker[T], row int, _ []partial) rowStats {
	t := w.targetOf(row)
	if t.ignored {
		return rowStats{}
	}
	scale := 1.0
	if w.ce.LogSum.Present() {
		if scale = at(&w.ce.LogSum, row); w.ce.OnePass {
			scale = 1 / rowSum(scale)
		} else {
			scale = math.Exp(-scale)
		}
	}
	return w.smoothed(t, at(&w.ce.DLoss, row)/w.divisor, at(&w.ce.Max, row), scale)
}

func (smoothedBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	w.writeSmoothed(row, lo, hi, s)
}

func (w *worker[T]) writeSmoothed(row, lo, hi int, s rowStats) {
	t := w.targetOf(row)
	if t.ignored {
		w.writeZeros(row, lo, hi)
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		dx := w.output(0, &w.dx, row, j, n)
		w.funcs.expScale(dx, w.read(0, &w.x, row, j, n), T(s.a), T(s.b))
		if w.weight.Present() {
			for i, v := range w.columnsOf(&w.weight, 2, j, n) {
				dx[i] -= v * T(s.d)
			}
		} else {
			w.funcs.subtract(dx, dx, T(s.d))
		}
		if k := t.column - j; t.valid && 0 <= k && k < n {
			dx[k] -= T(s.c)
		}
		w.write(&w.dx, row, j, dx)
	}
}
