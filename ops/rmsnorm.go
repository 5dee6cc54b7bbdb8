package ops

import (
	"math"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

const perRow = "one for each row of x"

// RMSNormForward computes y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) for each row
// (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). x and y are (M, N); weight (N) and
// rstd (M elements) are contiguous and may be nil. x, weight and y may each be float16, bfloat16 or
// float32; on the host all may be float64. rstd is float32, or float64 with a float64 x. y may be x where
// their dtypes agree.
func RMSNormForward(c *Call, x, weight, y, rstd *dlpack.Tensor, eps float64) error {
	k := check{op: "rmsnorm_forward"}
	mx := k.rows("x", x, anyFloat)
	var vw, vr kernels.Vector
	if weight != nil {
		vw = k.weights("weight", weight, companion(mx.DType), mx.Cols)
	}
	my := k.rowsLike("y", y, companion(mx.DType), "x", mx)
	k.output("x")
	if rstd != nil {
		vr = k.compact("rstd", rstd, statistic(mx.DType), mx.Rows, perRow)
		k.output()
	}
	if !(eps >= 0) || math.IsInf(eps, 1) {
		k.fail(StatusOption, "eps is %v, expected a finite number of 0 or more", eps)
	}
	k.chosen(c, kernels.RMSNormForward)
	switch {
	case k.err != nil:
		return k.err
	case mx.Rows == 0:
		return nil
	case !k.device.Host():
		return c.orDefault().cudaRMSNormForward(k.device.ID, mx, vw, my, vr, eps)
	}
	cpu.RMSNormForward(mx, vw, my, vr, eps, workers())
	return nil
}

// RMSNormBackward computes, with h = x * rstd and g = dout * weight, dx = (g - h * mean(g * h)) * rstd for
// each row and dw = the sum over rows of dout * h, accumulated in float32 in a fixed order. x, dout and dx
// are (M, N), rstd has M elements as forward wrote them, weight and dw are (N) and may be nil, dw must be
// without a weight. dx has the dtype of x and dw that of weight; otherwise dtypes are as in forward. dx may
// be dout where their dtypes agree.
func RMSNormBackward(c *Call, x, weight, dout, rstd, dx, dw *dlpack.Tensor) error {
	k := check{op: "rmsnorm_backward"}
	mx := k.rows("x", x, anyFloat)
	var vw, vdw kernels.Vector
	if weight != nil {
		vw = k.weights("weight", weight, companion(mx.DType), mx.Cols)
	}
	mdout := k.rowsLike("dout", dout, companion(mx.DType), "x", mx)
	vr := k.compact("rstd", rstd, statistic(mx.DType), mx.Rows, perRow)
	mdx := k.rowsLike("dx", dx, only(mx.DType), "x", mx)
	k.output("dout")
	switch {
	case dw != nil && weight == nil:
		k.fail(StatusOption, "dw is given without a weight, expected NULL; pass the weight or drop dw")
	case dw != nil:
		vdw = k.weights("dw", dw, only(vw.DType), mx.Cols)
		k.output()
	}
	k.chosen(c, kernels.RMSNormBackward)
	switch {
	case k.err != nil:
		return k.err
	case mx.Rows == 0 && !vdw.Present():
		return nil
	case !k.device.Host():
		return c.orDefault().cudaRMSNormBackward(k.device.ID, mx, vw, mdout, vr, mdx, vdw)
	}
	cpu.RMSNormBackward(mx, vw, mdout, vr, mdx, vdw, workers())
	return nil
}
