package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// Cross-entropy with options. Logits x are first mapped to z (kernels.LogitMap). With label smoothing e
// (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016), C classes of weights
// w, whose sum is W, and the log-sum-exp lse of z:
//
//	loss = (1 - e) w[t] (lse - z[t]) + e / C sum w[c] (lse - z[c]) + z_loss lse^2
//	dz[c] = (1 - e) w[t] (p[c] - [c = t]) + e / C (W p[c] - w[c]) + 2 z_loss lse p[c]
//
// All sums are of numbers that are not negative, so no digits cancel. With smoothing the target is not left
// out of the sum of exponentials: neither the loss nor the gradient of a certain target is near 0.
type (
	generalForward[T float]  struct{ crossEntropyForward[T] }
	generalBackward[T float] struct{ crossEntropyBackward[T] }
)

func (generalForward[T]) plan(c *call[T], workers int)  { c.planGeneral(workers) }
func (generalBackward[T]) plan(c *call[T], workers int) { c.planGeneral(workers) }

func (c *call[T]) planGeneral(workers int) {
	c.planRows(workers)
	if c.ce.LabelSmoothing != 0 {
		c.planWeight(c.ce.Weight, 0)
	}
}

func (o generalForward[T]) run(c *call[T]) {
	c.prepareClassWeights()
	o.crossEntropyForward.run(c)
}

func (o generalBackward[T]) run(c *call[T]) {
	c.prepareClassWeights()
	o.crossEntropyBackward.run(c)
}

