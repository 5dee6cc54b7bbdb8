package kernels

import "unsafe"

// The structs below are the kernels' only parameters, passed by value. Their C++ twins are generated: Rows in
// cuda/args_gen.cuh, the others in a header for each group of ops, such as cuda/softmax_args_gen.cuh.

// ArgBytes is the size of the parameter of a family's kernels.
func (f Family) ArgBytes() uintptr {
	return [...]uintptr{
		unsafe.Sizeof(SoftmaxArgs{}), unsafe.Sizeof(RMSNormArgs{}), unsafe.Sizeof(CrossEntropyArgs{}),
		unsafe.Sizeof(NormArgs{}), unsafe.Sizeof(MaskedSoftmaxArgs{}), unsafe.Sizeof(GeneralCrossEntropyArgs{}),
		unsafe.Sizeof(GLUArgs{}), unsafe.Sizeof(RotaryArgs{}),
		unsafe.Sizeof(QKNormRotaryArgs{}), unsafe.Sizeof(TokenStatisticsArgs{}),
		unsafe.Sizeof(SoftCrossEntropyArgs{}),
	}[f/3]
}

// What kernels and planner must agree on. cuda/args_gen.cuh has it as kChunkThreads and so on.
const (
	MinThreads   = 128 // threads of a CTA in which several rows lie, unless its shape says otherwise
	ChunkThreads = 256 // threads of the CTAs of Partial, Apply, Elementwise and Columns kernels
	GridStages   = 56  // GridCooperative: stages that the ring buffer has at most
	GridSteps    = 64  // GridCooperative: steps whose states have slots of their own
	GridTiles    = 16  // GridSharedMemory: tiles that a CTA keeps at most
)

// Limits lists the constants for the device code.
var Limits = []struct {
	Name  string
	Value int
}{
	{"MinThreads", MinThreads}, {"ChunkThreads", ChunkThreads},
	{"GridStages", GridStages}, {"GridSteps", GridSteps}, {"GridTiles", GridTiles},
}

// Input and Output are device addresses that a kernel reads, and that it writes (or reads and writes).
type (
	Input  uintptr
	Output uintptr
)

// Rows is what every row kernel works on. Strides count elements.
type Rows struct {
	A, B Input  // the first input, and the second if the op has one
	Y    Output // the rows that are written, if the op writes rows

	// (M, Splits) states of rows that are split. GridCooperative, GridSharedMemory: the slots through which
	// CTAs exchange states.
	Partial Output

	AStride, BStride, YStride int64
	M, N                      int64
	Chunk                     int64 // 16-byte vectors of a row that a CTA processes; a split row has more
	Splits                    int32 // chunks per row
	BType, YType              int32 // DType of B and Y

	// Vectors are counted from the row's first element, not from a 16-byte boundary. So the bits of a result
	// do not depend on where the row lies.
	IgnoreAlignment int32

	OpaqueZero int32 // 0, which the compiler cannot know (Tile::rematerialize in cuda/rows.cuh)

	// Stages of the ring buffer. Ring: rows. GridCooperative: steps of one or more rows.
	Stages int32

	// GridCooperative: steps that are reduced before one is mapped. GridSharedMemory: tiles that a CTA keeps in
	// shared memory.
	Depth int32

	// InRegisters, Staged: a CTA prefetches into L2 the rows that lie this many rows after its own.
	// Elementwise: it prefetches what the CTA that is this many CTAs after it works on. 0 for none.
	// PrefetchFrom is the first CTA, or cluster, that does.
	PrefetchDistance int32
	PrefetchFrom     int32

	_ int32
}

// SoftmaxArgs is the parameter of the softmax kernels.
type SoftmaxArgs struct {
	Rows Rows
}

// RMSNormArgs is the parameter of the RMSNorm kernels.
type RMSNormArgs struct {
	Rows       Rows
	Weight     Input  // (N), 0 for none
	Rstd       Output // (M) float32: forward writes it unless it is 0, backward reads it
	DwPartial  Output // (Partials, N) float32
	Dw         Output // (N)
	WeightType int32
	DwType     int32
	Options    RMSNormOptions
	InvN       float32 // 1 / N
	Partials   int32
	_          int32
}

