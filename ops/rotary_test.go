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

// rotaryCase is a call on tokens of sequences with some heads of some columns.
type rotaryCase struct {
	sequences, tokens, heads, kHeads, columns int64
	rotated                                   int64
	interleaved, perElement                   bool
	offset                                    int64
	offsets                                   []int64 // nil for none
	cuSeqlens                                 []int64 // nil for none
	tables                                    int64   // for each sequence; 0: one without that dimension
}

var rotaryCases = map[string]rotaryCase{
	"halves": {sequences: 2, tokens: 5, heads: 4, kHeads: 2, columns: 64, rotated: 64},
	"elements": {sequences: 2, tokens: 5, heads: 4, kHeads: 1, columns: 64, rotated: 64, perElement: true,
		tables: 1},
	"interleaved": {sequences: 2, tokens: 3, heads: 2, kHeads: 2, columns: 64, rotated: 64, interleaved: true},
	"interleaved elements": {sequences: 1, tokens: 3, heads: 2, kHeads: 2, columns: 48, rotated: 32,
		interleaved: true, perElement: true},
	"part":        {sequences: 2, tokens: 3, heads: 3, kHeads: 1, columns: 50, rotated: 18},
	"odd columns": {sequences: 1, tokens: 2, heads: 1, columns: 7, rotated: 2},
	"each sequence": {sequences: 3, tokens: 4, heads: 2, kHeads: 1, columns: 16, rotated: 16, perElement: true,
		tables: 3},
	"offset":  {sequences: 2, tokens: 3, heads: 2, kHeads: 1, columns: 16, rotated: 16, offset: 4},
	"offsets": {sequences: 2, tokens: 3, heads: 2, kHeads: 1, columns: 16, rotated: 16, offsets: []int64{3, 0}},
	"packed": {sequences: 1, tokens: 9, heads: 2, kHeads: 1, columns: 16, rotated: 16,
		cuSeqlens: []int64{1, 4, 4, 8}, offset: 1, offsets: []int64{0, 7, -1}},
	"long": {sequences: 1, tokens: 1, heads: 1, kHeads: 1, columns: 9000, rotated: 9000},
	"long interleaved": {sequences: 1, tokens: 1, heads: 1, kHeads: 1, columns: 9000, rotated: 9000,
		interleaved: true},
}

const positions = 12

// where is the sequence and the position of a token, or ok is false.
func (c rotaryCase) where(token int64) (sequence, position int64, ok bool) {
	sequence, position = token/c.tokens, token%c.tokens
	if c.cuSeqlens != nil {
		sequence = -1
		for i := range c.cuSeqlens[:len(c.cuSeqlens)-1] {
			if c.cuSeqlens[i] <= token && token < c.cuSeqlens[i+1] {
				sequence, position, ok = int64(i), token-c.cuSeqlens[i], true
			}
		}
		if !ok {
			return 0, 0, false
		}
	}
	position += c.offset
	if c.offsets != nil {
		position += c.offsets[sequence]
	}
	return sequence, position, true
}

// of rotates the heads of all tokens, in float64. sign is -1 for backward. magnitude is the sum of
// the absolute products.
func (c rotaryCase) of(x []float64, heads int64, cos, sin []float64, sign float64) (y, magnitude []float64) {
	width := c.rotated / 2
	if c.perElement {
		width = c.rotated
	}
	y, magnitude = append(y, x...), make([]float64, len(x))
	for token := range c.sequences * c.tokens {
		sequence, position, ok := c.where(token)
		if !ok {
			continue
		}
		table := (min(sequence, max(c.tables, 1)-1)*positions + position) * width
		for h := range heads {
			at := (token*heads + h) * c.columns
			for pair := range c.rotated / 2 {
				i, j := pair, pair+c.rotated/2
				if c.interleaved {
					i, j = 2*pair, 2*pair+1
				}
				ci, cj := pair, pair // columns of the tables
				if c.perElement {
					ci, cj = i, j
				}
				a, b := x[at+i], x[at+j]
				c1, c2, s1, s2 := cos[table+ci], cos[table+cj], -sin[table+ci], sin[table+cj]
				if sign < 0 {
					s1, s2 = s2, s1
				}
				y[at+i], y[at+j] = a*c1+b*s1, b*c2+a*s2
				magnitude[at+i] = math.Abs(a*c1) + math.Abs(b*s1)
				magnitude[at+j] = math.Abs(b*c2) + math.Abs(a*s2)
			}
		}
	}
	return y, magnitude
}

