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

// sharded is rows of logits whose tokens are divided into slices.
type sharded struct {
	d     dlpack.DType
	x     []float64 // (m, n)
	index []float64
	mask  []float64
	sizes []int64 // their sum is n
	m, n  int64
}

// parts computes what each slice contributes: 4 numbers of each row or, with all, 8.
func (s *sharded) parts(t *testing.T, narrow bool) *dlpack.Tensor {
	t.Helper()
	each := int64(8)
	if narrow {
		each = 4
	}
	parts, first := empty(t, s.d, int64(len(s.sizes)), each, s.m), int64(0)
	whole := tensor(t, s.d, s.x, s.m, s.n)
	for i, size := range s.sizes {
		at := func(number, width int64, dims ...int64) *dlpack.Tensor {
			dims = append([]int64{s.m}, dims...)
			return view(t, parts, (int64(i)*each+number)*s.m, dims, []int64{width, 1}[2-len(dims):])
		}
		f := ops.TokenStatisticsForward{
			Index: tensor(t, dlpack.Int64, s.index, s.m), RowMask: tensor(t, dlpack.Bool, s.mask, s.m),
			State: at(0, 3, 3), LogProb: at(3, 1), First: first, Classes: ops.Some(s.n),
		}
		if size == 0 {
			f.Logits, f.First = tensor(t, s.d, constant(math.Inf(-1), s.m), s.m, 1), s.n
		} else {
			f.Logits = view(t, whole, first, []int64{s.m, size}, []int64{s.n, 1})
		}
		if !narrow {
			f.LogSumSqProbs, f.MeanLogit, f.Predicted = at(4, 1), at(5, 1), at(6, 1)
			f.Predicted.DType = dlpack.Int64
		}
		require.NoError(t, f.Run(nil))
		if size == 0 && !narrow {
			require.NoError(t, f.MeanLogit.SetFloat64s(make([]float64, s.m)))
		}
		first += size
	}
	return parts
}

// combined is what is wanted of the whole rows, as seen from the slice that begins with first.
func (s *sharded) combined(t *testing.T, narrow bool, first int64) ops.ShardedTokenStatisticsCombine {
	t.Helper()
	o := ops.ShardedTokenStatisticsCombine{
		Parts: s.parts(t, narrow), Index: tensor(t, dlpack.Int64, s.index, s.m),
		RowMask: tensor(t, dlpack.Bool, s.mask, s.m), LogProb: empty(t, s.d, s.m), Entropy: empty(t, s.d, s.m),
		State: empty(t, s.d, s.m, 3), Local: empty(t, dlpack.Int64, s.m),
		First: first, Classes: ops.Some(s.n), Narrow: narrow,
	}
	if !narrow {
		o.LogSumSqProbs, o.MeanLogit = empty(t, s.d, s.m), empty(t, s.d, s.m)
		o.IsTop1, o.Predicted = empty(t, dlpack.Bool, s.m), empty(t, dlpack.Int64, s.m)
	}
	return o
}

func constant(v float64, n int64) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = v
	}
	return list
}

// TestShardedTokenStatistics compares with formulas of whole rows in float64, and special rows with the
// operator of whole rows.
func TestShardedTokenStatistics(t *testing.T) {
	const n = 24
	inf := math.Inf(1)
	for _, d := range []dlpack.DType{dlpack.Float32, dlpack.Float64} {
		for _, m := range []int64{1, 13, 300} {
			for _, sizes := range [][]int64{{n}, {7, 9, 8}, {7, 0, 16, 1}, {0, n}} {
				r := rand.New(rand.NewPCG(31, uint64(m)))
				s := sharded{d: d, x: random(t, r, d, m*n), sizes: sizes, m: m, n: n}
				for range m {
					s.index, s.mask = append(s.index, float64(r.IntN(n))), append(s.mask, 1)
				}
				regular := func(int64) bool { return true }
				if m > 1 {
					s.special(inf)
					regular = func(i int64) bool { return i == 2 || i == 7 || i > 12 }
				}
				for _, narrow := range []bool{false, true} {
					t.Run(fmt.Sprintf("%v/%d/%v/%t", d, m, sizes, narrow), func(t *testing.T) {
						s.test(t, narrow, regular)
					})
				}
			}
		}
	}
}

