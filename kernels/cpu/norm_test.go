package cpu

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

const none kernels.DType = -1

// normCase is a forward and a backward call. An absent operand has the type none.
type normCase struct {
	center    bool
	rows, n   int
	offset    float64 // of the weight
	eps       float64
	mean, std float64 // of x
	outlier   float64 // added to one element of each row

	x, residual, y, residualOut, weight, bias kernels.DType
	dout, dresidualOut, dx, dresidual, dw, db kernels.DType
}

// normals are random numbers. How many they are is prime.
var normals = func() []float64 {
	r := rand.New(rand.NewPCG(1, 2))
	v := make([]float64, 10007)
	for i := range v {
		v[i] = r.NormFloat64()
	}
	return v
}()

// normOperands are the operands of a case. Each matrix has its own stride and alignment.
type normOperands struct {
	x, residual, y, residualOut, dout, dresidualOut, dx, dresidual matrix
	weight, bias, mean, rstd, dw, db                               kernels.Vector
}

func (c *normCase) operands() *normOperands {
	i, gap := 0, 0
	next := func() float64 {
		i++
		return normals[i%len(normals)]
	}
	operand := func(t kernels.DType, f func(row, j int) float64) (m matrix) {
		gap++
		if t == none {
			return m
		}
		return newMatrix(t, c.rows, c.n, gap%5, gap%3).fill(f)
	}
	vector := func(t kernels.DType, n int, f func(int) float64) (v kernels.Vector) {
		if t == none {
			return v
		}
		return newVector(t, n, f)
	}
	normal := func(_, _ int) float64 { return next() * 2 }
	parameter := func(int) float64 { return next() }
	x := func(row, j int) float64 {
		v := c.mean + c.std*next()
		if j == (row+1)*c.n/(c.rows+1) {
			v += c.outlier
		}
		return v
	}
	nine := func(_, _ int) float64 { return 9 }
	nines := func(int) float64 { return 9 }
	o := &normOperands{
		x: operand(c.x, x), residual: operand(c.residual, normal),
		y: operand(c.y, nine), residualOut: operand(c.residualOut, nine),
		dout: operand(c.dout, normal), dresidualOut: operand(c.dresidualOut, normal),
		dx: operand(c.dx, nine), dresidual: operand(c.dresidual, nine),
		weight: vector(c.weight, c.n, parameter), bias: vector(c.bias, c.n, parameter),
		rstd: newVector(statistics(c.x), c.rows, nines),
		dw:   vector(c.dw, c.n, nines), db: vector(c.db, c.n, nines),
	}
	if c.center {
		o.mean = newVector(statistics(c.x), c.rows, nines)
	}
	return o
}

// placement lets outputs take the place of inputs.
type placement struct {
	name              string
	forward, backward func(o *normOperands)
}

var outOfPlace = placement{"out of place", func(*normOperands) {}, func(*normOperands) {}}

// run runs forward and backward, and checks the memory around each output.
func (c *normCase) run(t *testing.T, p placement, workers int) *normOperands {
	t.Helper()
	o := c.operands()
	x := o.x.clone()
	p.forward(o)
	n := kernels.Norm{X: o.x.Matrix, Residual: o.residual.Matrix, Weight: o.weight, Bias: o.bias,
		Y: o.y.Matrix, ResidualOut: o.residualOut.Matrix, Mean: o.mean, Rstd: o.rstd,
		Eps: c.eps, WeightOffset: c.offset, Center: c.center}
	require.NoError(t, NormForward(&n, workers))
	if c.residualOut != none {
		x = o.residualOut
	}
	p.backward(o)
	n = kernels.Norm{X: x.Matrix, Weight: o.weight, Mean: o.mean, Rstd: o.rstd, DOut: o.dout.Matrix,
		DResidualOut: o.dresidualOut.Matrix, DX: o.dx.Matrix, DResidual: o.dresidual.Matrix,
		DW: o.dw, DB: o.db, WeightOffset: c.offset, Center: c.center}
	require.NoError(t, NormBackward(&n, workers))
	for _, m := range []matrix{o.y, o.residualOut, o.dx, o.dresidual} {
		if m.Present() {
			m.requireIntact(t)
		}
	}
	return o
}

