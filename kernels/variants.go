package kernels

import (
	"fmt"
	"slices"
)

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
)

// String returns the op's name as it stands in symbols.
func (o Op) String() string {
	return [...]string{
		"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward", "weight_gradient",
		"total", "denominator", "softmax_clear", "rmsnorm_clear", "norm_forward", "norm_backward", "norm_gradient",
		"masked_softmax_forward", "masked_softmax_backward",
		"rescale", "layernorm_forward", "layernorm_backward", "rmsnorm_residual_forward",
		"rmsnorm_residual_backward", "combine_slices",
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
const Families = 5 * 3

var groups = [...]string{"softmax", "rmsnorm", "cross_entropy", "norm", "masked_softmax"}

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
	}
	return group*3 + Family(x)
}

// String returns the name that the family's source and images carry, such as "softmax_bfloat16".
func (f Family) String() string { return groups[f/3] + "_" + f.DType().String() }

// DType is the element type of x that the family's kernels take.
func (f Family) DType() DType { return DType(f % 3) }

// Group is the name of the family's group of ops: "softmax" and so on.
func (f Family) Group() string { return groups[f/3] }

// Variant is one compiled kernel.
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
	StatsRows  bool // InRegisters: the CTA's first threads each compute the statistics of another row
	Resident   int  // CTAs per SM that the compiler leaves registers for on sm_90; see ResidentOn

	// What is decided for the tile by the registers that it has left. Device code has these, and the layout, as
	// Flags.

	// ExactWarps: a row has only as many warps as it needs: see ThreadsFor. Kernels of rows with different
	// offsets, and the largest tiles, have no registers for it.
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

	// ExcludesTarget, of cross-entropy's short rows: the sum leaves out the target. Else it is taken out of the
	// sum: to leave it out would cost shorter rows too much, of each of which a lane of the warp does that.
	ExcludesTarget bool

	RowsPerStep   int // GridCooperative: rows whose states are exchanged together
	ComputeGroups int // GridCooperative: groups of threads of a CTA, with a row of the step each
	Stages        int // Lanes: rows that a thread loads early
	Shared        int // Lanes: bytes of dynamic shared memory per CTA
}

