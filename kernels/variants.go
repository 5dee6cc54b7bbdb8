package kernels

import "fmt"

// Op is what a kernel computes.
type Op uint8

// The ops. CrossEntropyForwardDX makes loss and gradient in one pass; WeightGradient and Total complete what
// other kernels left per CTA or per row; Denominator sums the rows' weights before the rows are read; Clear makes way for what a
// team's CTAs tell each other.
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
	Clear
)

// String returns the op's name as it stands in symbols.
func (o Op) String() string {
	return [...]string{
		"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward", "weight_gradient", "total", "denominator", "clear",
	}[o]
}

// Shape is how a kernel spreads its work; see cuda/rows.cuh and cuda/rmsnorm.cuh.
type Shape uint8

const (
	InRegisters Shape = iota // a row in the registers of RowThreads threads (or of a cluster), read once
	Partial                  // a CTA reduces one chunk of a row
	Apply                    // a CTA maps one chunk of a row whose partial states are known
	Ring                     // RMSNorm: persistent CTAs, rows through a ring in shared memory
	Team                     // RMSNorm backward: a CTA on each SM, which hold a row between them
	Lanes                    // RMSNorm backward: persistent groups of lanes, a row each
	Loop                     // short rows, many of them: persistent lanes, the next row on its way
	Columns                  // RMSNorm backward: a CTA walks down a tile of columns
	Finish                   // sums up what other kernels left
)

// String returns the shape's name as it stands in symbols and explanations.
func (s Shape) String() string {
	return [...]string{"rows", "partial", "apply", "ring", "team", "lanes", "loop", "columns", "finish"}[s]
}

// Family is the kernels of one group of ops for one element type of x: one translation unit and one device
// image, which is loaded at its first use.
type Family uint8

// Families is the number of families; they are numbered from 0.
const Families = 3 * 3

var groups = [...]string{"softmax", "rmsnorm", "cross_entropy"}

func familyOf(op Op, x DType) Family {
	group := Family(0)
	switch op {
	case RMSNormForward, RMSNormBackward, WeightGradient, Clear:
		group = 1
	case CrossEntropyForward, CrossEntropyForwardDX, CrossEntropyBackward, Total, Denominator:
		group = 2
	}
	return group*3 + Family(x)
}

// String returns the name that the family's source and images carry, such as "softmax_bfloat16".
func (f Family) String() string { return groups[f/3] + "_" + f.DType().String() }

// DType is the element type of x that the family's kernels take.
func (f Family) DType() DType { return DType(f % 3) }

// Group is the name of the family's group of ops: "softmax", "rmsnorm" or "cross_entropy".
func (f Family) Group() string { return groups[f/3] }

// Variant is one compiled kernel.
type Variant struct {
	Index      int // position in Variants
	Family     Family
	Symbol     string // the kernel's name in its image
	Op         Op
	Shape      Shape
	Threads    int  // threads per CTA
	RowThreads int  // threads of a CTA that share a row
	Vectors    int  // 16-byte vectors per thread and input
	General    bool // takes any alignment and row stride; the others want 16-byte aligned rows of whole vectors
	Cluster    bool // launched with clusters: sm_90 and later only
	Resident   int  // CTAs per SM that the compiler leaves registers for
	Stages     int  // Lanes: rows that a thread has on their way
	Shared     int  // Lanes: bytes of dynamic shared memory per CTA
}

// Capacity is how many vectors of a row one CTA of an InRegisters, Ring or Lanes variant holds.
func (v *Variant) Capacity() int64 { return int64(v.RowThreads * v.Vectors) }

// Fetches says whether the kernel brings RMSNorm's weights into the dynamic shared memory of its launch, if that has
// any: kFetches in cuda/rmsnorm.cuh.
func (v *Variant) Fetches() bool {
	return v.Op == RMSNormForward && (v.Shape == InRegisters || v.Shape == Apply) && !v.General &&
		v.RowThreads >= 128 && v.Capacity() <= 1024
}

// RowsPerCTA is how many rows one CTA works on at a time.
func (v *Variant) RowsPerCTA() int64 { return int64(v.Threads / v.RowThreads) }

// Geometry is how one launch is spread over the device.
type Geometry struct {
	Grid        uint32 // CTAs
	Cluster     uint32 // CTAs per cluster, 1 for none
	Shared      uint32 // bytes of dynamic shared memory per CTA
	Cooperative bool   // all CTAs must be resident at once
	Dependent   bool   // may start while the launch before it ends: its kernel waits (sm_90 and later)
}

