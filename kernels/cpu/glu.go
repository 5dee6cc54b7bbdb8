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
	act, rounds := activationOf[T](w.glu.Activation), w.rounding()
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		y := w.output(2, &w.y, row, j, n)
		up := w.read(1, &w.dy, row, j, n)
		for i, gate := range w.read(0, &w.x, row, j, n) {
			value, _ := act(float64(gate))
			y[i] = T(rounds(value) * float64(up[i]))
		}
		w.write(&w.y, row, j, y)
	}
}

func (gluBackward[T]) secondPass(w *worker[T], row, lo, hi int, _ []partial, _ rowStats) {
	act, rounds := activationOf[T](w.glu.Activation), w.rounding()
	for j := lo; j < hi; j += block {
		n := min(block, hi-j)
		gates, ups, dy := w.read(0, &w.x, row, j, n), w.read(1, &w.y, row, j, n), w.read(2, &w.dy, row, j, n)
		dgate, dup := w.output(0, &w.dx, row, j, n), w.output(1, &w.glu.DUp, row, j, n)
		for i, gate := range gates {
			up, dy := float64(ups[i]), float64(dy[i])
			value, derivative := act(float64(gate))
			dgate[i] = T(rounds(dy*up) * derivative)
			dup[i] = T(dy * rounds(value))
		}
		w.write(&w.dx, row, j, dgate)
		w.write(&w.glu.DUp, row, j, dup)
	}
}

// rounding returns a function that rounds to the rows' type, or with no option to do so does not.
func (c *call[T]) rounding() func(v float64) float64 {
	switch {
	case !c.glu.Round:
	case c.x.DType == kernels.Float16:
		return func(v float64) float64 { return float64(widenFloat16(narrowFloat16(float32(v)))) }
	case c.x.DType == kernels.BFloat16:
		return func(v float64) float64 { return float64(widenBFloat16(narrowBFloat16(float32(v)))) }
	case c.x.DType == kernels.Float32:
		return func(v float64) float64 { return float64(float32(v)) }
	}
	return func(v float64) float64 { return v }
}

// activationOf returns a function that returns act(x) and its derivative. What follows an exponential in T is
// computed in float64, so that it rounds nothing.
func activationOf[T float](a kernels.Activation) func(x float64) (value, derivative float64) {
	switch a {
	case kernels.GELU:
		return gelu
	case kernels.GELUTanh:
		return geluTanh[T]
	}
	return silu[T]
}

// expOf is exp(x), in T. In float32 it has the digits that x loses when it is rounded to float32.
func expOf[T float](x float64) float64 {
	if unsafe.Sizeof(T(0)) == 8 {
		return math.Exp(x)
	}
	rounded := float32(x)
	e := float64(exp32(rounded))
	if e == 0 || e > math.MaxFloat32 {
		return e
	}
	return e + e*(x-float64(rounded))
}

// remainder is 1 - s for the sigmoid s = 1 / (1 + e), with the digits that s loses where it is nearly 1.
func remainder(s, e float64) float64 {
	if e < 1 {
		return s * e
	}
	return 1 - s
}

func silu[T float](x float64) (value, derivative float64) {
	e := expOf[T](-x)
	s := 1 / (1 + e)
	return x / (1 + e), s * (1 + x*remainder(s, e))
}

// gelu has the share of the normal distribution below x as half of erfc, which keeps its digits where it is
// small.
func gelu(x float64) (value, derivative float64) {
	below := math.Erfc(-x*(1/math.Sqrt2)) / 2
	density := math.Exp(-x*x/2) * (1 / math.Sqrt(2*math.Pi))
	return x * below, below + x*density
}

// geluTanh is gelu with 0.5 (1 + tanh(u)) for the distribution. That is the sigmoid of 2 u, which keeps its
// digits where tanh(u) is nearly -1.
func geluTanh[T float](x float64) (value, derivative float64) {
	const twice, cubic = 2 * 0.797884560802865356, 0.044715 // 2 sqrt(2 / pi)
	e := expOf[T](-twice * x * (1 + cubic*x*x))
	s := 1 / (1 + e)
	return x / (1 + e), s * (1 + x*remainder(s, e)*twice*(1+3*cubic*x*x))
}
