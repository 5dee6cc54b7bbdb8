package cpu

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

var (
	floatTypes  = []kernels.DType{kernels.Float16, kernels.BFloat16, kernels.Float32, kernels.Float64}
	columnSizes = []int{1, 3, 31, 127, 1000, 4097, 50257}
	absent      kernels.Vector
)

// forEachInstructionSet runs a test with every instruction set of this machine.
func forEachInstructionSet(t *testing.T, test func(t *testing.T)) {
	for _, k := range supportedRowFuncs {
		t.Run(k.name, func(t *testing.T) {
			useRowFuncs(t, k)
			test(t)
		})
	}
}

// typesOf are the types to test with a table. float64 is tested with the portable one only: it always uses
// portable64.
func typesOf(k *rowFuncs[float32]) []kernels.DType {
	if k == &portable32 {
		return floatTypes
	}
	return floatTypes[:3]
}

func useRowFuncs(t testing.TB, k *rowFuncs[float32]) {
	before := engine32.funcs
	t.Cleanup(func() { engine32.funcs = before })
	engine32.funcs = k
}

// buffer is memory between two margins that must not be written.
type buffer struct {
	bytes []byte
	used  map[int]bool // offsets of elements
	size  int
}

const margin = 64

func newBuffer(t kernels.DType, elements, offset int) (*buffer, unsafe.Pointer) {
	size := int(t.Size())
	b := &buffer{bytes: make([]byte, 2*margin+(elements+offset)*size), used: map[int]bool{}, size: size}
	for i := range b.bytes {
		b.bytes[i] = 0xa5
	}
	return b, unsafe.Pointer(&b.bytes[margin+offset*size])
}

// matrix is a Matrix and the buffer that it lies in.
type matrix struct {
	kernels.Matrix
	*buffer
}

// newMatrix places rows with gaps of gap elements, offset elements into an aligned buffer.
func newMatrix(t kernels.DType, rows, cols, gap, offset int) matrix {
	b, p := newBuffer(t, rows*(cols+gap), offset)
	m := kernels.Matrix{Data: p, DType: t, Rows: int64(rows), Cols: int64(cols), Stride: int64(cols + gap)}
	return matrix{m, b}
}

func (m matrix) fill(f func(row, j int) float64) matrix {
	for row := range int(m.Rows) {
		for j := range int(m.Cols) {
			m.set(row, j, f(row, j))
		}
	}
	return m
}

func (m matrix) set(row, j int, v float64) { putScalar(m.DType, rowAt(&m.Matrix, row, j), v) }

func (m matrix) at(row, j int) float64 { return scalar(m.DType, rowAt(&m.Matrix, row, j)) }

func (m matrix) row(row int) []float64 {
	v := make([]float64, m.Cols)
	for j := range v {
		v[j] = m.at(row, j)
	}
	return v
}

func (m matrix) clone() matrix {
	b := &buffer{bytes: bytes.Clone(m.bytes), size: m.size}
	offset := uintptr(m.Data) - uintptr(unsafe.Pointer(&m.bytes[0]))
	c := matrix{m.Matrix, b}
	c.Data = unsafe.Pointer(&b.bytes[offset])
	return c
}

// requireIntact checks that nothing outside of the matrix's elements was written.
func (m matrix) requireIntact(t *testing.T) {
	t.Helper()
	c := m.clone()
	for row := range int(m.Rows) {
		p := unsafe.Slice((*byte)(rowAt(&c.Matrix, row, 0)), int(m.Cols)*m.size)
		for i := range p {
			p[i] = 0xa5
		}
	}
	require.Equal(t, len(c.bytes), bytes.Count(c.bytes, []byte{0xa5}), "written outside of the rows")
}

func newVector(t kernels.DType, n int, f func(i int) float64) kernels.Vector {
	m := newMatrix(t, 1, n, 0, 1)
	m.fill(func(_, j int) float64 { return f(j) })
	return kernels.Vector{Data: m.Data, DType: t, Len: int64(n), Stride: 1}
}

func newTargets(targets ...int64) kernels.Vector {
	return kernels.Vector{
		Data: unsafe.Pointer(&targets[0]), DType: kernels.Int64, Len: int64(len(targets)), Stride: 1,
	}
}

func values(v kernels.Vector) []float64 {
	a := make([]float64, v.Len)
	for i := range a {
		a[i] = at(&v, i)
	}
	return a
}

// statistics is the type of loss, lse and rstd for an x of the given type.
func statistics(x kernels.DType) kernels.DType {
	if x == kernels.Float64 {
		return x
	}
	return kernels.Float32
}

// epsilon is half an ulp of 1 in the type that x is computed in. For float64 it is 128 times that,
// because the reference also computes its sums in float64.
func epsilon(x kernels.DType) float64 {
	if x == kernels.Float64 {
		return 0x1p-46
	}
	return 0x1p-24
}