// NormArgs is the parameter of the kernels of norms with options. Inputs and outputs that are 0 are absent.
// Rows has as its first input x, or in backward what forward normalized; as its second the residual, or in
// backward the gradient of y; and it has as its output y, or in backward dx.
type NormArgs struct {
	Rows         Rows
	C            Input  // backward: the gradient of residual_out
	Z            Output // residual_out; in backward dresidual
	Weight, Bias Input  // (N) or (Heads, N)
	Mean, Rstd   Output // (M) float32: forward writes them, backward reads them

	// (Partials, N) float32 for dw, or for db, or (Partials, 2, N) for both. Row i is of head i % Heads.
	PartialSums Output
	Dw, Db      Output // like Weight and Bias

	CStride, ZStride        int64
	CType, ZType            int32
	WeightType, BiasType    int32
	DwType, DbType          int32
	Partials                int32
	Center                  int32 // LayerNorm: the mean is subtracted
	RoundNormalized         int32 // forward rounds xhat to x's type; backward to dx's in dw
	SumType                 int32 // forward rounds x + residual to this type
	Heads                   int32 // rows i and i + Heads share weight and bias
	Eps, WeightOffset, InvN float32
}

// MaskedSoftmaxArgs is the parameter of the kernels of softmax with options. Rows has as its first input x,
// or in backward the gradient of y; as its second, in backward, y; and it has as its output y, or in backward
// dx. The fields of the mask are those of Mask, which is 0 without one.
type MaskedSoftmaxArgs struct {
	Rows                                  Rows
	Mask                                  Input
	MaskExtent0, MaskExtent1              int64
	MaskStride0, MaskStride1, MaskStride2 int64
	Queries                               int64 // causal: rows of each matrix; 0 for no

	MaskInverse0, MaskInverse1, QueriesInverse float64 // of MaskExtent0 and so on: a division would be a call

	MaskType, MaskColumn int32
	Log, MaskedZero      int32
	Scale                float32
	_                    int32
}

// CrossEntropyArgs is the parameter of the cross-entropy kernels. Outputs that are 0 are not written.
type CrossEntropyArgs struct {
	Rows           Rows
	Target         Input  // (M) int32 or int64
	Weight         Input  // (N), 0 for none
	Dloss          Input  // (M) float32
	Divisor        Input  // one float32: divides losses and gradients; with Mean the denominator, gradients only
	Upstream       Input  // one float32: the gradient of the loss that forward's dx is made for; 0 for 1
	Loss           Output // (M) float32
	RowLosses      Output // (M) pairs of float32: loss and weight of each row, unless SingleCTATotal
	Total          Output // one float32
	TargetLogits   Output // (M) float32: the targets' logits, kept from one launch to the next
	Max            Output // (M) float32; the whole log-sum-exp if LogSum is 0
	LogSum         Output // (M) float32; with Sums the sums themselves, not their logarithms
	Denominator    Output // one float32
	TargetStride   int64
	LossStride     int64
	DlossStride    int64
	MaxStride      int64
	LogSumStride   int64
	IgnoreIndex    int64
	TargetType     int32
	WeightType     int32
	Mean           int32 // the total is divided by the sum of the weights
	SingleCTATotal int32 // the launch is one CTA, which also computes the total
	OnlyLosses     int32 // forward stores nothing but Loss, which no divisor divides
	OnePass        int32 // with Mean, forward divides dx by the denominator; backward exits if dx is made

	// Elementwise: threads of a CTA that share a row, 65536 over that rounded up, and rows of a CTA.
	RowThreads, InverseRowThreads, RowsPerCTA int32
	Parts                                     int32 // what CTAs take in turns: RowsPerCTA rows, or a chunk

	Slice int32 // backward: the columns are a slice of the classes, and a target may lie outside of it
	Sums  int32

	// CombineSlices: Rows has as its input (Ranks, 3 or 4, M) float32, AStride from rank to rank, and N classes.
	Weights Output // (M) float32
	Ranks   int64
}

// GeneralCrossEntropyArgs is the parameter of the kernels of cross-entropy with options.
type GeneralCrossEntropyArgs struct {
	CrossEntropyArgs
	ClassWeights   Output // one float32: the sum of Weight, which the first launch writes; 0 for N
	LabelSmoothing float32
	ZLoss          float32
	Inner, Outer   float32 // of kernels.LogitMap; Outer is never 0
}

