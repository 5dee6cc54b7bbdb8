package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// MaskedSoftmaxForward computes y = exp(h - max h) / sum exp(h - max h) for each row of h = x * scale + mask,
// or with Log y = h - max h - log(sum exp(h - max h)). Masked elements are left out, whatever they are: their
// y is 0, or with Log -inf. A row that is masked whole becomes NaN, or with MaskedZero zeros (-inf with Log).
// A row becomes NaN if those of its elements that take part have a NaN or +inf, or are all -inf. y may be x.
func MaskedSoftmaxForward(s *kernels.MaskedSoftmax, workers int) error {
	o := operands{x: s.X, y: s.Y, reuseUpTo: longRow, exponentials: true}
	return run(&o, more{masked: s}, workers, maskedForward[float32]{}, maskedForward[float64]{})
}

// MaskedSoftmaxBackward computes dx = scale * (dy - sum(dy * y)) * y for each row, or with Log dx = scale *
// (dy - exp(y) * sum(dy)). The sums are over the elements that take part. dx of a masked element is 0,
// whatever dy and y are there. dx may be dy or y.
func MaskedSoftmaxBackward(s *kernels.MaskedSoftmax, workers int) error {
	o := operands{x: s.Y, dy: s.DY, dx: s.DX, exponentials: s.Log}
	return run(&o, more{masked: s}, workers, maskedBackward[float32]{}, maskedBackward[float64]{})
}

// addends returns what is added to n elements of a row from column j on: -inf where an element is masked.
// They are in scratch space 2. It returns nil if nothing is added there.
func (w *worker[T]) addends(row, j, n int) []T {
	m := &w.masked.Mask
	open := n // elements before those that the causal mask leaves out
	if m.Queries > 0 {
		open = max(0, min(n, row%int(m.Queries)+1-j))
	}
	if !m.Present() && open == n {
		return nil
	}
	add := w.scratch(2, 0, n)
	masked := T(math.Inf(-1))
	switch {
	case !m.Present():
		clear(add[:open])
	case m.Column == 0:
		one := scalarAddend(m.DType, maskAt(m, row, 0))
		for i := range add[:open] {
			add[i] = T(one)
		}
	case m.DType == kernels.Bool || m.DType == kernels.Uint8:
		for i, taken := range unsafe.Slice((*byte)(maskAt(m, row, j)), open) {
			add[i] = masked
			if taken != 0 {
				add[i] = 0
			}
		}
	case m.DType == native[T]():
		copy(add, unsafe.Slice((*T)(maskAt(m, row, j)), open))
	default:
		w.funcs.load[m.DType](add[:open], maskAt(m, row, j))
	}
	for i := open; i < n; i++ {
		add[i] = masked
	}
	return add
}

// maskAt returns the address of the mask's element for column j of a row.
func maskAt(m *kernels.Mask, row, j int) unsafe.Pointer {
	r, offset := int64(row), int64(j)*m.Column
	for i, extent := range m.Extents {
		offset += r % extent * m.Strides[i]
		r /= extent
	}
	return unsafe.Add(m.Data, (offset+r*m.Strides[2])*m.DType.Size())
}

// scalarAddend is the mask's element at p as a number that is added.
func scalarAddend(t kernels.DType, p unsafe.Pointer) float64 {
	if t != kernels.Bool && t != kernels.Uint8 {
		return scalar(t, p)
	}
	if *(*byte)(p) == 0 {
		return math.Inf(-1)
	}
	return 0
}

type maskedForward[T float] struct{}