// ulp is the distance between neighbouring numbers of a type at v.
func ulp(t kernels.DType, v float64) float64 {
	digits := [...]int{kernels.Float16: 10, kernels.BFloat16: 7, kernels.Float32: 23, kernels.Float64: 52}[t]
	lowest := [...]int{kernels.Float16: -14, kernels.BFloat16: -126, kernels.Float32: -126,
		kernels.Float64: -1022}[t]
	_, e := math.Frexp(v)
	return math.Ldexp(1, max(e-1, lowest)-digits)
}

// requireClose allows the given error plus the error of rounding to dtype.
func requireClose(t *testing.T, dtype kernels.DType, want, got, allowed float64, row, j int) {
	t.Helper()
	limit := allowed + ulp(dtype, math.Abs(want)+allowed)/2
	if !(math.Abs(got-want) <= limit) && got != want {
		require.Failf(t, "too far", "row %d, column %d: want %v, got %v, allowed %v",
			row, j, want, got, limit)
	}
}

// forEachShape runs a test over element types, sizes and layouts.
func forEachShape(t *testing.T, test func(t *testing.T, x kernels.DType, n, gap, offset int, r *rand.Rand)) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, x := range typesOf(engine32.funcs) {
			for i, n := range columnSizes {
				layouts := [][2]int{{5, 3}, {0, 0}}
				if n > 1000 {
					layouts = layouts[:1]
				}
				if raceEnabled && n > 1000 {
					continue // slow, and single-threaded: TestWorkersChangeNothing covers long rows
				}
				for _, layout := range layouts {
					name := fmt.Sprintf("%v/%d/gap%d", x, n, layout[0])
					t.Run(name, func(t *testing.T) {
						test(t, x, n, layout[0], layout[1], rand.New(rand.NewPCG(uint64(i), uint64(x))))
					})
				}
			}
		}
	})
}

func softmaxReference(x []float64) (y []float64, high, sum float64) {
	high = math.Inf(-1)
	for _, v := range x {
		high = math.Max(high, v)
	}
	y = make([]float64, len(x))
	for i, v := range x {
		y[i] = math.Exp(v - high)
		sum += y[i]
	}
	for i := range y {
		y[i] /= sum
	}
	return y, high, sum
}

func TestSoftmax(t *testing.T) {
	forEachShape(t, func(t *testing.T, dtype kernels.DType, n, gap, offset int, r *rand.Rand) {
		logit := func(row, _ int) float64 { return r.NormFloat64()*4 + float64(row)*100 }
		x := newMatrix(dtype, 3, n, gap, offset).fill(logit)
		y := newMatrix(dtype, 3, n, gap+1, offset+1)
		SoftmaxForward(x.Matrix, y.Matrix, 1)
		y.requireIntact(t)
		for row := range 3 {
			v := x.row(row)
			want, high, _ := softmaxReference(v)
			for j, w := range want {
				requireClose(t, dtype, w, y.at(row, j), (6+high-v[j])*epsilon(dtype)*w, row, j)
			}
		}

		dy := newMatrix(dtype, 3, n, gap, offset).fill(func(_, _ int) float64 { return r.NormFloat64() })
		dx := newMatrix(dtype, 3, n, gap+2, offset)
		SoftmaxBackward(dy.Matrix, y.Matrix, dx.Matrix, 1)
		dx.requireIntact(t)
		for row := range 3 {
			dy, y, dx := dy.row(row), y.row(row), dx.row(row)
			dot, size := 0.0, 0.0
			for j := range n {
				dot += dy[j] * y[j]
				size += math.Abs(dy[j] * y[j])
			}
			for j := range n {
				allowed := 4 * epsilon(dtype) * (math.Abs(dy[j]) + size) * y[j]
				requireClose(t, dtype, (dy[j]-dot)*y[j], dx[j], allowed, row, j)
			}
		}
	})
}

