// Package kernels is the immutable description of everything gander can launch: element types, operand
// shapes, and the table of CUDA kernel variants. It knows nothing of DLPack, of a device that is present,
// or of what an op means; package ops decides what to launch and package driver launches it.
package kernels

//go:generate go run ../internal/cmd/instantiate

import "unsafe"

// DType is an element type. The device code has the same numbers (cuda/args_gen.cuh).
type DType int32

const (
	Float16 DType = iota
	BFloat16
	Float32
	Float64
	Int32
	Int64
	Bool
	Uint8
)

// Size returns the size of one element in bytes.
func (d DType) Size() int64 {
	switch d {
	case Float16, BFloat16:
		return 2
	case Float32, Int32:
		return 4
	case Bool, Uint8:
		return 1
	default:
		return 8
	}
}

// String returns the name that torch and NumPy use.
func (d DType) String() string {
	return [...]string{"float16", "bfloat16", "float32", "float64", "int32", "int64", "bool", "uint8"}[d]
}

// Matrix is Rows rows of Cols adjacent elements; rows begin Stride elements apart. Data may be aligned
// to the element only, and is nil where the operand is absent or has no elements.
type Matrix struct {
	Data   unsafe.Pointer
	DType  DType
	Rows   int64
	Cols   int64
	Stride int64
}

// Present tells whether an optional operand was given. It is false for one that has no elements.
func (m Matrix) Present() bool { return m.Data != nil }

// Vector is Len elements that lie Stride elements apart (0 repeats one element). A nil Data with a
// Len of 0 means that the operand is absent.
type Vector struct {
	Data   unsafe.Pointer
	DType  DType
	Len    int64
	Stride int64
}

// Present tells whether an optional operand was given.
func (v Vector) Present() bool { return v.Data != nil }

// CrossEntropy is what one cross-entropy call reads and writes, forward or backward.
// Statistics (Loss, Max, LogSum, Denominator, Divisor, Upstream, DLoss) are float32, or float64 where X is
// float64.
type CrossEntropy struct {
	X           Matrix // logits (M, N)
	Target      Vector // class of each row (M), int32 or int64
	Weight      Vector // weight of each class (N), optional
	IgnoreIndex int64  // rows with this target are left out: loss and gradient 0, weight 0 in a mean
	Reduction   Reduction

	// Divisor divides each row's gradient, and in forward its loss: one element, optional. Backward gets a
	// mean's denominator here.
	Divisor Vector

	// Upstream is the upstream gradient that forward's DX is made for: one element, 1 if absent.
	Upstream Vector

	// OnePass: forward's DX is the gradient of the reduced loss; with ReduceMean it is divided by the
	// denominator. Backward finds that gradient in DX, and computes it again only if DLoss is not Upstream, or
	// if that is NaN, for which forward need not make one.
	OnePass bool

	// LabelSmoothing is the share of a row's loss that all classes have alike, 0 to 1. ZLoss is the factor of
	// the square of a row's log-sum-exp, which is added to its loss. With either a row whose target has weight
	// 0 counts.
	LabelSmoothing, ZLoss float64

	// Map is what X goes through first. Everything else is of the results.
	Map LogitMap

	// Slice: X is a slice of each row's classes. Backward subtracts nothing in a row whose target is not in
	// the slice, and takes 1 as its weight.
	Slice bool

	// Forward writes:
	Loss Vector // (M) where Reduction is ReduceNone, else one element
	// Max and LogSum hold the two parts of each row's log-sum-exp; Max alone receives the whole where
	// LogSum is absent. Both are optional in the forward call. With OnePass LogSum holds no logarithm, but a
	// sum from which forward and backward compute the same bits: sum exp(x - max); or, with the sign bit, minus
	// the sum of the others where exp(x[target] - max) is 1. That may have digits that are lost in 1 + it. CUDA
	// kernels store it only if it is less than 1.
	Max, LogSum Vector
	DX          Matrix // weighted gradient for an upstream gradient of Upstream; optional in forward
	Denominator Vector // one element: the mean's denominator; optional

	// Backward reads Max and LogSum as well, and writes DX:
	DLoss Vector // upstream gradient, (M) or a single element with Stride 0
}

// HasOptions tells whether it takes more than the kernels of cross-entropy alone have.
func (c *CrossEntropy) HasOptions() bool {
	return c.LabelSmoothing != 0 || c.ZLoss != 0 || c.Map != LogitMap{}
}

// HasTotal tells whether forward writes a number for all rows together, which it does without rows, too.
func (c *CrossEntropy) HasTotal() bool {
	return c.Reduction != ReduceNone || c.Denominator.Present()
}

