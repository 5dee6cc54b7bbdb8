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
	act := activationOf[T](w.glu.Activation)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		y := w.output(2, &w.y, row, j, n)
		up := w.read(1, &w.dy, row, j, n)
		for i, gate := range w.read(0, &w.x, row, j, n) {
			value, _ := act(gate)
			y[i] = roundedIf(w.glu.Round, w.x.DType, value) * up[i]
		}
		w.write(&w.y, row, j, y)
	}
}

func (gluBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, _ rowStats) {
	act := activationOf[T](w.glu.Activation)
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		gates, ups, dy := w.read(0, &w.x, row, j, n), w.read(1, &w.y, row, j, n), w.read(2, &w.dy, row, j, n)
		dgate, dup := w.output(0, &w.dx, row, j, n), w.output(1, &w.glu.DUp, row, j, n)
		for i, gate := range gates {
			up, dy := ups[i], dy[i]
			value, derivative := act(gate)
			dgate[i] = roundedIf(w.glu.Round, w.x.DType, dy*up) * derivative
			dup[i] = dy * roundedIf(w.glu.Round, w.x.DType, value)
		}
		w.write(&w.dx, row, j, dgate)
		w.write(&w.glu.DUp, row, j, dup)
	}
}

// roundedIf rounds v to a type of memory.
func roundedIf[T float](round bool, t kernels.DType, v T) T {
	switch {
	case !round:
	case t == kernels.Float16:
		return T(widenFloat16(narrowFloat16(float32(v))))
	case t == kernels.BFloat16:
		return T(widenBFloat16(narrowBFloat16(float32(v))))
	}
	return v
}

// activationOf returns a function that returns act(x) and its derivative.
func activationOf[T float](a kernels.Activation) func(x T) (value, derivative T) {
	switch a {
	case kernels.GELU:
		return gelu[T]
	case kernels.GELUTanh:
		return geluTanh[T]
	}
	return silu[T]
}

func expOf[T float](x T) T {
	if unsafe.Sizeof(x) == 4 {
		return T(exp32(float32(x)))
	}
	return T(math.Exp(float64(x)))
}

func sigmoid[T float](x T) T { return 1 / (1 + expOf(-x)) }

func silu[T float](x T) (value, derivative T) {
	s := sigmoid(x)
	return x * s, s * (1 + x*(1-s))
}

// gelu has the share of the normal distribution below x as half of erfc, which keeps its digits where it is
// small.
func gelu[T float](x T) (value, derivative T) {
	below := math.Erfc(-float64(x)*(1/math.Sqrt2)) / 2
	density := math.Exp(-float64(x)*float64(x)/2) * (1 / math.Sqrt(2*math.Pi))
	return T(float64(x) * below), T(below + float64(x)*density)
}

// geluTanh is gelu with 0.5 (1 + tanh(u)) for the distribution. That is sigmoid(2 u), which keeps its digits
// where tanh(u) is nearly -1.
func geluTanh[T float](x T) (value, derivative T) {
	const twice, cubic = 2 * 0.797884560802865356, 0.044715 // 2 sqrt(2 / pi)
	s := sigmoid(twice * (x + cubic*x*x*x))
	return x * s, s * (1 + x*(1-s)*twice*(1+3*cubic*x*x))
}