// TokenStatisticsArgs is the parameter of the kernels of statistics of tokens' logits. Of the losses'
// arguments it uses the rows, the target, IgnoreIndex, Max, LogSum, Slice, and the map of logits.
type TokenStatisticsArgs struct {
	GeneralCrossEntropyArgs
	RowMask            Input // 0 for none
	RowMaskStride      int64
	DLogProb, DEntropy Input // backward: 0 for none
	DLogProbStride     int64
	DEntropyStride     int64
	Depth              Output // the third part of the state, of MaxStride like Max and LogSum
	LogProb, Entropy   Output // these six: 0 where not wanted
	LogSumSqProbs      Output
	MeanLogit          Output
	IsTop1, Predicted  Output
	First, Classes     int64 // forward: see TokenStatistics

	// CombineTokenStatistics: Rows has as its input (Ranks, Each, M) float32, AStride from rank to rank. Max is
	// the state, and Ranks is that of CombineSlices.
	Local Output // (M) int64

	RowMaskBytes int32 // of an element
	_            int32
}

// SoftCrossEntropyArgs is the parameter of the kernels of cross-entropy with class probabilities. Rows has
// them as its second input. Of the losses' arguments it uses none that is about a row's target.
type SoftCrossEntropyArgs struct {
	GeneralCrossEntropyArgs
	TargetWeight Output  // the third part of the state, of MaxStride like Max and LogSum
	InverseRows  float32 // backward of a mean: what it multiplies by; else 1
	_            int32
}

// GLUArgs is the parameter of the kernels of gated linear units. Rows has as its inputs the gate and what it
// multiplies, and as its output y, or in backward the gradient of the gate.
type GLUArgs struct {
	Rows             Rows
	C                Input  // backward: the gradient of y
	Z                Output // backward: the gradient of the second input
	CStride, ZStride int64

	// Threads of a CTA that share a row, 65536 over that rounded up, and rows of a CTA.
	RowThreads, InverseRowThreads, RowsPerCTA int32

	Activation      int32
	RoundActivation int32
	_               int32
}

// HeadStrides are those of Heads, in elements.
type HeadStrides struct{ Sequence, Token, Head int64 }

// RotaryArgs is the parameter of the kernels of rotary position embeddings: see Rotary. A thread rotates or
// copies two vectors, an item, of a few heads of a token.
type RotaryArgs struct {
	Q, K               Input
	QOut, KOut         Output
	Cos, Sin           Input
	Offsets, CuSeqlens Input // 0 for none

	QStrides, KStrides, QOutStrides, KOutStrides HeadStrides

	CosSequence, CosRow, SinSequence, SinRow int64 // strides

	Total     int64 // tokens of all sequences
	Tokens    int64 // of each sequence
	Sequences int64 // that CuSeqlens divides the tokens into
	Positions int64 // rows of the tables
	Offset    int64

	QHeads, Heads int32 // of q, and of q and k together
	Groups        int32 // threads that share the heads of an item: one has head i, i + Groups, ...
	Items         int32 // of each head
	Cols, Rotated int32

	CosType, OffsetsType, CuSeqlensType int32

	Interleaved, PerElement, Round, Backward int32
	_                                        int32
}

// QKNormRotaryArgs is the parameter of the kernels of rotary position embeddings of normalized heads.
// Backward's Q and K are forward's, and its QOut and KOut their gradients, of which KOut may be 0.
type QKNormRotaryArgs struct {
	RotaryArgs

	DQOut, DKOut               Input
	DQOutStrides, DKOutStrides HeadStrides
	QWeight, KWeight           Input  // (Cols), 0 for ones
	Partials                   Output // (PartialRows, 2, Cols) float32; 0 if no weight's gradient is wanted
	DQWeight, DKWeight         Output // (Cols), 0 if not wanted

	QWeightType, KWeightType   int32
	DQWeightType, DKWeightType int32
	PartialRows                int32
	Lanes                      int32 // threads that share a head, a power of two
	QParts                     int32 // of HeadsPerThread heads or less; Groups is those of q and k
	HeadsPerThread             int32
	RoundNormalized            int32
	Eps, WeightOffset, InvN    float32
}
