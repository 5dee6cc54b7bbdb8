package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

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

func (a *gluForward) refuse(k *check)  { k.gelu(a.Gelu, a.Tanh) }
func (a *gluBackward) refuse(k *check) { k.gelu(a.Gelu, a.Tanh) }

func (a *packedGLUForward) refuse(k *check) {
	k.gelu(a.Gelu, a.Tanh)
	k.evenColumns(a.X)
}

func (a *packedGLUBackward) refuse(k *check) {
	k.gelu(a.Gelu, a.Tanh)
	k.evenColumns(a.X)
}

// evenColumns refuses rows that have no halves.
func (k *check) evenColumns(x kernels.Matrix) {
	if k.err == nil && x.Cols%2 != 0 {
		k.fail(StatusShape, "x has %d columns, expected an even number: gates and what they multiply", x.Cols)
	}
}

func (a *gluForward) call() kernels.GLU {
	return kernels.GLU{
		Gate: a.Gate, Up: a.Up, Y: a.Y, Activation: activation(a.Gelu, a.Tanh), Round: a.RoundActivation,
	}
}

func (a *gluBackward) call() kernels.GLU {
	return kernels.GLU{
		Gate: a.Gate, Up: a.Up, DY: a.DY, DGate: a.DGate, DUp: a.DUp, Activation: activation(a.Gelu, a.Tanh),
		Round: a.RoundActivation,
	}
}

func (a *packedGLUForward) call() kernels.GLU {
	gate, up := halves(a.X)
	return kernels.GLU{
		Gate: gate, Up: up, Y: a.Y, Activation: activation(a.Gelu, a.Tanh), Round: a.RoundActivation,
	}
}

func (a *packedGLUBackward) call() kernels.GLU {
	gate, up := halves(a.X)
	dgate, dup := halves(a.DX)
	return kernels.GLU{
		Gate: gate, Up: up, DY: a.DY, DGate: dgate, DUp: dup, Activation: activation(a.Gelu, a.Tanh),
		Round: a.RoundActivation,
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

func (a *gluForward) host() error        { return gluOnHost(a.call(), cpu.GLUForward) }
func (a *gluBackward) host() error       { return gluOnHost(a.call(), cpu.GLUBackward) }
func (a *packedGLUForward) host() error  { return gluOnHost(a.call(), cpu.GLUForward) }
func (a *packedGLUBackward) host() error { return gluOnHost(a.call(), cpu.GLUBackward) }

func gluOnHost(g kernels.GLU, run func(*kernels.GLU, int) error) error {
	if g.Gate.Rows == 0 {
		return nil
	}
	joinRows(&g.Gate, &g.Up, &g.Y, &g.DY, &g.DGate, &g.DUp)
	return run(&g, workers())
}

func (a *gluForward) cuda(c *Call, ordinal int32) error {
	return c.glu(ordinal, kernels.GLUForward, a.Choice, a.call())
}

func (a *gluBackward) cuda(c *Call, ordinal int32) error {
	return c.glu(ordinal, kernels.GLUBackward, a.Choice, a.call())
}

func (a *packedGLUForward) cuda(c *Call, ordinal int32) error {
	return c.glu(ordinal, kernels.GLUForward, a.Choice, a.call())
}

func (a *packedGLUBackward) cuda(c *Call, ordinal int32) error {
	return c.glu(ordinal, kernels.GLUBackward, a.Choice, a.call())
}

// glu launches forward or backward.
func (c *Call) glu(ordinal int32, op kernels.Op, choice Choice, g kernels.GLU) error {
	if g.Gate.Rows == 0 {
		return nil
	}
	y := &g.Y
	if op == kernels.GLUBackward {
		y = &g.DGate
	}
	joinRows(&g.Gate, &g.Up, y, &g.DY, &g.DUp)
	layout := layoutOf(true, g.Gate, g.Up, *y)
	if op == kernels.GLUBackward {
		layout = layoutOf(true, g.Gate, g.Up, *y, g.DY, g.DUp)
	}
	r := request{op: op, Choice: choice, x: g.Gate.DType, layout: layout, m: g.Gate.Rows, n: g.Gate.Cols}
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.GLUArgs{
		Rows: k.rows(g.Gate, g.Up, *y), C: input(g.DY.Data), Z: output(g.DUp.Data),
		CStride: g.DY.Stride, ZStride: g.DUp.Stride, Activation: int32(g.Activation),
		RowThreads: k.plan.rowThreads, RowsPerCTA: k.plan.rowsPerCTA,
		InverseRowThreads: 65536/k.plan.rowThreads + 1,
	}
	if g.Round {
		args.RoundActivation = 1
	}
	return k.launch(unsafe.Pointer(&args))
}

// joinRows makes one row of matrices whose rows all follow each other without a gap. Then their length, and
// so the alignment of rows, does not matter.
func joinRows(all ...*kernels.Matrix) {
	for _, m := range all {
		if m.Data != nil && m.Rows > 1 && m.Stride != m.Cols {
			return
		}
	}
	for _, m := range all {
		m.Cols, m.Rows, m.Stride = m.Cols*m.Rows, min(m.Rows, 1), m.Cols*m.Rows
	}
}
