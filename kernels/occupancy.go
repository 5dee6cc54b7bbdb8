package kernels

import "slices"

// occupancy says for how many threads on an SM the compiler leaves registers: 65536 / threads for each. The
// first row that is for a kernel counts. With more threads, one CTA loads while another stores. With fewer,
// each thread holds more data.
var occupancy = []struct {
	threads int // on an SM; a CTA of more threads is alone on it
	shapes  []Shape
	ops     []Op
	types   []DType
	layout  layout
	rows    limits // threads for each row
	vectors limits // for each thread, of all inputs together
}{
	// Norms and softmax with options: rows are kept as floats.
	{threads: 1024, ops: []Op{NormForward, LayerNormForward}},
	{threads: 1280, ops: []Op{RMSNormResidualForward}},
	{threads: 768, ops: []Op{LayerNormBackward, RMSNormResidualBackward}, vectors: limits{2, 3}},
	{threads: 768, ops: []Op{NormBackward}, shapes: []Shape{Ring}, vectors: limits{2, 2}},
	{threads: 512, ops: []Op{NormBackward}, shapes: []Shape{Ring}},
	{threads: 1024, ops: []Op{NormBackward, NormGradient}},

	{threads: 1024, ops: []Op{MaskedSoftmaxForward, MaskedSoftmaxBackward}},

	// Rows in shared memory.
	{threads: 1280, shapes: []Shape{Staged}, vectors: limits{1, 4}},
	{threads: 1024, shapes: []Shape{Staged}},
	{threads: 640, shapes: []Shape{Ring}, rows: limits{128, 128}},
	{threads: 768, shapes: []Shape{Ring}, rows: limits{256, 256}, vectors: limits{2, 2}},
	{threads: 768, shapes: []Shape{Ring}, rows: limits{320, 384}},
	{threads: 512, shapes: []Shape{Ring, GridCooperative, GridSharedMemory}},
	{threads: 512, shapes: []Shape{Lanes}, layout: unaligned},
	{threads: 768, shapes: []Shape{Lanes}},
	{threads: 1024, shapes: []Shape{Loop}},

	// Unaligned rows whose operands have the same offset, with the most data.
	{threads: 1024, layout: sameOffset, vectors: limits{5, 16}},

	// Rows that hold exponentials or weights as well.
	{threads: 1280, ops: []Op{CrossEntropyForwardDX}, types: []DType{Float32}, layout: aligned,
		rows: limits{1, 128}, vectors: limits{1, 4}},
	{threads: 1280, ops: []Op{CrossEntropyForward}, layout: aligned, rows: limits{1, 32},
		vectors: limits{4, 6}},
	{threads: 1280, shapes: []Shape{InRegisters}, ops: []Op{SoftmaxForward}, types: []DType{Float16, BFloat16},
		layout: aligned, rows: limits{256, 256}, vectors: limits{4, 4}},
	{threads: 1280, ops: []Op{RMSNormForward}, layout: aligned, vectors: limits{1, 4}},
	{threads: 640, ops: []Op{CrossEntropyForwardDX}, types: []DType{Float16, BFloat16}, layout: aligned,
		rows: limits{32, 32}, vectors: limits{5, 8}},
	{threads: 1024, ops: []Op{CrossEntropyForwardDX}, layout: aligned, rows: limits{32, 32}},

	// All others: the most code, the most data, and the rest.
	{threads: 1280, ops: []Op{SoftmaxForward, SoftmaxBackward, SoftmaxClear}, layout: unaligned},
	{threads: 1024, layout: unaligned},
	{threads: 1024, ops: []Op{RMSNormBackward}},
	{threads: 1536, ops: []Op{CrossEntropyForward}, vectors: limits{5, 5}},
	{threads: 1024, vectors: limits{5, 16}},
	{threads: 1280, ops: []Op{CrossEntropyBackward, Rescale}},
	{threads: 1280, ops: []Op{SoftmaxForward}, shapes: []Shape{Apply}, types: []DType{Float32}},
	{threads: 1280, ops: []Op{SoftmaxBackward}, shapes: []Shape{Partial, Apply}},
	{threads: 2048, rows: limits{1024, 1024}},
	{threads: 1536, ops: []Op{SoftmaxForward}, types: []DType{Float32}, rows: limits{1, 32}},
	{threads: 2048, ops: []Op{SoftmaxForward, CrossEntropyForward}, rows: limits{1, 128}},
	{threads: 1536},
}

// resident is how many CTAs of a variant an SM holds on sm_90, by the registers that the compiler leaves.
func resident(v *Variant) int { return max(1, occupancy[occupancyOf(v)].threads/v.Threads) }

// occupancyOf is the number of the row for a variant.
func occupancyOf(v *Variant) int {
	for i, o := range occupancy {
		switch {
		case len(o.shapes) > 0 && !slices.Contains(o.shapes, v.Shape):
		case len(o.ops) > 0 && !slices.Contains(o.ops, v.Op):
		case len(o.types) > 0 && !slices.Contains(o.types, v.Family.DType()):
		case !o.layout.holds(v) || !o.rows.hold(v.RowThreads) || !o.vectors.hold(v.Vectors*v.Op.Inputs()):
		default:
			return i
		}
	}
	panic("the last row is for all kernels")
}

// limits are the least and the most of a number; zero is any.
type limits struct{ least, most int }

func (l limits) hold(n int) bool { return l.most == 0 || l.least <= n && n <= l.most }

// layout is the alignment of rows that a row of the table is for.
type layout uint8

const (
	anyLayout  layout = iota
	aligned           // kernels that want whole, aligned vectors
	unaligned         // kernels that do not
	sameOffset        // of those, the ones that want all operands at the same offset
)

// layoutOf is the layout that a kernel is for.
func layoutOf(v *Variant) layout {
	switch {
	case v.SameOffset:
		return sameOffset
	case v.Unaligned:
		return unaligned
	}
	return aligned
}

func (l layout) holds(v *Variant) bool {
	switch l {
	case aligned:
		return !v.Unaligned
	case unaligned:
		return v.Unaligned
	case sameOffset:
		return v.SameOffset
	}
	return true
}
