package ops_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// activations are those of gated linear units, each with its derivative.
var activations = map[string]struct {
	gelu, tanh bool
	of         func(x float64) (value, derivative float64)
}{
	"silu": {false, false, func(x float64) (float64, float64) {
		s := 1 / (1 + math.Exp(-x))
		return x * s, s * (1 + x*(1-s))
	}},
	"gelu": {true, false, func(x float64) (float64, float64) {
		below := math.Erfc(-x/math.Sqrt2) / 2
		return x * below, below + x*math.Exp(-x*x/2)/math.Sqrt(2*math.Pi)
	}},
	"gelu_tanh": {true, true, func(x float64) (float64, float64) {
		u := math.Sqrt(2/math.Pi) * (x + 0.044715*x*x*x)
		s := 1 / (1 + math.Exp(-2*u)) // (1 + tanh(u)) / 2, with all digits
		return x * s, s + 2*x*s*(1-s)*math.Sqrt(2/math.Pi)*(1+3*0.044715*x*x)
	}},
}

func TestGLU(t *testing.T) {
	const m = 3
	for name, act := range activations {
		for _, d := range floats {
			for _, n := range append(rowWidths, 64, 50000) { // 3 rows of 50000 are one that workers share
				t.Run(fmt.Sprintf("%s/%v/%d", name, d, n), func(t *testing.T) {
					r := rand.New(rand.NewPCG(uint64(n), uint64(d.Bits)))
					vg, vu, vdy := random(t, r, d, m*n), random(t, r, d, m*n), random(t, r, d, m*n)
					wantY, wantDGate, wantDUp := make([]float64, m*n), make([]float64, m*n), make([]float64, m*n)
					// An exponential of -x^2 / 2 has x^2 times the relative error of x. Below 1e-38 it is 0 in float32.
					size, sizeY, sizeDUp := make([]float64, m*n), make([]float64, m*n), make([]float64, m*n)
					for i := range vg {
						value, derivative := act.of(vg[i])
						wantY[i], wantDUp[i] = value*vu[i], value*vdy[i]
						wantDGate[i], size[i] = vdy[i]*vu[i]*derivative, math.Abs(vdy[i]*vu[i])
						sizeY[i] = math.Abs(wantY[i])*(1+vg[i]*vg[i]) + 1e-31
						sizeDUp[i] = math.Abs(wantDUp[i])*(1+vg[i]*vg[i]) + 1e-31
					}
					gate, up, dy := tensor(t, d, vg, m, n), tensor(t, d, vu, m, n), tensor(t, d, vdy, m, n)
					y, dgate, dup := empty(t, d, m, n), empty(t, d, m, n), empty(t, d, m, n)
					require.NoError(t, ops.GLUForward{Gate: gate, Up: up, Y: y, Gelu: act.gelu, Tanh: act.tanh}.Run(nil))
					requireClose(t, wantY, sizeY, values(t, y), d, n)
					require.NoError(t, ops.GLUBackward{Gate: gate, Up: up, DY: dy, DGate: dgate, DUp: dup,
						Gelu: act.gelu, Tanh: act.tanh}.Run(nil))
					requireClose(t, wantDGate, size, values(t, dgate), d, n)
					requireClose(t, wantDUp, sizeDUp, values(t, dup), d, n)

					// From the two halves of rows, with the same bits.
					packed := make([]float64, 0, 2*m*n)
					for i := range int64(m) {
						packed = append(append(packed, vg[i*n:(i+1)*n]...), vu[i*n:(i+1)*n]...)
					}
					x, half, dx := tensor(t, d, packed, m, 2*n), empty(t, d, m, n), empty(t, d, m, 2*n)
					require.NoError(t, ops.PackedGLUForward{X: x, Y: half, Gelu: act.gelu, Tanh: act.tanh}.Run(nil))
					assert.Equal(t, values(t, y), values(t, half))
					require.NoError(t, ops.PackedGLUBackward{X: x, DY: dy, DX: dx, Gelu: act.gelu,
						Tanh: act.tanh}.Run(nil))
					halves := values(t, dx)
					for i := range int64(m) {
						assert.Equal(t, values(t, dgate)[i*n:(i+1)*n], halves[2*i*n:(2*i+1)*n])
						assert.Equal(t, values(t, dup)[i*n:(i+1)*n], halves[(2*i+1)*n:(2*i+2)*n])
					}
					require.NoError(t, ops.PackedGLUBackward{X: x, DY: dy, DX: x, Gelu: act.gelu,
						Tanh: act.tanh}.Run(nil))
					assert.Equal(t, halves, values(t, x), "in place")
					require.NoError(t, ops.GLUBackward{Gate: gate, Up: up, DY: dy, DGate: gate, DUp: up,
						Gelu: act.gelu, Tanh: act.tanh}.Run(nil))
					assert.Equal(t, values(t, dgate), values(t, gate), "in place")
					assert.Equal(t, values(t, dup), values(t, up), "in place")
				})
			}
		}
	}
}

