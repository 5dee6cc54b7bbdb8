package kernels

import (
	"fmt"
	"slices"
)

// Op is what a kernel computes.
type Op uint8

// The ops. CrossEntropyForwardDX makes loss and gradient in one pass; WeightGradient and Total complete what
// other kernels left per CTA or per row; Denominator sums the rows' weights before the rows are read; SoftmaxClear and
// RMSNormClear make way for what a team's CTAs tell each other.
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
)

// String returns the op's name as it stands in symbols.
func (o Op) String() string {
	return [...]string{
		"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward", "weight_gradient", "total", "denominator",
		"softmax_clear", "rmsnorm_clear",
	}[o]
}

// Shape is how a kernel spreads its work; see cuda/rows.cuh and cuda/rmsnorm.cuh.
type Shape uint8

const (
	InRegisters Shape = iota // a row in the registers of RowThreads threads (or of a cluster), read once
	Partial                  // a CTA reduces one chunk of a row
	Apply                    // a CTA maps one chunk of a row whose partial states are known
	Staged                   // RMSNorm forward: a row in the shared memory of a CTA (or of a cluster)
	Ring                     // RMSNorm backward: persistent CTAs, rows through a ring in shared memory
	Team                     // a CTA on each SM, which hold a row between them
	Lanes                    // RMSNorm backward: persistent groups of lanes, a row each
	Loop                     // short rows, many of them: persistent lanes, the next row on its way
	Columns                  // RMSNorm backward: a CTA walks down a tile of columns
	Held                     // a few long rows, in the shared memory of all SMs as far as that goes
	Elementwise              // cross-entropy backward: any number of threads share a row
	Finish                   // sums up what other kernels left
)

// String returns the shape's name as it stands in symbols and explanations.
func (s Shape) String() string {
	return [...]string{"rows", "partial", "apply", "staged", "ring", "team", "lanes", "loop", "columns", "held", "elementwise", "finish"}[s]
}

// Family is the kernels of one group of ops for one element type of x: one translation unit and one device
// image, which is loaded at its first use.
type Family uint8

// Families is the number of families; they are numbered from 0.
const Families = 3 * 3

var groups = [...]string{"softmax", "rmsnorm", "cross_entropy"}

