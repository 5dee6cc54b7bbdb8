package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// maskedCase is a forward and a backward call. Package ops tests all masks, types and layouts; these are rows
// of several blocks, and rows that workers share.
type maskedCase struct {
	dtype        kernels.DType
	rows, n      int
	log, added   bool // added: the mask is added, of the same type
	queries      int64
	scale        float64
	x, y, dy, dx matrix
	mask         matrix
}

func (c *maskedCase) run(t *testing.T, workers int) {
	t.Helper()
	r := rand.New(rand.NewPCG(7, uint64(c.n)))
	normal := func(_, _ int) float64 { return r.NormFloat64() }
	nine := func(_, _ int) float64 { return 9 }
	c.x = newMatrix(c.dtype, c.rows, c.n, 3, 1).fill(normal)
	c.dy = newMatrix(c.dtype, c.rows, c.n, 0, 2).fill(normal)
	c.y = newMatrix(c.dtype, c.rows, c.n, 1, 3).fill(nine)
	c.dx = newMatrix(c.dtype, c.rows, c.n, 2, 0).fill(nine)
	masked := func(_, _ int) float64 {
		if r.IntN(3) == 0 {
			return math.Inf(-1)
		}
		return r.NormFloat64()
	}
	s := kernels.MaskedSoftmax{X: c.x.Matrix, Y: c.y.Matrix, DY: c.dy.Matrix, DX: c.dx.Matrix, Log: c.log,
		Scale: c.scale, Mask: kernels.Mask{Queries: c.queries}}
	if c.added {
		c.mask = newMatrix(c.dtype, c.rows, c.n, 1, 1).fill(masked)
		s.Mask.Data, s.Mask.DType, s.Mask.Column = c.mask.Data, c.dtype, 1
		s.Mask.Extents, s.Mask.Strides = [2]int64{int64(c.rows), 1}, [3]int64{c.mask.Stride}
	}
	forward := s
	forward.DY, forward.DX = kernels.Matrix{}, kernels.Matrix{}
	require.NoError(t, MaskedSoftmaxForward(&forward, workers))
	s.X = kernels.Matrix{}
	require.NoError(t, MaskedSoftmaxBackward(&s, workers))
	c.y.requireIntact(t)
	c.dx.requireIntact(t)
}

// takes tells whether an element takes part, and what is added to it.
func (c *maskedCase) takes(row, j int) (add float64, takes bool) {
	if c.added {
		add = c.mask.at(row, j)
	}
	return add, !math.IsInf(add, -1) && (c.queries == 0 || int64(j) <= int64(row)%c.queries)
}

func (c *maskedCase) check(t *testing.T) {
	t.Helper()
	for row := range c.rows {
		high, sum, dot, size := math.Inf(-1), 0.0, 0.0, 0.0
		h := make([]float64, c.n)
		for j := range h {
			add, takes := c.takes(row, j)
			h[j] = c.x.at(row, j)*c.scale + add
			if !takes {
				h[j] = math.Inf(-1)
			}
			high = max(high, h[j])
		}
		for j := range h {
			if _, takes := c.takes(row, j); !takes {
				continue
			}
			sum += math.Exp(h[j] - high)
			p := 1.0
			if !c.log {
				p = c.y.at(row, j)
			}
			dot += c.dy.at(row, j) * p
			size += math.Abs(c.dy.at(row, j) * p)
		}
		e := epsilon(c.dtype)
		for j := range h {
			want, grad, allowed := math.Exp(h[j]-high)/sum, 0.0, 0.0
			if c.log {
				want = h[j] - high - math.Log(sum)
			}
			if _, takes := c.takes(row, j); takes {
				dy, y := c.dy.at(row, j), c.y.at(row, j)
				grad = c.scale * (dy - dot) * y
				if c.log {
					y = math.Exp(y)
					grad = c.scale * (dy - y*dot)
				}
				allowed = math.Abs(c.scale) * (math.Abs(dy) + y*size) * 64 * e
				requireClose(t, c.dtype, want, c.y.at(row, j), 64*e*max(1, math.Abs(h[j]-high))*max(want, -want), row, j)
			} else {
				require.Equal(t, want, c.y.at(row, j))
			}
			requireClose(t, c.dtype, grad, c.dx.at(row, j), allowed, row, j)
		}
	}
}

func TestMaskedSoftmax(t *testing.T) {
	forEachInstructionSet(t, func(t *testing.T) {
		for _, dtype := range floatTypes {
			for _, shape := range [][2]int{{5, 5000}, {2, longRow + 3000}} {
				for _, log := range []bool{false, true} {
					for _, added := range []bool{false, true} {
						if shape[1] > longRow && (dtype != kernels.Float32 || !added) {
							continue
						}
						c := maskedCase{dtype: dtype, rows: shape[0], n: shape[1], log: log, added: added, scale: 0.8}
						if shape[0] > 2 {
							c.queries = int64(shape[0])
						}
						t.Run(fmt.Sprintf("%v %v log=%t added=%t", dtype, shape, log, added), func(t *testing.T) {
							c.run(t, 4)
							c.check(t)
							y, dx := bytesOfRows(&c.y), bytesOfRows(&c.dx)
							c.run(t, 1)
							require.Equal(t, y, bytesOfRows(&c.y), "y depends on the number of workers")
							require.Equal(t, dx, bytesOfRows(&c.dx), "dx depends on the number of workers")
						})
					}
				}
			}
		}
	})
}

func bytesOfRows(m *matrix) (all []byte) {
	for row := range int(m.Rows) {
		all = append(all, unsafe.Slice((*byte)(rowAt(&m.Matrix, row, 0)), m.Cols*m.DType.Size())...)
	}
	return all
}