// Flags lists what the device code is told about a kernel, as bits of its enum Flag. The device code of some
// shapes asks about a few alone.
var Flags = []struct {
	Name string
	Of   func(v *Variant) bool
}{
	{"Unaligned", func(v *Variant) bool { return v.Unaligned }},
	{"SameOffset", func(v *Variant) bool { return v.SameOffset }},
	{"Cluster", func(v *Variant) bool { return v.Cluster }},
	{"ExactWarps", func(v *Variant) bool { return v.ExactWarps }},
	{"KeepsExp", func(v *Variant) bool { return v.KeepsExp }},
	{"LateWeights", func(v *Variant) bool { return v.LateWeights }},
	{"LateWideWeights", func(v *Variant) bool { return v.LateWideWeights }},
	{"MergesThreads", func(v *Variant) bool { return v.MergesThreads }},
	{"PatchesTarget", func(v *Variant) bool { return v.PatchesTarget }},
	{"ExcludesTarget", func(v *Variant) bool { return v.ExcludesTarget }},
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

// tile is a row of the tables below: threads per row, vectors per thread and input.
type tile struct{ threads, vectors int }

func (t tile) capacity() int { return t.threads * t.vectors }

// gridTile is a tile of GridCooperative, with the rows of a step.
type gridTile struct {
	tile
	rowsPerStep int
}

// gridTiles lists the tiles for rows that clusters do not hold, or for which clusters leave SMs idle.
func gridTiles(op Op, x DType) []gridTile {
	all := []gridTile{
		{tile{160, 1}, 2}, {tile{256, 1}, 2}, {tile{256, 2}, 1}, {tile{512, 2}, 1}, {tile{512, 4}, 1},
	}
	switch {
	case op == SoftmaxForward, op == RMSNormForward: // clusters hold longer rows
		return all[3:]
	case op == SoftmaxBackward, x == Float32:
		return all[2:4]
	}
	return all[:4]
}

// Which tiles are compiled, from short rows to long ones. The policy (internal/policy) says which of them a
// request gets. 8 lanes load the 128 bytes that memory moves at once. Four vectors per thread with 32 to 40
// registers keep 96 KiB per SM in flight, eight vectors with 64 registers 128 KiB.
var (
	tiny = map[int][]tile{ // by the number of inputs
		1: {{8, 1}, {8, 4}, {16, 4}, {32, 4}},
		2: {{8, 1}, {8, 2}, {16, 2}, {32, 2}},
	}
	tinyOf = map[Op][]tile{
		// Two warps halve the exponentials of each.
		SoftmaxForward: {{8, 1}, {4, 3}, {8, 2}, {8, 3}, {8, 4}, {16, 4}, {64, 2}, {32, 4}},
		RMSNormForward: {{8, 1}, {4, 3}, {8, 2}, {8, 4}, {32, 4}}, // many rows of 33 to 64 vectors take Loop
		// It only reads. So there are more and smaller CTAs, which share the SMs more evenly: N = 256 0.87 to
		// 0.91.
		CrossEntropyForward: {{8, 1}, {8, 2}, {16, 2}, {16, 4}, {32, 4}},
	}

	// Of those with one input, the first leaves no thread idle with 129 to 256 vectors.
	inRegisters = map[Op][]tile{
		SoftmaxForward: {{32, 8}, {128, 4}, {256, 4}, {512, 2}, {512, 4}, {512, 8}, {1024, 8}},
		RMSNormForward: {{64, 4}, {128, 4}, {256, 4}, {512, 2}, {1024, 8}},
		// The last is for devices without clusters.
		CrossEntropyForwardDX: {{32, 6}, {32, 8}, {128, 4}, {256, 4}, {512, 4}, {512, 8}, {1024, 8}},
		// Longer rows take clusters, or stream: Partial, Apply.
		CrossEntropyForward: {{32, 6}, {32, 8}, {128, 2}, {512, 1}, {128, 4}, {256, 4}, {512, 3}, {512, 4},
			{512, 5}, {512, 8}},
		// Two inputs: half the vectors of each. RMSNorm's weights leave no registers for four of each.
		SoftmaxBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}, {1024, 4}},
		RMSNormBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}},
	}
	// Ten vectors fit into 64 registers, so that more rows of a vocabulary's length are in flight. Whether eight
	// or ten leave fewer threads idle depends on the length.
	inClusters = map[Op][]tile{
		SoftmaxForward: {{256, 4}, {512, 8}, {512, 10}},
		// GridCooperative has no tiles for the longest.
		CrossEntropyForwardDX: {{256, 4}, {512, 8}, {512, 10}, {1024, 8}},
		RMSNormForward:        {{256, 2}},
		CrossEntropyForward:   {{256, 4}, {512, 10}},
		SoftmaxBackward:       {{256, 2}, {256, 4}, {512, 5}, {1024, 4}},
		RMSNormBackward:       {{256, 2}, {1024, 2}},
	}

	// Unaligned rows have fewer tiles: they are rarer, and their code is longer. mixed: each operand may have
	// another offset.
	mixed = map[int][]tile{ // by the number of inputs
		1: {{8, 1}, {8, 4}, {16, 4}, {32, 4}, {128, 4}, {192, 4}, {256, 4}, {384, 4}, {512, 4}, {768, 4},
			{1024, 4}},
		2: {{8, 1}, {8, 2}, {16, 2}, {32, 2}, {128, 2}, {192, 2}, {256, 2}, {384, 2}, {512, 2}, {768, 2},
			{1024, 2}},
	}
	mixedOf = map[Op][]tile{ // its only operand has mixed offsets only where batch invariance ignores alignment
		CrossEntropyForward: {
			{8, 1}, {8, 4}, {16, 4}, {32, 4}, {128, 4}, {256, 4}, {512, 4}, {1024, 4},
		},
	}
	mixedInClusters = map[Op][]tile{
		SoftmaxForward:        {{256, 4}, {512, 4}, {1024, 4}},
		RMSNormForward:        {{256, 4}, {512, 4}, {1024, 4}},
		CrossEntropyForwardDX: {{256, 4}, {512, 4}},
		SoftmaxBackward:       {{256, 2}, {512, 2}, {1024, 2}},
		RMSNormBackward:       {{256, 2}, {512, 2}, {1024, 2}},
	}

	// All operands have the same offset, as they nearly always do. Nothing is shifted, so more vectors fit.
	sameOffsets = map[Op][]tile{
		SoftmaxForward:        {{128, 6}, {192, 6}, {384, 6}, {512, 8}, {1024, 8}},
		CrossEntropyForwardDX: {{128, 6}, {192, 6}, {384, 6}, {512, 8}, {1024, 8}},
		CrossEntropyForward:   {{128, 4}, {128, 6}, {256, 4}, {512, 4}, {512, 8}},
		SoftmaxBackward:       {{128, 3}, {192, 3}, {256, 4}, {384, 3}, {512, 4}, {1024, 4}},
	}
	sameOffsetsInClusters = map[Op][]tile{
		SoftmaxForward:        {{256, 8}, {512, 8}},
		CrossEntropyForwardDX: {{256, 8}, {512, 9}, {512, 10}},
		CrossEntropyForward:   {{512, 10}},
		SoftmaxBackward:       {{256, 4}, {512, 5}},
	}

	// Clusters are faster than these tiles. So these are compiled only for architectures without clusters.
	clusterless = map[Op]map[layout][]tile{
		SoftmaxForward:        {unaligned: {{768, 4}}, sameOffset: {{512, 8}}},
		SoftmaxBackward:       {aligned: {{1024, 2}}, unaligned: {{768, 2}}, sameOffset: {{512, 4}}},
		RMSNormForward:        {unaligned: {{768, 4}}},
		RMSNormBackward:       {unaligned: {{768, 2}}},
		CrossEntropyForwardDX: {aligned: {{1024, 8}}, unaligned: {{768, 4}, {1024, 4}}, sameOffset: {{1024, 8}}},
	}

	// Cross-entropy forward: each CTA streams through a long row.
	stream           = tile{512, 8}
	sameOffsetStream = tile{ChunkThreads, 8}

	// RMSNorm of short rows: from the second row on the weights come from L1.
	loops = []tile{{4, 3}, {8, 2}, {8, 3}, {8, 4}, {16, 4}, {32, 4}}

	// RMSNorm of long rows, through the shared memory of a CTA or of a cluster.
	staged           = []tile{{512, 8}, {1024, 8}}
	stagedInClusters = []tile{{256, 4}, {256, 8}, {512, 8}}

	// RMSNorm backward with dw, whose float32 sums stay in registers.
	ring        = []tile{{128, 1}, {256, 1}, {384, 2}, {512, 2}}
	ringCluster = []tile{{320, 2}, {512, 2}}
	longRing    = tile{512, 4} // of float32: 16-bit rows of that length would need too many registers
	lanes       = []tile{{8, 1}, {8, 2}, {16, 2}, {32, 2}}

	// The last reduction of dw, by the threads that share a column of partial dw. Few columns, of which many
	// CTAs have left sums; more columns than such CTAs process in one wave; one thread for each column.
	weightGradient = []tile{{32, 1}, {8, 1}, {1, 1}}

	// Norms with options. One vector for each thread is for few rows, which wait for the slowest of their loads.
	norms           = []tile{{8, 1}, {8, 4}, {16, 4}, {32, 4}, {64, 4}, {128, 4}, {256, 4}, {512, 4}, {1024, 1}}
	normsInClusters = []tile{{256, 4}, {512, 4}}
	normRings       = []tile{{8, 1}, {16, 1}, {32, 1}, {64, 1}, {128, 1}, {256, 1}, {256, 2}, {512, 2}}
	normRingCluster = []tile{{256, 2}, {512, 2}}

	// The norms of cuda/aligned_norm.cuh. Backward of shorter rows is that of norms with options.
	layerNorms              = []tile{{8, 4}, {16, 4}, {32, 4}, {128, 4}, {256, 4}, {512, 4}, {512, 8}, {1024, 1}}
	layerNormsInClusters    = []tile{{256, 4}, {512, 4}}
	longLayerNorms          = tile{512, 8} // in clusters, of float32: 16-bit rows would need too many registers
	residualNorms           = []tile{{16, 2}, {32, 2}, {512, 2}}
	residualNormsInClusters = []tile{{256, 2}}
	alignedNormRings        = []tile{{128, 1}, {256, 2}, {512, 2}}
	alignedNormRingCluster  = []tile{{256, 2}, {512, 2}}

	// Softmax with options. The vectors of backward are those of each of two inputs.
	maskedForward = []tile{{8, 1}, {8, 4}, {16, 4}, {32, 4}, {64, 4}, {128, 4}, {256, 4}, {512, 2},
		{512, 4}}
	maskedForwardInClusters  = []tile{{256, 4}, {512, 4}}
	maskedBackward           = []tile{{8, 1}, {8, 2}, {16, 2}, {32, 2}, {64, 2}, {128, 2}, {256, 2}, {512, 2}}
	maskedBackwardInClusters = []tile{{256, 2}, {512, 2}}
)

