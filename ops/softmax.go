package ops

import (
	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// SoftmaxForward computes y[i] = exp(x[i] - max x) / sum exp(x - max x) for each row. x and y are (M, N)
// of one dtype: float16, bfloat16 or float32, on the host also float64. y may be x.
func SoftmaxForward(c *Call, x, y *dlpack.Tensor) error {
	k := check{op: "softmax_forward"}
	mx := k.rows("x", x, anyFloat)
	my := k.rowsLike("y", y, only(mx.DType), "x", mx)
	k.output("x")
	k.chosen(c, kernels.SoftmaxForward)
	switch {
	case k.err != nil:
		return k.err
	case mx.Rows == 0:
		return nil
	case !k.device.Host():
		return c.orDefault().cudaSoftmaxForward(k.device.ID, mx, my)
	}
	cpu.SoftmaxForward(mx, my, workers())
	return nil
}

// SoftmaxBackward computes dx = (dy - sum(dy * y)) * y for each row. dy, y and dx are (M, N) of one dtype:
// float16, bfloat16 or float32, on the host also float64. dx may be dy or y.
func SoftmaxBackward(c *Call, dy, y, dx *dlpack.Tensor) error {
	k := check{op: "softmax_backward"}
	mdy := k.rows("dy", dy, anyFloat)
	my := k.rowsLike("y", y, only(mdy.DType), "dy", mdy)
	mdx := k.rowsLike("dx", dx, only(mdy.DType), "dy", mdy)
	k.output("dy", "y")
	k.chosen(c, kernels.SoftmaxBackward)
	switch {
	case k.err != nil:
		return k.err
	case mdy.Rows == 0:
		return nil
	case !k.device.Host():
		return c.orDefault().cudaSoftmaxBackward(k.device.ID, mdy, my, mdx)
	}
	cpu.SoftmaxBackward(mdy, my, mdx, workers())
	return nil
}