func (c rotaryCase) tableShape() []int64 {
	width := c.rotated / 2
	if c.perElement {
		width = c.rotated
	}
	if c.tables > 0 {
		return []int64{c.tables, positions, width}
	}
	return []int64{positions, width}
}

func indices(t testing.TB, d dlpack.DType, v []int64) *dlpack.Tensor {
	if v == nil {
		return nil
	}
	var all []float64
	for _, i := range v {
		all = append(all, float64(i))
	}
	return tensor(t, d, all, int64(len(v)))
}

func TestRotary(t *testing.T) {
	for name, c := range rotaryCases {
		for _, d := range floats {
			for _, dt := range companions(d) {
				t.Run(fmt.Sprintf("%s/%v/%v", name, d, dt), func(t *testing.T) {
					r := rand.New(rand.NewPCG(uint64(c.columns), uint64(d.Bits)))
					rows := c.sequences * c.tokens
					qShape := []int64{c.sequences, c.tokens, c.heads, c.columns}
					kShape := []int64{c.sequences, c.tokens, c.kHeads, c.columns}
					size := int64(1)
					for _, n := range c.tableShape() {
						size *= n
					}
					vq, vk := random(t, r, d, rows*c.heads*c.columns), random(t, r, d, rows*c.kHeads*c.columns)
					vcos, vsin := random(t, r, dt, size), random(t, r, dt, size)
					cos, sin := tensor(t, dt, vcos, c.tableShape()...), tensor(t, dt, vsin, c.tableShape()...)
					for sign, run := range map[float64]func(q, k, qOut, kOut *dlpack.Tensor) error{
						1: func(q, k, qOut, kOut *dlpack.Tensor) error {
							return ops.RotaryForward{Q: q, K: k, Cos: cos, Sin: sin, QOut: qOut, KOut: kOut, Offset: c.offset,
								Offsets: indices(t, dlpack.Int64, c.offsets), Interleaved: c.interleaved,
								CuSeqlens: indices(t, dlpack.Int32, c.cuSeqlens), PerElement: c.perElement}.Run(nil)
						},
						-1: func(q, k, qOut, kOut *dlpack.Tensor) error {
							return ops.RotaryBackward{DQOut: q, DKOut: k, Cos: cos, Sin: sin, DQ: qOut, DK: kOut, Offset: c.offset,
								Offsets: indices(t, dlpack.Int32, c.offsets), Interleaved: c.interleaved,
								CuSeqlens: indices(t, dlpack.Int64, c.cuSeqlens), PerElement: c.perElement}.Run(nil)
						},
					} {
						wantQ, sizeQ := c.of(vq, c.heads, vcos, vsin, sign)
						wantK, sizeK := c.of(vk, c.kHeads, vcos, vsin, sign)
						q, k := tensor(t, d, vq, qShape...), tensor(t, d, vk, kShape...)
						qOut, kOut := empty(t, d, qShape...), empty(t, d, kShape...)
						require.NoError(t, run(q, k, qOut, kOut))
						requireClose(t, wantQ, sizeQ, values(t, qOut), d, 2)
						requireClose(t, wantK, sizeK, values(t, kOut), d, 2)

						alone := empty(t, d, qShape...)
						require.NoError(t, run(q, nil, alone, nil))
						assert.Equal(t, values(t, qOut), values(t, alone), "without k")
						require.NoError(t, run(q, k, alone, nil))
						assert.Equal(t, vk, values(t, k), "k without k_out")

						// Slices of a buffer with a token's heads of both, in place.
						both := empty(t, d, rows, c.heads+c.kHeads, c.columns)
						pitch := (c.heads + c.kHeads) * c.columns
						inQ := view(t, both, 0, qShape, []int64{c.tokens * pitch, pitch, c.columns, 1})
						inK := view(t, both, c.heads*c.columns, kShape, []int64{c.tokens * pitch, pitch, c.columns, 1})
						require.NoError(t, inQ.SetFloat64s(vq))
						require.NoError(t, inK.SetFloat64s(vk))
						require.NoError(t, run(inQ, inK, inQ, inK))
						assert.Equal(t, values(t, qOut), values(t, inQ), "in place")
						assert.Equal(t, values(t, kOut), values(t, inK), "in place")

						// Heads before tokens, as models have them.
						turned := view(t, empty(t, d, c.sequences, c.heads, c.tokens, c.columns), 0, qShape,
							[]int64{c.heads * c.tokens * c.columns, c.columns, c.tokens * c.columns, 1})
						require.NoError(t, turned.SetFloat64s(vq))
						require.NoError(t, run(turned, nil, turned, nil))
						assert.Equal(t, values(t, qOut), values(t, turned), "heads before tokens")
					}
				})
			}
		}
	}
}