// TokenStatistics is what one call of statistics of tokens' logits reads and writes, forward or backward. Of
// the loss it uses X, Target, IgnoreIndex, Map, Max, LogSum, DX and Slice. Max, LogSum and Depth are a row's
// state: its maximum, the logarithm of its sum of exp(x - max), and the mean of max - x under its
// probabilities, which is its entropy without that logarithm.
type TokenStatistics struct {
	CrossEntropy
	RowMask Vector // (M) Bool, Uint8, Int32 or Int64: rows where it is 0 are left out; optional
	Depth   Vector // forward: all of the state is optional

	LogProb, Entropy, LogSumSqProbs, MeanLogit Vector // (M), optional
	IsTop1                                     Vector // (M) Bool, optional
	Predicted                                  Vector // (M) Int64, optional

	DLogProb, DEntropy Vector // (M), optional in backward

	// Forward with Slice, which backward has too: X is a slice of each row's tokens, of which there are Classes.
	// It begins with First, from where its columns count in Target and Predicted. MeanLogit is divided by
	// Classes, which is X's columns without Slice. The state of a row that is left out is NaN.
	First, Classes int64
}

// What a backward call with Slice takes in place of an index.
const (
	InNoSlice = -2 // the log-probability and its gradient are NaN
	LeftOut   = -3 // with it as IgnoreIndex
)

// SetState takes the three parts of the state from a vector of those of all rows.
func (s *TokenStatistics) SetState(all Vector) { setState(all, &s.Max, &s.LogSum, &s.Depth) }

func setState(all Vector, parts ...*Vector) {
	if !all.Present() {
		return
	}
	each := int64(len(parts))
	for i, part := range parts {
		*part = Vector{
			Data: at(all.Data, int64(i), all.DType), DType: all.DType, Len: all.Len / each, Stride: each,
		}
	}
}

// WantsAny tells whether there is anything to compute.
func (s *TokenStatistics) WantsAny() bool {
	return s.LogProb.Present() || s.Entropy.Present() || s.Max.Present() || s.NeedsAll()
}

// NeedsAll tells whether more is wanted than log-probability, entropy and state.
func (s *TokenStatistics) NeedsAll() bool {
	return s.LogSumSqProbs.Present() || s.MeanLogit.Present() || s.IsTop1.Present() || s.Predicted.Present()
}

// SoftCrossEntropy is what one call of cross-entropy with class probabilities reads and writes, forward or
// backward. It uses no class of the loss, and no option that is about one. Max, LogSum and TargetWeight are a
// row's state: its maximum, the logarithm of its sum of exp(x - max), and the sum of its probabilities, each
// times the weight of its class. A mean is over all rows.
type SoftCrossEntropy struct {
	CrossEntropy
	Probabilities Matrix // like X, of any type that is not float64 unless X's is
	TargetWeight  Vector // forward: all of the state is optional
}

// SetState takes the three parts of the state from a vector of those of all rows.
func (s *SoftCrossEntropy) SetState(all Vector) { setState(all, &s.Max, &s.LogSum, &s.TargetWeight) }

// LogitMap is a function of logits: Outer * tanh(Inner * x), without a cap Outer * x. The zero value is x.
type LogitMap struct {
	Inner float64 // of logits with a cap, else 0
	Outer float64
}

// MapLogits is the map to softcap * tanh(scale * x / softcap) / temperature, without a softcap to scale * x /
// temperature.
func MapLogits(scale, softcap, temperature float64) LogitMap {
	switch {
	case softcap != 0:
		return LogitMap{Inner: scale / softcap, Outer: softcap / temperature}
	case scale != temperature:
		return LogitMap{Outer: scale / temperature}
	}
	return LogitMap{}
}

// ShardedCrossEntropy is what one call combines: cross-entropy's statistics of slices of the classes. All but
// Target are of one type, float32 or float64.
type ShardedCrossEntropy struct {
	// Parts is contiguous (Ranks, 3 or 4, M): maxima, logarithms of sums, losses in the slice, NaN where the
	// target is not in it, and where Weighted the weights of targets in the slice.
	Parts    Matrix // (Ranks x 3 or 4, M)
	Ranks    int64
	Weighted bool

	Target      Vector // class of each row (M), int32 or int64
	Classes     int64  // in all slices
	IgnoreIndex int64
	Mean        bool // Loss is divided by Denominator

	// These are written. Losses, Loss, Weights and Denominator are optional.
	Losses, Max, LogSum, Weights Vector // (M)
	Loss, Denominator            Vector // one element
}

