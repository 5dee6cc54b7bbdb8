package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// QKNormRotary normalizes each head (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019) and
// rotates it as Rotary does, or backward computes the gradients of the heads and of the weights. Outputs may
// be what is rotated.
func QKNormRotary(r *kernels.QKNormRotary, workers int) error {
	heads := r.Q.Heads + r.K.Heads
	tokens := kernels.Matrix{DType: r.Q.DType, Rows: r.Q.Sequences * r.Q.Tokens, Cols: heads * r.Q.Cols}
	o := operands{x: tokens, y: tokens}
	return run(&o, more{qkNorm: r}, workers, qkNorm[float32]{}, qkNorm[float64]{})
}

// qkNorm has the tokens as its rows.
type qkNorm[T float] struct{ elementwise[T] }

func (qkNorm[T]) plan(c *call[T], _ int) {
	columns := int(c.rotary.Q.Cols)
	c.plan = plan{tasks: min(c.rows, maxTasks), recent: 2*int(c.rotary.Rotated()) + 4*columns}
	if c.rotary.Backward {
		c.plan.perTask = 2 * columns
	}
}

// run sums the weights' gradients of tasks, of which there are as many whatever the number of workers.
func (qkNorm[T]) run(c *call[T]) {
	clear(c.taskSums)
	c.runRows()
	columns := int(c.rotary.Q.Cols)
	for i, out := range [...]*kernels.Vector{&c.qkNorm.DQWeight, &c.qkNorm.DKWeight} {
		if !out.Present() {
			continue
		}
		for j := range columns {
			sum := 0.0
			for task := range c.plan.tasks {
				sum += c.taskSums[task*2*columns+i*columns+j]
			}
			put(out, j, sum)
		}
	}
}

func (qkNorm[T]) secondPass(w *worker[T], token, _, _ int, _ []partial, _ rowStats) {
	r, q := &w.rotary, &w.qkNorm
	s, t, turn := w.rotationOf(int64(token))
	for i, of := range [...]struct {
		x, dy, out *kernels.Heads
		weight     *kernels.Vector
	}{{&r.Q, &q.DQOut, &r.QOut, &q.QWeight}, {&r.K, &q.DKOut, &r.KOut, &q.KWeight}} {
		if r.Backward && !of.dy.Present() || !r.Backward && !of.out.Present() {
			continue
		}
		weights := w.headWeights(of.weight)
		for h := range of.x.Heads {
			if !r.Backward {
				w.normalizeHead(of.out.At(s, t, h), of.x.At(s, t, h), weights, turn)
				continue
			}
			var out unsafe.Pointer
			if of.out.Present() {
				out = of.out.At(s, t, h)
			}
			n := int(r.Q.Cols)
			sums := w.taskSums[(2*w.task+i)*n:][:n]
			w.headGradient(out, of.x.At(s, t, h), of.dy.At(s, t, h), weights, sums, turn)
		}
	}
}

// headRoom is the worker's space for the elements of a head: the weights' is the first, after the rotation.
func (w *worker[T]) headRoom(i int) []T {
	n := int(w.rotary.Q.Cols)
	return w.recent[2*int(w.rotary.Rotated())+i*n:][:n]
}

// headWeights are weight + offset, 1 without a weight.
func (w *worker[T]) headWeights(weight *kernels.Vector) []T {
	weights := w.headRoom(0)
	for i := range weights {
		weights[i] = 1
		if weight.Present() {
			weights[i] = T(at(weight, i) + w.qkNorm.WeightOffset)
		}
	}
	return weights
}

// readHead reads a head into space number i.
func (w *worker[T]) readHead(i int, p unsafe.Pointer) []T {
	x := w.headRoom(i)
	w.numbersAt(x, p, w.rotary.Q.DType)
	return x
}

func (w *worker[T]) writeHead(p unsafe.Pointer, x []T) {
	if t := w.rotary.Q.DType; t == native[T]() {
		copy(unsafe.Slice((*T)(p), len(x)), x)
	} else {
		w.funcs.store[t](p, x, 1)
	}
}

// headRstd is 1 / sqrt(mean of squares + eps).
func (w *worker[T]) headRstd(x []T) T {
	return T(1 / math.Sqrt(w.funcs.dot(x, x)/float64(len(x))+w.qkNorm.Eps))
}

// turnHead rotates a head in place.
func (w *worker[T]) turnHead(x []T, turn rotation[T]) {
	half := len(turn.c1)
	switch {
	case half == 0:
	case w.rotary.Interleaved:
		turn.apply(x, x[1:], x, x[1:], 2, w.roundsProducts())
	default:
		turn.apply(x[:half], x[half:], x[:half], x[half:], 1, w.roundsProducts())
	}
}

func (w *worker[T]) normalizeHead(out, p unsafe.Pointer, weights []T, turn rotation[T]) {
	x := w.readHead(1, p)
	rstd := w.headRstd(x)
	normalized, rounds := w.rounding(w.qkNorm.RoundNormalized), w.rounding(w.rotary.Round)
	for i, v := range x {
		x[i] = rounds(normalized(v*rstd) * weights[i])
	}
	w.turnHead(x, turn)
	w.writeHead(out, x)
}

// headGradient adds to sums the weights' gradients. out is nil if the head's is not wanted.
func (w *worker[T]) headGradient(out, p, dy unsafe.Pointer, weights []T, sums []float64, turn rotation[T]) {
	x, dn, g := w.readHead(1, p), w.readHead(2, dy), w.headRoom(3)
	rstd := w.headRstd(x)
	w.turnHead(dn, turn)
	normalized, rounds := w.rounding(w.qkNorm.RoundNormalized), w.rounding(w.rotary.Round)
	for i, v := range x {
		d := rounds(dn[i])
		x[i] = v * rstd
		g[i] = d * weights[i]
		sums[i] += float64(d) * float64(normalized(x[i]))
	}
	if out == nil {
		return
	}
	mean := T(w.funcs.dot(g, x) / float64(len(x)))
	for i, h := range x {
		x[i] = (g[i] - h*mean) * rstd
	}
	w.writeHead(out, x)
}