// laneStages keeps some 100 KiB per SM in flight.
const laneStages = 3

// Inputs is how many matrices the op reads.
func (o Op) Inputs() int {
	switch o {
	case SoftmaxBackward, RMSNormBackward, NormBackward, LayerNormBackward, MaskedSoftmaxBackward,
		RMSNormResidualForward:
		return 2
	case RMSNormResidualBackward:
		return 3
	}
	return 1
}

// Variants is the table of all kernels.
var Variants = table()

func table() []Variant {
	var t tableOf
	for _, t.x = range []DType{Float16, BFloat16, Float32} {
		for _, op := range []Op{
			SoftmaxForward, SoftmaxBackward, RMSNormForward, RMSNormBackward,
			CrossEntropyForward, CrossEntropyForwardDX,
		} {
			t.addRows(op)
		}
		t.addChunks(CrossEntropyBackward, Elementwise, 4)
		t.addChunks(Rescale, Elementwise, 4)
		t.addStaged()
		t.addRings()
		t.addGrid()
		for _, unaligned := range []bool{false, true} {
			t.add(Variant{Op: RMSNormBackward, Shape: Lanes, Unaligned: unaligned}, lanes...)
		}
		for _, unaligned := range []bool{false, true} {
			columns := Variant{Op: RMSNormBackward, Shape: Columns, Unaligned: unaligned}
			t.add(columns, tile{ChunkThreads, 1})
		}
		t.addFinish()
		t.addSharded()
		t.addNorms()
		t.addMasked()
	}
	return t.variants
}

