package ops_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// norm has the operands of a norm of (5, 24) float32 with everything that it can read and write.
type norm struct {
	x, weight, bias, residual, y, sum, mean, rstd *dlpack.Tensor
	dout, dsum, dx, dresidual, dw, db             *dlpack.Tensor
	eps, offset                                   float64
	algorithm                                     ops.Algorithm
}

func newNorm(t testing.TB) *norm {
	r := rand.New(rand.NewPCG(1, 2))
	filled := func(dims ...int64) *dlpack.Tensor {
		v := empty(t, dlpack.Float32, dims...)
		require.NoError(t, v.SetFloat64s(random(t, r, dlpack.Float32, v.Len())))
		return v
	}
	rows := func() *dlpack.Tensor { return filled(5, 24) }
	return &norm{x: rows(), weight: filled(24), bias: filled(24), residual: rows(), y: rows(), sum: rows(),
		mean: filled(5), rstd: filled(5), dout: rows(), dsum: rows(), dx: rows(), dresidual: rows(),
		dw: filled(24), db: filled(24), eps: 1e-6}
}

func (n *norm) all() []*dlpack.Tensor {
	return []*dlpack.Tensor{n.x, n.weight, n.bias, n.residual, n.y, n.sum, n.mean, n.rstd, n.dout, n.dsum, n.dx,
		n.dresidual, n.dw, n.db}
}

var norms = map[string]func(n *norm) error{
	"rmsnorm_forward": func(n *norm) error {
		return ops.RMSNormForward{X: n.x, Weight: n.weight, Bias: n.bias, Residual: n.residual, Y: n.y,
			ResidualOut: n.sum, Rstd: n.rstd, Eps: ops.Some(n.eps), WeightOffset: n.offset,
			Algorithm: n.algorithm}.Run(nil)
	},
	"rmsnorm_backward": func(n *norm) error {
		return ops.RMSNormBackward{X: n.x, Weight: n.weight, DOut: n.dout, DResidualOut: n.dsum, Rstd: n.rstd,
			DX: n.dx, DResidual: n.dresidual, DW: n.dw, DB: n.db, WeightOffset: n.offset,
			Algorithm: n.algorithm}.Run(nil)
	},
	"layernorm_forward": func(n *norm) error {
		return ops.LayerNormForward{X: n.x, Weight: n.weight, Bias: n.bias, Residual: n.residual, Y: n.y,
			ResidualOut: n.sum, Mean: n.mean, Rstd: n.rstd, Eps: ops.Some(n.eps)}.Run(nil)
	},
	"layernorm_backward": func(n *norm) error {
		return ops.LayerNormBackward{X: n.x, Weight: n.weight, DOut: n.dout, DResidualOut: n.dsum, Mean: n.mean,
			Rstd: n.rstd, DX: n.dx, DResidual: n.dresidual, DW: n.dw, DB: n.db}.Run(nil)
	},
}

// Every operand reaches the operand of kernels.Norm that it belongs to.
func TestNormOperands(t *testing.T) {
	for _, center := range []bool{false, true} {
		n, prefix := newNorm(t), "rmsnorm"
		if center {
			prefix = "layernorm"
		} else {
			n.offset = 0.5
		}
		require.NoError(t, norms[prefix+"_forward"](n))
		x, residual, weight, bias := values(t, n.x), values(t, n.residual), values(t, n.weight), values(t, n.bias)
		h := make([]float64, len(x))
		mean, rstd := make([]float64, 5), make([]float64, 5)
		for m := range int64(5) {
			for i := m * 24; i < m*24+24; i++ {
				h[i] = x[i] + residual[i]
				if center {
					mean[m] += h[i] / 24
				}
			}
			squares := 0.0
			for _, v := range row(h, m, 24) {
				squares += (v - mean[m]) * (v - mean[m]) / 24
			}
			rstd[m] = 1 / math.Sqrt(squares+1e-6)
		}
		y, size := make([]float64, len(h)), make([]float64, len(h))
		for i := range h {
			m, j := i/24, i%24
			y[i] = (h[i]-mean[m])*rstd[m]*(weight[j]+n.offset) + bias[j]
			size[i] = 16
		}
		requireClose(t, y, size, values(t, n.y), dlpack.Float32, 24)
		requireClose(t, h, size, values(t, n.sum), dlpack.Float32, 1)
		requireClose(t, rstd, size, values(t, n.rstd), dlpack.Float32, 24)
		if center {
			requireClose(t, mean, size, values(t, n.mean), dlpack.Float32, 24)
		}

		n.x = n.sum
		require.NoError(t, norms[prefix+"_backward"](n))
		dout, dsum := values(t, n.dout), values(t, n.dsum)
		dx, dw, db := make([]float64, len(h)), make([]float64, 24), make([]float64, 24)
		for m := range 5 {
			g, along := 0.0, 0.0
			for j := range 24 {
				i := m*24 + j
				normed := (h[i] - mean[m]) * rstd[m]
				gradient := dout[i] * (weight[j] + n.offset)
				if center {
					g += gradient / 24
				}
				along += gradient * normed / 24
				dw[j] += dout[i] * normed
				db[j] += dout[i]
			}
			for j := range 24 {
				i := m*24 + j
				normed := (h[i] - mean[m]) * rstd[m]
				dx[i] = (dout[i]*(weight[j]+n.offset)-g-normed*along)*rstd[m] + dsum[i]
				size[i] = 256
			}
		}
		requireClose(t, dx, size, values(t, n.dx), dlpack.Float32, 24)
		assert.Equal(t, values(t, n.dx), values(t, n.dresidual))
		requireClose(t, dw, size, values(t, n.dw), dlpack.Float32, 24)
		requireClose(t, db, size, values(t, n.db), dlpack.Float32, 24)
	}
}