// With RoundProducts a model that rounds both products before it adds them gets the same bits.
func TestRotaryRounds(t *testing.T) {
	c := rotaryCase{sequences: 1, tokens: 8, heads: 4, columns: 64, rotated: 64, perElement: true}
	for _, interleaved := range []bool{false, true} {
		c.interleaved = interleaved
		for _, d := range floats[:3] {
			r := rand.New(rand.NewPCG(1, uint64(d.Bits)))
			n := c.tokens * c.heads * c.columns
			vq, vcos, vsin := random(t, r, d, n), random(t, r, d, positions*64), random(t, r, d, positions*64)
			shape := []int64{c.tokens, c.heads, c.columns}
			rounded := func(v []float64) []float64 { return values(t, tensor(t, d, v, int64(len(v)))) }
			zeros := make([]float64, len(vsin))
			for _, backward := range []bool{false, true} {
				sign := 1.0
				if backward {
					sign = -1
				}
				cosines, _ := c.of(vq, c.heads, vcos, zeros, sign)
				sines, _ := c.of(vq, c.heads, zeros, vsin, sign)
				cosines, sines = rounded(cosines), rounded(sines)
				for i, s := range sines {
					cosines[i] += s
				}
				y := empty(t, d, shape...)
				q := tensor(t, d, vq, shape...)
				cos, sin := tensor(t, d, vcos, positions, 64), tensor(t, d, vsin, positions, 64)
				run := ops.RotaryForward{Q: q, Cos: cos, Sin: sin, QOut: y, PerElement: true, Interleaved: interleaved,
					RoundProducts: true}.Run
				if backward {
					run = ops.RotaryBackward{DQOut: q, Cos: cos, Sin: sin, DQ: y, PerElement: true, Interleaved: interleaved,
						RoundProducts: true}.Run
				}
				require.NoError(t, run(nil))
				assert.Equal(t, rounded(cosines), values(t, y), "%v %v", d, backward)
			}
		}
	}
}

// A token whose position is in no table becomes NaN, and nothing behind the table is read.
func TestRotaryOutOfTables(t *testing.T) {
	q, y := empty(t, dlpack.Float32, 2, 2, 1, 4), empty(t, dlpack.Float32, 2, 2, 1, 4)
	table := tensor(t, dlpack.Float32, []float64{1, 1, 1, 1}, 2, 2)
	for _, offset := range []int64{1, -3, math.MaxInt64, math.MinInt64} {
		offsets := empty(t, dlpack.Int64, 2)
		*(*int64)(offsets.Pointer()) = offset
		require.NoError(t, ops.RotaryForward{Q: q, Cos: table, Sin: table, QOut: y, Offsets: offsets}.Run(nil))
		got := values(t, y)
		assert.True(t, math.IsNaN(got[4]), "%v", offset)
		assert.Equal(t, []float64{0, 0, 0, 0, 0, 0, 0, 0}, got[8:])
	}
}

func TestRotaryEmpty(t *testing.T) {
	table := empty(t, dlpack.Float32, 4, 2)
	for _, shape := range [][]int64{{0, 3, 2, 4}, {2, 0, 2, 4}, {2, 3, 0, 4}} {
		q := empty(t, dlpack.Float32, shape...)
		require.NoError(t, ops.RotaryForward{Q: q, Cos: table, Sin: table, QOut: q}.Run(nil))
	}
	// Without heads of q, those of k are rotated.
	q, k := empty(t, dlpack.Float32, 2, 3, 0, 4), tensor(t, dlpack.Float32, make([]float64, 24), 2, 3, 1, 4)
	ones := tensor(t, dlpack.Float32, []float64{1, 1, 1, 1, 1, 1, 1, 1}, 4, 2)
	out := tensor(t, dlpack.Float32, []float64{mark, mark, mark, mark}, 1, 1, 1, 4)
	none := view(t, q, 0, []int64{1, 1, 0, 4}, nil)
	require.NoError(t, ops.RotaryForward{Q: none, K: view(t, k, 0, []int64{1, 1, 1, 4}, nil), Cos: ones,
		Sin: ones, QOut: none, KOut: out}.Run(nil))
	assert.Equal(t, []float64{0, 0, 0, 0}, values(t, out))
}

