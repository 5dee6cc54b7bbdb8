package cpu

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// activation is a function of the table, with its exact values.
type activation struct {
	name  string
	run   func(k *rowFuncs[float32], value, slope, x []float32)
	exact func(x float64) (value, slope float64)
}

var activations = []activation{
	{"silu", func(k *rowFuncs[float32], value, slope, x []float32) { k.gate(value, slope, x, 1, 0) },
		func(x float64) (float64, float64) {
			s, rest := 1/(1+math.Exp(-x)), 1/(1+math.Exp(x))
			return x * s, s * (1 + x*rest)
		}},
	{"gate", func(k *rowFuncs[float32], value, slope, x []float32) { k.gate(value, slope, x, 1.5, 0.25) },
		func(x float64) (float64, float64) {
			v := x * (1.5 + 0.25*x*x)
			s, rest := 1/(1+math.Exp(-v)), 1/(1+math.Exp(v))
			return x * s, s * (1 + x*rest*(1.5+0.75*x*x))
		}},
	{"gelu", func(k *rowFuncs[float32], value, slope, x []float32) { k.gelu(value, slope, x) },
		func(x float64) (float64, float64) {
			below := math.Erfc(-x/math.Sqrt2) / 2
			return x * below, below + x*math.Exp(-x*x/2)/math.Sqrt(2*math.Pi)
		}},
}

// TestActivations: values and slopes have all digits but the last two, also where they are small and negative
// by the exponential, whose argument rounds in proportion to its size. They are the same for an element alone
// and among others, and nothing behind the end is written.
func TestActivations(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 0))
	x := []float32{0, float32(math.Copysign(0, -1)), 1e-30, -1e-30, 1e-42, 5, -5, 13, -13, 90, -90, 3e38, -3e38}
	for range 20000 {
		x = append(x, float32(r.NormFloat64()*3))
	}
	for _, k := range supportedRowFuncs {
		for _, f := range activations {
			value, slope := make([]float32, len(x)), make([]float32, len(x))
			f.run(k, value, slope, x)
			forward := make([]float32, len(x))
			f.run(k, forward, nil, x)
			require.True(t, slices.Equal(value, forward), "%s %s", k.name, f.name)
			inPlace := slices.Clone(x)
			f.run(k, forward, inPlace, inPlace)
			require.True(t, slices.Equal(slope, inPlace), "%s %s in place", k.name, f.name)
			for i, g := range x {
				v, s := f.exact(float64(g))
				// The exponent of the gate is up to g (1.5 + g^2 / 4), and rounded three times.
				size := 4 + 3*min(math.Abs(float64(g)*(1.5+float64(g*g)/4)), 100)
				require.InDelta(t, v, value[i], math.Abs(v)*size*0x1p-24+1e-35, "%s %s(%v)", k.name, f.name, g)
				// s + s * rest * x * w is a difference where x is negative.
				require.InDelta(t, s, slope[i], (math.Abs(s)+math.Abs(v)*(2+float64(g*g)))*size*0x1p-24+1e-35,
					"%s %s'(%v)", k.name, f.name, g)
			}
			for n := 1; n < 40; n++ {
				value, slope := []float32{40: 7}, []float32{40: 7}
				value[n], slope[n] = 7, 7
				f.run(k, value[:n], slope[:n], x[100:100+n])
				require.Equal(t, forward[100:100+n], value[:n], "%s %s %d", k.name, f.name, n)
				require.Equal(t, inPlace[100:100+n], slope[:n], "%s %s %d", k.name, f.name, n)
				require.Equal(t, [2]float32{7, 7}, [2]float32{value[n], slope[n]}, "%s %s %d", k.name, f.name, n)
			}
		}
	}
}

func TestActivationsFarOut(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, k := range supportedRowFuncs {
		for _, f := range activations {
			value, slope := make([]float32, 3), make([]float32, 3)
			f.run(k, value, slope, []float32{inf, -inf, nan})
			require.Equal(t, inf, value[0], "%s %s", k.name, f.name)
			for _, v := range []float32{value[1], value[2], slope[2]} { // as torch's
				require.True(t, v != v, "%s %s: %v", k.name, f.name, value)
			}
		}
	}
}

// bytesAt are those of a matrix of one row.
func bytesAt(m *kernels.Matrix) []byte {
	return unsafe.Slice((*byte)(m.Data), m.Cols*m.DType.Size())
}

// TestGLUWorkers: the bits do not depend on how many workers share the rows.
func TestGLUWorkers(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			r := rand.New(rand.NewPCG(6, uint64(dtype)))
			random := func(int, int) float64 { return r.NormFloat64() * 2 }
			fill := func() matrix { return newMatrix(dtype, 1, longRow+chunk/2, 0, 3).fill(random) }
			gate, up, dy := fill(), fill(), fill()
			for act := range kernels.Activations {
				results := func(workers int) []kernels.Matrix {
					y, dgate, dup := gate.clone(), gate.clone(), up.clone()
					require.NoError(t, GLUForward(&kernels.GLU{Gate: gate.Matrix, Up: up.Matrix, Y: y.Matrix,
						Activation: act, Round: act == kernels.GELU}, workers))
					require.NoError(t, GLUBackward(&kernels.GLU{Gate: dgate.Matrix, Up: dup.Matrix, DY: dy.Matrix,
						DGate: dgate.Matrix, DUp: dup.Matrix, Activation: act, Round: act == kernels.GELU}, workers))
					return []kernels.Matrix{y.Matrix, dgate.Matrix, dup.Matrix}
				}
				want := results(1)
				for _, workers := range []int{2, 5} {
					for i, got := range results(workers) {
						require.True(t, bytes.Equal(bytesAt(&want[i]), bytesAt(&got)), "%v %v %d", dtype, act, i)
					}
				}
			}
		}
	})
}
