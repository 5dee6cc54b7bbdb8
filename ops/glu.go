package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// glu is a call of one of the four operators, whose operands have been checked. Those of a packed operator
// are the halves of its rows.
type glu struct {
	op kernels.Op
	kernels.GLU
	Choice
}

func (a *gluForward) glu() *glu {
	return &glu{kernels.GLUForward, kernels.GLU{
		Gate: a.Gate, Up: a.Up, Y: a.Y, Activation: activation(a.Gelu, a.Tanh), Round: a.RoundActivation,
	}, a.Choice}
}

func (a *gluBackward) glu() *glu {
	return &glu{kernels.GLUBackward, kernels.GLU{
		Gate: a.Gate, Up: a.Up, DY: a.DY, DGate: a.DGate, DUp: a.DUp,
		Activation: activation(a.Gelu, a.Tanh), Round: a.RoundActivation,
	}, a.Choice}
}

func (a *packedGLUForward) glu() *glu {
	gate, up := halves(a.X)
	return (&gluForward{gate, up, a.Y, a.Gelu, a.Tanh, a.RoundActivation, a.Choice}).glu()
}

func (a *packedGLUBackward) glu() *glu {
	gate, up := halves(a.X)
	dgate, dup := halves(a.DX)
	return (&gluBackward{gate, up, a.DY, dgate, dup, a.Gelu, a.Tanh, a.RoundActivation, a.Choice}).glu()
}

// activation is what the options name.
func activation(gelu, tanh bool) kernels.Activation {
	switch {
	case tanh:
		return kernels.GELUTanh
	case gelu:
		return kernels.GELU
	}
	return kernels.SiLU
}

// gelu refuses tanh without gelu.
func (k *check) gelu(gelu, tanh bool) {
	if tanh && !gelu && k.err == nil {
		k.fail(StatusOption, "tanh is set without gelu, expected both: SiLU has no approximation; set gelu, "+
			"or leave tanh out")
	}
}

func (a *gluForward) refuse(k *check)        { k.gelu(a.Gelu, a.Tanh) }
func (a *gluBackward) refuse(k *check)       { k.gelu(a.Gelu, a.Tanh) }
func (a *packedGLUForward) refuse(k *check)  { k.gelu(a.Gelu, a.Tanh); k.evenColumns(a.X) }
func (a *packedGLUBackward) refuse(k *check) { k.gelu(a.Gelu, a.Tanh); k.evenColumns(a.X) }

func (a *gluForward) host() error        { return a.glu().host() }
func (a *gluBackward) host() error       { return a.glu().host() }
func (a *packedGLUForward) host() error  { return a.glu().host() }
func (a *packedGLUBackward) host() error { return a.glu().host() }

func (a *gluForward) cuda(c *Call, ordinal int32) error        { return a.glu().cuda(c, ordinal) }
func (a *gluBackward) cuda(c *Call, ordinal int32) error       { return a.glu().cuda(c, ordinal) }
func (a *packedGLUForward) cuda(c *Call, ordinal int32) error  { return a.glu().cuda(c, ordinal) }
func (a *packedGLUBackward) cuda(c *Call, ordinal int32) error { return a.glu().cuda(c, ordinal) }

// evenColumns refuses rows that have no halves.
func (k *check) evenColumns(x kernels.Matrix) {
	if k.err == nil && x.Cols%2 != 0 {
		k.fail(StatusShape, "x has %d columns, expected an even number: gates and what they multiply", x.Cols)
	}
}

// halves are the two halves of each row.
func halves(m kernels.Matrix) (first, second kernels.Matrix) {
	m.Cols /= 2
	first, second = m, m
	if m.Data != nil {
		second.Data = unsafe.Add(m.Data, m.Cols*m.DType.Size())
	}
	return first, second
}

func (g *glu) host() error {
	if g.Gate.Rows == 0 {
		return nil
	}
	g.joinRows()
	if g.op == kernels.GLUForward {
		return cpu.GLUForward(&g.GLU, workers())
	}
	return cpu.GLUBackward(&g.GLU, workers())
}

func (g *glu) cuda(c *Call, ordinal int32) error {
	if g.Gate.Rows == 0 {
		return nil
	}
	g.joinRows()
	k, err := c.start(ordinal, g.request())
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.GLUArgs{
		Rows: k.rows(g.Gate, g.Up, g.out()), C: input(g.DY.Data), Z: output(g.DUp.Data),
		CStride: g.DY.Stride, ZStride: g.DUp.Stride, Activation: int32(g.Activation),
		RowThreads: k.plan.rowThreads, RowsPerCTA: k.plan.rowsPerCTA,
		InverseRowThreads: 65536/k.plan.rowThreads + 1,
	}
	if g.Round {
		args.RoundActivation = 1
	}
	return k.launch(unsafe.Pointer(&args))
}

// out is what the kernels take as the output of rows; backward has dup beside it.
func (g *glu) out() kernels.Matrix {
	if g.op == kernels.GLUForward {
		return g.Y
	}
	return g.DGate
}

func (g *glu) request() request {
	others := [...]kernels.Matrix{g.Up, g.out(), g.DY, g.DUp}
	count := len(others)
	if g.op == kernels.GLUForward {
		count = 2
	}
	return request{
		op: g.op, Choice: g.Choice, x: g.Gate.DType, layout: layoutOf(true, g.Gate, others[:count]...),
		m: g.Gate.Rows, n: g.Gate.Cols,
	}
}

// joinRows makes one row of matrices whose rows all follow each other without a gap. Then their length, and
// so the alignment of rows, does not matter.
func (g *glu) joinRows() {
	all := [...]*kernels.Matrix{&g.Gate, &g.Up, &g.Y, &g.DY, &g.DGate, &g.DUp}
	for _, m := range all {
		if m.Data != nil && m.Rows > 1 && m.Stride != m.Cols {
			return
		}
	}
	for _, m := range all {
		m.Cols, m.Rows, m.Stride = m.Cols*m.Rows, min(m.Rows, 1), m.Cols*m.Rows
	}
}