func TestRotaryRefuses(t *testing.T) {
	f := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	i := func(n int64) *dlpack.Tensor { return empty(t, dlpack.Int64, n) }
	q, y, cos := f(2, 3, 2, 8), f(2, 3, 2, 8), f(5, 4)
	overlapping := view(t, f(64), 0, []int64{2, 3, 1, 8}, []int64{24, 4, 8, 1})
	for want, call := range map[string]ops.RotaryForward{
		"q has shape (3, 8), expected (..., tokens, heads, columns) of rank 3 or more; reshape it": {
			Q: f(3, 8), Cos: cos, Sin: cos, QOut: y},
		"k has shape (2, 2, 1, 8), expected (2, 3, any, 8), with any number of heads, as q": {
			Q: q, K: f(2, 2, 1, 8), Cos: cos, Sin: cos, QOut: y, KOut: f(2, 2, 1, 8)},
		"k_out is given without a k, expected NULL; pass the k or drop k_out": {
			Q: q, Cos: cos, Sin: cos, QOut: y, KOut: f(2, 3, 1, 8)},
		"k_out has shape (2, 3, 2, 8), expected (2, 3, 1, 8) as k": {
			Q: q, K: f(2, 3, 1, 8), Cos: cos, Sin: cos, QOut: y, KOut: f(2, 3, 2, 8)},
		"q_out has shape (2, 3, 1, 8), expected (2, 3, 2, 8) as q": {
			Q: q, Cos: cos, Sin: cos, QOut: f(2, 3, 1, 8)},
		"cos has shape (3, 5, 4), expected (positions, width), or before that (2,), the sequences of q, or as " +
			"many 1s": {Q: q, Cos: f(3, 5, 4), Sin: f(3, 5, 4), QOut: y},
		"sin has shape (1, 5, 4), expected (5, 4) as cos": {Q: q, Cos: cos, Sin: f(1, 5, 4), QOut: y},
		"cos has width 5, expected at most the 8 columns of q, with two columns for each of its numbers": {
			Q: q, Cos: f(5, 5), Sin: f(5, 5), QOut: y},
		"cos has width 5 with per_element, expected an even number: two for each pair": {
			Q: q, Cos: f(5, 5), Sin: f(5, 5), QOut: y, PerElement: true},
		"cos has 5 positions, expected those of the tokens, 3 to 5 with offset 3": {
			Q: q, Cos: cos, Sin: cos, QOut: y, Offset: 3},
		"cos has 5 positions, expected those of the tokens, -1 to 1 with offset -1": {
			Q: q, Cos: cos, Sin: cos, QOut: y, Offset: -1},
		"offsets has 3 elements, expected 2: one for each sequence": {
			Q: q, Cos: cos, Sin: cos, QOut: y, Offsets: i(3)},
		"cu_seqlens is given for 2 sequences of tokens in q, expected one, which it divides; reshape q to " +
			"(tokens, heads, columns)": {Q: q, Cos: cos, Sin: cos, QOut: y, CuSeqlens: i(3)},
		"cu_seqlens has no elements, expected the first token of each sequence and the end": {
			Q: f(3, 2, 8), Cos: cos, Sin: cos, QOut: f(3, 2, 8), CuSeqlens: i(0)},
		"q_out has strides [24 4 0] of sequences, tokens and heads, expected an output whose elements do not " +
			"share memory; make it contiguous": {Q: f(2, 3, 1, 8), Cos: cos, Sin: cos, QOut: overlapping},
		"q_out overlaps q, expected exactly the same rows and dtype, or separate memory; allocate q_out " +
			"separately": {
			Q: q, Cos: cos, Sin: cos, QOut: view(t, q, 0, []int64{2, 3, 2, 8}, []int64{48, 8, 24, 1})},
	} {
		assert.EqualError(t, call.Run(nil), "rotary_forward: "+want)
	}
}
