package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *softmaxForward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	return cpu.SoftmaxForward(a.X, a.Y, workers())
}

func (a *softmaxForward) cuda(c *Call, ordinal int32) error {
	return c.softmax(ordinal, a.request(), a.X, kernels.Matrix{}, a.Y)
}

func (a *softmaxForward) request() request {
	return request{
		op: kernels.SoftmaxForward, Choice: a.Choice, x: a.X.DType, layout: layoutOf(true, a.X, a.Y),
		m: a.X.Rows, n: a.X.Cols,
	}
}

func (a *softmaxBackward) host() error {
	if a.DY.Rows == 0 {
		return nil
	}
	return cpu.SoftmaxBackward(a.DY, a.Y, a.DX, workers())
}

func (a *softmaxBackward) cuda(c *Call, ordinal int32) error {
	return c.softmax(ordinal, a.request(), a.DY, a.Y, a.DX)
}

func (a *softmaxBackward) request() request {
	return request{
		op: kernels.SoftmaxBackward, Choice: a.Choice, x: a.DY.DType, layout: layoutOf(true, a.DY, a.Y, a.DX),
		m: a.DY.Rows, n: a.DY.Cols,
	}
}

// softmax launches forward or backward.
func (c *Call) softmax(ordinal int32, r request, first, second, out kernels.Matrix) error {
	if first.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.SoftmaxArgs{Rows: k.rows(first, second, out)}
	return k.launch(unsafe.Pointer(&args))
}
