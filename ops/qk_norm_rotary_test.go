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

const normEps, normOffset = 0.01, 0.5

// normalized are heads that have been normalized, with each head's rstd.
func (c rotaryCase) normalized(x, weight []float64) (y, rstd []float64) {
	y = make([]float64, len(x))
	for head := range int64(len(x)) / c.columns {
		v, sum := row(x, head, c.columns), 0.0
		for _, e := range v {
			sum += e * e
		}
		rstd = append(rstd, 1/math.Sqrt(sum/float64(c.columns)+normEps))
		for i, e := range v {
			y[head*c.columns+int64(i)] = e * rstd[head] * (weight[i] + normOffset)
		}
	}
	return y, rstd
}

// gradients are those of heads and of their weight, for a gradient of what they become. The sizes are of what
// is added up.
func (c rotaryCase) gradients(
	x, weight, dy []float64, heads int64, cos, sin []float64,
) (dx, dw, sizeDX, sizeDW []float64) {
	_, rstd := c.normalized(x, weight)
	dn, size := c.of(dy, heads, cos, sin, -1)
	dx, sizeDX = make([]float64, len(x)), make([]float64, len(x))
	dw, sizeDW = make([]float64, c.columns), make([]float64, c.columns)
	for head := range int64(len(x)) / c.columns {
		at, mean, meanSize := head*c.columns, 0.0, 0.0
		for i := range c.columns {
			h := x[at+i] * rstd[head]
			mean += dn[at+i] * (weight[i] + normOffset) * h / float64(c.columns)
			meanSize += math.Abs((size[at+i]+math.Abs(dn[at+i]))*(weight[i]+normOffset)*h) / float64(c.columns)
			dw[i] += dn[at+i] * h
			sizeDW[i] += (size[at+i] + math.Abs(dn[at+i])) * math.Abs(h)
		}
		for i := range c.columns {
			h, w := x[at+i]*rstd[head], weight[i]+normOffset
			dx[at+i] = (dn[at+i]*w - h*mean) * rstd[head]
			sizeDX[at+i] = ((size[at+i]+math.Abs(dn[at+i]))*math.Abs(w) + math.Abs(h)*meanSize) * rstd[head]
		}
	}
	return dx, dw, sizeDX, sizeDW
}

func TestQKNormRotary(t *testing.T) {
	for name, c := range rotaryCases {
		if c.columns > 512 || c.kHeads == 0 {
			continue
		}
		for _, d := range floats {
			for _, wt := range companions(d) {
				t.Run(fmt.Sprintf("%s/%v/%v", name, d, wt), func(t *testing.T) {
					r := rand.New(rand.NewPCG(uint64(c.columns), uint64(d.Bits)))
					rows, size := c.sequences*c.tokens, int64(1)
					qShape := []int64{c.sequences, c.tokens, c.heads, c.columns}
					kShape := []int64{c.sequences, c.tokens, c.kHeads, c.columns}
					for _, n := range c.tableShape() {
						size *= n
					}
					vq, vk := random(t, r, d, rows*c.heads*c.columns), random(t, r, d, rows*c.kHeads*c.columns)
					vdq, vdk := random(t, r, d, rows*c.heads*c.columns), random(t, r, d, rows*c.kHeads*c.columns)
					vqw, vkw := random(t, r, wt, c.columns), random(t, r, wt, c.columns)
					vcos, vsin := random(t, r, wt, size), random(t, r, wt, size)
					q, k := tensor(t, d, vq, qShape...), tensor(t, d, vk, kShape...)
					qw, kw := tensor(t, wt, vqw, c.columns), tensor(t, wt, vkw, c.columns)
					cos, sin := tensor(t, wt, vcos, c.tableShape()...), tensor(t, wt, vsin, c.tableShape()...)
					y, z := empty(t, d, qShape...), empty(t, d, kShape...)
					offsets, ends := indices(t, dlpack.Int64, c.offsets), indices(t, dlpack.Int32, c.cuSeqlens)
					forward := ops.QKNormRotaryForward{Q: q, K: k, QWeight: qw, KWeight: kw, Cos: cos, Sin: sin, QOut: y,
						KOut: z, Offsets: offsets, CuSeqlens: ends, Offset: c.offset, Interleaved: c.interleaved,
						PerElement: c.perElement, Eps: ops.Some(normEps), WeightOffset: normOffset}
					require.NoError(t, forward.Run(nil))
					for _, of := range []struct {
						x, weight, got []float64
						heads          int64
					}{{vq, vqw, values(t, y), c.heads}, {vk, vkw, values(t, z), c.kHeads}} {
						n, _ := c.normalized(of.x, of.weight)
						want, sizes := c.of(n, of.heads, vcos, vsin, 1)
						for i := range sizes {
							sizes[i] += math.Abs(want[i])
						}
						requireClose(t, want, sizes, of.got, d, c.columns)
					}

					dq, dk := tensor(t, d, vdq, qShape...), tensor(t, d, vdk, kShape...)
					dqw, dkw := empty(t, wt, c.columns), empty(t, wt, c.columns)
					backward := ops.QKNormRotaryBackward{Q: q, K: k, QWeight: qw, KWeight: kw, Cos: cos, Sin: sin,
						DQOut: dq, DKOut: dk, DQ: empty(t, d, qShape...), DK: empty(t, d, kShape...), DQWeight: dqw,
						DKWeight: dkw, Offsets: offsets, CuSeqlens: ends, Offset: c.offset, Interleaved: c.interleaved,
						PerElement: c.perElement, Eps: ops.Some(normEps), WeightOffset: normOffset}
					require.NoError(t, backward.Run(nil))
					for _, of := range []struct {
						x, weight, dy []float64
						heads         int64
						gotDX, gotDW  *dlpack.Tensor
					}{{vq, vqw, vdq, c.heads, backward.DQ, dqw}, {vk, vkw, vdk, c.kHeads, backward.DK, dkw}} {
						dx, dw, sizeDX, sizeDW := c.gradients(of.x, of.weight, of.dy, of.heads, vcos, vsin)
						requireClose(t, dx, sizeDX, values(t, of.gotDX), d, 4*c.columns)
						requireClose(t, dw, sizeDW, values(t, of.gotDW), wt, 4*c.columns)
					}

					// The same bits without what is not wanted, and in place.
					alone := backward
					alone.K, alone.KWeight, alone.DKOut, alone.DK = nil, nil, nil, nil
					alone.DKWeight, alone.DQWeight = nil, nil
					alone.DQ = alone.DQOut
					require.NoError(t, alone.Run(nil))
					assert.Equal(t, values(t, backward.DQ), values(t, dq))
					weights := backward
					weights.DK, weights.DQOut, weights.DKWeight = nil, tensor(t, d, vdq, qShape...), empty(t, wt, c.columns)
					require.NoError(t, weights.Run(nil))
					assert.Equal(t, values(t, dkw), values(t, weights.DKWeight))
					forward.QOut, forward.KOut = q, k
					require.NoError(t, forward.Run(nil))
					assert.Equal(t, values(t, y), values(t, q))
					assert.Equal(t, values(t, z), values(t, k))
				})
			}
		}
	}
}