func TestRMSNorm(t *testing.T) {
	forEachShape(t, func(t *testing.T, dtype kernels.DType, n, gap, offset int, r *rand.Rand) {
		const eps = 1e-5
		normal := func(_, _ int) float64 { return r.NormFloat64() * 2 }
		others := []kernels.DType{kernels.Float16, kernels.BFloat16, kernels.Float32}
		if dtype == kernels.Float64 {
			others = []kernels.DType{kernels.Float64}
		}
		for i, other := range others {
			rows, next := 21, others[(i+1)%len(others)] // 21 rows give two partial sums of dw
			if n > 1000 {
				rows = 3
			}
			if n > 5000 && i > 0 {
				break
			}
			x := newMatrix(dtype, rows, n, gap, offset).fill(normal)
			y := newMatrix(next, rows, n, gap+1, offset)
			w := newVector(other, n, func(int) float64 { return r.NormFloat64() })
			rstd := newVector(statistics(dtype), rows, func(int) float64 { return 0 })
			RMSNormForward(x.Matrix, w, y.Matrix, rstd, eps, 1)
			y.requireIntact(t)

			dout := newMatrix(other, rows, n, gap, offset+1).fill(normal)
			dx := newMatrix(dtype, rows, n, gap+2, offset)
			dw := newVector(other, n, func(int) float64 { return 7 })
			RMSNormBackward(x.Matrix, w, dout.Matrix, rstd, dx.Matrix, dw, 1)
			dx.requireIntact(t)
			bare, bareX := newMatrix(next, rows, n, 0, 0), newMatrix(dtype, rows, n, 0, 0)
			RMSNormForward(x.Matrix, absent, bare.Matrix, absent, eps, 1)
			RMSNormBackward(x.Matrix, absent, dout.Matrix, rstd, bareX.Matrix, absent, 1)

			weight, ones := values(w), make([]float64, n)
			for j := range ones {
				ones[j] = 1
			}
			wantDW, sizeDW := make([]float64, n), make([]float64, n)
			for row := range rows {
				v, d, s := x.row(row), dout.row(row), at(&rstd, row)
				checkRMSNormRow(t, statistics(dtype), v, s, eps, row)
				checkRMSNorm(t, dtype, next, v, d, weight, y.row(row), dx.row(row), s, row)
				checkRMSNorm(t, dtype, next, v, d, ones, bare.row(row), bareX.row(row), s, row)
				for j := range n {
					wantDW[j] += d[j] * v[j] * s
					sizeDW[j] += math.Abs(d[j] * v[j] * s)
				}
			}
			for j, got := range values(dw) {
				requireClose(t, other, wantDW[j], got, 2*epsilon(dtype)*sizeDW[j], 0, j)
			}
		}
	})
}

func checkRMSNormRow(t *testing.T, dtype kernels.DType, x []float64, rstd, eps float64, row int) {
	t.Helper()
	square := 0.0
	for _, v := range x {
		square += v * v
	}
	want := 1 / math.Sqrt(square/float64(len(x))+eps)
	requireClose(t, dtype, want, rstd, 2*epsilon(dtype)*want, row, 0)
}

// checkRMSNorm checks a row of y and of dx, given the rstd that was passed to backward.
func checkRMSNorm(t *testing.T, dtype, yType kernels.DType, x, dout, w, y, dx []float64, rstd float64,
	row int) {
	t.Helper()
	e, mean, size := epsilon(dtype), 0.0, 0.0
	for j := range x {
		gh := dout[j] * w[j] * x[j] * rstd / float64(len(x))
		mean, size = mean+gh, size+math.Abs(gh)
	}
	for j := range x {
		h, g := x[j]*rstd, dout[j]*w[j]
		requireClose(t, yType, h*w[j], y[j], 4*e*math.Abs(h*w[j]), row, j)
		requireClose(t, dtype, (g-h*mean)*rstd, dx[j], 8*e*(math.Abs(g)+math.Abs(h)*size)*rstd, row, j)
	}
}