// ChunkThreads is the CTA size of Partial, Apply and Columns kernels (kChunkThreads in cuda/rows.cuh).
const ChunkThreads = 256

// shape is a row of the tables below: threads per row, vectors per thread and input.
type shape struct{ threads, vectors int }

// What rows are tried in, from short to long: the first that holds a row serves it, and the order is that of the measured
// times (bench/tune.py on an H100; see bench/results). 8 lanes cover the 128 bytes that memory moves at once; four vectors per thread
// with 32 to 40 registers keep 96 KiB per SM in flight, eight with 64 registers 128 KiB.
var (
	tiny = []shape{{8, 1}, {8, 4}, {16, 4}, {32, 4}}

	inRegisters = map[Op][]shape{
		SoftmaxForward:        {{32, 8}, {128, 4}, {256, 4}, {512, 4}, {512, 8}},
		RMSNormForward:        {{128, 4}, {256, 4}, {512, 4}, {512, 8}},
		CrossEntropyForwardDX: {{128, 4}, {256, 4}, {512, 4}, {512, 8}},
		// Longer rows stream: Partial, Apply.
		CrossEntropyForward:  {{32, 8}, {128, 4}, {256, 4}, {512, 4}},
		CrossEntropyBackward: {{32, 8}, {128, 4}, {256, 4}, {512, 4}},
		// Two inputs: half the vectors of each. RMSNorm's weights leave no registers for four of each.
		SoftmaxBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}, {1024, 4}},
		RMSNormBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}},
	}
	inClusters = map[Op][]shape{
		SoftmaxForward:        {{256, 4}, {512, 8}, {1024, 8}},
		RMSNormForward:        {{256, 4}, {1024, 4}, {1024, 8}},
		CrossEntropyForwardDX: {{256, 4}, {512, 8}, {1024, 8}},
		SoftmaxBackward:       {{256, 2}, {256, 4}, {512, 4}, {1024, 4}},
		RMSNormBackward:       {{256, 2}, {512, 2}, {1024, 2}},
	}

	// Rows of any alignment, with fewer shapes: they are rarer, and their code is longer.
	anyInRegisters = map[int][]shape{1: {{8, 1}, {8, 4}, {16, 4}, {32, 4}, {128, 4}, {192, 4}, {256, 4}, {384, 4}, {512, 4}, {768, 4}, {1024, 4}},
		2: {{8, 1}, {8, 2}, {16, 2}, {32, 2}, {128, 2}, {192, 2}, {256, 2}, {384, 2}, {512, 2}, {768, 2}, {1024, 2}}}
	anyInClusters = map[int][]shape{1: {{256, 4}, {512, 4}, {1024, 4}}, 2: {{256, 2}, {512, 2}, {1024, 2}}}

	// RMSNorm of short rows: the weights come out of L1 from the second row on.
	loops = []shape{{8, 4}, {16, 4}}

	// RMSNorm of the longest rows, which would fetch the weights again with every row; and its backward with dw, whose float32 sums
	// stay in registers.
	forwardRing = []shape{{512, 2}, {512, 4}}
	ring        = []shape{{128, 1}, {256, 2}}
	ringCluster = []shape{{256, 2}, {512, 2}}
	longRing    = shape{512, 4} // of float32; what 16-bit rows as long would need does not fit the registers
	team        = []shape{{256, 1}, {512, 1}, {512, 2}}
	lanes       = []shape{{8, 1}, {8, 2}, {16, 2}, {32, 2}}
)

// laneStages keeps some 100 KiB per SM on their way.
const laneStages = 3

// resident sets the registers that a thread may use: 64 with the most data in registers or the most code, 32 to 40 otherwise, so that
// one CTA loads while another stores.
func resident(v *Variant) int {
	switch {
	case v.Shape == Ring && v.Op == RMSNormForward:
		return 4 / v.Vectors
	case v.Shape == Ring:
		return map[shape]int{{128, 1}: 5, {256, 2}: 2, {512, 2}: 1, {512, 4}: 1}[shape{v.Threads, v.Vectors}]
	case v.Shape == Team:
		return 1
	case v.Shape == Lanes && v.General:
		return 2
	case v.Shape == Lanes:
		return 3
	case v.Shape == Loop:
		return 8
	case v.General && v.Family.Group() == "softmax":
		return max(1, 1280/v.Threads)
	case v.General, v.Op == RMSNormBackward, v.Vectors*v.Op.Inputs() > 4:
		return max(1, 1024/v.Threads)
	case v.Op == CrossEntropyBackward, v.Family.DType() == Float16 && v.Op != SoftmaxForward, // they hold more
		v.Family.DType() == Float32 && v.Op == SoftmaxForward && v.Shape == Apply:
		return max(1, 1280/v.Threads)
	case v.Threads == 1024:
		return 2
	case v.Op.Inputs() == 2 && (v.Shape == Partial || v.Shape == Apply):
		return 5
	case v.Threads == 128 && (v.Op == SoftmaxForward || v.Op == CrossEntropyForward):
		return 16
	}
	return 1536 / v.Threads
}