// ShardedTokenStatistics is what one call combines: statistics of slices of tokens. All but integers are of
// one type, float32 or float64.
type ShardedTokenStatistics struct {
	// Parts is contiguous (Ranks, Each, M), with Each 4 or 8: of each row the state, three numbers, and the
	// log-probability; of 8 also LogSumSqProbs, MeanLogit, and the bits of Predicted, an Int64.
	Parts       Matrix // (Ranks x Each, M)
	Ranks, Each int64

	Index          Vector // token of each row (M), int32 or int64
	RowMask        Vector // as that of TokenStatistics
	IgnoreIndex    int64
	First, Classes int64 // the token with which this rank's slice begins, and how many there are

	// These are written, and optional. With an Each of 4 the last four of the statistics are absent.
	LogProb, Entropy, LogSumSqProbs, MeanLogit, IsTop1, Predicted Vector

	State Vector // (M, 3)
	Local Vector // (M) Int64: what backward takes as Target, with IgnoreIndex LeftOut
}

// Mask says which elements of a matrix take part in a softmax.
type Mask struct {
	// Data is nil without a mask. Bool and Uint8: elements that are 0 are masked. Other types are added to
	// the matrix, and -inf masks.
	Data   unsafe.Pointer
	DType  DType
	Column int64 // elements from column to column: 1, or 0 if a row has one element for all of them

	// Row r begins at the sum of the products of Strides with r % Extents[0], r / Extents[0] % Extents[1], and
	// the rest of r.
	Extents [2]int64
	Strides [3]int64

	Queries int64 // causal: row r also masks the columns after r % Queries; 0 for no
}

// Present tells whether there is a mask beside that of Queries.
func (m *Mask) Present() bool { return m.Data != nil }

// MaskedSoftmax is what one call of softmax with options reads and writes, forward or backward. Each matrix
// has a type of its own, but all are float64 where the first is.
type MaskedSoftmax struct {
	X, Y       Matrix // (M, N); X in forward only
	DY, DX     Matrix // backward
	Mask       Mask
	Scale      float64
	Log        bool // Y is the logarithm of the softmax
	MaskedZero bool // forward: a row that is masked whole becomes zeros, or with Log -inf
}

// Heads is vectors of Cols adjacent elements: one for each of Heads heads of Tokens tokens of Sequences
// sequences. Strides count elements. Data is nil where the operand is absent or has no elements.
type Heads struct {
	Data                     unsafe.Pointer
	DType                    DType
	Sequences, Tokens, Heads int64
	Cols                     int64

	SequenceStride, TokenStride, HeadStride int64
}

// Present tells whether an optional operand was given. It is false for one that has no elements.
func (h *Heads) Present() bool { return h.Data != nil }

// At is the address of a vector.
func (h *Heads) At(sequence, token, head int64) unsafe.Pointer {
	return at(h.Data, sequence*h.SequenceStride+token*h.TokenStride+head*h.HeadStride, h.DType)
}

// Table is Rows rows of Cols adjacent elements for each sequence, or with a SequenceStride of 0 for all.
type Table struct {
	Data                   unsafe.Pointer
	DType                  DType
	Rows, Cols             int64
	SequenceStride, Stride int64
}

// Rotary is what one call of rotary position embeddings reads and writes, forward or backward.
type Rotary struct {
	Q, K       Heads // or their gradients; K is optional
	QOut, KOut Heads // without KOut, K is left alone
	Cos, Sin   Table

	Offset      int64  // added to each position
	Offsets     Vector // one more for each sequence: int32 or int64, optional
	CuSeqlens   Vector // where the sequences begin in the tokens, and the end of the last: likewise
	Interleaved bool   // a pair is two adjacent elements, not one of each half
	PerElement  bool   // Cos and Sin have a number for each element, not for each pair
	Round       bool   // products are rounded to Q's type
	Backward    bool   // the angle's sign is that of the gradient
}

// Tokens is how many tokens there are in all sequences: none if there is nothing to write.
func (r *Rotary) Tokens() int64 {
	if !r.QOut.Present() && !r.KOut.Present() {
		return 0
	}
	return r.Q.Sequences * r.Q.Tokens
}

// Rotated is how many of the first columns are rotated.
func (r *Rotary) Rotated() int64 {
	if r.PerElement {
		return r.Cos.Cols
	}
	return 2 * r.Cos.Cols
}

// QKNormRotary is what one call of rotary position embeddings of normalized heads reads and writes.
// Backward's QOut and KOut are the gradients of Q and K, which are forward's.
type QKNormRotary struct {
	Rotary
	QWeight, KWeight Vector // (Cols), optional

	DQOut, DKOut       Heads  // backward: the gradients of forward's results; without DKOut, K is left alone
	DQWeight, DKWeight Vector // backward: like the weights, optional

	Eps, WeightOffset float64
	RoundNormalized   bool // x * rstd is rounded to Q's type; in backward, where it is in the weights' gradients
}