// prepareClassWeights computes the sums of the class weights of each block.
func (c *call[T]) prepareClassWeights() {
	c.classWeights, c.blockWeights = float64(c.cols), nil
	if c.ce.LabelSmoothing == 0 {
		return
	}
	c.prepareColumns(&c.weight)
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

// mapped is n mapped logits of a row, in place of x or of scratch space 0. slope receives the derivatives,
// unless it is nil.
func (w *worker[T]) mapped(slope []T, row, j, n int) []T {
	x := w.read(0, &w.x, row, j, n)
	if w.ce.Map == (kernels.LogitMap{}) {
		return x
	}
	z := w.scratch(0, j, n)
	w.mapLogits(z, slope, x)
	return z
}

func (w *worker[T]) mapLogits(z, slope, x []T) {
	m := w.ce.Map
	if m.Inner == 0 {
		for i, v := range x {
			z[i] = T(m.Outer * float64(v))
		}
		for i := range slope {
			slope[i] = T(m.Outer)
		}
		return
	}
	for i, t := range w.tanhOf(x) {
		z[i] = T(m.Outer * t)
		if slope != nil {
			slope[i] = T(m.Inner * m.Outer * ((1 - t) * (1 + t)))
		}
	}
}

// tanhOf is tanh(Inner * x). For float32, from an exponential: the error is 2^-52 of 1.
func (w *worker[T]) tanhOf(x []T) []float64 {
	if w.tanhs == nil {
		w.tanhs = make([]float64, block)
	}
	t, inner := w.tanhs[:len(x)], w.ce.Map.Inner
	if unsafe.Sizeof(T(0)) == 8 {
		for i, v := range x {
			t[i] = math.Tanh(inner * float64(v))
		}
		return t
	}
	for i, v := range x {
		t[i] = 2 * inner * float64(v)
	}
	w.funcs.expAll(t)
	for i, e := range t {
		t[i] = 1 - 2/(e+1)
	}
	return t
}

// mappedLogit is a mapped logit, as T has it.
func (w *worker[T]) mappedLogit(row, column int) float64 {
	x := T(w.logit(row, column))
	if w.ce.Map != (kernels.LogitMap{}) {
		x = w.mapLogit(x)
	}
	return float64(x)
}

// mapLogit stands apart because it allocates, and a call without options must not.
func (w *worker[T]) mapLogit(x T) T {
	v := [1]T{x}
	w.mapLogits(v[:], nil, v[:])
	return v[0]
}

// leftOut is the column that takes no part in the row's sum, or noColumn.
func (w *worker[T]) leftOut(t *target) int {
	if w.ce.LabelSmoothing != 0 {
		return noColumn
	}
	return t.leftOut()
}

// firstPass: the block's maximum, its sum of exp(z - max), and as the mean its sum of w (max - z).
func (generalForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	t := w.targetOf(row)
	if w.skipped(t) {
		return
	}
	out := w.leftOut(&t)
	for j := lo; j < hi; j += block {
		n, p := min(block, hi-j), &partials[j/block]
		z, below := w.mapped(nil, row, j, n), w.scratch(1, j, n)
		if j <= out && out < j+n {
			high := w.funcs.without(below, z, out-j)
			p.max, p.sum = float64(high), w.funcs.exp(below, below, finiteMax(high))
			continue
		}
		high := w.funcs.max(z)
		p.max, p.sum = float64(high), w.funcs.exp(below, z, finiteMax(high))
		switch {
		case w.ce.LabelSmoothing == 0:
		case w.weight.Present():
			w.funcs.subtract(below, z, finiteMax(high))
			p.mean = w.weightedDepth(below, w.columnsOf(&w.weight, 2, j, n))
		default:
			sum, _ := w.funcs.moments(z, finiteMax(high))
			p.mean = -sum
		}
	}
}

// weightedDepth is minus the sum of z * weight. A weight of 0 counts for nothing, even if z is infinite.
func (w *worker[T]) weightedDepth(z, weight []T) float64 {
	sum := -w.funcs.dot(z, weight)
	if !math.IsNaN(sum) {
		return sum
	}
	sum = 0
	for i, v := range z {
		if weight[i] != 0 {
			sum -= float64(v) * float64(weight[i])
		}
	}
	return sum
}

// combine: see general.
func (generalForward[T]) combine(w *worker[T], row int, partials []partial) (stats rowStats) {
	targets, loss := [1]target{w.targetOf(row)}, 0.0
	t := targets[0]
	if !w.skipped(t) {
		var high, logSum, saved float64
		if w.ce.LabelSmoothing == 0 {
			s := w.sumsOf(row, targets[:], partials)[0]
			high, logSum, saved = s.high, w.together.logs[0], s.saved
		} else {
			high, saved = logSumExp(partials)
			logSum = math.Log(saved)
		}
		w.writeLSE(row, high, logSum, saved)
		if !t.ignored {
			loss = w.generalLoss(row, t, high, logSum, partials)
			if w.dx.Data != nil {
				stats = w.general(row, t, w.upstream/w.divisor, high, logSum, 1/rowSum(saved))
			}
		}
	}
	w.addLoss(row, loss, t.weight)
	return stats
}

func (w *worker[T]) generalLoss(row int, t target, high, logSum float64, partials []partial) (loss float64) {
	if !t.valid {
		return math.NaN()
	}
	e := w.ce.LabelSmoothing
	if e != 0 {
		depth := w.classWeights * logSum
		for i, p := range partials {
			weight := w.blockSize(i)
			if w.blockWeights != nil {
				weight = w.blockWeights[i]
			}
			depth += p.mean + weight*(finiteMax(high)-finiteMax(p.max))
		}
		loss = e / float64(w.cols) * depth
	}
	if own := (1 - e) * t.weight; own != 0 {
		loss += own * ((high - w.mappedLogit(row, t.column)) + logSum)
	}
	if w.ce.ZLoss != 0 {
		loss += w.ce.ZLoss * (high + logSum) * (high + logSum)
	}
	return loss
}

// general is what the second pass needs: dz = exp(z - a) b - d w, and at the target c. scale is the inverse
// of the sum of exp(z - high), whose logarithm is logSum.
func (w *worker[T]) general(row int, t target, gradient, high, logSum, scale float64) rowStats {
	e := w.ce.LabelSmoothing
	own, others := gradient*(1-e)*t.weight, gradient*e/float64(w.cols)
	rest := others * w.classWeights
	if w.ce.ZLoss != 0 {
		rest += 2 * w.ce.ZLoss * gradient * (high + logSum)
	}
	s := rowStats{a: high, b: (own + rest) * scale, d: others}
	if t.valid {
		log := (w.mappedLogit(row, t.column) - high) - logSum
		s.c = own*math.Expm1(log) + rest*math.Exp(log)
		if others != 0 {
			s.c -= others * w.classWeight(t.column)
		}
	}
	return s
}

// classWeight is the weight of a class, 1 without weights.
func (w *worker[T]) classWeight(column int) float64 {
	if !w.ce.Weight.Present() {
		return 1
	}
	return at(&w.ce.Weight, column)
}

func (generalForward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	if w.dx.Data != nil {
		w.writeGeneral(row, lo, hi, s)
	}
}

func (generalBackward[T]) combine(w *worker[T], row int, _ []partial) rowStats {
	t := w.targetOf(row)
	if t.ignored {
		return rowStats{}
	}
	scale, logSum := 1.0, 0.0
	if w.ce.LogSum.Present() {
		if logSum = at(&w.ce.LogSum, row); w.ce.OnePass {
			scale, logSum = 1/rowSum(logSum), logOfSaved(logSum)
		} else {
			scale = math.Exp(-logSum)
		}
	}
	return w.general(row, t, at(&w.ce.DLoss, row)/w.divisor, at(&w.ce.Max, row), logSum, scale)
}

// logOfSaved is the logarithm of the sum that was saved.
func logOfSaved(saved float64) float64 {
	if math.Signbit(saved) {
		return math.Log1p(-saved)
	}
	return math.Log(saved)
}

func (generalBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	w.writeGeneral(row, lo, hi, s)
}

func (w *worker[T]) writeGeneral(row, lo, hi int, s rowStats) {
	t := w.targetOf(row)
	if t.ignored {
		w.writeZeros(row, lo, hi)
		return
	}
	isMapped := w.ce.Map != (kernels.LogitMap{})
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		slope := w.scratch(1, j, n)
		z, dx := w.mapped(slope, row, j, n), w.output(0, &w.dx, row, j, n)
		w.funcs.expScale(dx, z, T(s.a), T(s.b))
		switch {
		case s.d == 0:
		case w.weight.Present():
			for i, v := range w.columnsOf(&w.weight, 2, j, n) {
				dx[i] -= v * T(s.d)
			}
		default:
			w.funcs.subtract(dx, dx, T(s.d))
		}
		if k := t.column - j; t.valid && 0 <= k && k < n {
			dx[k] = T(s.c)
		}
		if isMapped {
			w.funcs.multiply(dx, dx, slope, 1)
		}
		w.write(&w.dx, row, j, dx)
	}
}