// With both roundings the bits are those of a norm and of a rotation that round by themselves.
func TestQKNormRotaryRounds(t *testing.T) {
	for _, d := range floats[:2] {
		r := rand.New(rand.NewPCG(3, uint64(d.Bits)))
		shape := []int64{2, 5, 3, 64}
		q, w := tensor(t, d, random(t, r, d, 2*5*3*64), shape...), tensor(t, d, random(t, r, d, 64), 64)
		cos, sin := tensor(t, d, random(t, r, d, 5*64), 5, 64), tensor(t, d, random(t, r, d, 5*64), 5, 64)
		n, want, got := empty(t, d, shape...), empty(t, d, shape...), empty(t, d, shape...)
		for _, once := range []bool{false, true} { // Gemma's norm rounds once
			require.NoError(t, ops.RMSNormForward{X: q, Weight: w, Y: n, RoundNormalized: !once}.Run(nil))
			require.NoError(t, ops.RotaryForward{Q: n, Cos: cos, Sin: sin, QOut: want, PerElement: true,
				RoundProducts: true}.Run(nil))
			require.NoError(t, ops.QKNormRotaryForward{Q: q, QWeight: w, Cos: cos, Sin: sin, QOut: got,
				PerElement:    true,
				RoundProducts: true, RoundNormalized: !once}.Run(nil))
			equal, expected, found := 0, values(t, want), values(t, got)
			for i := range expected {
				if expected[i] == found[i] {
					equal++
				}
			}
			assert.Greater(t, float64(equal)/float64(len(expected)), 0.995) // the order of a norm's sum may differ
		}
	}
}

func TestQKNormRotaryOfNoTokens(t *testing.T) {
	q, w := empty(t, dlpack.Float32, 2, 0, 3, 8), empty(t, dlpack.Float32, 8)
	cos := empty(t, dlpack.Float32, 4, 4)
	dw := tensor(t, dlpack.Float32, []float64{1, 2, 3, 4, 5, 6, 7, 8}, 8)
	require.NoError(t, ops.QKNormRotaryForward{Q: q, QWeight: w, Cos: cos, Sin: cos, QOut: q}.Run(nil))
	require.NoError(t, ops.QKNormRotaryBackward{Q: q, QWeight: w, Cos: cos, Sin: cos, DQOut: q, DQ: q,
		DQWeight: dw}.Run(nil))
	assert.Equal(t, make([]float64, 8), values(t, dw))
}

func TestQKNormRotaryRefuses(t *testing.T) {
	f := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	q, k, cos := f(2, 3, 2, 8), f(2, 3, 1, 8), f(3, 4)
	long := f(1, 1, 1, 520)
	for want, call := range map[string]ops.QKNormRotaryForward{
		"q has 520 columns, expected at most 512; normalize the heads with rmsnorm, and rotate them with rotary": {
			Q: long, Cos: f(1, 4), Sin: f(1, 4), QOut: long},
		"weight_offset is 1 without a weight, expected 0; pass the weights": {
			Q: q, Cos: cos, Sin: cos, QOut: q, WeightOffset: 1},
		"k_weight is given without a k, expected NULL; pass the k or drop k_weight": {
			Q: q, KWeight: f(8), Cos: cos, Sin: cos, QOut: q},
		"q_weight has shape (7,), expected (8,): one for each column of q": {
			Q: q, QWeight: f(7), Cos: cos, Sin: cos, QOut: q},
		"eps is -1, expected 0 or more":        {Q: q, Cos: cos, Sin: cos, QOut: q, Eps: ops.Some(-1.0)},
		"eps is NaN, expected a finite number": {Q: q, Cos: cos, Sin: cos, QOut: q, Eps: ops.Some(math.NaN())},
	} {
		assert.EqualError(t, call.Run(nil), "qk_norm_rotary_forward: "+want)
	}
	assert.EqualError(t, ops.QKNormRotaryBackward{Q: q, K: k, KWeight: f(8), Cos: cos, Sin: cos,
		DQOut: f(2, 3, 2, 8), DQ: f(2, 3, 2, 8), DKWeight: f(8)}.Run(nil),
		"qk_norm_rotary_backward: dk_weight is given without a dk_out, expected NULL; pass the dk_out or drop "+
			"dk_weight")
}