// Tokens is Rotary's, also if of the heads' gradients none is wanted, but those of the weights.
func (r *QKNormRotary) Tokens() int64 {
	if r.DKOut.Present() {
		return r.Q.Sequences * r.Q.Tokens
	}
	return r.Rotary.Tokens()
}

// GLU is what one call of a gated linear unit reads and writes, forward or backward. All matrices have the
// shape and the type of Gate.
type GLU struct {
	Gate, Up       Matrix
	Y              Matrix // forward
	DY, DGate, DUp Matrix // backward
	Activation     Activation
	Round          bool // act(gate) is rounded to its type
}

// Activation is the function of the gate. The device code has the same numbers.
type Activation int32

// The activations: GELUTanh is GELU's approximation by a hyperbolic tangent.
const (
	SiLU Activation = iota
	GELU
	GELUTanh
	Activations // how many there are
)

// String returns the name that the device code has, after a k.
func (a Activation) String() string { return [...]string{"SiLU", "GELU", "GELUTanh"}[a] }

// Norm is what one call of RMSNorm or LayerNorm reads and writes, forward or backward. Forward normalizes
// h = X + Residual (see SumType). Backward's X is h as forward stored it: forward's ResidualOut if it wrote
// one, else its X. Each matrix and vector has a type of its own, but all are float64 where X is,
// and Mean and Rstd are float32 elsewhere.
type Norm struct {
	X            Matrix // (M, N)
	Weight, Bias Vector // (N) or (Heads, N), optional: ones and zeros; backward needs no Bias
	Mean, Rstd   Vector // (M), optional in forward, which writes them; Mean only with Center

	// Forward:
	Residual    Matrix // optional
	Y           Matrix
	ResidualOut Matrix // receives h; optional

	// Backward:
	DOut         Matrix // gradient of Y
	DResidualOut Matrix // gradient of ResidualOut; optional
	DX           Matrix // gradient of h
	DResidual    Matrix // receives the same numbers as DX; optional
	DW, DB       Vector // like Weight and Bias, optional

	Eps          float64 // forward only
	Over         float64 // RMSNorm: see Divisor
	WeightOffset float64 // added to each weight; no effect without a Weight
	Center       bool    // LayerNorm: the mean is subtracted

	// RoundNormalized: the normalized row is rounded before the weight is applied, and in DW. Forward rounds to
	// X's type, backward to DX's.
	RoundNormalized bool

	// Heads is how many rows of Weight and Bias there are. Row i uses row i % Heads of them. 0 means 1.
	Heads int64
}

// Divisor is what a row's sums, of squares and of products with them, are divided by: N, unless Over is
// another number.
func (n *Norm) Divisor() float64 {
	if n.Over != 0 {
		return n.Over
	}
	return float64(n.X.Cols)
}

// SumType is the type that forward rounds h to, Float32 or Float64 for none. LayerNorm's h is what
// ResidualOut holds, and an absent ResidualOut stands for one of the type that X + Residual has in PyTorch.
// Where the elements of a row differ by less than the rounding step, the rounded row has another variance,
// and backward, which reads it, needs that variance. RMSNorm's h is not rounded.
func (n *Norm) SumType() DType {
	switch {
	case n.X.DType == Float64:
		return Float64
	case n.Center && n.ResidualOut.Present() && (n.Residual.Present() || n.ResidualOut.DType != n.X.DType):
		return n.ResidualOut.DType
	case n.Center && n.Residual.Present() && n.Residual.DType == n.X.DType:
		return n.X.DType
	}
	return Float32
}

// Head is the part of a call that uses row i of Weight and Bias.
func (n *Norm) Head(i int64) Norm {
	h := *n
	h.Heads = 1
	for _, m := range [...]*Matrix{&h.X, &h.Residual, &h.Y, &h.ResidualOut, &h.DOut, &h.DResidualOut, &h.DX,
		&h.DResidual} {
		m.Data = at(m.Data, i*m.Stride, m.DType)
		m.Rows, m.Stride = m.Rows/n.Heads, m.Stride*n.Heads
	}
	for _, v := range [...]*Vector{&h.Mean, &h.Rstd} {
		v.Data = at(v.Data, i*v.Stride, v.DType)
		v.Len, v.Stride = v.Len/n.Heads, v.Stride*n.Heads
	}
	for _, v := range [...]*Vector{&h.Weight, &h.Bias, &h.DW, &h.DB} {
		v.Len /= n.Heads
		v.Data = at(v.Data, i*v.Len, v.DType)
	}
	return h
}

// at is the address of an element, or nil for an operand without elements.
func at(data unsafe.Pointer, element int64, t DType) unsafe.Pointer {
	if data == nil {
		return nil
	}
	return unsafe.Add(data, element*t.Size())
}