// Outputs may be written over the inputs that the table names, with the same results.
func TestNormsInPlace(t *testing.T) {
	for name, call := range norms {
		apart := newNorm(t)
		require.NoError(t, call(apart))
		for what, merge := range map[string]func(n *norm){
			"y over x":            func(n *norm) { n.y = n.x },
			"residual_out over x": func(n *norm) { n.sum = n.x },
			"both":                func(n *norm) { n.y, n.sum = n.x, n.residual },
			"dx over dout":        func(n *norm) { n.dx = n.dout },
		} {
			n := newNorm(t)
			merge(n)
			require.NoError(t, call(n), "%s: %s", name, what)
			for i, v := range []*dlpack.Tensor{n.y, n.sum, n.dx, n.dw, n.db, n.mean, n.rstd} {
				written := []*dlpack.Tensor{apart.y, apart.sum, apart.dx, apart.dw, apart.db, apart.mean,
					apart.rstd}[i]
				if forward := i < 2 || i > 4; forward == (name[len(name)-7:] == "forward") {
					assert.Equal(t, values(t, written), values(t, v), "%s: %s, operand %d", name, what, i)
				}
			}
		}
	}
}

func TestNormsWithoutRows(t *testing.T) {
	for name, call := range norms {
		n, filled := newNorm(t), newNorm(t)
		rows := []**dlpack.Tensor{&n.x, &n.residual, &n.y, &n.sum, &n.dout, &n.dsum, &n.dx, &n.dresidual}
		for _, v := range rows {
			*v = empty(t, dlpack.Float32, 0, 24)
		}
		n.mean, n.rstd = empty(t, dlpack.Float32, 0), empty(t, dlpack.Float32, 0)
		require.NoError(t, call(n), name)
		want := make([]float64, 24) // sums over no rows
		if name[len(name)-7:] == "forward" {
			want = values(t, filled.db)
		}
		assert.Equal(t, want, values(t, n.db), name)
	}
}

func TestNormRefusals(t *testing.T) {
	float64s := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float64, dims...) }
	cuda := func(n *norm) {
		for _, v := range n.all() {
			v.Device = dlpack.Device{Type: dlpack.CUDA, ID: 1 << 20}
		}
		n.algorithm = ops.Warp
	}
	for _, c := range []struct {
		op      string
		spoil   func(n *norm)
		status  ops.Status
		message string
	}{
		{"layernorm_forward", func(n *norm) { n.x = nil }, ops.StatusNull, "x is NULL, expected a tensor"},
		{"layernorm_backward", func(n *norm) { n.mean = nil }, ops.StatusNull, "mean is NULL"},
		{"rmsnorm_forward", func(n *norm) { n.residual = view(t, n.residual, 0, []int64{4, 24}, nil) },
			ops.StatusShape, "residual has shape (4, 24), expected (5, 24) as x"},
		{"layernorm_forward", func(n *norm) { n.bias = view(t, n.bias, 0, []int64{23}, nil) }, ops.StatusShape,
			"bias has shape (23,)"},
		{"rmsnorm_forward", func(n *norm) { n.bias = float64s(24) }, ops.StatusDType,
			"bias has dtype float64, expected float16, bfloat16 or float32; convert it"},
		{"layernorm_forward", func(n *norm) { n.sum = float64s(5, 24) }, ops.StatusDType,
			"residual_out has dtype float64"},
		{"rmsnorm_backward", func(n *norm) { n.db = float64s(24) }, ops.StatusDType, "db has dtype float64"},
		{"layernorm_backward", func(n *norm) { n.dsum = float64s(5, 24) }, ops.StatusDType,
			"dresidual_out has dtype float64"},
		{"rmsnorm_forward", func(n *norm) { n.sum = n.y }, ops.StatusOverlap, "residual_out overlaps y"},
		{"layernorm_backward", func(n *norm) { n.dresidual = n.dx }, ops.StatusOverlap, "dresidual overlaps dx"},
		{"layernorm_backward", func(n *norm) { n.weight = nil }, ops.StatusOption,
			"dw is given without a weight, expected NULL"},
		{"layernorm_forward", func(n *norm) { n.eps = -1 }, ops.StatusOption, "eps is -1, expected a finite"},
		{"rmsnorm_forward", func(n *norm) { n.weight, n.offset = nil, 1 }, ops.StatusOption,
			"weight_offset is 1 without a weight"},
		{"rmsnorm_forward", func(n *norm) { n.algorithm = ops.Warp }, ops.StatusUnsupported,
			`algorithm is "warp" on cpu, expected "auto"`},
		{"rmsnorm_forward", cuda, ops.StatusUnsupported,
			`algorithm is "warp" with bias, expected "auto", the only one there; leave it out`},
		{"rmsnorm_forward", func(n *norm) { cuda(n); n.bias = nil }, ops.StatusUnsupported,
			`algorithm is "warp" with residual, expected "auto"`},
		{"rmsnorm_backward", cuda, ops.StatusUnsupported,
			`algorithm is "warp" with dresidual_out, expected "auto"`},
	} {
		n := newNorm(t)
		c.spoil(n)
		err := norms[c.op](n)
		var e *ops.Error
		require.ErrorAs(t, err, &e, c.message)
		assert.Equal(t, c.status, e.Status, c.message)
		assert.Contains(t, e.Message, c.op+": "+c.message)
	}
}