// special changes the first rows.
func (s *sharded) special(inf float64) {
	s.mask[0] = 0
	s.index[1] = -100
	set := func(row int64, v float64, columns ...int64) {
		for _, j := range columns {
			s.x[row*s.n+j] = v
		}
	}
	all := make([]int64, s.n)
	for j := range all {
		all[j] = int64(j)
	}
	set(2, 40, 3)
	s.index[2] = 3 // a certain token
	set(3, -inf, all...)
	set(4, -inf, append(append([]int64{}, all[:7]...), all[16:]...)...) // whole slices, one with the index
	s.index[4] = 20
	set(5, math.NaN(), 8)
	set(6, inf, 23)
	set(7, 30, 5, 12, 22) // ties
	s.index[7] = 12
	s.index[8], s.index[9] = float64(s.n), -2 // no tokens
	set(10, -inf, all...)
	set(10, math.NaN(), 17)
	set(11, -inf, all[1:]...) // all is certain
	s.index[11] = 0
	set(12, -inf, 9)
	s.index[12] = 9
}

func (s *sharded) test(t *testing.T, narrow bool, regular func(row int64) bool) {
	got := s.combined(t, narrow, 0)
	require.NoError(t, got.Run(nil))
	whole := ops.TokenStatisticsForward{
		Logits: tensor(t, s.d, s.x, s.m, s.n), Index: got.Index, RowMask: got.RowMask,
		LogProb: empty(t, s.d, s.m), Entropy: empty(t, s.d, s.m), LogSumSqProbs: empty(t, s.d, s.m),
		MeanLogit: empty(t, s.d, s.m), IsTop1: empty(t, dlpack.Bool, s.m), Predicted: empty(t, dlpack.Int64, s.m),
		State: empty(t, s.d, s.m, 3),
	}
	require.NoError(t, whole.Run(nil))
	near(t, values(t, whole.LogProb), values(t, got.LogProb), s.d)
	near(t, values(t, whole.Entropy), values(t, got.Entropy), s.d)
	near(t, values(t, whole.State), values(t, got.State), s.d)
	if !narrow {
		near(t, values(t, whole.LogSumSqProbs), values(t, got.LogSumSqProbs), s.d)
		near(t, values(t, whole.MeanLogit), values(t, got.MeanLogit), s.d)
		assert.Equal(t, values(t, whole.Predicted), values(t, got.Predicted))
		assert.Equal(t, values(t, whole.IsTop1), values(t, got.IsTop1))
	}
	for i := range s.m {
		if !regular(i) {
			continue
		}
		want := statisticsOf(row(s.x, i, s.n), int64(s.index[i]))
		for _, of := range []struct {
			want float64
			from *dlpack.Tensor
		}{
			{want.logProb, got.LogProb}, {want.entropy, got.Entropy}, {want.logSumSq, got.LogSumSqProbs},
		} {
			if of.from != nil { // as many digits in a certain row as in others
				assert.InDelta(t, of.want, values(t, of.from)[i], 16*ulp(s.d, of.want), "row %d", i)
			}
		}
		if !narrow {
			assert.InDelta(t, want.mean, values(t, got.MeanLogit)[i], 16*ulp(s.d, 1+math.Abs(want.mean)), "row %d", i)
			assert.EqualValues(t, want.predicted, values(t, got.Predicted)[i], "row %d", i)
		}
	}
	s.testGradient(t, narrow, &whole)
}

// testGradient: from the combined state and the local index backward computes the slices of the gradient.
func (s *sharded) testGradient(t *testing.T, narrow bool, whole *ops.TokenStatisticsForward) {
	upstream := make([]float64, s.m)
	for i := range upstream {
		upstream[i] = math.Sin(float64(i + 1))
	}
	b := ops.TokenStatisticsBackward{
		Logits: whole.Logits, Index: whole.Index, RowMask: whole.RowMask, State: whole.State,
		DLogProb: tensor(t, s.d, upstream, s.m), DEntropy: tensor(t, s.d, upstream, s.m),
		DLogits: empty(t, s.d, s.m, s.n),
	}
	for _, logProb := range []bool{true, false} {
		if !logProb {
			b.DLogProb = nil // the entropy needs no index
		}
		b.Logits, b.Index, b.RowMask, b.State = whole.Logits, whole.Index, whole.RowMask, whole.State
		b.Slice, b.IgnoreIndex, b.DLogits = false, ops.Some[int64](-100), empty(t, s.d, s.m, s.n)
		require.NoError(t, b.Run(nil))
		want, got, first := values(t, b.DLogits), empty(t, s.d, s.m, s.n), int64(0)
		for _, size := range s.sizes {
			o := s.combined(t, narrow, first)
			require.NoError(t, o.Run(nil))
			part := func(v *dlpack.Tensor) *dlpack.Tensor {
				return view(t, v, first, []int64{s.m, size}, []int64{s.n, 1})
			}
			if size > 0 {
				b.Logits, b.DLogits, b.Index, b.RowMask = part(whole.Logits), part(got), o.Local, nil
				b.State, b.Slice, b.IgnoreIndex = o.State, true, ops.Some[int64](-3)
				require.NoError(t, b.Run(nil))
			}
			first += size
		}
		near(t, want, values(t, got), s.d)
	}
}