// FamilyOf returns the family that has an op's kernels for rows of x: float16, bfloat16 or float32.
func FamilyOf(op Op, x DType) Family {
	group := Family(0)
	switch op {
	case RMSNormForward, RMSNormBackward, WeightGradient, RMSNormClear:
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
	RowThreads int  // threads of a CTA that share a row; of WeightGradient, a column
	Vectors    int  // 16-byte vectors per thread and input
	General    bool // takes any alignment and row stride; the others want 16-byte aligned rows of whole vectors
	Alike      bool // general: wants all operands' rows to lie alike in their 16-byte vectors, for which more of them fit the registers
	Cluster    bool // launched with clusters: sm_90 and later only
	NoClusters bool // compiled only for architectures without clusters, which are faster than this tile
	Resident   int  // CTAs per SM that the compiler leaves registers for on sm_90; ResidentOn has the others
	Together   int  // Team: rows that are taken together
	Groups     int  // Team: parts of a CTA that take them side by side, each with its own dw
	Stages     int  // Lanes: rows that a thread has on their way
	Shared     int  // Lanes: bytes of dynamic shared memory per CTA
}

// Capacity is how many vectors of a row one CTA of an InRegisters, Staged, Ring, Team or Lanes variant holds; of Held, in a tile.
func (v *Variant) Capacity() int64 { return int64(v.RowThreads * v.Vectors) }

// RowsPerCTA is how many rows one CTA works on at a time; of WeightGradient, columns.
func (v *Variant) RowsPerCTA() int64 { return int64(v.Threads / v.RowThreads) }

// Geometry is how one launch is spread over the device.
type Geometry struct {
	Grid        uint32 // CTAs
	Cluster     uint32 // CTAs per cluster, 1 for none
	Shared      uint32 // bytes of dynamic shared memory per CTA
	Cooperative bool   // all CTAs must be resident at once
	Dependent   bool   // may start while the launch before it ends: its kernel waits (sm_90 and later)
}

// shape is a row of the tables below: threads per row, vectors per thread and input.
type shape struct{ threads, vectors int }

// team is a row of Team's table: a shape, and the rows that are taken together.
type team struct {
	shape
	together int
}

// teams is for rows of which clusters leave SMs idle, or which they do not hold.
func teams(op Op, x DType) []team {
	all := []team{{shape{160, 1}, 2}, {shape{256, 1}, 2}, {shape{256, 2}, 1}, {shape{512, 2}, 1}, {shape{512, 4}, 1}}
	switch {
	case op == SoftmaxForward, op == RMSNormForward: // clusters hold longer rows
		return all[3:]
	case op == SoftmaxBackward, x == Float32:
		return all[2:4]
	}
	return all[:4]
}

func (s shape) capacity() int { return s.threads * s.vectors }

// Which tiles are compiled, from short rows to long. The policy (internal/policy) has which of them a request gets.
// 8 lanes cover the 128 bytes that memory moves at once; four vectors per thread with 32 to 40 registers keep 96 KiB
// per SM in flight, eight with 64 registers 128 KiB.
var (
	tiny        = []shape{{8, 1}, {8, 4}, {16, 4}, {32, 4}}
	tinyRMSNorm = []shape{{8, 1}, {8, 4}, {32, 4}}                   // many rows of 33 to 64 vectors take Loop
	tinySoftmax = []shape{{8, 1}, {8, 4}, {16, 4}, {64, 2}, {32, 4}} // two warps have half of the exponentials each

	// Cross-entropy forward, which only reads: more and smaller CTAs even out better. N = 256 0.87 to 0.91.
	tinyReads = []shape{{8, 1}, {8, 2}, {16, 2}, {16, 4}, {32, 4}}

	// Of those with one input, the first leaves no thread idle with 129 to 256 vectors.
	inRegisters = map[Op][]shape{
		SoftmaxForward:        {{32, 8}, {128, 4}, {256, 4}, {512, 4}, {512, 8}, {1024, 8}},
		RMSNormForward:        {{64, 4}, {128, 4}, {256, 4}, {1024, 8}},
		CrossEntropyForwardDX: {{32, 8}, {128, 4}, {256, 4}, {512, 4}, {512, 8}, {1024, 8}}, // the last where there are no clusters
		// Longer rows stream: Partial, Apply.
		CrossEntropyForward: {{128, 2}, {128, 4}, {256, 4}, {512, 4}, {512, 8}},
		// Two inputs: half the vectors of each. RMSNorm's weights leave no registers for four of each.
		SoftmaxBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}, {1024, 4}},
		RMSNormBackward: {{128, 2}, {256, 2}, {512, 2}, {1024, 2}},
	}
	inClusters = map[Op][]shape{
		SoftmaxForward:        {{256, 4}, {512, 8}},
		RMSNormForward:        {},                              // staged
		CrossEntropyForwardDX: {{256, 4}, {512, 8}, {1024, 8}}, // there is no team for the longest
		CrossEntropyForward:   {{256, 4}},                      // few rows; many stream
		SoftmaxBackward:       {{256, 2}, {256, 4}, {512, 4}, {1024, 4}},
		RMSNormBackward:       {{256, 2}, {1024, 2}},
	}

	// Rows of any alignment, with fewer shapes: they are rarer, and their code is longer.
	anyInRegisters = map[int][]shape{1: {{8, 1}, {8, 4}, {16, 4}, {32, 4}, {128, 4}, {192, 4}, {256, 4}, {384, 4}, {512, 4}, {768, 4}, {1024, 4}},
		2: {{8, 1}, {8, 2}, {16, 2}, {32, 2}, {128, 2}, {192, 2}, {256, 2}, {384, 2}, {512, 2}, {768, 2}, {1024, 2}}}
	anyInClusters = map[Op][]shape{
		SoftmaxForward:        {{256, 4}, {512, 4}, {1024, 4}},
		RMSNormForward:        {{256, 4}, {512, 4}, {1024, 4}},
		CrossEntropyForwardDX: {{256, 4}, {512, 4}},
		SoftmaxBackward:       {{256, 2}, {512, 2}, {1024, 2}},
		RMSNormBackward:       {{256, 2}, {512, 2}, {1024, 2}},
	}

	// Clusters are faster than these tiles. So these are compiled only for architectures without clusters.
	clusterless = map[Op]map[layout][]shape{
		SoftmaxForward:        {unaligned: {{768, 4}}, sameOffset: {{512, 8}}},
		SoftmaxBackward:       {aligned: {{1024, 2}}, unaligned: {{768, 2}}, sameOffset: {{512, 4}}},
		RMSNormForward:        {unaligned: {{768, 4}}},
		RMSNormBackward:       {unaligned: {{768, 2}}},
		CrossEntropyForwardDX: {aligned: {{1024, 8}}, unaligned: {{768, 4}, {1024, 4}}, sameOffset: {{1024, 8}}},
	}

	// Where all operands lie alike, as they nearly always do, nothing has to be shifted, and more vectors fit.
	alikeInRegisters = map[Op][]shape{
		SoftmaxForward:        {{128, 6}, {192, 6}, {384, 6}, {512, 8}, {1024, 8}},
		CrossEntropyForwardDX: {{128, 6}, {192, 6}, {384, 6}, {512, 8}, {1024, 8}},
		CrossEntropyForward:   {{128, 4}, {128, 6}, {256, 4}, {512, 4}, {512, 8}},
		SoftmaxBackward:       {{128, 3}, {192, 3}, {256, 4}, {384, 3}, {512, 4}, {1024, 4}},
	}
	alikeInClusters = map[Op][]shape{
		SoftmaxForward:        {{256, 8}, {512, 8}},
		CrossEntropyForwardDX: {{256, 8}, {512, 8}},
		SoftmaxBackward:       {{256, 4}, {512, 4}},
	}

	// Cross-entropy forward, a long row to each CTA.
	stream      = shape{512, 8}
	alikeStream = shape{ChunkThreads, 8}

	// RMSNorm of short rows: the weights come out of L1 from the second row on.
	loops = []shape{{8, 4}, {16, 4}}

	// RMSNorm of long rows by way of shared memory, in a CTA or in a cluster.
	staged           = []shape{{512, 8}, {1024, 8}}
	stagedInClusters = []shape{{256, 4}, {256, 8}, {512, 8}}

	// RMSNorm backward with dw, whose float32 sums stay in registers.
	ring        = []shape{{128, 1}, {256, 1}, {256, 2}, {512, 2}}
	ringCluster = []shape{{256, 2}, {512, 2}}
	longRing    = shape{512, 4} // of float32; what 16-bit rows as long would need does not fit the registers
	lanes       = []shape{{8, 1}, {8, 2}, {16, 2}, {32, 2}}

	// The last reduction of dw: threads that share a column of partial dw. Few columns, which many CTAs have left; more columns than such
	// CTAs take in one wave; a thread to each.
	weightGradient = []shape{{32, 1}, {8, 1}, {1, 1}}
)

