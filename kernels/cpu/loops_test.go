package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// TestLoopedRows: operators that have a loop for rows of one block give the bits that the passes for all rows
// give, except for the sign and the payload of a NaN.
func TestLoopedRows(t *testing.T) {
	defer func(n int) { loopedRow = n }(loopedRow)
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			r := rand.New(rand.NewPCG(3, uint64(dtype)))
			for i := range shortRowsCases {
				for _, op := range [...]struct {
					name string
					run  func(*shortRows) []kernels.Matrix
				}{
					{"softmax", softmaxOfShortRows}, {"softmax's gradient", softmaxGradOfShortRows},
					{"norm", normOfShortRows}, {"norm's gradient", normGradOfShortRows}, {"loss", lossOfShortRows},
				} {
					rows := newShortRows(r, dtype)
					loopedRow = block
					got := op.run(rows.again())
					loopedRow = 0
					want := op.run(rows.again())
					for k := range want {
						requireSame(t, &want[k], &got[k], fmt.Sprintf("%s of %v, case %d, %d x %d, output %d",
							op.name, dtype, i, rows.rows, rows.cols, k))
					}
				}
			}
		}
	})
}

// shortRowsCases is how many of them a test takes: all of them in CI, where GANDER_TEST is "all".
var shortRowsCases = func() int {
	n := map[bool]int{false: 60, true: 15}[raceEnabled]
	if os.Getenv("GANDER_TEST") != "all" {
		n /= 5
	}
	return n
}()

// shortRows are some rows of one block, and a source of the other arguments of a call.
type shortRows struct {
	*rand.Rand
	seed       uint64
	dtype      kernels.DType
	rows, cols int
	workers    int
	x          matrix
}

func newShortRows(r *rand.Rand, dtype kernels.DType) *shortRows {
	s := &shortRows{Rand: r, seed: r.Uint64(), dtype: dtype, rows: 1 + r.IntN(20), workers: 1 + r.IntN(3)}
	s.cols = [...]int{1 + r.IntN(20), 1 + r.IntN(300), block - r.IntN(40), 64 * (1 + r.IntN(5))}[r.IntN(4)]
	switch {
	case s.cols <= 20 && r.IntN(2) == 0:
		s.rows = maxTasks*maxTogether/2 + r.IntN(maxTasks*maxTogether)
	case s.cols%64 == 0 && s.cols <= shortBlock && r.IntN(5) == 0: // more rows in a task than are taken together
		s.rows = maxTasks*min(block/s.cols, maxTogether) + 1 + r.IntN(200)
	}
	s.x = s.matrix(dtype)
	return s
}

// again are the same rows, with a source that starts anew.
func (s *shortRows) again() *shortRows {
	c := *s
	c.Rand = rand.New(rand.NewPCG(s.seed, 0))
	return &c
}

// matrix has special values in some of its rows.
func (s *shortRows) matrix(dtype kernels.DType) matrix {
	specials := [...]float64{math.NaN(), math.Inf(1), math.Inf(-1), math.Copysign(0, -1), 3e38, 1e-40, -100}
	density := [...]float64{0, 0, 0.02, 1}
	often, special := 0.0, 0.0
	return newMatrix(dtype, s.rows, s.cols, s.IntN(4), s.IntN(20)).fill(func(_, j int) float64 {
		if j == 0 {
			often, special = density[s.IntN(len(density))], specials[s.IntN(len(specials))]
		}
		if s.Float64() < often {
			return special
		}
		return s.NormFloat64() * 3
	})
}

// output is x itself or a matrix of its own.
func (s *shortRows) output(x matrix) matrix {
	if s.IntN(3) == 0 {
		return x
	}
	return newMatrix(s.dtype, s.rows, s.cols, s.IntN(4), s.IntN(20)).fill(func(_, _ int) float64 { return 7 })
}

// vector has one of the values in each element.
func (s *shortRows) vector(dtype kernels.DType, n int, values ...float64) kernels.Vector {
	return newVector(dtype, n, func(int) float64 { return values[s.IntN(len(values))] })
}

// maybe is v or, as often, nothing.
func (s *shortRows) maybe(v kernels.Vector) kernels.Vector {
	if s.IntN(2) == 0 {
		return kernels.Vector{}
	}
	return v
}

func softmaxOfShortRows(s *shortRows) []kernels.Matrix {
	x := s.x.clone()
	y := s.output(x)
	SoftmaxForward(x.Matrix, y.Matrix, s.workers)
	return []kernels.Matrix{y.Matrix}
}

