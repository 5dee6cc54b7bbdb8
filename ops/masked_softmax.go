package ops

import (
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *maskedSoftmaxForward) refuse(k *check) {
	k.finite("scale", a.Scale)
	if a.Causal {
		a.Mask.Queries = k.secondLast()
	}
}

func (a *maskedSoftmaxBackward) refuse(k *check) {
	k.finite("scale", a.Scale)
	if a.Causal {
		a.Mask.Queries = k.secondLast()
	}
}

func (a *maskedSoftmaxForward) call() kernels.MaskedSoftmax {
	return kernels.MaskedSoftmax{
		X: a.X, Y: a.Y, Mask: a.Mask, Scale: a.Scale, Log: a.Log, MaskedZero: a.MaskedZero,
	}
}

func (a *maskedSoftmaxForward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.call()
	return cpu.MaskedSoftmaxForward(&s, workers())
}

func (a *maskedSoftmaxForward) cuda(c *Call, ordinal int32) error {
	s := a.call()
	return c.maskedSoftmax(ordinal, a.request(), &s, s.X, kernels.Matrix{}, s.Y)
}

func (a *maskedSoftmaxForward) request() request {
	return request{
		op: kernels.MaskedSoftmaxForward, Choice: a.Choice, x: a.X.DType, m: a.X.Rows, n: a.X.Cols,
		layout: maskedLayout(&a.Mask, a.X, a.Y),
	}
}

func (a *maskedSoftmaxBackward) call() kernels.MaskedSoftmax {
	return kernels.MaskedSoftmax{DY: a.DY, Y: a.Y, DX: a.DX, Mask: a.Mask, Scale: a.Scale, Log: a.Log}
}

func (a *maskedSoftmaxBackward) host() error {
	if a.DY.Rows == 0 {
		return nil
	}
	s := a.call()
	return cpu.MaskedSoftmaxBackward(&s, workers())
}

func (a *maskedSoftmaxBackward) cuda(c *Call, ordinal int32) error {
	s := a.call()
	return c.maskedSoftmax(ordinal, a.request(), &s, s.DY, s.Y, s.DX)
}

func (a *maskedSoftmaxBackward) request() request {
	r := request{
		op: kernels.MaskedSoftmaxBackward, Choice: a.Choice, x: a.DY.DType, m: a.DY.Rows, n: a.DY.Cols,
		layout: maskedLayout(&a.Mask, a.DY, a.Y, a.DX),
	}
	if a.Y.DType != a.DY.DType { // kernels that keep rows in registers keep y in dy's type
		r.layout = policy.MixedOffsets
	}
	return r
}

// maskedLayout is normLayout with a mask.
func maskedLayout(m *kernels.Mask, first kernels.Matrix, others ...kernels.Matrix) policy.Layout {
	if m.Present() && m.Column != 0 {
		size := m.DType.Size()
		unit := min(16, 16/first.DType.Size()*size)
		whole := int64(uintptr(m.Data))%unit == 0
		for _, stride := range m.Strides {
			whole = whole && stride*size%unit == 0
		}
		if !whole {
			return policy.MixedOffsets
		}
	}
	return normLayout(first, kernels.Vector{}, kernels.Vector{}, others...)
}

// maskedSoftmax launches forward or backward.
func (c *Call) maskedSoftmax(
	ordinal int32, r request, s *kernels.MaskedSoftmax, first, second, out kernels.Matrix,
) error {
	if first.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	m := &s.Mask
	args := kernels.MaskedSoftmaxArgs{
		Rows: k.rows(first, second, out), Mask: input(m.Data), MaskType: int32(m.DType),
		MaskColumn: int32(m.Column), MaskExtent0: m.Extents[0], MaskExtent1: m.Extents[1],
		MaskStride0: m.Strides[0], MaskStride1: m.Strides[1], MaskStride2: m.Strides[2],
		Queries: m.Queries, Scale: float32(s.Scale),
	}
	args.MaskInverse0, args.MaskInverse1 = 1/float64(m.Extents[0]), 1/float64(m.Extents[1])
	if m.Queries > 0 {
		args.QueriesInverse = 1 / float64(m.Queries)
	}
	if s.Log {
		args.Log = 1
	}
	if s.MaskedZero {
		args.MaskedZero = 1
	}
	return k.launch(unsafe.Pointer(&args))
}