// tableOf collects the kernels of one element type after the other.
type tableOf struct {
	x        DType
	variants []Variant
}

// leftOut tells whether a kernel is not compiled for its element type.
func leftOut(v *Variant) bool {
	wide := v.Family.DType() == Float32
	switch p := (tile{v.RowThreads, v.Vectors}); {
	case v.Shape == Loop && (p == tile{4, 3} || p == tile{32, 4}),
		v.Op == CrossEntropyForward && v.Shape == InRegisters && (p == tile{512, 3} || p == tile{512, 5}):
		return wide // only 16-bit rows were measured
	case v.Op == SoftmaxForward && v.Cluster && p == tile{512, 10}:
		return wide // the exponentials that it keeps would spill
	case v.Op == CrossEntropyForwardDX && v.SameOffset && p == tile{512, 10}:
		return !wide // it would spill
	case v.Op == CrossEntropyForwardDX && v.SameOffset && p == tile{512, 9}:
		return wide // ten are faster
	}
	return false
}

// add appends a kernel for each tile.
func (t *tableOf) add(like Variant, tiles ...tile) {
	for _, p := range tiles {
		v := like
		v.Index, v.Family, v.RowThreads, v.Vectors = len(t.variants), FamilyOf(v.Op, t.x), p.threads, p.vectors
		switch v.Threads = max(p.threads, 128); {
		case v.Shape == GridCooperative: // five warps exchange states, one copies rows
			v.Threads = v.ComputeGroups*p.threads + 6*32
		case v.Op == NormBackward && v.Shape == Ring:
			v.Threads = max(p.threads, ChunkThreads)
		case v.Op == WeightGradient || v.Op == NormGradient: // 16 columns at least
			v.Threads = max(16*p.threads, ChunkThreads)
		case v.Shape == Lanes:
			v.Threads, v.Stages = 256, laneStages
			v.Shared = v.Stages * v.Threads * (2*16*v.Vectors + 4) // vectors of x and dy, rstd
		}
		v.StatsRows = v.Shape == InRegisters && p.threads <= 32 &&
			(v.Op == CrossEntropyForward || v.Op == CrossEntropyForwardDX)
		v.NoClusters = v.Shape == InRegisters && !v.Cluster &&
			slices.Contains(clusterless[v.Op][layoutOf(&v)], p)
		v.Resident = resident(&v)
		v.decide()
		v.Symbol = v.symbol()
		if !leftOut(&v) {
			t.variants = append(t.variants, v)
		}
	}
}