// With RoundActivation a model that rounds act(gate) before it multiplies gets the same bits.
func TestGLURounds(t *testing.T) {
	const n = 1000
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range floats[:2] {
		require.EqualValues(t, 16, d.Bits)
		vg, vu, vdy := random(t, r, d, n), random(t, r, d, n), random(t, r, d, n)
		gate, up, dy := tensor(t, d, vg, 1, n), tensor(t, d, vu, 1, n), tensor(t, d, vdy, 1, n)
		ones := make([]float64, n)
		for i := range ones {
			ones[i] = 1
		}
		act, y, dgate, dup := empty(t, d, 1, n), empty(t, d, 1, n), empty(t, d, 1, n), empty(t, d, 1, n)
		require.NoError(t, ops.GLUForward{Gate: gate, Up: tensor(t, d, ones, 1, n), Y: act}.Run(nil))
		require.NoError(t, ops.GLUForward{Gate: gate, Up: up, Y: y, RoundActivation: true}.Run(nil))
		require.NoError(t, ops.GLUBackward{Gate: gate, Up: up, DY: dy, DGate: dgate, DUp: dup,
			RoundActivation: true}.Run(nil))
		rounded, wantY, wantDUp := values(t, act), empty(t, d, 1, n), empty(t, d, 1, n)
		for i, a := range rounded {
			rounded[i] = a * vu[i]
		}
		require.NoError(t, wantY.SetFloat64s(rounded))
		assert.Equal(t, values(t, wantY), values(t, y))
		for i, a := range values(t, act) {
			rounded[i] = a * vdy[i]
		}
		require.NoError(t, wantDUp.SetFloat64s(rounded))
		assert.Equal(t, values(t, wantDUp), values(t, dup))
	}
}

// What is far out has the limits of the function, and not NaN.
func TestGLUFarOut(t *testing.T) {
	inf := math.Inf(1)
	gates := []float64{-200, -90, 90, 200, inf, math.NaN()}
	n := int64(len(gates))
	for name, act := range activations {
		for _, d := range []dlpack.DType{dlpack.Float32, dlpack.Float64} {
			gate, y := tensor(t, d, gates, 1, n), empty(t, d, 1, n)
			ones := tensor(t, d, []float64{1, 1, 1, 1, 1, 1}, 1, n)
			require.NoError(t, ops.GLUForward{Gate: gate, Up: ones, Y: y, Gelu: act.gelu, Tanh: act.tanh}.Run(nil))
			got := values(t, y)
			assert.InDelta(t, 0, got[0], 1e-37, name)
			assert.InDelta(t, 0, got[1], 1e-30, name)
			assert.Equal(t, []float64{90, 200, inf}, got[2:5], name)
			assert.True(t, math.IsNaN(got[5]), name)
		}
	}
}

func TestGLURefuses(t *testing.T) {
	x := empty(t, dlpack.Float32, 2, 4)
	for want, err := range map[string]error{
		"glu_forward: tanh is set without gelu, expected both: SiLU has no approximation; set gelu, or leave " +
			"tanh out": ops.GLUForward{Gate: x, Up: x, Y: x, Tanh: true}.Run(nil),
		"glu_forward: up has shape (2, 2), expected (2, 4) as gate": ops.GLUForward{
			Gate: x, Up: empty(t, dlpack.Float32, 2, 2), Y: x}.Run(nil),
		"packed_glu_forward: x has 3 columns, expected an even number: gates and what they multiply": ops.
			PackedGLUForward{X: empty(t, dlpack.Float32, 2, 3), Y: empty(t, dlpack.Float32, 2, 1)}.Run(nil),
		"packed_glu_forward: y has shape (2, 4), expected (2, 2): half of the columns of x": ops.
			PackedGLUForward{X: x, Y: empty(t, dlpack.Float32, 2, 4)}.Run(nil),
	} {
		assert.EqualError(t, err, want)
	}
	one := empty(t, dlpack.Float32, 2, 1)
	err := ops.PackedGLUForward{X: one, Y: empty(t, dlpack.Float32, 2, 0)}.Run(nil)
	assert.ErrorContains(t, err, "even number")
}
