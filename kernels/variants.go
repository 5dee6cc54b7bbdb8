package kernels

// Op is what a kernel computes.
type Op uint8

// The ops. CrossEntropyForwardDX computes loss and gradient in one pass. WeightGradient and Total sum
// what other kernels computed for each CTA or row. Denominator sums the rows' weights before the rows are
// read. SoftmaxClear and RMSNormClear clear the memory through which CTAs of the next launch exchange
// states. NormForward and NormBackward are RMSNorm and LayerNorm with all their options. RMSNormForward,
// RMSNormBackward, LayerNormForward, LayerNormBackward, RMSNormResidualForward and
// RMSNormResidualBackward are what is used most. NormGradient sums dw and db. MaskedSoftmaxForward and
// MaskedSoftmaxBackward are softmax and log-softmax with options. Rescale multiplies gradients that were
// made for another upstream gradient. CombineSlices computes the loss of rows whose classes are divided.
// GeneralCrossEntropyForward and so on are cross-entropy with label smoothing. ClassWeights sums its class
// weights before the rows are read. GLUForward and GLUBackward are gated linear units.
// Rotate is rotary position embeddings and their gradient.
// QKNormRotate, QKNormRotateBackward and QKNormWeights are the same of normalized heads, their gradients, and
// what sums those of the weights. TokenStatisticsForward is log-probability and entropy of the rows,
// AllTokenStatisticsForward those and all other statistics of logits, and TokenStatisticsBackward the
// gradient of the two. CombineTokenStatistics computes the statistics of rows whose tokens are divided.
// SoftCrossEntropyForward and SoftCrossEntropyBackward are cross-entropy with class probabilities.
const (
	SoftmaxForward Op = iota
	SoftmaxBackward
	RMSNormForward
	RMSNormBackward
	CrossEntropyForward
	CrossEntropyForwardDX
	CrossEntropyBackward
	WeightGradient
	Total
	Denominator
	SoftmaxClear
	RMSNormClear
	NormForward
	NormBackward
	NormGradient
	MaskedSoftmaxForward
	MaskedSoftmaxBackward
	Rescale
	LayerNormForward
	LayerNormBackward
	RMSNormResidualForward
	RMSNormResidualBackward
	CombineSlices
	GeneralCrossEntropyForward
	GeneralCrossEntropyForwardDX
	GeneralCrossEntropyBackward
	ClassWeights
	GLUForward
	GLUBackward
	Rotate
	QKNormRotate
	QKNormRotateBackward
	QKNormWeights
	TokenStatisticsForward
	AllTokenStatisticsForward
	TokenStatisticsBackward
	CombineTokenStatistics
	SoftCrossEntropyForward
	SoftCrossEntropyBackward
	Ops // how many there are
)

// String returns the op's name as it stands in symbols.
func (o Op) String() string {
	return [...]string{
		"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward", "weight_gradient",
		"total", "denominator", "softmax_clear", "rmsnorm_clear", "norm_forward", "norm_backward", "norm_gradient",
		"masked_softmax_forward", "masked_softmax_backward",
		"rescale", "layernorm_forward", "layernorm_backward", "rmsnorm_residual_forward",
		"rmsnorm_residual_backward", "combine_slices", "general_cross_entropy_forward",
		"general_cross_entropy_forward_dx", "general_cross_entropy_backward", "class_weights",
		"glu_forward", "glu_backward", "rotate", "qk_norm_rotate", "qk_norm_rotate_backward", "qk_norm_weights",
		"token_statistics_forward", "all_token_statistics_forward", "token_statistics_backward",
		"combine_token_statistics",
		"soft_cross_entropy_forward", "soft_cross_entropy_backward",
	}[o]
}

// Shape is how a kernel spreads its work; see cuda/rows.cuh and cuda/rmsnorm.cuh.
type Shape uint8

