package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// Rotary rotates pairs of elements of each head by the angles of the token's position (Su et al., "RoFormer:
// Enhanced Transformer with Rotary Position Embedding", 2021), or backward, where they are gradients, by the
// negative angles. Outputs may be the inputs.
func Rotary(r *kernels.Rotary, workers int) error {
	heads := r.Q.Heads
	if r.KOut.Present() {
		heads += r.K.Heads
	}
	tokens := kernels.Matrix{DType: r.Q.DType, Rows: r.Tokens(), Cols: heads * r.Q.Cols}
	o := operands{x: tokens, y: tokens}
	return run(&o, more{rotary: r}, workers, rotary[float32]{}, rotary[float64]{})
}

// rotary has the tokens as its rows.
type rotary[T float] struct{ elementwise[T] }

func (rotary[T]) plan(c *call[T], _ int) {
	c.plan = plan{tasks: min(c.rows, maxTasks), recent: 2 * int(c.rotary.Rotated())}
}

func (rotary[T]) secondPass(w *worker[T], token, _, _ int, _ []partial, _ rowStats) {
	r := &w.rotary
	s, t, turn := w.rotationOf(int64(token))
	for h := range r.Q.Heads {
		w.rotate(r.QOut.At(s, t, h), r.Q.At(s, t, h), turn)
	}
	if r.KOut.Present() {
		for h := range r.K.Heads {
			w.rotate(r.KOut.At(s, t, h), r.K.At(s, t, h), turn)
		}
	}
}

// rotationOf is a token's row of heads, its number there, and its rotation.
func (w *worker[T]) rotationOf(token int64) (row, number int64, turn rotation[T]) {
	r := &w.rotary
	if sequence, position, within := place(r, token); within {
		turn = w.rotation(sequence, position)
	}
	return token / r.Q.Tokens, token % r.Q.Tokens, turn
}

// place is a token's sequence, and its position there. within is false if it is in none.
func place(r *kernels.Rotary, token int64) (sequence, position int64, within bool) {
	if !r.CuSeqlens.Present() {
		return token / r.Q.Tokens, token % r.Q.Tokens, true
	}
	// The last sequence that begins at the token or before it. Empty ones begin where the next one does.
	low, high := int64(0), r.CuSeqlens.Len-1 // the first is at low or after it, the last before high
	for low < high {
		if middle := (low + high) / 2; integerAt(&r.CuSeqlens, int(middle)) <= token {
			low = middle + 1
		} else {
			high = middle
		}
	}
	if low == 0 || token >= integerAt(&r.CuSeqlens, int(r.CuSeqlens.Len-1)) {
		return 0, 0, false
	}
	return low - 1, token - integerAt(&r.CuSeqlens, int(low-1)), true
}

// rotation has what a pair (a, b) becomes: (a c1 + b s1, b c2 + a s2). It is empty for no rotation.
type rotation[T float] struct{ c1, c2, s1, s2 []T }

// rotation is that of a position. The worker has room for it.
func (w *worker[T]) rotation(sequence, position int64) (turn rotation[T]) {
	r, half := &w.rotary, int(w.rotary.Rotated()/2)
	turn.c1, turn.c2 = w.recent[:half], w.recent[half:2*half]
	turn.s1, turn.s2 = w.recent[2*half:3*half], w.recent[3*half:4*half]
	row := position + r.Offset
	if r.Offsets.Present() {
		row += integerAt(&r.Offsets, int(sequence))
	}
	if row < 0 || row >= r.Cos.Rows {
		for i := range w.recent[:4*half] {
			w.recent[i] = T(math.NaN())
		}
		return turn
	}
	w.numbers(turn.c1, turn.c2, &r.Cos, sequence, row)
	w.numbers(turn.s1, turn.s2, &r.Sin, sequence, row)
	for i, v := range turn.s1 {
		turn.s1[i] = -v
	}
	if r.Backward {
		turn.s1, turn.s2 = turn.s2, turn.s1
	}
	return turn
}

// numbers reads a table's numbers for the first elements of all pairs, and for the second.
func (w *worker[T]) numbers(first, second []T, t *kernels.Table, sequence, row int64) {
	p := unsafe.Add(t.Data, (sequence*t.SequenceStride+row*t.Stride)*t.DType.Size())
	if !w.rotary.PerElement {
		w.numbersAt(first, p, t.DType)
		copy(second, first)
		return
	}
	if !w.rotary.Interleaved {
		w.numbersAt(first, p, t.DType)
		w.numbersAt(second, unsafe.Add(p, int64(len(first))*t.DType.Size()), t.DType)
		return
	}
	for i := range first {
		first[i] = T(scalar(t.DType, unsafe.Add(p, int64(2*i)*t.DType.Size())))
		second[i] = T(scalar(t.DType, unsafe.Add(p, int64(2*i+1)*t.DType.Size())))
	}
}