func softmaxGradOfShortRows(s *shortRows) []kernels.Matrix {
	y, dy := s.x.clone(), s.matrix(s.dtype)
	dx := s.output(dy)
	if s.IntN(3) == 0 {
		dx = y
	}
	SoftmaxBackward(dy.Matrix, y.Matrix, dx.Matrix, s.workers)
	return []kernels.Matrix{dx.Matrix}
}

func normOfShortRows(s *shortRows) []kernels.Matrix {
	x, stat := s.x.clone(), statistics(s.dtype)
	y := s.output(x)
	n := kernels.Norm{X: x.Matrix, Y: y.Matrix, Eps: 1e-6, Center: s.IntN(2) == 0,
		RoundNormalized: s.IntN(6) == 0, Weight: s.maybe(s.vector(s.dtype, s.cols, 1, -0.3, 2)),
		Bias: s.maybe(s.vector(s.dtype, s.cols, 0, 1, -0.3)), Rstd: s.maybe(s.vector(stat, s.rows, 9))}
	if n.Center {
		n.Mean = s.maybe(s.vector(stat, s.rows, 9))
	}
	if s.IntN(6) == 0 {
		n.Residual = s.matrix(s.dtype).Matrix
	}
	NormForward(&n, s.workers)
	return []kernels.Matrix{y.Matrix, asRow(n.Rstd), asRow(n.Mean)}
}

func normGradOfShortRows(s *shortRows) []kernels.Matrix {
	x, dout, stat := s.x.clone(), s.matrix(s.dtype), statistics(s.dtype)
	n := kernels.Norm{X: x.Matrix, DOut: dout.Matrix, DX: s.output(dout).Matrix, Center: s.IntN(4) == 0,
		RoundNormalized: s.IntN(6) == 0, Weight: s.maybe(s.vector(s.dtype, s.cols, 1, -0.3, 2)),
		Rstd: s.vector(stat, s.rows, 0.5, 1, 3), Mean: s.vector(stat, s.rows, 0, 1, -0.3),
		DW: s.maybe(s.vector(s.dtype, s.cols, 9)), DB: s.maybe(s.vector(s.dtype, s.cols, 9))}
	if s.IntN(6) == 0 {
		n.DResidualOut = s.matrix(s.dtype).Matrix
	}
	NormBackward(&n, s.workers)
	return []kernels.Matrix{n.DX, asRow(n.DW), asRow(n.DB)}
}

// TestTogether: rows of 16 bits that are taken together have the bits of the same rows of float32, rounded,
// also where results are written past the cache, and where other operands are float32.
func TestTogether(t *testing.T) {
	defer func(n int) { streamBytes = n }(streamBytes)
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			if dtype.Size() != 2 || engine32.funcs.rmsNormRows == nil {
				continue
			}
			r := rand.New(rand.NewPCG(4, uint64(dtype)))
			for i := range shortRowsCases {
				s := newShortRows(r, dtype)
				s.cols = 64 * (1 + r.IntN(2))
				s.rows = [...]int{1, 7, 33, 80, 257, 700}[r.IntN(6)]
				x, dy := s.matrix(dtype), s.matrix(dtype)
				mixed := s.matrix([...]kernels.DType{dtype, kernels.Float32}[r.IntN(2)])
				streamBytes = [...]int{math.MaxInt, 0}[r.IntN(2)]
				got := s.together(x, dy, mixed)
				streamBytes = math.MaxInt
				want := s.together(s.wide(x), s.wide(dy), s.wide(mixed))
				for k := range want {
					rounded := newMatrix(got[k].DType, int(want[k].Rows), int(want[k].Cols), 0, 0)
					for row := range int(want[k].Rows) {
						engine32.funcs.store[got[k].DType](rowAt(&rounded.Matrix, row, 0),
							view[float32](&want[k], row, 0, int(want[k].Cols)), 1)
					}
					requireSame(t, &rounded.Matrix, &got[k],
						fmt.Sprintf("%v, case %d, %d x %d, output %d", dtype, i, s.rows, s.cols, k))
				}
			}
		}
	})
}

// wide is a matrix in float32.
func (s *shortRows) wide(m matrix) matrix {
	return newMatrix(kernels.Float32, s.rows, s.cols, 3, 0).fill(m.at)
}