const (
	InRegisters      Shape = iota // a row in the registers of RowThreads threads, or of a cluster; read once
	Partial                       // a CTA reduces one chunk of a row
	Apply                         // a CTA maps one chunk of a row whose chunks have been reduced
	Staged                        // RMSNorm forward: a row in the shared memory of a CTA, or of a cluster
	Ring                          // RMSNorm and norm backward: persistent CTAs, a ring of rows in shared memory
	GridCooperative               // persistent CTAs, one on each SM, that all work on the same row
	Lanes                         // RMSNorm backward: persistent groups of lanes, each with a row
	Loop                          // many short rows: persistent groups of lanes that load the next row early
	Columns                       // RMSNorm's and norms' backward: a CTA goes down a tile of columns
	GridSharedMemory              // a few long rows, each in the shared memory of several CTAs, not persistent
	Elementwise                   // nothing is reduced: any number of threads share a row
	Finish                        // sums what other kernels computed
	Shapes                        // how many there are
)

var shapeNames = [...]string{
	"rows", "partial", "apply", "staged", "ring", "grid_cooperative", "lanes", "loop", "columns",
	"grid_shared_memory", "elementwise", "finish",
}

// String returns the shape's name as it stands in symbols and explanations.
func (s Shape) String() string { return shapeNames[s] }

// Family is the kernels of one group of ops for one element type of x: one translation unit and one device
// image, which is loaded at its first use.
type Family uint8

// Families is the number of families; they are numbered from 0.
const Families = 11 * 3

var groups = [...]string{
	"softmax", "rmsnorm", "cross_entropy", "norm", "masked_softmax", "general_cross_entropy",
	"glu", "rotary", "qk_norm_rotary", "token_statistics", "soft_cross_entropy",
}

// FamilyOf returns the family that has an op's kernels for rows of x: float16, bfloat16 or float32.
func FamilyOf(op Op, x DType) Family {
	group := Family(0)
	switch op {
	case RMSNormForward, RMSNormBackward, WeightGradient, RMSNormClear:
		group = 1
	case CrossEntropyForward, CrossEntropyForwardDX, CrossEntropyBackward, Total, Denominator,
		Rescale, CombineSlices:
		group = 2
	case NormForward, NormBackward, NormGradient, LayerNormForward, LayerNormBackward,
		RMSNormResidualForward, RMSNormResidualBackward:
		group = 3
	case MaskedSoftmaxForward, MaskedSoftmaxBackward:
		group = 4
	case GeneralCrossEntropyForward, GeneralCrossEntropyForwardDX, GeneralCrossEntropyBackward, ClassWeights:
		group = 5
	case GLUForward, GLUBackward:
		group = 6
	case Rotate:
		group = 7
	case QKNormRotate, QKNormRotateBackward, QKNormWeights:
		group = 8
	case TokenStatisticsForward, AllTokenStatisticsForward, TokenStatisticsBackward, CombineTokenStatistics:
		group = 9
	case SoftCrossEntropyForward, SoftCrossEntropyBackward:
		group = 10
	}
	return group*3 + Family(x)
}

// String returns the name that the family's source and images carry, such as "softmax_bfloat16".
func (f Family) String() string { return groups[f/3] + "_" + f.DType().String() }

// DType is the element type of x that the family's kernels take.
func (f Family) DType() DType { return DType(f % 3) }

// Group is the name of the family's group of ops: "softmax" and so on.
func (f Family) Group() string { return groups[f/3] }