// results are the bytes of the elements of all outputs.
func (o *normOperands) results() map[string][]byte {
	all := map[string][]byte{}
	for name, m := range map[string]matrix{
		"y": o.y, "residual_out": o.residualOut, "dx": o.dx, "dresidual": o.dresidual,
	} {
		for row := range int(m.Rows) {
			p := unsafe.Slice((*byte)(rowAt(&m.Matrix, row, 0)), m.Cols*m.DType.Size())
			all[name] = append(all[name], p...)
		}
	}
	for name, v := range map[string]kernels.Vector{"mean": o.mean, "rstd": o.rstd, "dw": o.dw, "db": o.db} {
		all[name] = unsafe.Slice((*byte)(v.Data), v.Len*v.DType.Size())
	}
	return all
}

// check compares the results with plain loops in float64. Each bound is a few roundings of the numbers that a
// result is computed from.
func (c *normCase) check(t *testing.T, o *normOperands) {
	t.Helper()
	e, stat := epsilon(c.x), statistics(c.x)
	rounded, sum := newMatrix(max(c.residualOut, 0), 1, 1, 0, 0), stat
	switch {
	case c.center && c.residualOut != none:
		sum = c.residualOut
	case c.center && c.residual == c.x:
		sum = c.x
	}
	stored := newMatrix(sum, 1, 1, 0, 0)
	weight, bias := make([]float64, c.n), make([]float64, c.n)
	for j := range weight {
		weight[j] = 1
	}
	if o.weight.Present() {
		weight = values(o.weight)
		for j := range weight {
			weight[j] += c.offset
		}
	}
	if o.bias.Present() {
		bias = values(o.bias)
	}
	dw, dwSize := make([]float64, c.n), make([]float64, c.n)
	db, dbSize := make([]float64, c.n), make([]float64, c.n)
	for row := range c.rows {
		h := o.x.row(row)
		if o.residual.Present() {
			for j, v := range o.residual.row(row) {
				h[j] += v
				if stat == kernels.Float32 {
					h[j] = float64(float32(h[j]))
				}
			}
		}
		for j, v := range h {
			stored.set(0, 0, v)
			h[j] = stored.at(0, 0)
		}
		mean, rest, size, squares := 0.0, 0.0, 0.0, 0.0
		if c.center {
			for _, v := range h {
				mean += v / float64(c.n)
				size += math.Abs(v) / float64(c.n)
			}
			for _, v := range h {
				rest += (v - mean) / float64(c.n) // what rounding took from the mean
			}
			requireClose(t, stat, mean+rest, at(&o.mean, row), 0x1p-46*size, row, 0)
		}
		for _, v := range h {
			squares += (v - mean - rest) * (v - mean - rest)
		}
		rstd := 1 / math.Sqrt(squares/float64(c.n)+c.eps)
		requireClose(t, stat, rstd, at(&o.rstd, row), 2*e*rstd, row, 0)
		for j, v := range h {
			xhat := (v - mean - rest) * rstd
			want := xhat*weight[j] + bias[j]
			allowed := (8*e*math.Abs(xhat) + 0x1p-46*size*rstd) * math.Abs(weight[j])
			requireClose(t, c.y, want, o.y.at(row, j), allowed+2*e*math.Abs(want), row, j)
			if o.residualOut.Present() {
				rounded.set(0, 0, v)
				if want, got := rounded.at(0, 0), o.residualOut.at(row, j); want != got {
					require.Failf(t, "residual_out", "row %d, column %d: want %v, got %v", row, j, want, got)
				}
			}
		}

		// Backward reads x and the statistics as they were stored, but knows the mean of x to more digits.
		x, dout, added := o.x.row(row), o.dout.row(row), make([]float64, c.n)
		if o.residualOut.Present() {
			x = o.residualOut.row(row)
		}
		if o.dresidualOut.Present() {
			added = o.dresidualOut.row(row)
		}
		mean, rstd = 0, at(&o.rstd, row)
		if c.center {
			mean, rest = at(&o.mean, row), 0
			for _, v := range x {
				rest += (v - mean) / float64(c.n)
			}
			if stat == kernels.Float32 && math.Abs(rest) <= 0x1p-23*math.Abs(mean) { // else of another x
				mean += rest
			}
		}
		var g, gSize, gx, gxSize, restSize float64
		for _, v := range x {
			if c.center { // the rounding of the largest deviation shows in the mean of all
				restSize = max(restSize, math.Abs(v-mean)*rstd/float64(c.n))
			}
		}
		for j, v := range x {
			xhat := (v - mean) * rstd
			p := dout[j] * weight[j] / float64(c.n)
			g, gSize = g+p, gSize+math.Abs(p)
			gx, gxSize = gx+p*xhat, gxSize+math.Abs(p*xhat)
			dw[j] += dout[j] * xhat
			dwSize[j] += math.Abs(dout[j]) * (math.Abs(xhat) + restSize)
			db[j] += dout[j]
			dbSize[j] += math.Abs(dout[j])
		}
		if !c.center {
			g, gSize = 0, 0
		}
		for j, v := range x {
			xhat, scaled := (v-mean)*rstd, dout[j]*weight[j]
			want := (scaled-g-xhat*gx)*rstd + added[j]
			allowed := 8*e*(math.Abs(scaled)+gSize+(math.Abs(xhat)+restSize)*gxSize)*rstd + e*math.Abs(want)
			requireClose(t, c.dx, want, o.dx.at(row, j), allowed, row, j)
			if o.dresidual.Present() {
				requireClose(t, c.dresidual, want, o.dresidual.at(row, j), allowed, row, j)
			}
		}
	}
	if o.dw.Present() {
		for j, got := range values(o.dw) {
			requireClose(t, c.dw, dw[j], got, 4*e*dwSize[j], 0, j)
		}
	}
	if o.db.Present() {
		for j, got := range values(o.db) {
			requireClose(t, c.db, db[j], got, e*math.Abs(db[j])+0x1p-46*dbSize[j], 0, j)
		}
	}
}