// together are the results of what takes rows together, with the same vectors in each call. mixed is another
// gradient of y.
func (s *shortRows) together(x, dy, mixed matrix) []kernels.Matrix {
	same := s.again()
	rstd, weight := same.vector(kernels.Float32, s.rows, 0.5, 1, 3), same.vector(s.dtype, s.cols, 1, -0.3, 2)
	saved, dw := same.vector(kernels.Float32, s.rows, 9), same.vector(kernels.Float32, s.cols, 9)
	db := same.vector(kernels.Float32, s.cols, 9)
	y, dx, grad := newMatrix(x.DType, s.rows, s.cols, 0, 5), newMatrix(x.DType, s.rows, s.cols, 0, 0), dy.clone()
	other := newMatrix(mixed.DType, s.rows, s.cols, 2, 0)
	NormForward(&kernels.Norm{X: x.Matrix, Y: y.Matrix, Weight: weight, Rstd: saved, Eps: 1e-6}, s.workers)
	NormBackward(&kernels.Norm{X: x.Matrix, DOut: dy.Matrix, DX: dx.Matrix, Weight: weight, Rstd: rstd, DW: dw,
		DB: db}, s.workers)
	NormBackward(&kernels.Norm{X: x.Matrix, DOut: mixed.Matrix, DX: other.Matrix, Rstd: rstd}, s.workers)
	SoftmaxBackward(dy.Matrix, x.Matrix, grad.Matrix, s.workers)
	return []kernels.Matrix{y.Matrix, dx.Matrix, grad.Matrix, other.Matrix, asRow(saved), asRow(dw), asRow(db)}
}

func lossOfShortRows(s *shortRows) []kernels.Matrix {
	stat, n := statistics(s.dtype), int64(s.cols)
	choices := [...]int64{-100, -1, n, 1 << 40, 0, n - 1}
	targets := make([]int64, s.rows)
	for i := range targets {
		if targets[i] = s.Int64N(n); s.IntN(3) == 0 {
			targets[i] = choices[s.IntN(len(choices))]
		}
	}
	a := kernels.CrossEntropy{X: s.x.Matrix, IgnoreIndex: -100, OnePass: s.IntN(2) == 0,
		Reduction: kernels.Reduction(s.IntN(3)), Max: s.maybe(s.vector(stat, s.rows, 9)),
		Divisor: s.maybe(s.vector(stat, 1, 3)), Denominator: s.maybe(s.vector(stat, 1, 9))}
	if a.Max.Present() {
		a.LogSum = s.maybe(s.vector(stat, s.rows, 9))
	}
	if s.IntN(6) > 0 {
		a.Target = newTargets(targets...)
		a.Weight = s.maybe(s.vector(s.dtype, s.cols, 0, math.Copysign(0, -1), 1, 0.3, math.NaN()))
		losses := 1
		if a.Reduction == kernels.ReduceNone {
			losses = s.rows
		}
		a.Loss = s.vector(stat, losses, 9)
	} else {
		a.Reduction = kernels.ReduceNone
	}
	dx := matrix{}
	if a.Target.Present() && s.IntN(2) == 0 {
		x := s.x.clone()
		dx = s.output(x)
		a.X, a.DX, a.Upstream = x.Matrix, dx.Matrix, s.maybe(s.vector(stat, 1, 0.5))
	}
	CrossEntropyForward(&a, s.workers)
	for row := range s.rows { // the maximum of a row with a NaN is any number
		if a.Max.Present() && hasNaN(&s.x.Matrix, row) {
			put(&a.Max, row, math.NaN())
		}
	}
	return []kernels.Matrix{dx.Matrix, asRow(a.Loss), asRow(a.Max), asRow(a.LogSum), asRow(a.Denominator)}
}

func hasNaN(m *kernels.Matrix, row int) bool {
	for j := range int(m.Cols) {
		if math.IsNaN(scalar(m.DType, rowAt(m, row, j))) {
			return true
		}
	}
	return false
}

func asRow(v kernels.Vector) kernels.Matrix {
	return kernels.Matrix{Data: v.Data, DType: v.DType, Rows: min(v.Len, 1), Cols: v.Len, Stride: v.Len}
}

func requireSame(t *testing.T, want, got *kernels.Matrix, what string) {
	t.Helper()
	size := int(want.DType.Size())
	for row := range int(want.Rows) {
		for j := range int(want.Cols) {
			p, q := rowAt(want, row, j), rowAt(got, row, j)
			w, g := scalar(want.DType, p), scalar(got.DType, q)
			if math.IsNaN(w) && math.IsNaN(g) {
				continue
			}
			require.Equal(t, unsafe.Slice((*byte)(p), size), unsafe.Slice((*byte)(q), size),
				"%s: row %d, column %d is %v, expected %v", what, row, j, g, w)
		}
	}
}