// Inputs is how many matrices the op reads.
func (o Op) Inputs() int {
	if o == SoftmaxBackward || o == RMSNormBackward {
		return 2
	}
	return 1
}

// Variants is the table of all kernels.
var Variants = table()

func table() []Variant {
	var t []Variant
	for _, x := range []DType{Float16, BFloat16, Float32} {
		add := func(op Op, s Shape, general, cluster bool, shapes ...shape) {
			for _, p := range shapes {
				v := Variant{
					Index: len(t), Family: familyOf(op, x), Op: op, Shape: s, RowThreads: p.threads, Vectors: p.vectors,
					General: general, Cluster: cluster, Threads: max(p.threads, 128),
				}
				if s == Team {
					v.Threads += 6 * 32 // one warp shares sums, four take them, one brings rows
				}
				if s == Lanes {
					v.Threads, v.Stages = 256, laneStages
					v.Shared = v.Stages * v.Threads * (2*16*v.Vectors + 4) // vectors of x and dy, rstd
				}
				v.Resident = resident(&v)
				v.Symbol = fmt.Sprintf("%s_%s_%s_%dx%d", op, s, x, p.threads, p.vectors)
				if general {
					v.Symbol += "_general"
				}
				if cluster {
					v.Symbol += "_cluster"
				}
				t = append(t, v)
			}
		}
		chunks := func(op Op, s Shape, vectors int) {
			add(op, s, false, false, shape{ChunkThreads, vectors})
			add(op, s, true, false, shape{ChunkThreads, vectors / 2})
		}
		for _, op := range []Op{
			SoftmaxForward, SoftmaxBackward, RMSNormForward, RMSNormBackward,
			CrossEntropyForward, CrossEntropyForwardDX, CrossEntropyBackward,
		} {
			n := op.Inputs()
			for _, s := range tiny {
				add(op, InRegisters, false, false, shape{s.threads, max(1, s.vectors/n)})
			}
			add(op, InRegisters, false, false, inRegisters[op]...)
			if op == RMSNormForward {
				add(op, Loop, false, false, loops...)
			}
			add(op, InRegisters, true, false, anyInRegisters[n]...)
			if inClusters[op] != nil {
				add(op, InRegisters, false, true, inClusters[op]...)
				add(op, InRegisters, true, true, anyInClusters[n]...)
			}
			if op != CrossEntropyBackward {
				chunks(op, Partial, 4/n)
			}
			chunks(op, Apply, 4/n)
		}
		add(RMSNormForward, Ring, false, false, forwardRing...)
		add(RMSNormForward, Ring, false, true, forwardRing...)
		add(RMSNormBackward, Ring, false, false, ring...)
		add(RMSNormBackward, Ring, false, true, ringCluster...)
		if x == Float32 {
			add(RMSNormBackward, Ring, false, true, longRing)
		}
		add(RMSNormBackward, Ring, true, false, ring...)
		add(RMSNormBackward, Ring, true, true, ringCluster...)
		if x != Float32 { // for which rows as long as the first holds are left to the ring
			add(RMSNormBackward, Team, false, false, team[0])
		}
		add(RMSNormBackward, Team, false, false, team[1:]...)
		add(RMSNormBackward, Lanes, false, false, lanes...)
		add(RMSNormBackward, Lanes, true, false, lanes...)
		add(RMSNormBackward, Columns, false, false, shape{ChunkThreads, 1})
		add(RMSNormBackward, Columns, true, false, shape{ChunkThreads, 1})
		add(WeightGradient, Finish, true, false, shape{1024, 1}, shape{256, 1})
		add(Clear, Finish, true, false, shape{256, 1})
		for _, op := range []Op{Total, Denominator} {
			add(op, Finish, true, false, shape{1024, 1})
			add(op, Finish, true, true, shape{1024, 1})
		}
	}
	return t
}