// randomNorm has random types, absent operands and values.
func randomNorm(r *rand.Rand, x kernels.DType) normCase {
	companion := func() kernels.DType {
		if x == kernels.Float64 {
			return x
		}
		return kernels.DType(r.IntN(3))
	}
	optional := func() kernels.DType {
		if r.IntN(2) == 0 {
			return none
		}
		return companion()
	}
	c := normCase{center: r.IntN(2) == 0, rows: 1 + r.IntN(4), n: 1 + r.IntN(5000), eps: 1e-6, std: 1,
		x: x, residual: optional(), y: companion(), residualOut: optional(),
		weight: optional(), bias: optional(),
		dout: companion(), dresidualOut: optional(), dx: companion(), dresidual: optional(),
		dw: optional(), db: optional()}
	switch r.IntN(5) {
	case 0:
		c.mean = 1e4
	case 2:
		if x != kernels.Float64 {
			c.mean, c.std = 1e4, 1e-2 // rounding the mean to float32 is a hundredth of that
		}
	case 1:
		c.outlier = 1e4
	}
	switch r.IntN(3) {
	case 0:
		c.n = 1 + r.IntN(70)
		c.rows = 1 + r.IntN(40) // from 16 rows on, dw and db have several partial sums
	case 1:
		c.n = block - 1 + r.IntN(3)
	}
	if r.IntN(3) == 0 && c.weight != none {
		c.offset = 1
	}
	return c
}

func TestNorm(t *testing.T) {
	if raceEnabled {
		t.Skip("slow, and single-threaded; TestNormInPlace has what workers share")
	}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, x := range typesOf(engine32.funcs) {
			r := rand.New(rand.NewPCG(3, uint64(x)))
			for range 60 {
				c := randomNorm(r, x)
				t.Run(fmt.Sprintf("%v/%dx%d", x, c.rows, c.n), func(t *testing.T) {
					defer logOnFailure(t, &c)
					c.check(t, c.run(t, outOfPlace, 1))
				})
			}
		}
	})
}

// logOnFailure is to be deferred: requirements that fail end the goroutine.
func logOnFailure(t *testing.T, c *normCase) {
	if t.Failed() {
		t.Logf("%+v", *c)
	}
}

// TestNormLongRows has rows that forward reads again, and whose weight and bias are converted block by block.
func TestNormLongRows(t *testing.T) {
	if raceEnabled {
		t.Skip("slow; TestNormInPlace has what workers share")
	}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, x := range typesOf(engine32.funcs)[1:] {
			r := rand.New(rand.NewPCG(4, uint64(x)))
			for _, center := range []bool{false, true} {
				c := randomNorm(r, x)
				c.center, c.rows, c.n, c.mean = center, 2, longRow+4099, 1e4
				c.weight, c.bias, c.dw, c.db = c.y, c.dx, c.y, c.dout
				c.check(t, c.run(t, outOfPlace, 3))
			}
		}
	})
}

