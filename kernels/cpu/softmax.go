package cpu

import (
	"math"

	"github.com/gander-go/gander/kernels"
)

// SoftmaxForward computes y = exp(x - max x) / sum exp(x - max x) for each row. y may be x. A row that holds a NaN, an
// infinity, or nothing above -inf becomes NaN.
func SoftmaxForward(x, y kernels.Matrix, workers int) error {
	o := operands{x: x, y: y, keep: longRow}
	if x.DType == kernels.Float32 || x.DType == kernels.Float64 {
		o.keep = math.MaxInt // in y itself
	}
	return run(&o, workers, softmaxForward[float32]{}, softmaxForward[float64]{})
}

// SoftmaxBackward computes dx = (dy - sum(dy * y)) * y for each row. dx may be dy or y.
func SoftmaxBackward(dy, y, dx kernels.Matrix, workers int) error {
	o := operands{x: y, dy: dy, dx: dx, keep: widenedRow}
	return run(&o, workers, softmaxBackward[float32]{}, softmaxBackward[float64]{})
}

type softmaxForward[T float] struct{}

func (softmaxForward[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (softmaxForward[T]) run(c *call[T]) { c.eachRow() }

func (softmaxForward[T]) first(w *worker[T], row, lo, hi int, parts []part) {
	w.exponentials(&w.x, &w.y, row, lo, hi, parts)
}

func (softmaxForward[T]) join(_ *worker[T], _ int, parts []part) stats {
	high, sum := logSumExp(parts)
	return stats{a: high, b: 1 / sum}
}

func (softmaxForward[T]) second(w *worker[T], row, lo, hi int, parts []part, s stats) {
	w.normalise(&w.x, &w.y, row, lo, hi, parts, s.a, s.b)
}

// exponentials takes the exponentials of each block, less the block's own maximum, so that one pass over memory and one
// exponential per element are enough; whole rows keep them for normalise, where y will be or in the buffer.
func (w *worker[T]) exponentials(x, y *kernels.Matrix, row, lo, hi int, parts []part) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		v := w.read(0, x, row, j, n)
		high := w.kit.max(v)
		parts[j/block].max = float64(high)
		switch {
		case w.whole:
			parts[j/block].sum = w.kit.exp(w.output(0, y, row, j, n), v, reference(high))
		case w.kit.expSum != nil:
			parts[j/block].sum = w.kit.expSum(v, reference(high))
		default:
			parts[j/block].sum = w.kit.exp(w.scratch(0, j, n), v, reference(high))
		}
	}
}

// reference is what is subtracted from a block with the given maximum: a block of nothing but -inf must give zeros, for
// other blocks of the row may be finite.
func reference[T float](high T) T {
	if math.IsInf(float64(high), -1) {
		return 0
	}
	return high
}

// logSumExp joins blocks into the row's maximum and its sum of exp(x - max).
func logSumExp(parts []part) (high, sum float64) {
	high = math.Inf(-1)
	for _, p := range parts {
		high = larger(high, p.max)
	}
	for _, p := range parts {
		sum += p.sum * shift(p.max, high)
	}
	return high, sum
}

// shift is exp(from - to) with 1 for a block of -inf in a row of -inf.
func shift(from, to float64) float64 {
	if from == to {
		return 1
	}
	return math.Exp(from - to)
}

// normalise brings a row's exponentials to one maximum, and writes them times gain.
func (w *worker[T]) normalise(x, y *kernels.Matrix, row, lo, hi int, parts []part, high, gain float64) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		p := parts[j/block]
		c := T(gain * shift(p.max, high))
		e := w.output(0, y, row, j, n)
		if w.whole {
			w.kit.store[y.DType](rowAt(y, row, j), e, c)
			continue
		}
		w.kit.expScale(e, w.read(0, x, row, j, n), reference(T(p.max)), c)
		w.write(y, row, j, e)
	}
}

type softmaxBackward[T float] struct{}

func (softmaxBackward[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (softmaxBackward[T]) run(c *call[T]) { c.eachRow() }

func (softmaxBackward[T]) first(w *worker[T], row, lo, hi int, parts []part) {
	raw := w.kit.dotRaw[w.x.DType]
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		if raw != nil {
			parts[j/block].sum = raw(rowAt(&w.dy, row, j), rowAt(&w.x, row, j), n)
			continue
		}
		parts[j/block].sum = w.kit.dot(w.read(0, &w.dy, row, j, n), w.read(1, &w.x, row, j, n))
	}
}

func (softmaxBackward[T]) join(_ *worker[T], _ int, parts []part) stats {
	return stats{a: total(parts)}
}

func total(parts []part) float64 {
	sum := 0.0
	for _, p := range parts {
		sum += p.sum
	}
	return sum
}

func (softmaxBackward[T]) second(w *worker[T], row, lo, hi int, _ []part, s stats) {
	d, rest := split[T](s.a)
	if raw := w.kit.softmaxGradRaw[w.x.DType]; raw != nil {
		dx := rowAt(&w.dx, row, lo)
		raw(dx, rowAt(&w.dy, row, lo), rowAt(&w.x, row, lo), hi-lo, float32(d), float32(rest),
			w.stream && uintptr(dx)%64 == 0)
		return
	}
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		dy, y := w.again(0, &w.dy, row, j, n), w.again(1, &w.x, row, j, n)
		dx := w.output(0, &w.dx, row, j, n)
		w.kit.softmaxGrad(dx, dy, y, d, rest)
		w.write(&w.dx, row, j, dx)
	}
}

// split is d and what rounding it to T leaves, without which dy - d loses its digits where dy is close to d.
func split[T float](d float64) (hi, lo T) {
	hi = T(d)
	if rest := d - float64(hi); math.Abs(rest) < math.MaxFloat32 { // not of an infinity or a NaN
		lo = T(rest)
	}
	return hi, lo
}
