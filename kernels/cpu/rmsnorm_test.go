package cpu

import "github.com/gander-go/gander/kernels"

// RMSNormForward computes y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) for each row (Zhang and
// Sennrich, 2019). An absent weight means ones. rstd is written unless it is absent. y may be x.
func RMSNormForward(x kernels.Matrix, weight kernels.Vector, y kernels.Matrix, rstd kernels.Vector,
	eps float64, workers int) error {
	return NormForward(&kernels.Norm{X: x, Weight: weight, Y: y, Rstd: rstd, Eps: eps}, workers)
}

// RMSNormBackward computes dx = (g - h * mean(g * h)) * rstd for each row, with h = x * rstd and
// g = dout * weight. Unless dw is absent it also computes dw = sum over rows of dout * h. dx may be dout.
func RMSNormBackward(x kernels.Matrix, weight kernels.Vector, dout kernels.Matrix, rstd kernels.Vector,
	dx kernels.Matrix, dw kernels.Vector, workers int) error {
	return NormBackward(&kernels.Norm{X: x, Weight: weight, DOut: dout, Rstd: rstd, DX: dx, DW: dw}, workers)
}