// placements are all ways in which the results of a call may overwrite its operands.
var placements = []placement{
	{"y is x", func(o *normOperands) { o.y = o.x }, func(o *normOperands) { o.dx = o.dout }},
	{"y is residual", func(o *normOperands) { o.y = o.residual },
		func(o *normOperands) { o.dx = o.dresidualOut }},
	{"residual_out is x", func(o *normOperands) { o.residualOut = o.x },
		func(o *normOperands) { o.dresidual = o.dout }},
	{"residual_out is residual", func(o *normOperands) { o.residualOut = o.residual },
		func(o *normOperands) { o.dresidual = o.dresidualOut }},
	{"y is x, residual_out is residual", func(o *normOperands) { o.y, o.residualOut = o.x, o.residual },
		func(o *normOperands) { o.dx, o.dresidual = o.dout, o.dresidualOut }},
	{"y is residual, residual_out is x", func(o *normOperands) { o.y, o.residualOut = o.residual, o.x },
		func(o *normOperands) { o.dx, o.dresidual = o.dresidualOut, o.dout }},
}

// TestNormInPlace: neither the number of workers nor where results are written changes a bit.
func TestNormInPlace(t *testing.T) {
	shapes := [][2]int{{250, 300}, {5, 3}, {9, block}, {9, 4097}, {2, longRow + 4099}}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, types := range [][2]kernels.DType{
			{kernels.BFloat16, kernels.BFloat16}, {kernels.Float32, kernels.Float32},
			{kernels.BFloat16, kernels.Float32}, {kernels.Float32, kernels.Float16},
			{kernels.Float64, kernels.Float64},
		} {
			if types[0] == kernels.Float64 && engine32.funcs != &portable32 {
				continue // float64 has portable code only
			}
			for i, shape := range shapes {
				if shape[1] > longRow && types[0] != kernels.Float32 || raceEnabled && (i > 2 || types[0] == types[1]) {
					continue // slow
				}
				a, b := types[0], types[1]
				c := normCase{center: i%2 == 0, rows: shape[0], n: shape[1], eps: 1e-5, mean: 3, std: 2,
					x: a, residual: b, weight: b, bias: a, dout: a, dresidualOut: b, dw: a, db: b}
				for _, p := range placements {
					// The outputs have the types of the operands whose place they take.
					o := &normOperands{x: matrix{Matrix: kernels.Matrix{DType: a}},
						residual:     matrix{Matrix: kernels.Matrix{DType: b}},
						dout:         matrix{Matrix: kernels.Matrix{DType: a}},
						dresidualOut: matrix{Matrix: kernels.Matrix{DType: b}},
						y:            matrix{Matrix: kernels.Matrix{DType: a}},
						residualOut:  matrix{Matrix: kernels.Matrix{DType: a}},
						dx:           matrix{Matrix: kernels.Matrix{DType: b}},
						dresidual:    matrix{Matrix: kernels.Matrix{DType: b}}}
					p.forward(o)
					p.backward(o)
					c.y, c.residualOut, c.dx, c.dresidual =
						o.y.DType, o.residualOut.DType, o.dx.DType, o.dresidual.DType
					want := c.run(t, outOfPlace, 1).results()
					for name, got := range c.run(t, p, 4).results() {
						require.True(t, bytes.Equal(want[name], got), "%s: %s of %+v", p.name, name, c)
					}
				}
			}
		}
	})
}