// A row that another rank leaves out, or whose part is not to be trusted, is NaN, except where it is left out
// here.
func TestShardedTokenStatisticsOfUnknownParts(t *testing.T) {
	s := sharded{
		d: dlpack.Float32, x: []float64{1, 2, 3, 4, 5, 6}, index: []float64{1, 1, 1}, mask: []float64{1, 1, 1},
		sizes: []int64{1, 1}, m: 3, n: 2,
	}
	o := s.combined(t, false, 0)
	s.mask[1], s.mask[2] = 0, 0
	masked := values(t, s.parts(t, false))
	copy(masked, values(t, o.Parts)[:8*s.m])
	o.Parts = tensor(t, s.d, masked, 2, 8, s.m)
	o.RowMask = tensor(t, dlpack.Bool, []float64{1, 1, 0}, s.m)
	require.NoError(t, o.Run(nil))
	for _, of := range []*dlpack.Tensor{o.LogProb, o.Entropy, o.LogSumSqProbs, o.MeanLogit} {
		got := values(t, of)
		assert.False(t, math.IsNaN(got[0]))
		assert.True(t, math.IsNaN(got[1]))
		assert.Zero(t, got[2])
	}
	assert.Equal(t, []float64{1, -1, -1}, values(t, o.Predicted))
	assert.Equal(t, []float64{1, 0, 0}, values(t, o.IsTop1))
	assert.Equal(t, []float64{1, 1, -3}, values(t, o.Local))
	assert.True(t, math.IsNaN(values(t, o.State)[3]))
}

func TestShardedTokenStatisticsRefuses(t *testing.T) {
	type combine = ops.ShardedTokenStatisticsCombine
	f := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	for message, spoil := range map[string]func(o *combine){
		"parts has dtype float16, expected float32 or float64": func(o *combine) {
			o.Parts = empty(t, dlpack.Float16, 2, 8, 5)
		},
		"parts has shape (2, 4, 5), expected (2, 8, 5): eight numbers of each of N rows": func(o *combine) {
			o.Parts = f(2, 4, 5)
		},
		"parts has rows of 5 elements 7 apart, expected adjacent rows": func(o *combine) {
			o.Parts = view(t, f(128), 0, []int64{2, 8, 5}, []int64{56, 7, 1})
		},
		"index has shape (4,), expected (5,): one for each column of parts": func(o *combine) {
			o.Index = empty(t, dlpack.Int64, 4)
		},
		"classes is 0, expected":           func(o *combine) { o.Classes = ops.Some[int64](0) },
		"first is -1, expected at least 0": func(o *combine) { o.First = -1 },
		"first is 10, expected at least 0 and at most classes, 9": func(o *combine) {
			o.First = 10
		},
		"state has shape (5, 2), expected (5, 3): three numbers for each column": func(o *combine) {
			o.State = f(5, 2)
		},
		"mean_logit is given with narrow, expected NULL": func(o *combine) {
			o.Parts, o.Narrow = f(2, 4, 5), true
		},
	} {
		o := combine{
			Parts: f(2, 8, 5), Index: empty(t, dlpack.Int64, 5), MeanLogit: f(5), State: f(5, 3),
			Classes: ops.Some[int64](9),
		}
		require.NoError(t, o.Run(nil))
		spoil(&o)
		assert.ErrorContains(t, o.Run(nil), message)
	}
	err := ops.TokenStatisticsForward{Logits: f(2, 3), Index: empty(t, dlpack.Int64, 2), Entropy: f(2),
		First: 3}.Run(nil)
	assert.ErrorContains(t, err, "first is 3 without classes, expected 0; set classes")
	err = ops.TokenStatisticsForward{Logits: f(2, 3), Index: empty(t, dlpack.Int64, 2), Entropy: f(2),
		Classes: ops.Some[int64](0)}.Run(nil)
	assert.ErrorContains(t, err, "classes is 0, expected how many there are in all slices")
	for _, first := range []int64{-1, 8} {
		err = ops.TokenStatisticsForward{Logits: f(2, 3), Index: empty(t, dlpack.Int64, 2), Entropy: f(2),
			First: first, Classes: ops.Some[int64](7)}.Run(nil)
		assert.ErrorContains(t, err, fmt.Sprintf("first is %d, expected at least 0 and at most", first))
	}
}