func TestCrossEntropy(t *testing.T) {
	forEachShape(t, func(t *testing.T, dtype kernels.DType, n, gap, offset int, r *rand.Rand) {
		const rows = 6
		stat := statistics(dtype)
		logit := func(row, _ int) float64 { return r.NormFloat64()*4 + float64(row)*100 }
		x := newMatrix(dtype, rows, n, gap, offset).fill(logit)
		target := make([]int64, rows)
		for i := range target {
			target[i] = r.Int64N(int64(n))
		}
		target[2] = -100
		w := absent
		if gap > 0 {
			w = newVector(dtype, n, func(int) float64 { return r.Float64() + 0.5 })
		}
		zeros := func(n int) kernels.Vector { return newVector(stat, n, func(int) float64 { return 0 }) }
		a := kernels.CrossEntropy{X: x.Matrix, Target: newTargets(target...), Weight: w, IgnoreIndex: -100,
			Loss: zeros(rows), Max: zeros(rows), LogSum: zeros(rows), Denominator: zeros(1)}
		CrossEntropyForward(&a, 1)

		fused := newMatrix(dtype, rows, n, gap+1, offset+1)
		b := a
		b.Loss, b.Max, b.LogSum, b.DX = zeros(rows), zeros(rows), zeros(rows), fused.Matrix
		CrossEntropyForward(&b, 1)
		fused.requireIntact(t)
		require.Equal(t, values(a.Loss), values(b.Loss))
		require.Equal(t, values(a.Max), values(b.Max))
		require.Equal(t, values(a.LogSum), values(b.LogSum))

		for _, reduction := range []kernels.Reduction{kernels.ReduceSum, kernels.ReduceMean} {
			c := a
			c.Reduction, c.Loss, c.Max, c.LogSum = reduction, zeros(1), zeros(rows), absent
			CrossEntropyForward(&c, 1)
			want, size := 0.0, 0.0
			for _, l := range values(a.Loss) {
				want, size = want+l, size+math.Abs(l)
			}
			if reduction == kernels.ReduceMean {
				want, size = want/at(&a.Denominator, 0), size/at(&a.Denominator, 0)
			}
			requireClose(t, stat, want, at(&c.Loss, 0), 2*epsilon(dtype)*size, 0, 0)
			for i := range rows {
				lse := at(&a.Max, i) + at(&a.LogSum, i)
				requireClose(t, stat, lse, at(&c.Max, i), epsilon(dtype)*math.Abs(at(&a.LogSum, i)), i, 0)
			}
		}

		dx := newMatrix(dtype, rows, n, gap+2, offset)
		d := a
		d.DX, d.Reduction, d.Divisor = dx.Matrix, kernels.ReduceMean, a.Denominator
		d.DLoss = newVector(stat, 1, func(int) float64 { return 1.5 })
		d.DLoss.Stride = 0
		CrossEntropyBackward(&d, 1)
		dx.requireIntact(t)

		e, denominator := epsilon(dtype), 0.0
		for row := range rows {
			if target[row] != -100 {
				denominator += weightOf(w, target[row])
			}
		}
		requireClose(t, stat, denominator, at(&a.Denominator, 0), 0, 0, 0)
		denominator = at(&a.Denominator, 0)
		for row := range rows {
			v := x.row(row)
			p, high, sum := softmaxReference(v)
			require.Equal(t, high, at(&a.Max, row))
			requireClose(t, stat, math.Log(sum), at(&a.LogSum, row), 4*e*(1+math.Log(sum)), row, 0)
			if target[row] == -100 {
				require.Zero(t, at(&a.Loss, row))
				require.Equal(t, make([]float64, n), fused.row(row))
				require.Equal(t, make([]float64, n), dx.row(row))
				continue
			}
			k := int(target[row])
			weight := weightOf(w, target[row])
			loss := weight * (high - v[k] + math.Log(sum))
			requireClose(t, stat, loss, at(&a.Loss, row), 4*e*weight*(1+math.Log(sum)), row, k)
			logSum := at(&a.LogSum, row) // the rounded value, which backward reads
			for j := range n {
				hot := 0.0
				if j == k {
					hot = 1
				}
				allowed := (8 + high - v[j]) * e * weight * p[j]
				requireClose(t, dtype, weight*(p[j]-hot), fused.at(row, j), allowed+e*weight*hot, row, j)
				g := weight * 1.5 / denominator
				want := g * (math.Exp(v[j]-high-logSum) - hot)
				allowed = g * e * ((8+high-v[j])*p[j] + hot)
				requireClose(t, dtype, want, dx.at(row, j), allowed, row, j)
			}
		}
	})
}

func weightOf(w kernels.Vector, i int64) float64 {
	if !w.Present() {
		return 1
	}
	return at(&w, int(i))
}

// TestSpecialValues has rows of one block, rows of several blocks of which one is all -inf, and a long row.
func TestSpecialValues(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			for _, n := range []int{3, 70, 3 * block, longRow + 1} {
				if n > longRow && dtype == kernels.Float16 {
					continue // has the same code path as BFloat16
				}
				for name, special := range map[string]struct {
					at     func(j int) bool
					value  float64
					allNaN bool
				}{
					"-inf entries":  {at: func(j int) bool { return j%3 == 1 || j/block == 1 }, value: -inf},
					"-inf row":      {at: func(int) bool { return true }, value: -inf, allNaN: true},
					"NaN at start":  {at: func(j int) bool { return j == 0 }, value: nan, allNaN: true},
					"NaN at end":    {at: func(j int) bool { return j == n-1 }, value: nan, allNaN: true},
					"NaN row":       {at: func(int) bool { return true }, value: nan, allNaN: true},
					"inf in middle": {at: func(j int) bool { return j == n/2 }, value: inf, allNaN: true},
				} {
					x := newMatrix(dtype, 1, n, 0, 0).fill(func(_, j int) float64 {
						if special.at(j) {
							return special.value
						}
						return float64(j % 7)
					})
					y, dx := newMatrix(dtype, 1, n, 0, 0), newMatrix(dtype, 1, n, 0, 0)
					stat := statistics(dtype)
					one := func() kernels.Vector { return newVector(stat, 1, func(int) float64 { return 1 }) }
					a := kernels.CrossEntropy{X: x.Matrix, Target: newTargets(2), IgnoreIndex: -100,
						Loss: one(), Max: one(), LogSum: one(), DX: dx.Matrix, DLoss: one()}
					SoftmaxForward(x.Matrix, y.Matrix, 1)
					CrossEntropyForward(&a, 1)
					back := newMatrix(dtype, 1, n, 0, 0)
					a.DX = back.Matrix
					CrossEntropyBackward(&a, 1)
					require.Equal(t, special.allNaN, math.IsNaN(at(&a.Loss, 0)), name)
					want, _, _ := softmaxReference(x.row(0))
					for j := range n {
						got := [3]float64{y.at(0, j), dx.at(0, j), back.at(0, j)}
						isNaN := math.IsNaN(got[0]) && math.IsNaN(got[1]) && math.IsNaN(got[2])
						switch {
						case special.allNaN && !isNaN,
							!special.allNaN && special.at(j) && got != [3]float64{}:
							require.Failf(t, name, "%v, %d columns, at %d: %v", dtype, n, j, got)
						case !special.allNaN && !special.at(j):
							requireClose(t, dtype, want[j], got[0], 20*epsilon(dtype)*want[j], 0, j)
						}
					}
					if name == "-inf row" {
						a.LogSum = absent
						CrossEntropyForward(&a, 1)
						require.Equal(t, -inf, at(&a.Max, 0), "log-sum-exp of a row of -inf")
					}
				}
			}
		}
	})
}