// TestNormSpecialRows: a row without a deviation becomes the bias, and a NaN or an infinity stays in its row.
func TestNormSpecialRows(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range typesOf(engine32.funcs) {
			for _, n := range []int{1, 37, block + 5} {
				for _, center := range []bool{false, true} {
					rows := []float64{1e4, math.NaN(), math.Inf(1), 0}
					x := newMatrix(dtype, len(rows), n, 1, 1).fill(func(row, j int) float64 {
						if j == n/2 || rows[row] == 1e4 {
							return rows[row]
						}
						return 0
					})
					y := newMatrix(dtype, len(rows), n, 0, 0)
					bias := newVector(dtype, n, func(i int) float64 { return float64(i % 7) })
					v := kernels.Norm{X: x.Matrix, Y: y.Matrix, Bias: bias, Eps: 1e-6, Center: center,
						Mean: newVector(statistics(dtype), len(rows), func(int) float64 { return 9 }),
						Rstd: newVector(statistics(dtype), len(rows), func(int) float64 { return 9 })}
					require.NoError(t, NormForward(&v, 1))
					if center {
						require.Equal(t, values(bias), y.row(0))
						require.Equal(t, x.at(0, 0), at(&v.Mean, 0))
						require.InEpsilon(t, 1000, at(&v.Rstd, 0), 1e-6)
					}
					require.Equal(t, values(bias), y.row(3))
					for _, row := range []int{1, 2} {
						require.True(t, math.IsNaN(y.at(row, n/2)), "%v %v", dtype, y.row(row))
						if center {
							require.True(t, math.IsNaN(y.at(row, 0)))
						}
					}
				}
			}
		}
	})
}

func TestNormNoRows(t *testing.T) {
	for _, dtype := range floatTypes {
		for _, n := range []int{5, longRow + 3} {
			x := kernels.Matrix{DType: dtype, Cols: int64(n), Stride: int64(n)}
			one := func(int) float64 { return 1 }
			v := kernels.Norm{X: x, DOut: x, DX: x, Center: true,
				DW: newVector(dtype, n, one), DB: newVector(dtype, n, one)}
			require.NoError(t, NormBackward(&v, 4))
			require.Equal(t, make([]float64, n), values(v.DW))
			require.Equal(t, make([]float64, n), values(v.DB))
		}
	}
}

// TestNormHeads: the results of a head are those of a call on its rows with its weight and bias.
func TestNormHeads(t *testing.T) {
	const heads, tokens, n = 3, 5, 70
	one := func(int) float64 { return 1 }
	for _, dtype := range floatTypes {
		for _, center := range []bool{false, true} {
			c := normCase{center: center, rows: heads * tokens, n: n, eps: 1e-5, mean: 1, std: 2, x: dtype,
				residual: dtype, y: dtype, residualOut: dtype, weight: none, bias: none, dout: dtype,
				dresidualOut: dtype, dx: dtype, dresidual: dtype, dw: none, db: none}
			o := c.operands()
			parameter := func(seed int) kernels.Vector {
				return newVector(dtype, heads*n, func(i int) float64 { return normals[(seed+i)%len(normals)] })
			}
			all := kernels.Norm{X: o.x.Matrix, Residual: o.residual.Matrix, Y: o.y.Matrix,
				ResidualOut: o.residualOut.Matrix, Mean: o.mean, Rstd: o.rstd, DOut: o.dout.Matrix,
				DResidualOut: o.dresidualOut.Matrix, DX: o.dx.Matrix, DResidual: o.dresidual.Matrix,
				Weight: parameter(5), Bias: parameter(501), DW: newVector(dtype, heads*n, one),
				DB: newVector(dtype, heads*n, one), Eps: c.eps, Center: center, Heads: heads}
			require.NoError(t, NormForward(&all, 2))
			require.NoError(t, NormBackward(&all, 2))
			for head := range heads {
				gather := func(m matrix) matrix {
					return newMatrix(dtype, tokens, n, 0, 0).fill(func(row, j int) float64 {
						return m.at(row*heads+head, j)
					})
				}
				part := func(v kernels.Vector) kernels.Vector {
					return newVector(dtype, n, func(i int) float64 { return at(&v, head*n+i) })
				}
				y, sum, dx, dresidual := gather(o.y), gather(o.residualOut), gather(o.dx), gather(o.dresidual)
				perRow := func() kernels.Vector { return newVector(statistics(dtype), tokens, one) }
				v := kernels.Norm{X: gather(o.x).Matrix, Residual: gather(o.residual).Matrix, Y: y.clone().Matrix,
					ResidualOut: sum.clone().Matrix, Rstd: perRow(), DOut: gather(o.dout).Matrix,
					DResidualOut: gather(o.dresidualOut).Matrix, DX: dx.clone().Matrix,
					DResidual: dresidual.clone().Matrix, Weight: part(all.Weight), Bias: part(all.Bias),
					DW: newVector(dtype, n, one), DB: newVector(dtype, n, one), Eps: c.eps, Center: center}
				if center {
					v.Mean = perRow()
				}
				require.NoError(t, NormForward(&v, 1))
				require.NoError(t, NormBackward(&v, 1))
				for row := range tokens {
					for what, m := range map[*kernels.Matrix]matrix{
						&v.Y: y, &v.ResidualOut: sum, &v.DX: dx, &v.DResidual: dresidual,
					} {
						require.Equal(t, m.row(row), matrix{Matrix: *what}.row(row))
					}
					require.Equal(t, at(&v.Rstd, row), at(&all.Rstd, row*heads+head))
				}
				require.Equal(t, values(part(all.DW)), values(v.DW))
				require.Equal(t, values(part(all.DB)), values(v.DB))
			}
		}
	}
}