// Variant is one compiled kernel. variants.txt has a row for it. internal/cmd/instantiate adds what follows
// from the row, and writes variants_gen.go.
type Variant struct {
	Index      int // position in Variants
	Family     Family
	Symbol     string // the kernel's name in its image
	Op         Op
	Shape      Shape
	Threads    int // threads per CTA
	RowThreads int // threads of a CTA that share a row; of WeightGradient, that share a column
	Vectors    int // 16-byte vectors per thread and input

	// Unaligned kernels take rows of any alignment and stride. The others, aligned kernels, take rows of whole
	// vectors that begin at 16-byte boundaries. SameOffset: an unaligned kernel that requires that the rows of
	// all operands begin equally far from such a boundary. So it shifts nothing, and holds more vectors.
	Unaligned  bool
	SameOffset bool

	Cluster    bool // launched with clusters: sm_90 and later only
	NoClusters bool // compiled only for architectures without clusters, which are faster than this tile
	Without    int  // major number of the compute capability for which it is not compiled; 0: compiled for all
	StatsRows  bool // InRegisters: the CTA's first threads each compute the statistics of another row
	Resident   int  // CTAs per SM that the compiler leaves registers for on sm_90; see ResidentOn

	// Elsewhere has smaller numbers for architectures on which ptxas spills with Resident CTAs per SM.
	// ./build.sh wheel compiles for all of them and refuses spills.
	Elsewhere []Residency

	// What is decided for the tile by the registers that it has left. Device code has these, and the layout, as
	// flags: kExactWarps and so on.

	// ExactWarps: a row has only as many warps as it needs: see ThreadsFor. Kernels of rows with different
	// offsets, and of the largest tiles, have no registers for it.
	ExactWarps bool

	// KeepsExp: exponentials are computed once and kept. Else they are computed again from the elements.
	KeepsExp bool

	// LateWeights: weights and biases are loaded when a row's sum is complete, of GridCooperative for each row
	// again. Else their loads overlap with those of the row, of GridCooperative the first row. Unaligned
	// kernels always load them late.
	LateWeights bool

	// LateWideWeights: the same for float32 weights of 16-bit rows alone.
	LateWideWeights bool

	// MergesThreads: one warp merges the states of all threads of a CTA. Else each warp merges its own first.
	MergesThreads bool

	// PatchesTarget, of cross-entropy's short rows: the gradient at the target is stored by itself, after its
	// vector. Else it replaces an element of that vector, which takes fewer registers and more instructions.
	PatchesTarget bool

	// ExcludesTarget, of cross-entropy's short rows: the sum leaves out the target. Else the target is taken out
	// of the sum. Where several rows share a warp, to leave it out costs the warp the instructions of each row.
	ExcludesTarget bool

	RowsPerStep   int // GridCooperative: rows whose states are exchanged together
	ComputeGroups int // GridCooperative: groups of threads of a CTA, with a row of the step each
	MinStages     int // GridCooperative: stages of the ring without which the planner does not take it
	Stages        int // Lanes: rows that a thread loads early
	Shared        int // Lanes: bytes of dynamic shared memory per CTA

	UpTo int64 // Finish: columns, or rows, up to which the planner takes it; 0 for any number
}

// Residency is how many CTAs per SM the compiler leaves registers for where the major number of the compute
// capability is Major. 0 leaves the number to ptxas, which then chooses differently: only the size of a CTA
// limits its registers.
type Residency struct{ Major, Resident int }

// numbered sets each Index. In variants_gen.go it would change with every row before.
func numbered(variants []Variant) []Variant {
	for i := range variants {
		variants[i].Index = i
	}
	return variants
}

// Capacity is how many vectors of a row one CTA holds; of GridSharedMemory, how many there are in a tile.
func (v *Variant) Capacity() int64 { return int64(v.RowThreads * v.Vectors) }

// RowsPerCTA is how many rows one CTA works on at a time; of WeightGradient, columns.
func (v *Variant) RowsPerCTA() int64 { return int64(v.Threads / v.RowThreads) }

// ThreadsFor is how many threads a CTA has that holds so many vectors of a row. Most kernels with one row in
// a CTA take any number of warps up to Threads, each with Vectors x 32 vectors (RowPlace in cuda/rows.cuh).
// So no warp is idle, whatever the length of a row. Warps that hold nothing would not change a bit of the
// results.
func (v *Variant) ThreadsFor(vectors int64) int64 {
	const warp = 32
	if !v.ExactWarps {
		return int64(v.Threads)
	}
	perWarp := int64(v.Vectors) * warp
	return min(max((vectors+perWarp-1)/perWarp, 1)*warp, int64(v.Threads))
}

// Geometry is how one launch is spread over the device.
type Geometry struct {
	Grid        uint32 // CTAs
	Threads     uint32 // of a CTA; 0 for all that the kernel was compiled for
	Cluster     uint32 // CTAs per cluster, 1 for none
	Shared      uint32 // bytes of dynamic shared memory per CTA
	Cooperative bool   // all CTAs must be resident at once
	Dependent   bool   // may start while the launch before it ends: its kernel waits (sm_90 and later)
}

// Inputs is how many matrices the op reads.
func (o Op) Inputs() int {
	switch o {
	case SoftmaxBackward, RMSNormBackward, NormBackward, LayerNormBackward, MaskedSoftmaxBackward,
		RMSNormResidualForward, GLUForward, SoftCrossEntropyForward, SoftCrossEntropyBackward:
		return 2
	case RMSNormResidualBackward, GLUBackward:
		return 3
	}
	return 1
}