// TestInfiniteTarget: a logit of +inf makes its row's loss and gradient NaN, also if it is the target's.
func TestInfiniteTarget(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			for _, onePass := range []bool{false, true} {
				x := newMatrix(dtype, 1, 9, 0, 0).fill(func(_, j int) float64 { return float64(j) })
				x.set(0, 2, math.Inf(1))
				dx, one := newMatrix(dtype, 1, 9, 0, 0), func() kernels.Vector {
					return newVector(statistics(dtype), 1, func(int) float64 { return 1 })
				}
				a := kernels.CrossEntropy{X: x.Matrix, Target: newTargets(2), IgnoreIndex: -100, OnePass: onePass,
					Reduction: kernels.ReduceSum, Loss: one(), Max: one(), LogSum: one(), DX: dx.Matrix}
				CrossEntropyForward(&a, 1)
				require.True(t, math.IsNaN(at(&a.Loss, 0)))
				for j := range 9 {
					require.True(t, math.IsNaN(dx.at(0, j)), "%v at %d", dtype, j)
				}
			}
		}
	})
}

func TestTargets(t *testing.T) {
	nan := math.NaN()
	for _, dtype := range floatTypes {
		x := newMatrix(dtype, 5, 4, 0, 0).fill(func(row, j int) float64 { return float64(row * j % 3) })
		x.set(4, 1, nan)
		dx := newMatrix(dtype, 5, 4, 0, 0)
		stat := statistics(dtype)
		zeros := func(n int) kernels.Vector { return newVector(stat, n, func(int) float64 { return 0 }) }
		// With a stride of 2: valid, too large, negative, ignored, ignored.
		targets := []int32{1, 99, 4, 99, -1, 99, -100, 99, -100, 99}
		a := kernels.CrossEntropy{X: x.Matrix, IgnoreIndex: -100,
			Loss: zeros(5), Max: zeros(5), LogSum: zeros(5), DX: dx.Matrix, Denominator: zeros(1),
			DLoss:  newVector(stat, 5, func(int) float64 { return nan }),
			Weight: newVector(dtype, 4, func(int) float64 { return 2 }),
			Target: kernels.Vector{
				Data: unsafe.Pointer(&targets[0]), DType: kernels.Int32, Len: 5, Stride: 2,
			},
		}
		check := func(finite bool) {
			t.Helper()
			for j := range 4 {
				require.Equal(t, finite, !math.IsNaN(dx.at(0, j)))
				require.True(t, math.IsNaN(dx.at(1, j)))
				require.True(t, math.IsNaN(dx.at(2, j)))
				require.Zero(t, dx.at(3, j))
				require.Zero(t, dx.at(4, j))
			}
		}
		CrossEntropyForward(&a, 1)
		check(true)
		loss := values(a.Loss)
		require.False(t, math.IsNaN(loss[0]))
		require.True(t, math.IsNaN(loss[1]) && math.IsNaN(loss[2]), loss)
		require.Equal(t, []float64{0, 0}, loss[3:], "an ignored row may contain a NaN")
		require.True(t, math.IsNaN(at(&a.Denominator, 0)), "a mean over targets that are no classes")
		require.Equal(t, []float64{0, 2, 2, 0}, values(a.Max)[:4], "ignored rows too")
		CrossEntropyBackward(&a, 1)
		check(false)

		targets = []int32{-100, 0, -100, 0, -100, 0, -100, 0, -100}
		a.Target.Data = unsafe.Pointer(&targets[0])
		a.Reduction, a.Loss, a.Max, a.LogSum = kernels.ReduceMean, zeros(1), absent, absent
		CrossEntropyForward(&a, 1)
		require.True(t, math.IsNaN(at(&a.Loss, 0)), "mean over no row")
		require.Zero(t, at(&a.Denominator, 0))
		require.Equal(t, make([]float64, 4), dx.row(4))
		a.Max, a.LogSum = zeros(5), zeros(5)
		CrossEntropyBackward(&a, 1)
		require.Equal(t, make([]float64, 4), dx.row(4))
		a.Reduction, a.Loss = kernels.ReduceSum, zeros(1)
		CrossEntropyForward(&a, 1)
		require.Zero(t, at(&a.Loss, 0))
	}
}