// TestNormRounded: y and dw have the normalized rows rounded to the type of x, and of dx.
func TestNormRounded(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for dtype, unit := range map[kernels.DType]float64{
			kernels.Float16: 0x1p-11, kernels.BFloat16: 0x1p-8, kernels.Float32: 0x1p-22,
		} {
			for _, n := range []int{1, 70, block + 5, longRow + 77} {
				if raceEnabled && n > 70 {
					continue // slow
				}
				const rows = 3
				single := kernels.Float32
				x := newMatrix(dtype, rows, n, 1, 1).fill(func(row, j int) float64 {
					return normals[(row*n+j)%len(normals)]
				})
				y, dout, dx := newMatrix(single, rows, n, 0, 0), newMatrix(single, rows, n, 0, 0), x.clone()
				dout = dout.fill(func(row, j int) float64 { return normals[(row*n+3*j)%len(normals)] })
				v := kernels.Norm{X: x.Matrix, Y: y.Matrix, DOut: dout.Matrix, DX: dx.Matrix, Eps: 1e-6,
					Weight: newVector(single, n, func(i int) float64 { return normals[i%len(normals)] }),
					Rstd:   newVector(single, rows, func(int) float64 { return 9 }),
					DW:     newVector(single, n, func(int) float64 { return 9 }), RoundNormalized: true}
				require.NoError(t, NormForward(&v, 2))
				require.NoError(t, NormBackward(&v, 2))
				rounded, off := newMatrix(dtype, 1, 1, 0, 0), 0
				dw, most := make([]float64, n), make([]float64, n)
				for row := range rows {
					for j, element := range x.row(row) {
						normed := element * at(&v.Rstd, row)
						rounded.set(0, 0, normed)
						want := rounded.at(0, 0) * at(&v.Weight, j)
						if math.Abs(y.at(row, j)-want) > 1e-6*math.Abs(want) {
							off++ // in the middle between two numbers of x's type, or nearly
						}
						allowed := (1.01*unit*math.Abs(normed) + 0x1p-25) * math.Abs(at(&v.Weight, j))
						require.InDelta(t, normed*at(&v.Weight, j), y.at(row, j), allowed)
						dw[j] += dout.at(row, j) * rounded.at(0, 0)
						most[j] += math.Abs(dout.at(row, j) * normed)
					}
				}
				require.LessOrEqual(t, off, rows*n/100)
				different := 0
				for j := range dw {
					require.InDelta(t, dw[j], at(&v.DW, j), 1.01*unit*most[j]+0x1p-22)
					if math.Abs(dw[j]-at(&v.DW, j)) > 1e-6*most[j] {
						different++
					}
				}
				require.LessOrEqual(t, different, n/50)
			}
		}
	})
}