func (maskedForward[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (maskedForward[T]) run(c *call[T]) { c.runRows() }

// scores writes h of n elements of a row to scratch space 0: -inf where they are masked. any tells whether an
// element takes part.
func (w *worker[T]) scores(row, j, n int) (h []T, any bool) {
	h = w.scratch(0, j, n)
	x, add, scale := w.read(0, &w.x, row, j, n), w.addends(row, j, n), T(w.masked.Scale)
	if add == nil {
		for i, v := range x {
			h[i] = v * scale
		}
		return h, true
	}
	masked := T(math.Inf(-1))
	for i, a := range add {
		if a == masked {
			h[i] = masked
			continue
		}
		h[i] = x[i]*scale + a
		any = true
	}
	return h, any
}

// firstPass: max is the block's maximum, sum its sum of exp(h - max), and mean is 1 if any of its elements
// takes part. With w.reuse it leaves for the second pass exp(h - max), or with Log h.
func (maskedForward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	for j := lo; j < hi; j += block {
		h, any := w.scores(row, j, min(block, hi-j))
		high := w.funcs.max(h)
		p := partial{max: float64(high)}
		if any {
			p.mean = 1
		}
		exps := h
		if w.masked.Log {
			exps = w.scratch(1, 0, len(h))
		}
		p.sum = w.funcs.exp(exps, h, finiteMax(high))
		partials[j/block] = p
	}
}

// combine: a is the maximum. b is 1 / sum, or with Log the logarithm of the sum.
func (maskedForward[T]) combine(w *worker[T], _ int, partials []partial) rowStats {
	any := false
	for _, p := range partials {
		any = any || p.mean != 0
	}
	high, sum := logSumExp(partials)
	switch {
	case !any && w.masked.MaskedZero:
		return rowStats{}
	case !any:
		return rowStats{b: math.NaN()}
	case w.masked.Log:
		return rowStats{a: high, b: math.Log(sum)}
	}
	return rowStats{a: high, b: 1 / sum}
}

func (maskedForward[T]) secondPass(w *worker[T], row, lo, hi int, partials []partial, s rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		h := w.scratch(0, j, n)
		if !w.reuse {
			h, _ = w.scores(row, j, n)
		}
		if w.masked.Log {
			w.funcs.subtract(h, h, T(s.a))
			w.funcs.subtract(h, h, T(s.b))
			w.storeRow(&w.y, row, j, h, 1)
			continue
		}
		high := partials[j/block].max
		if !w.reuse {
			w.funcs.exp(h, h, finiteMax(T(high)))
		}
		factor := s.b
		if factor != 0 { // of a row that is masked whole, whose maximum is no number to subtract from
			factor *= expDiff(high, s.a)
		}
		w.storeRow(&w.y, row, j, h, T(factor))
	}
}

// storeRow stores v * c to a row from column j on.
func (w *worker[T]) storeRow(m *kernels.Matrix, row, j int, v []T, c T) {
	w.funcs.store[m.DType](rowAt(m, row, j), v, c)
}

type maskedBackward[T float] struct{}

func (maskedBackward[T]) plan(c *call[T], workers int) { c.planRows(workers) }

func (maskedBackward[T]) run(c *call[T]) { c.runRows() }

// firstPass: sum is the block's sum of dy * y, or with Log of dy.
func (maskedBackward[T]) firstPass(w *worker[T], row, lo, hi int, partials []partial) {
	masked := T(math.Inf(-1))
	for j := lo; j < hi; j += block {
		n, sum := min(block, hi-j), 0.0
		dy, add := w.read(0, &w.dy, row, j, n), w.addends(row, j, n)
		if w.masked.Log {
			for i, v := range dy {
				if add == nil || add[i] != masked {
					sum += float64(v)
				}
			}
		} else {
			y := w.read(1, &w.x, row, j, n)
			for i, v := range dy {
				if add == nil || add[i] != masked {
					sum += float64(v) * float64(y[i])
				}
			}
		}
		partials[j/block].sum = sum
	}
}

func (maskedBackward[T]) combine(_ *worker[T], _ int, partials []partial) rowStats {
	return rowStats{a: total(partials)}
}

func (maskedBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, s rowStats) {
	masked, scale := T(math.Inf(-1)), T(w.masked.Scale)
	d, rest := splitFloat[T](s.a)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		dy, y, add := w.read(0, &w.dy, row, j, n), w.read(1, &w.x, row, j, n), w.addends(row, j, n)
		if w.masked.Log {
			exps := w.scratch(1, 0, n)
			w.funcs.exp(exps, y, 0)
			y = exps
		}
		dx := w.output(0, &w.dx, row, j, n)
		for i, v := range dy {
			switch {
			case add != nil && add[i] == masked:
				dx[i] = 0
			case w.masked.Log:
				dx[i] = (v - y[i]*d - y[i]*rest) * scale
			default:
				dx[i] = ((v - d) - rest) * y[i] * scale
			}
		}
		w.write(&w.dx, row, j, dx)
	}
}