func TestNoRows(t *testing.T) {
	for _, dtype := range floatTypes {
		x := kernels.Matrix{DType: dtype, Cols: 5, Stride: 5}
		stat := statistics(dtype)
		one := func(n int) kernels.Vector { return newVector(stat, n, func(int) float64 { return 1 }) }
		none := kernels.Vector{DType: stat, Stride: 1}
		SoftmaxForward(x, x, 4)
		SoftmaxBackward(x, x, x, 4)
		ones := func(n int) kernels.Vector { return newVector(dtype, n, func(int) float64 { return 1 }) }
		w, dw := ones(5), ones(5)
		RMSNormForward(x, w, x, none, 1e-6, 4)
		RMSNormBackward(x, w, x, none, x, dw, 4)
		require.Equal(t, make([]float64, 5), values(dw))
		long := kernels.Matrix{DType: dtype, Cols: longRow + 3, Stride: longRow + 3}
		w, dw = ones(longRow+3), ones(longRow+3)
		RMSNormBackward(long, w, long, none, long, dw, 4)
		require.Equal(t, make([]float64, longRow+3), values(dw))
		a := kernels.CrossEntropy{X: x, Target: kernels.Vector{DType: kernels.Int64, Stride: 1}, Loss: one(1),
			Reduction: kernels.ReduceMean, Denominator: one(1)}
		CrossEntropyForward(&a, 4)
		require.True(t, math.IsNaN(at(&a.Loss, 0)))
		require.Zero(t, at(&a.Denominator, 0))
	}
}

// TestOnePassWithOneStatistic: what OnePass saves of the sum is there only if the log-sum-exp has two parts.
func TestOnePassWithOneStatistic(t *testing.T) {
	x := newMatrix(kernels.Float64, 2, 3, 0, 0).fill(func(_, j int) float64 { return float64(j + 1) })
	number := func(v float64) kernels.Vector {
		return newVector(kernels.Float64, 1, func(int) float64 { return v })
	}
	gradients := func(onePass bool) [][]float64 {
		dx := newMatrix(kernels.Float64, 2, 3, 0, 0).fill(func(_, _ int) float64 { return 7 })
		lse := newVector(kernels.Float64, 2, func(int) float64 { return 9 })
		a := kernels.CrossEntropy{X: x.Matrix, DX: dx.Matrix, Target: newTargets(0, 2), IgnoreIndex: -1,
			Reduction: kernels.ReduceSum, OnePass: onePass, Loss: number(0), Max: lse}
		if !onePass {
			a.DX = kernels.Matrix{}
		}
		CrossEntropyForward(&a, 1)
		a.DX, a.DLoss = dx.Matrix, number(2)
		CrossEntropyBackward(&a, 1)
		return [][]float64{dx.row(0), dx.row(1)}
	}
	want := gradients(false)
	require.InDelta(t, -1.81994, want[0][0], 1e-5)
	require.Equal(t, want, gradients(true))
}

