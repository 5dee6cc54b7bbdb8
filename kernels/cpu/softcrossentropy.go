package cpu

import (
	"math"
	"slices"

	"github.com/gander-go/gander/kernels"
)

// Cross-entropy of class probabilities. Logits are mapped to z as in generalForward. With e for label
// smoothing, C classes, v[c] = weight[c] ((1 - e) target[c] + e / C), the row's maximum m and p = softmax(z):
//
//	r = sum exp(z - m) - 1, without the largest element's own 1
//	d = sum v (m - z)
//	V = sum v
//	loss = d + V log1p(r) + z_loss lse^2
//	dz[c] = V p[c] - v[c] + 2 z_loss lse p[c]
//
// Where probabilities are not negative these are sums of numbers that are not, so no digits cancel.
type (
	softForward[T float]  struct{}
	softBackward[T float] struct{}
)

// softPartial is the sums of a block: m, r, d and V.
type softPartial struct{ max, others, depth, weight float64 }

// SoftCrossEntropyForward computes the losses, and their sum or mean.
func SoftCrossEntropyForward(s *kernels.SoftCrossEntropy, workers int) error {
	o := operands{x: s.X, y: s.Probabilities, exponentials: true}
	m := more{ce: &s.CrossEntropy, soft: s}
	return run(&o, m, workers, softForward[float32]{}, softForward[float64]{})
}

// SoftCrossEntropyBackward computes the gradient of the logits. DX may be X.
func SoftCrossEntropyBackward(s *kernels.SoftCrossEntropy, workers int) error {
	o := operands{x: s.X, y: s.Probabilities, dx: s.DX, exponentials: true}
	m := more{ce: &s.CrossEntropy, soft: s}
	return run(&o, m, workers, softBackward[float32]{}, softBackward[float64]{})
}

func (softForward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.plan.soft = true
	c.planWeight(c.ce.Weight, 0)
}

func (softForward[T]) run(c *call[T]) {
	c.divisor = or1(&c.ce.Divisor)
	c.prepareColumns(&c.weight)
	clear(c.losses[:])
	c.runRows()
	c.writeTotal()
}

// softTargets is v of n classes, in place or in scratch space 2. It also uses scratch space 1.
func (w *worker[T]) softTargets(row, j, n int) []T {
	q, e := w.read(2, &w.y, row, j, n), w.ce.LabelSmoothing
	if e == 0 && !w.weight.Present() {
		return q
	}
	v, weight := w.scratch(2, j, n), w.columnsOf(&w.weight, 1, j, n)
	w.funcs.multiply(v, q, weight, T(1-e))
	if e != 0 {
		each := T(e / float64(w.cols))
		for i, of := range weight {
			v[i] += each * of
		}
	}
	return v
}

func (softForward[T]) firstPass(w *worker[T], row, lo, hi int, _ []partial) {
	partials := w.softPartials(row)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		partials[j/block] = w.softBlock(w.mapped(nil, row, j, n), w.softTargets(row, j, n), w.scratch(1, j, n))
	}
}

// softPartials is the row's partial sums.
func (w *worker[T]) softPartials(row int) []softPartial {
	if w.plan.splitRows {
		return w.splitSoft[row*w.blocks:][:w.blocks]
	}
	return w.blockSoft
}

// softBlock is the sums of a block. below is scratch space.
func (w *worker[T]) softBlock(z, v, below []T) (p softPartial) {
	k := max(slices.Index(z, w.funcs.max(z)), 0) // a block of NaNs has no maximum
	m := finiteMax(z[k])
	p.max = float64(z[k])
	p.weight, _ = w.funcs.moments(v, 0)
	w.funcs.subtract(below, z, m)
	p.depth = w.weightedDepth(below, v)
	w.funcs.without(below, z, k)
	p.others = w.funcs.exp(below, below, m)
	return p
}

// combine adds up a row's loss and writes its state.
func (softForward[T]) combine(w *worker[T], row int, _ []partial) (none rowStats) {
	s, isFirst := softPartial{max: math.Inf(-1)}, true
	partials := w.softPartials(row)
	for _, p := range partials {
		s.max = larger(s.max, p.max)
	}
	for _, p := range partials {
		switch {
		case p.max == s.max && isFirst:
			isFirst = false
			s.others += p.others
		default:
			s.others += expDiff(p.max, s.max) * (1 + p.others)
		}
		s.depth += p.depth
		s.weight += p.weight
		if p.weight != 0 {
			s.depth += p.weight * (finiteMax(s.max) - finiteMax(p.max))
		}
	}
	if math.IsInf(s.max, 0) { // also where all elements are -inf
		s.others = math.NaN()
	}
	logSum := math.Log1p(s.others)
	loss := s.depth + s.weight*logSum
	if w.ce.ZLoss != 0 {
		loss += w.ce.ZLoss * (s.max + logSum) * (s.max + logSum)
	}
	w.addLoss(row, loss, 1)
	if w.ce.Max.Present() {
		put(&w.ce.Max, row, s.max)
		put(&w.ce.LogSum, row, logSum)
		put(&w.soft.TargetWeight, row, s.weight)
	}
	return none
}

func (softForward[T]) secondPass(*worker[T], int, int, int, []partial, rowStats) {}

func (softBackward[T]) plan(c *call[T], workers int) {
	c.planRows(workers)
	c.planWeight(c.ce.Weight, 0)
}

func (softBackward[T]) run(c *call[T]) {
	c.divisor = or1(&c.ce.Divisor)
	if c.ce.Reduction == kernels.ReduceMean {
		c.divisor = float64(c.rows)
	}
	c.prepareColumns(&c.weight)
	c.runRows()
}

func (softBackward[T]) firstPass(*worker[T], int, int, int, []partial) {}

// combine: dz = exp(z - a) b - d v, where b is c over the row's sum.
func (softBackward[T]) combine(w *worker[T], row int, _ []partial) rowStats {
	gradient := at(&w.ce.DLoss, row) / w.divisor
	high, logSum := at(&w.ce.Max, row), at(&w.ce.LogSum, row)
	rest := gradient * at(&w.soft.TargetWeight, row)
	if w.ce.ZLoss != 0 {
		rest += 2 * w.ce.ZLoss * gradient * (high + logSum)
	}
	return rowStats{a: high, b: rest * math.Exp(-logSum), c: rest, d: gradient}
}

// confident is the logarithm of a row's sum below which one class has most of it. Then 1 - p keeps the digits
// that p has not.
const confident = 0.25

func (softBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	isMapped, logSum := w.ce.Map != (kernels.LogitMap{}), at(&w.ce.LogSum, row)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		v := w.softTargets(row, j, n)
		slope := w.scratch(1, j, n)
		z, dx, top := w.mapped(slope, row, j, n), w.output(0, &w.dx, row, j, n), -1
		if logSum < confident {
			top = slices.Index(z, T(s.a))
		}
		w.funcs.expScale(dx, z, T(s.a), T(s.b))
		for i, of := range v {
			dx[i] -= T(s.d) * of
		}
		if top >= 0 {
			dx[top] = T((s.c - s.d*float64(v[top])) + s.c*math.Expm1(-logSum))
		}
		if isMapped {
			w.funcs.multiply(dx, dx, slope, 1)
		}
		w.write(&w.dx, row, j, dx)
	}
}
