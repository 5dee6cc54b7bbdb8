package ops

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *rescaleGradient) spec() kernels.CrossEntropy {
	return kernels.CrossEntropy{
		X: a.X, DX: a.Y, DLoss: a.DLoss, Upstream: a.Upstream, OnePass: a.X.Data == a.Y.Data,
	}
}

func (a *rescaleGradient) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.Rescale(&s, workers())
}

func (a *rescaleGradient) request() request {
	return request{
		op: kernels.Rescale, Choice: a.Choice, x: a.X.DType, layout: layoutOf(true, a.X, a.Y),
		onePass: a.X.Data == a.Y.Data, m: a.X.Rows, n: a.X.Cols,
	}
}

func (a *rescaleGradient) cuda(c *Call, ordinal int32) error {
	if a.X.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, a.request())
	if err != nil {
		return err
	}
	defer k.finish()
	s := a.spec()
	args := k.crossEntropy(&s)
	args.Dloss = input(s.DLoss.Data)
	if s.OnePass {
		args.OnePass = 1
	}
	return k.launch(unsafe.Pointer(&args))
}