// runAllOps runs all ops on the same inputs, with inPlace in place, and returns the bytes of all outputs.
func runAllOps(dtype kernels.DType, rows, n, workers int, inPlace bool) map[string][]byte {
	r := rand.New(rand.NewPCG(1, 2))
	normal := func(_, _ int) float64 { return r.Float64()*8 - 4 }
	x, dy := newMatrix(dtype, rows, n, 1, 1).fill(normal), newMatrix(dtype, rows, n, 1, 1).fill(normal)
	w := newVector(dtype, n, func(int) float64 { return r.NormFloat64() })
	stat := statistics(dtype)
	written := map[string][]byte{}
	keep := func(name string, m matrix) { written[name] = m.bytes }
	keepVector := func(name string, v kernels.Vector) {
		written[name] = unsafe.Slice((*byte)(v.Data), v.Len*v.DType.Size())
	}
	output := func(m matrix) matrix {
		if inPlace {
			return m
		}
		out := newMatrix(dtype, rows, n, 1, 1)
		copy(out.bytes, m.bytes)
		return out
	}
	zeros := func(n int) kernels.Vector { return newVector(stat, n, func(int) float64 { return 0 }) }

	in := x.clone()
	y := output(in)
	SoftmaxForward(in.Matrix, y.Matrix, workers)
	keep("softmax", y)
	in = dy.clone()
	dx := output(in)
	SoftmaxBackward(in.Matrix, y.Matrix, dx.Matrix, workers)
	keep("softmax backward into dy", dx)
	in = y.clone()
	dx = output(in)
	SoftmaxBackward(dy.Matrix, in.Matrix, dx.Matrix, workers)
	keep("softmax backward into y", dx)

	in = x.clone()
	y = output(in)
	rstd := zeros(rows)
	RMSNormForward(in.Matrix, w, y.Matrix, rstd, 1e-6, workers)
	keep("rmsnorm", y)
	keepVector("rstd", rstd)
	in = dy.clone()
	dx = output(in)
	dw := newVector(dtype, n, func(int) float64 { return 0 })
	RMSNormBackward(x.Matrix, w, in.Matrix, rstd, dx.Matrix, dw, workers)
	keep("rmsnorm backward", dx)
	keepVector("dw", dw)

	targets := make([]int64, rows)
	for i := range targets {
		targets[i] = r.Int64N(int64(n)+1) - 1
	}
	in = x.clone()
	dx = output(in)
	a := kernels.CrossEntropy{X: in.Matrix, Target: newTargets(targets...), Weight: w, IgnoreIndex: -1,
		Reduction: kernels.ReduceMean, Loss: zeros(1), Max: zeros(rows), LogSum: zeros(rows),
		Denominator: zeros(1), DX: dx.Matrix, DLoss: newVector(stat, 1, func(int) float64 { return 0.5 })}
	a.DLoss.Stride = 0
	CrossEntropyForward(&a, workers)
	keep("cross-entropy with gradient", dx)
	keepVector("loss", a.Loss)
	keepVector("denominator", a.Denominator)
	keepVector("max", a.Max)
	keepVector("log-sum", a.LogSum)
	in = x.clone()
	dx = output(in)
	a.X, a.DX, a.Loss, a.Denominator, a.OnePass = in.Matrix, dx.Matrix, zeros(1), zeros(1), true
	CrossEntropyForward(&a, workers)
	keep("cross-entropy in one pass", dx)
	keepVector("one pass's loss", a.Loss)
	keepVector("one pass's denominator", a.Denominator)
	a.OnePass = false
	a.Reduction = kernels.ReduceSum
	a.X, a.DX, a.Loss = x.Matrix, kernels.Matrix{}, zeros(1)
	CrossEntropyForward(&a, workers)
	keepVector("sum of losses", a.Loss)
	in = x.clone()
	dx = output(in)
	a.X, a.DX, a.Reduction, a.Divisor = in.Matrix, dx.Matrix, kernels.ReduceMean, a.Denominator
	CrossEntropyBackward(&a, workers)
	keep("cross-entropy backward", dx)
	return written
}

// parallelShapes are large enough for several workers: one has many rows, the other few rows, which are
// split.
var parallelShapes = [][2]int{{900, 600}, {3, longRow + 50001}}

func TestWorkersChangeNothing(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs)[1:] { // Float16 has the same code path as BFloat16
			for _, shape := range parallelShapes {
				want := runAllOps(dtype, shape[0], shape[1], 1, false)
				for _, workers := range []int{2, 7} {
					got := runAllOps(dtype, shape[0], shape[1], workers, false)
					for name := range want {
						require.True(t, bytes.Equal(want[name], got[name]), "%s %v %v with %d workers",
							name, dtype, shape, workers)
					}
				}
			}
		}
	})
}

func TestInPlace(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs)[1:] {
			for _, shape := range append(parallelShapes, [2]int{5, 3}, [2]int{40, 4097}) {
				want := runAllOps(dtype, shape[0], shape[1], 2, false)
				got := runAllOps(dtype, shape[0], shape[1], 2, true)
				for name := range want {
					require.True(t, bytes.Equal(want[name], got[name]), "%s %v %v", name, dtype, shape)
				}
			}
		}
	})
}

func TestSmallCallsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop what it is given")
	}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range floatTypes {
			stat := statistics(dtype)
			one := func(_, _ int) float64 { return 1 }
			x, y := newMatrix(dtype, 4, 100, 0, 0).fill(one), newMatrix(dtype, 4, 100, 0, 0)
			ones := func(t kernels.DType, n int) kernels.Vector {
				return newVector(t, n, func(int) float64 { return 1 })
			}
			w, dw, rstd := ones(dtype, 100), ones(dtype, 100), ones(stat, 4)
			a := kernels.CrossEntropy{X: x.Matrix, Target: newTargets(1, 2, 3, 4), Loss: ones(stat, 4),
				Max: ones(stat, 4), LogSum: ones(stat, 4), DX: y.Matrix, DLoss: ones(stat, 4)}
			layerNorm := kernels.Norm{X: x.Matrix, Residual: x.Matrix, ResidualOut: x.Matrix, Y: y.Matrix,
				Weight: w, Bias: w, Mean: rstd, Rstd: rstd, DOut: x.Matrix, DX: y.Matrix, DW: dw, DB: dw,
				Eps: 1e-6, Center: true}
			plainLayerNorm := layerNorm
			plainLayerNorm.Residual, plainLayerNorm.ResidualOut = kernels.Matrix{}, kernels.Matrix{}
			loss := a
			loss.DX = kernels.Matrix{}
			masked := kernels.MaskedSoftmax{X: x.Matrix, Y: y.Matrix, DY: x.Matrix, DX: y.Matrix, Scale: 2,
				Mask: kernels.Mask{Queries: 2}}
			for name, call := range map[string]func(){
				"softmax forward":  func() { SoftmaxForward(x.Matrix, y.Matrix, 8) },
				"softmax backward": func() { SoftmaxBackward(x.Matrix, x.Matrix, y.Matrix, 8) },
				"rmsnorm forward":  func() { RMSNormForward(x.Matrix, w, y.Matrix, rstd, 1e-6, 8) },
				"rmsnorm backward": func() {
					RMSNormBackward(x.Matrix, w, x.Matrix, rstd, y.Matrix, dw, 8)
				},
				"masked forward":         func() { MaskedSoftmaxForward(&masked, 8) },
				"masked backward":        func() { MaskedSoftmaxBackward(&masked, 8) },
				"layernorm forward":      func() { NormForward(&layerNorm, 8) },
				"its loop":               func() { NormForward(&plainLayerNorm, 8) },
				"layernorm backward":     func() { NormBackward(&layerNorm, 8) },
				"cross-entropy forward":  func() { CrossEntropyForward(&a, 8) },
				"loss alone":             func() { CrossEntropyForward(&loss, 8) },
				"cross-entropy backward": func() { CrossEntropyBackward(&a, 8) },
			} {
				require.Zero(t, testing.AllocsPerRun(100, call), "%s %v", name, dtype)
			}
		}
	})
}

func TestChooseRowFuncs(t *testing.T) {
	for _, k := range supportedRowFuncs {
		t.Setenv("GANDER_SIMD", k.name)
		require.Same(t, k, chooseRowFuncs())
	}
	t.Setenv("GANDER_SIMD", "avx1024")
	require.Same(t, supportedRowFuncs[0], chooseRowFuncs(), "an unknown name gives the fastest")
	require.Equal(t, engine32.funcs.name, SIMD())
	require.Contains(t, []string{"avx512", "avx2", "portable"}, SIMD())
}

func BenchmarkOps(b *testing.B) {
	for _, dtype := range floatTypes {
		for _, shape := range [][2]int{{4096, 64}, {64, 512}, {1024, 4096}, {256, 131072}} {
			rows, n := shape[0], shape[1]
			if dtype.Size()*int64(rows*n) > 64<<20 {
				rows /= 2
			}
			stat := statistics(dtype)
			r := rand.New(rand.NewPCG(1, 2))
			x := newMatrix(dtype, rows, n, 0, 0).fill(func(_, _ int) float64 { return r.NormFloat64() })
			y := newMatrix(dtype, rows, n, 0, 0).fill(func(_, _ int) float64 { return 0 })
			ones := func(t kernels.DType, n int) kernels.Vector {
				return newVector(t, n, func(int) float64 { return 1 })
			}
			w, dw, rstd := ones(dtype, n), ones(dtype, n), ones(stat, rows)
			a := kernels.CrossEntropy{X: x.Matrix, Target: newTargets(make([]int64, rows)...),
				IgnoreIndex: -1, Loss: ones(stat, rows), Max: ones(stat, rows), LogSum: ones(stat, rows),
				DLoss: ones(stat, rows)}
			withDX := a
			withDX.DX = y.Matrix
			for _, op := range []struct {
				name   string
				moved  int // tensors of x's size read and written
				called func(workers int)
			}{
				{"SoftmaxForward", 2, func(k int) { SoftmaxForward(x.Matrix, y.Matrix, k) }},
				{"SoftmaxBackward", 3, func(k int) { SoftmaxBackward(x.Matrix, x.Matrix, y.Matrix, k) }},
				{"RMSNormForward", 2, func(k int) { RMSNormForward(x.Matrix, w, y.Matrix, rstd, 1e-6, k) }},
				{"RMSNormBackward", 3, func(k int) {
					RMSNormBackward(x.Matrix, w, x.Matrix, rstd, y.Matrix, dw, k)
				}},
				{"CrossEntropyForward", 1, func(k int) { CrossEntropyForward(&a, k) }},
				{"CrossEntropyForwardDX", 2, func(k int) { CrossEntropyForward(&withDX, k) }},
				{"CrossEntropyBackward", 2, func(k int) { CrossEntropyBackward(&withDX, k) }},
			} {
				b.Run(fmt.Sprintf("%s/%v/%dx%d", op.name, dtype, rows, n), func(b *testing.B) {
					b.SetBytes(int64(op.moved*rows*n) * dtype.Size())
					for b.Loop() {
						op.called(2)
					}
				})
			}
		}
	}
}
