package kernels

// The structs below are the kernels' only parameters, passed by value. Their C++ twins in
// cuda/args_gen.cuh are generated from them.

// What kernels and planner must agree on. cuda/args_gen.cuh has it as kChunkThreads and so on.
const (
	ChunkThreads = 256 // threads of the CTAs of Partial, Apply and Columns kernels
	TeamStages   = 56  // rows that the ring of a Team kernel holds at most
	TeamSteps    = 64  // steps whose sums a Team kernel keeps apart
	HeldTiles    = 16  // tiles that a CTA of a Held kernel holds at most
)

// Limits lists the constants for the device code.
var Limits = []struct {
	Name  string
	Value int
}{{"ChunkThreads", ChunkThreads}, {"TeamStages", TeamStages}, {"TeamSteps", TeamSteps}, {"HeldTiles", HeldTiles}}

// Input and Output are device addresses that a kernel reads, and that it writes (or reads and writes).
type (
	Input  uintptr
	Output uintptr
)

// Rows is what every row kernel works on. Strides count elements.
type Rows struct {
	A, B                      Input  // the first input, and the second where the op has one
	Y                         Output // the row that is written, where the op writes one
	Partial                   Output // (M, Splits) states, where rows are split; of Team and Held, what their CTAs share
	AStride, BStride, YStride int64
	M, N                      int64
	Chunk                     int64 // 16-byte vectors of a row that a CTA takes; more than the row has where it is not split
	Splits                    int32 // chunks per row
	BType, YType              int32 // DType of B and Y
	Fixed                     int32 // vectors are counted from the row's first element, wherever it lies: the same bits wherever that is
	Zero                      int32 // 0, which the compiler cannot know (Tile::rematerialize in cuda/rows.cuh)
	Stages                    int32 // Ring, Team: what shared memory holds, rows or a team's steps
	Lag                       int32 // Team: steps that are summed before the one that is mapped; Held: tiles in shared memory
	Ahead                     int32 // InRegisters, Staged: from a CTA's rows to those that it has L2 fetch for a later one; 0 for none
	AheadFrom                 int32 // the first CTA, or cluster, that does
	RowThreads                int32 // Elementwise: threads of a CTA that share a row
}

// SoftmaxArgs is the parameter of the softmax kernels.
type SoftmaxArgs struct {
	Rows Rows
}

// RMSNormArgs is the parameter of the RMSNorm kernels.
type RMSNormArgs struct {
	Rows       Rows
	Weight     Input  // (N), 0 for none
	Rstd       Output // (M) float32: forward writes it unless 0, backward reads it
	DwPartial  Output // (Partials, N) float32
	Dw         Output // (N)
	WeightType int32
	DwType     int32
	Options    RMSNormOptions
	InvN       float32 // 1 / N
	Partials   int32
	_          int32
}

// CrossEntropyArgs is the parameter of the cross-entropy kernels.
type CrossEntropyArgs struct {
	Rows         Rows
	Target       Input  // (M) int32 or int64
	Weight       Input  // (N), 0 for none
	Dloss        Input  // (M) float32
	Loss         Output // (M) float32, 0 for none
	RowLosses    Output // (M) pairs of float32: loss and weight of each row, to be totalled; 0 for none or TotalHere
	Total        Output // one float32, 0 for none
	Logits       Output // (M) float32: the targets' logits, kept from one launch to the next
	Max          Output // (M) float32, 0 for none; the whole log-sum-exp where LogSum is 0
	LogSum       Output // (M) float32, 0 for none
	Denominator  Output // one float32, 0 for none
	TargetStride int64
	LossStride   int64
	DlossStride  int64
	MaxStride    int64
	LogSumStride int64
	IgnoreIndex  int64
	TargetType   int32
	WeightType   int32
	Mean         int32 // the total is divided by the sum of the weights
	TotalHere    int32 // the launch is one CTA, which makes the total as well
	OnePass      int32 // forward divides dx by the denominator with Mean; backward ends at once where Dloss is 1
	_            int32
}
