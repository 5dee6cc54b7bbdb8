package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// GLUForward computes y = act(gate) * up for each element. y may be gate or up.
func GLUForward(g *kernels.GLU, workers int) error {
	o := operands{x: g.Gate, dy: g.Up, y: g.Y, exponentials: true}
	return run(&o, more{glu: g}, workers, gluForward[float32]{}, gluForward[float64]{})
}

// GLUBackward computes dgate = dy * up * act'(gate) and dup = dy * act(gate) for each element. dgate may be
// gate, and dup may be up.
func GLUBackward(g *kernels.GLU, workers int) error {
	o := operands{x: g.Gate, y: g.Up, dy: g.DY, dx: g.DGate, exponentials: true}
	return run(&o, more{glu: g}, workers, gluBackward[float32]{}, gluBackward[float64]{})
}

type (
	gluForward[T float]  struct{ elementwise[T] }
	gluBackward[T float] struct{ elementwise[T] }
)

// elementwise is the first pass of operators that reduce nothing.
type elementwise[T float] struct{}

func (elementwise[T]) plan(c *call[T], workers int)                   { c.planRows(workers) }
func (elementwise[T]) run(c *call[T])                                 { c.runRows() }
func (elementwise[T]) firstPass(*worker[T], int, int, int, []partial) {}
func (elementwise[T]) combine(*worker[T], int, []partial) rowStats    { return rowStats{} }

func (gluForward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, _ rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		gates, up := w.read(0, &w.x, row, j, n), w.read(1, &w.dy, row, j, n)
		value, y := w.scratch(2, j, n), w.output(2, &w.y, row, j, n)
		w.activate(value, nil, gates)
		w.multiply(y, value, up)
		w.write(&w.y, row, j, y)
	}
}

// secondPass has each result in place of what is not read any more.
func (gluBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, _ rowStats) {
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		gates, up, dy := w.read(0, &w.x, row, j, n), w.read(1, &w.y, row, j, n), w.read(2, &w.dy, row, j, n)
		value, slope := w.rounded[w.blockRoom:][:n], w.scratch(0, j, n)
		w.activate(value, slope, gates)
		dgate, dup := w.output(0, &w.dx, row, j, n), w.output(1, &w.glu.DUp, row, j, n)
		w.multiply(dup, dy, up)
		w.roundIntermediate(dup)
		w.multiply(dgate, dup, slope)
		w.multiply(dup, dy, value)
		w.write(&w.dx, row, j, dgate)
		w.write(&w.glu.DUp, row, j, dup)
	}
}

func (w *worker[T]) multiply(dst, x, y []T) { w.funcs.multiply(dst, x, y, 1) }

// activate computes act(x), which with the option is rounded to the rows' type, and its derivative, unless
// slope is nil.
func (w *worker[T]) activate(value, slope, x []T) {
	switch w.glu.Activation {
	case kernels.GELU:
		w.funcs.gelu(value, slope, x)
	case kernels.GELUTanh:
		const twice, cubic = 2 * 0.797884560802865356, 0.044715 // 2 sqrt(2 / pi)
		// 0.5 (1 + tanh(u)) is the sigmoid of 2 u, which keeps its digits where tanh(u) is nearly -1.
		w.funcs.gate(value, slope, x, twice, twice*cubic)
	default:
		w.funcs.gate(value, slope, x, 1, 0)
	}
	w.roundIntermediate(value)
}

// roundIntermediate rounds to the rows' type, if the option asks for it.
func (w *worker[T]) roundIntermediate(x []T) {
	if w.glu.Round && w.x.DType != native[T]() {
		w.roundTo(x, x, 1, w.x.DType)
	}
}

// farSquare is the largest square that gate takes: a sigmoid of more is 0 or 1 already, and products of an
// infinity and 0 would be NaN.
const farSquare = 0x1p100

// gate is computed in float64, except for the exponential in T, so that it rounds nothing else. The
// exponential of -|v| is at most 1, and both s = sigmoid(v) and 1 - s keep all their digits.
func gate[T float](value, slope, x []T, a, b T) {
	for i, v := range x {
		x, c, d := float64(v), float64(a), float64(b)
		square := min(x*x, farSquare)
		s, rest := sigmoid[T](x * (c + d*square))
		value[i] = T(x * s)
		if slope != nil {
			slope[i] = T(s + s*rest*x*(c+3*d*square))
		}
	}
}

// sigmoid is s = 1 / (1 + exp(-v)), and 1 - s.
func sigmoid[T float](v float64) (s, rest float64) {
	e := expOf[T](-math.Abs(v))
	s, rest = 1/(1+e), e/(1+e)
	if v < 0 {
		return rest, s
	}
	return s, rest
}

// expOf is exp(x), in T. In float32 it has the digits that x loses when it is rounded to float32.
func expOf[T float](x float64) float64 {
	if unsafe.Sizeof(T(0)) == 8 {
		return math.Exp(x)
	}
	rounded := float32(x)
	e := float64(exp32(rounded))
	if e == 0 {
		return 0
	}
	return e + e*(x-float64(rounded))
}

const densityAt0 = 0.398942280401432678 // of the normal distribution: 1 / sqrt(2 pi)

// gelu has the share of the normal distribution below x as half of erfc, which keeps its digits where it is
// small.
func gelu[T float](value, slope, x []T) {
	for i, v := range x {
		x := float64(v)
		below := math.Erfc(-x*(1/math.Sqrt2)) / 2
		value[i] = T(x * below)
		if slope != nil {
			slope[i] = T(below + x*math.Exp(-x*x/2)*densityAt0)
		}
	}
}