// decide sets what depends on the registers that a thread has left.
func (v *Variant) decide() {
	wide, capacity, aligned := v.Family.DType() == Float32, v.RowThreads*v.Vectors, !v.Unaligned
	inRegisters, wholeCTA := v.Shape == InRegisters, v.RowThreads == v.Threads
	gradient := v.Op == CrossEntropyForwardDX
	switch {
	case v.Shape == Staged, v.Shape == Ring:
		v.ExactWarps = wholeCTA
	case inRegisters:
		v.ExactWarps = wholeCTA && (aligned || v.SameOffset) && capacity < 8192
	}
	switch {
	case !inRegisters:
	case v.Op == SoftmaxForward && wide:
		v.KeepsExp = capacity >= 2048
	case v.Op == SoftmaxForward:
		v.KeepsExp = aligned && v.RowThreads > 32 && (v.Vectors <= 2 || v.RowThreads == 256 && v.Vectors == 4)
	case gradient && v.RowThreads > 32:
		v.KeepsExp = wide && aligned && !v.Cluster
	case gradient:
		v.KeepsExp = aligned && (wide || v.RowThreads == 32 && v.Vectors >= 4)
	}
	switch {
	case v.Op == NormForward && inRegisters:
		v.LateWeights = v.Vectors > 2
	case inRegisters && aligned && (v.Op == RMSNormForward || v.Op == LayerNormForward):
		v.LateWeights = v.Vectors > 4
	case v.Shape == GridCooperative && (v.Op == RMSNormForward || v.Op == RMSNormBackward):
		v.LateWeights = v.Vectors > 2 && !wide
	}
	if v.Op == RMSNormForward && aligned && !wide {
		v.LateWideWeights = inRegisters && v.RowThreads <= 64 && v.Vectors > 2 ||
			v.Shape == Staged && v.Cluster && v.Vectors > 4
	}
	v.MergesThreads = inRegisters && v.Op == CrossEntropyForward && !wide && !v.Cluster &&
		v.RowThreads > 32 && v.RowThreads <= 256
	v.PatchesTarget = v.StatsRows && gradient && (wide || v.Vectors > 4)
	v.ExcludesTarget = v.StatsRows && !wide && capacity > 128
}

func (v *Variant) symbol() string {
	s := fmt.Sprintf("%s_%s_%s_%dx%d", v.Op, v.Shape, v.Family.DType(), v.RowThreads, v.Vectors)
	if v.RowsPerStep > 0 {
		s += fmt.Sprintf("x%d", v.RowsPerStep)
	}
	switch {
	case v.SameOffset:
		s += "_same_offset"
	case v.Unaligned:
		s += "_unaligned"
	}
	if v.Cluster {
		s += "_cluster"
	}
	return s
}