// numbersAt reads adjacent elements of a type.
func (w *worker[T]) numbersAt(dst []T, p unsafe.Pointer, t kernels.DType) {
	if t == native[T]() {
		copy(dst, unsafe.Slice((*T)(p), len(dst)))
		return
	}
	w.funcs.load[t](dst, p)
}

// rotate rotates a head from p to out, block by block.
func (w *worker[T]) rotate(out, p unsafe.Pointer, turn rotation[T]) {
	r, half := &w.rotary, len(turn.c1)
	size := r.Q.DType.Size()
	const most = block / 2
	for from := 0; from < half; from += most {
		n := min(most, half-from)
		step, first, second := 1, from, half+from
		if r.Interleaved {
			step, first, second = 2, 2*from, 2*from+1
		}
		w.rotatePairs(out, p, first, second, step, n, turn.from(from, n))
	}
	// An address behind the last element must not be formed.
	if done, all := int64(2*half)*size, r.Q.Cols*size; out != p && done < all {
		copy(unsafe.Slice((*byte)(unsafe.Add(out, done)), all-done),
			unsafe.Slice((*byte)(unsafe.Add(p, done)), all-done))
	}
}

// from is the rotation of n pairs, from one on.
func (r rotation[T]) from(first, n int) rotation[T] {
	return rotation[T]{r.c1[first:][:n], r.c2[first:][:n], r.s1[first:][:n], r.s2[first:][:n]}
}

// rotatePairs rotates n pairs: elements from first on and from second on, a step apart.
func (w *worker[T]) rotatePairs(out, p unsafe.Pointer, first, second, step, n int, turn rotation[T]) {
	t := w.rotary.Q.DType
	size, length := int(t.Size()), (n-1)*step+1
	a, b := unsafe.Add(p, first*size), unsafe.Add(p, second*size)
	outA, outB := unsafe.Add(out, first*size), unsafe.Add(out, second*size)
	switch {
	case t == native[T]():
		turn.apply(unsafe.Slice((*T)(outA), length), unsafe.Slice((*T)(outB), length),
			unsafe.Slice((*T)(a), length), unsafe.Slice((*T)(b), length), step, nil)
	case step == 2:
		both := w.scratch(0, 0, 2*n)
		w.funcs.load[t](both, a)
		turn.apply(both, both[1:], both, both[1:], step, w.roundsProducts())
		w.funcs.store[t](outA, both, 1)
	default:
		x, y := w.scratch(0, 0, n), w.scratch(1, 0, n)
		w.funcs.load[t](x, a)
		w.funcs.load[t](y, b)
		turn.apply(x, y, x, y, step, w.roundsProducts())
		w.funcs.store[t](outA, x, 1)
		w.funcs.store[t](outB, y, 1)
	}
}

// roundsProducts is a function that rounds to the heads' type, or nil if products are not rounded.
func (w *worker[T]) roundsProducts() func(v T) T {
	if !w.rotary.Round || w.rotary.Q.DType == native[T]() {
		return nil
	}
	return w.rounding(true)
}

// rounding returns a function that rounds one number to the heads' type if round is set, and else does not.
func (w *worker[T]) rounding(round bool) func(v T) T {
	switch {
	case !round:
	case w.rotary.Q.DType == kernels.Float16:
		return func(v T) T { return T(widenFloat16(narrowFloat16(float32(v)))) }
	case w.rotary.Q.DType == kernels.BFloat16:
		return func(v T) T { return T(widenBFloat16(narrowBFloat16(float32(v)))) }
	}
	return func(v T) T { return v }
}

// apply rotates pairs of elements of a and b, which lie a step apart, as in outA and outB, which may
// be a and b.
// The conversions keep the compiler from fusing a product with the sum.
func (r rotation[T]) apply(outA, outB, a, b []T, step int, rounds func(v T) T) {
	for i, c1 := range r.c1 {
		j := i * step
		x, y := a[j], b[j]
		p1, q1, p2, q2 := T(x*c1), T(y*r.s1[i]), T(y*r.c2[i]), T(x*r.s2[i])
		if rounds != nil {
			p1, q1, p2, q2 = rounds(p1), rounds(q1), rounds(p2), rounds(q2)
		}
		outA[j], outB[j] = p1+q1, p2+q2
	}
}