// TestLayerNormOfTheSum: y is the norm of what residual_out holds. It is the same without residual_out if
// that has the type of x + residual in torch.
func TestLayerNormOfTheSum(t *testing.T) {
	low := []kernels.DType{kernels.Float16, kernels.BFloat16, kernels.Float32}
	norm := func(x, residual, sum matrix) []float64 {
		y := newMatrix(kernels.Float32, int(x.Rows), int(x.Cols), 0, 0)
		call := kernels.Norm{X: x.Matrix, Residual: residual.Matrix, ResidualOut: sum.Matrix, Y: y.Matrix,
			Eps: 1e-6, Center: true}
		require.NoError(t, NormForward(&call, 1))
		return y.row(int(x.Rows) - 1)
	}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, n := range []int{5, 300, block + 1, longRow + 1} {
			for _, of := range [][2]kernels.DType{{0, 0}, {1, 1}, {2, 2}, {0, 1}, {1, 2}, {2, 0}} {
				normal := func(_, j int) float64 { return normals[j%len(normals)] }
				x := newMatrix(of[0], 2, n, 0, 0).fill(normal)
				residual := newMatrix(of[1], 2, n, 0, 0).fill(func(_, _ int) float64 { return 30 })
				inTorch := kernels.Float32
				if of[0] == of[1] {
					inTorch = of[0]
				}
				for _, stored := range low {
					sum := newMatrix(stored, 2, n, 0, 0)
					y := norm(x, residual, sum)
					require.Equal(t, norm(sum, matrix{}, matrix{}), y, "%v in %v, %d columns", of, stored, n)
					if stored == inTorch {
						require.Equal(t, norm(x, residual, matrix{}), y, "%v, %d columns", of, n)
					}
				}
			}
		}
	})
}

func BenchmarkNorm(b *testing.B) {
	for _, dtype := range []kernels.DType{kernels.BFloat16, kernels.Float32} {
		for _, shape := range [][2]int{{64, 512}, {2048, 4096}, {64, 131072}} {
			c := normCase{center: true, rows: shape[0], n: shape[1], eps: 1e-6, std: 1,
				x: dtype, residual: dtype, y: dtype, residualOut: dtype, weight: dtype, bias: dtype,
				dout: dtype, dresidualOut: dtype, dx: dtype, dresidual: none, dw: dtype, db: dtype}
			o := c.operands()
			for _, center := range []bool{false, true} {
				plain := kernels.Norm{X: o.x.Matrix, Weight: o.weight, Y: o.y.Matrix, Rstd: o.rstd,
					DOut: o.dout.Matrix, DX: o.dx.Matrix, DW: o.dw, Eps: c.eps, Center: center}
				if center {
					plain.Mean, plain.Bias, plain.DB = o.mean, o.bias, o.db
				}
				added := plain
				added.Residual, added.ResidualOut = o.residual.Matrix, o.residualOut.Matrix
				added.DResidualOut = o.dresidualOut.Matrix
				name := map[bool]string{false: "RMSNorm", true: "LayerNorm"}[center]
				for _, call := range []struct {
					name  string
					norm  kernels.Norm
					moved int // tensors of x's size read and written
					run   func(*kernels.Norm, int) error
				}{
					{"Forward", plain, 2, NormForward}, {"ForwardAdd", added, 4, NormForward},
					{"Backward", plain, 3, NormBackward}, {"BackwardAdd", added, 4, NormBackward},
				} {
					b.Run(fmt.Sprintf("%s%s/%v/%dx%d", name, call.name, dtype, shape[0], shape[1]),
						func(b *testing.B) {
							b.SetBytes(int64(call.moved*shape[0]*shape[1]) * dtype.Size())
							for b.Loop() {
								call.run(&call.norm, 2)
							}
						})
				}
			}
		}
	}
}

// TestFloat64Deviations: an element far from all others comes first, where it is the pivot.
func TestFloat64Deviations(t *testing.T) {
	const n = 2048
	x, y := newMatrix(kernels.Float64, 1, n, 0, 0), newMatrix(kernels.Float64, 1, n, 0, 0)
	statistics := newVector(kernels.Float64, 1, func(int) float64 { return 0 })
	mean, squares := new(big.Float).SetPrec(200), new(big.Float).SetPrec(200)
	r := rand.New(rand.NewPCG(1, 2))
	for j := range n {
		v := r.NormFloat64()
		if j == 0 {
			v = 1e6
		}
		x.set(0, j, v)
		mean.Add(mean, big.NewFloat(v))
	}
	mean.Quo(mean, big.NewFloat(n))
	for j := range n {
		d := new(big.Float).SetPrec(200).Sub(big.NewFloat(x.at(0, j)), mean)
		squares.Add(squares, d.Mul(d, d))
	}
	want, _ := squares.Quo(squares, big.NewFloat(n)).Float64()
	call := kernels.Norm{X: x.Matrix, Y: y.Matrix, Rstd: statistics, Center: true}
	require.NoError(t, NormForward(&call, 1))
	require.InEpsilon(t, 1/math.Sqrt(want), at(&statistics, 0), 4e-16)
}