// addUnaligned adds the kernels of both lists, from short rows to long ones. Of two tiles that hold about as
// much, the one for the same offset comes first: it is faster, and takes fewer rows.
func (t *tableOf) addUnaligned(like Variant, mixed, same []tile) {
	like.Unaligned = true
	for len(mixed)+len(same) > 0 {
		like.SameOffset = len(mixed) == 0 || len(same) > 0 && 4*same[0].capacity() <= 5*mixed[0].capacity()
		next := &mixed
		if like.SameOffset {
			next = &same
		}
		t.add(like, (*next)[0])
		*next = (*next)[1:]
	}
}

// addChunks adds the kernels whose CTAs each process a chunk of a row.
func (t *tableOf) addChunks(op Op, s Shape, vectors int) {
	t.add(Variant{Op: op, Shape: s}, tile{ChunkThreads, vectors})
	t.add(Variant{Op: op, Shape: s, Unaligned: true}, tile{ChunkThreads, vectors / 2})
}

func tilesOf(op Op, byOp map[Op][]tile, byInputs map[int][]tile) []tile {
	if tiles := byOp[op]; tiles != nil {
		return tiles
	}
	return byInputs[op.Inputs()]
}

// addRows adds the kernels that hold rows in registers, and those for chunks of longer rows.
func (t *tableOf) addRows(op Op) {
	rows, clusters := Variant{Op: op, Shape: InRegisters}, Variant{Op: op, Shape: InRegisters, Cluster: true}
	t.add(rows, tilesOf(op, tinyOf, tiny)...)
	t.add(rows, inRegisters[op]...)
	if op == RMSNormForward {
		t.add(Variant{Op: op, Shape: Loop}, loops...)
	}
	t.addUnaligned(rows, tilesOf(op, mixedOf, mixed), sameOffsets[op])
	t.add(clusters, inClusters[op]...)
	t.addUnaligned(clusters, mixedInClusters[op], sameOffsetsInClusters[op])
	vectors := 4 / op.Inputs()
	t.addChunks(op, Partial, vectors)
	if op == CrossEntropyForward {
		t.add(Variant{Op: op, Shape: Partial}, stream)
		t.add(Variant{Op: op, Shape: Partial, Unaligned: true, SameOffset: true}, sameOffsetStream)
	}
	t.addChunks(op, Apply, vectors)
}

func (t *tableOf) addStaged() {
	t.add(Variant{Op: RMSNormForward, Shape: Staged}, staged...)
	t.add(Variant{Op: RMSNormForward, Shape: Staged, Cluster: true}, stagedInClusters...)
	same := Variant{Op: RMSNormForward, Shape: Staged, Unaligned: true, SameOffset: true}
	t.add(same, staged...)
	same.Cluster = true
	t.add(same, stagedInClusters[1:]...)
}

func (t *tableOf) addRings() {
	t.add(Variant{Op: RMSNormBackward, Shape: Ring}, ring...)
	t.add(Variant{Op: RMSNormBackward, Shape: Ring, Cluster: true}, ringCluster...)
	if t.x == Float32 {
		t.add(Variant{Op: RMSNormBackward, Shape: Ring, Cluster: true}, longRing)
	}
	t.add(Variant{Op: RMSNormBackward, Shape: Ring, Unaligned: true}, ring...)
	t.add(Variant{Op: RMSNormBackward, Shape: Ring, Unaligned: true, Cluster: true}, ringCluster...)
}

func (t *tableOf) addGrid() {
	for _, op := range []Op{SoftmaxForward, SoftmaxBackward, RMSNormForward} {
		t.add(Variant{Op: op, Shape: GridSharedMemory}, tile{ChunkThreads, 4 / op.Inputs()})
	}
	for _, op := range []Op{SoftmaxForward, SoftmaxBackward, RMSNormForward, RMSNormBackward} {
		for _, g := range gridTiles(op, t.x) {
			// With two rows per step, the threads of one are too few for a CTA.
			like := Variant{Op: op, Shape: GridCooperative, RowsPerStep: g.rowsPerStep, ComputeGroups: g.rowsPerStep}
			t.add(like, g.tile)
		}
	}
}