// laneStages keeps some 100 KiB per SM on their way.
const laneStages = 3

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
		add := func(like Variant, shapes ...shape) {
			for _, p := range shapes {
				v := like
				v.Index, v.Family, v.RowThreads, v.Vectors, v.Threads = len(t), FamilyOf(v.Op, x), p.threads, p.vectors, max(p.threads, 128)
				if v.Shape == Team {
					v.Groups = 1
					if v.Together == 2 { // whose threads are too few by themselves
						v.Groups = 2
					}
					v.Threads = v.Groups*p.threads + 6*32 // one warp shares sums, four take them, one brings rows
				}
				if v.Op == WeightGradient { // 16 columns at least
					v.Threads = max(16*p.threads, ChunkThreads)
				}
				if v.Shape == Lanes {
					v.Threads, v.Stages = 256, laneStages
					v.Shared = v.Stages * v.Threads * (2*16*v.Vectors + 4) // vectors of x and dy, rstd
				}
				v.Resident = resident(&v)
				v.NoClusters = v.Shape == InRegisters && !v.Cluster &&
					slices.Contains(clusterless[v.Op][layoutOf(&v)], p)
				v.Symbol = fmt.Sprintf("%s_%s_%s_%dx%d", v.Op, v.Shape, x, p.threads, p.vectors)
				if v.Together > 0 {
					v.Symbol += fmt.Sprintf("x%d", v.Together)
				}
				switch {
				case v.Alike:
					v.Symbol += "_alike"
				case v.General:
					v.Symbol += "_general"
				}
				if v.Cluster {
					v.Symbol += "_cluster"
				}
				t = append(t, v)
			}
		}
		// Rows of any alignment: of two shapes that hold about as much, the faster one first, which takes fewer rows.
		addUnaligned := func(like Variant, anyhow, alike []shape) {
			like.General = true
			for len(anyhow)+len(alike) > 0 {
				if like.Alike = len(anyhow) == 0 || len(alike) > 0 && 4*alike[0].capacity() <= 5*anyhow[0].capacity(); like.Alike {
					add(like, alike[0])
					alike = alike[1:]
				} else {
					add(like, anyhow[0])
					anyhow = anyhow[1:]
				}
			}
		}
		chunks := func(op Op, s Shape, vectors int) {
			add(Variant{Op: op, Shape: s}, shape{ChunkThreads, vectors})
			add(Variant{Op: op, Shape: s, General: true}, shape{ChunkThreads, vectors / 2})
		}
		for _, op := range []Op{
			SoftmaxForward, SoftmaxBackward, RMSNormForward, RMSNormBackward,
			CrossEntropyForward, CrossEntropyForwardDX,
		} {
			n := op.Inputs()
			rows, clusters := Variant{Op: op, Shape: InRegisters}, Variant{Op: op, Shape: InRegisters, Cluster: true}
			switch op {
			case CrossEntropyForward:
				add(rows, tinyReads...)
			case SoftmaxForward:
				add(rows, tinySoftmax...)
			case RMSNormForward:
				add(rows, tinyRMSNorm...)
			default:
				for _, s := range tiny {
					add(rows, shape{s.threads, max(1, s.vectors/n)})
				}
			}
			add(rows, inRegisters[op]...)
			if op == RMSNormForward {
				add(Variant{Op: op, Shape: Loop}, loops...)
			}
			anyhow := anyInRegisters[n]
			if op == CrossEntropyForward { // whose only operand is off from itself where vectors are counted from a row's first element
				anyhow = []shape{{8, 1}, {8, 4}, {16, 4}, {32, 4}, {128, 4}, {256, 4}, {512, 4}, {1024, 4}}
			}
			addUnaligned(rows, anyhow, alikeInRegisters[op])
			if inClusters[op] != nil {
				add(clusters, inClusters[op]...)
				addUnaligned(clusters, anyInClusters[op], alikeInClusters[op])
			}
			switch op {
			case CrossEntropyForward:
				chunks(op, Partial, 4)
				add(Variant{Op: op, Shape: Partial}, stream)
				add(Variant{Op: op, Shape: Partial, General: true, Alike: true}, alikeStream)
			default:
				chunks(op, Partial, 4/n)
			}
			chunks(op, Apply, 4/n)
		}
		for _, general := range []bool{false, true} {
			add(Variant{Op: CrossEntropyBackward, Shape: Elementwise, General: general}, shape{ChunkThreads, 4})
		}
		add(Variant{Op: RMSNormForward, Shape: Staged}, staged...)
		add(Variant{Op: RMSNormForward, Shape: Staged, Cluster: true}, stagedInClusters...)
		alike := Variant{Op: RMSNormForward, Shape: Staged, General: true, Alike: true}
		add(alike, staged...)
		alike.Cluster = true
		add(alike, stagedInClusters[1:]...)
		add(Variant{Op: RMSNormBackward, Shape: Ring}, ring...)
		add(Variant{Op: RMSNormBackward, Shape: Ring, Cluster: true}, ringCluster...)
		if x == Float32 {
			add(Variant{Op: RMSNormBackward, Shape: Ring, Cluster: true}, longRing)
		}
		add(Variant{Op: RMSNormBackward, Shape: Ring, General: true}, ring...)
		add(Variant{Op: RMSNormBackward, Shape: Ring, General: true, Cluster: true}, ringCluster...)
		for _, op := range []Op{SoftmaxForward, SoftmaxBackward, RMSNormForward} {
			add(Variant{Op: op, Shape: Held}, shape{ChunkThreads, 4 / op.Inputs()})
		}
		for _, op := range []Op{SoftmaxForward, SoftmaxBackward, RMSNormForward, RMSNormBackward} {
			for _, t := range teams(op, x) {
				add(Variant{Op: op, Shape: Team, Together: t.together}, t.shape)
			}
		}
		add(Variant{Op: RMSNormBackward, Shape: Lanes}, lanes...)
		add(Variant{Op: RMSNormBackward, Shape: Lanes, General: true}, lanes...)
		add(Variant{Op: RMSNormBackward, Shape: Columns}, shape{ChunkThreads, 1})
		add(Variant{Op: RMSNormBackward, Shape: Columns, General: true}, shape{ChunkThreads, 1})
		add(Variant{Op: WeightGradient, Shape: Finish, General: true}, weightGradient...)
		add(Variant{Op: SoftmaxClear, Shape: Finish, General: true}, shape{256, 1})
		add(Variant{Op: RMSNormClear, Shape: Finish, General: true}, shape{256, 1})
		for _, op := range []Op{Total, Denominator} {
			add(Variant{Op: op, Shape: Finish, General: true}, shape{1024, 1})
			add(Variant{Op: op, Shape: Finish, General: true, Cluster: true}, shape{1024, 1})
		}
	}
	return t
}