func (t *tableOf) addFinish() {
	t.add(Variant{Op: WeightGradient, Shape: Finish, Unaligned: true}, weightGradient...)
	t.add(Variant{Op: SoftmaxClear, Shape: Finish, Unaligned: true}, tile{256, 1})
	t.add(Variant{Op: RMSNormClear, Shape: Finish, Unaligned: true}, tile{256, 1})
	for _, op := range []Op{Total, Denominator} {
		for _, cluster := range []bool{false, true} {
			t.add(Variant{Op: op, Shape: Finish, Unaligned: true, Cluster: cluster}, tile{1024, 1})
		}
	}
}

// addSharded adds what takes one thread for each row. Its operands are float32, whatever the logits are.
func (t *tableOf) addSharded() {
	if t.x == Float32 {
		t.add(Variant{Op: CombineSlices, Shape: Finish, Unaligned: true}, tile{256, 1})
	}
}

// addNorms adds the kernels of norms with options. Rows that are not whole vectors, or that do not begin at
// multiples of one, take two passes, as longer rows do.
func (t *tableOf) addNorms() {
	t.add(Variant{Op: NormForward, Shape: InRegisters}, norms...)
	t.add(Variant{Op: NormForward, Shape: InRegisters, Cluster: true}, normsInClusters...)
	t.add(Variant{Op: NormBackward, Shape: Ring}, normRings...)
	t.add(Variant{Op: NormBackward, Shape: Ring, Cluster: true}, normRingCluster...)
	for _, unaligned := range []bool{false, true} {
		t.add(Variant{Op: NormForward, Shape: Partial, Unaligned: unaligned}, tile{ChunkThreads, 2})
		t.add(Variant{Op: NormForward, Shape: Apply, Unaligned: unaligned}, tile{ChunkThreads, 1})
		t.add(Variant{Op: NormBackward, Shape: Partial, Unaligned: unaligned}, tile{ChunkThreads, 1})
	}
	t.add(Variant{Op: NormBackward, Shape: Columns, Unaligned: true}, tile{ChunkThreads, 1})
	t.add(Variant{Op: NormGradient, Shape: Finish, Unaligned: true}, weightGradient...)
	t.add(Variant{Op: LayerNormForward, Shape: InRegisters}, layerNorms...)
	inClusters := Variant{Op: LayerNormForward, Shape: InRegisters, Cluster: true}
	t.add(inClusters, layerNormsInClusters...)
	if t.x == Float32 {
		t.add(inClusters, longLayerNorms)
	}
	t.add(Variant{Op: RMSNormResidualForward, Shape: InRegisters}, residualNorms...)
	t.add(Variant{Op: RMSNormResidualForward, Shape: InRegisters, Cluster: true}, residualNormsInClusters...)
	for _, op := range []Op{LayerNormBackward, RMSNormResidualBackward} {
		t.add(Variant{Op: op, Shape: Ring}, alignedNormRings...)
		t.add(Variant{Op: op, Shape: Ring, Cluster: true}, alignedNormRingCluster...)
	}
}

// addMasked adds the kernels of softmax with options. Unaligned rows take two passes, as longer rows do.
func (t *tableOf) addMasked() {
	for _, k := range []struct {
		op              Op
		tiles, clusters []tile
	}{
		{MaskedSoftmaxForward, maskedForward, maskedForwardInClusters},
		{MaskedSoftmaxBackward, maskedBackward, maskedBackwardInClusters},
	} {
		t.add(Variant{Op: k.op, Shape: InRegisters}, k.tiles...)
		t.add(Variant{Op: k.op, Shape: InRegisters, Cluster: true}, k.clusters...)
		for _, unaligned := range []bool{false, true} {
			vectors := 2 / k.op.Inputs()
			t.add(Variant{Op: k.op, Shape: Partial, Unaligned: unaligned}, tile{ChunkThreads, vectors})
			t.add(Variant{Op: k.op, Shape: Apply, Unaligned: unaligned}, tile{ChunkThreads, 1})
		}
	}
}
