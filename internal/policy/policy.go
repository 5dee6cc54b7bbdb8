// Package policy is the data by which the planner chooses kernels: for each device, operator, element type
// and layout a list of rows, of which the first that fits a request wins. policy.txt is its source;
// internal/cmd/policy generates the Go tables from it, and updates it from files of measurements.
package policy

//go:generate go run ../cmd/policy

import "github.com/gander-go/gander/kernels"

// Device is a kind of device that has choices of its own.
type Device uint8

// The devices. A device that was not measured keeps its choices when those of a measured one change, but in
// sections for any device.
const (
	H100      Device = iota
	H200             // as many SMs as an H100, 1.4 times the memory bandwidth
	Other            // any other
	OtherFast        // any other with more than 4100 GB/s of memory bandwidth
)

// Operator is what a plan computes.
type Operator uint8

// The operators.
const (
	SoftmaxForward Operator = iota
	SoftmaxBackward
	RMSNormForward
	RMSNormBackward   // dx and dw
	RMSNormBackwardDX // dx alone
	CrossEntropyForward
	CrossEntropyForwardDX // loss and gradient
	CrossEntropyBackward
	NormForward          // RMSNorm with options, LayerNorm
	NormBackward         // with or without dw and db
	MaskedSoftmaxForward // softmax and log-softmax with options
	MaskedSoftmaxBackward
	GeneralCrossEntropyForward // with label smoothing
	GeneralCrossEntropyForwardDX
	TokenStatisticsForward // log-probability and entropy
	AllTokenStatisticsForward
	SoftCrossEntropyForward // with class probabilities
	LayerNormForward        // aligned, operands of one type, no residual; all others are norms with options
	LayerNormBackward
	RMSNormResidualForward // the same with a residual, and no bias
	RMSNormResidualBackward
)

// Layout says where the rows of the operands lie.
type Layout uint8

// The layouts, from the one that most kernels take to the one that fewest do.
const (
	Aligned      Layout = iota // every row is made of whole, aligned 16-byte vectors
	SameOffset                 // row by row, all operands begin at the same offset from a 16-byte boundary
	MixedOffsets               // at any offsets
	MixedTypes                 // the second input has another type than x
)

// Vectors is how many 16-byte vectors of so many elements a row of n elements may touch.
func (l Layout) Vectors(n, elements int64) int64 {
	if l != Aligned {
		n += elements - 1 // the row may begin anywhere in a vector
	}
	return (n + elements - 1) / elements
}

// Regime is a way to spread rows over the device.
type Regime uint8

// The regimes.
const (
	Registers           Regime = iota // a row in the registers of a CTA, or of a part of one
	ClusterRegisters                  // a row in the registers of a cluster
	SharedMemory                      // a row in the shared memory of a CTA
	ClusterSharedMemory               // a row in the shared memory of a cluster
	PersistentLoop                    // parts of warps go from row to row
	PersistentLanes                   // the same for RMSNorm backward, with dw in registers
	PersistentRing                    // CTAs or clusters go from row to row, the next rows in a ring
	GridCooperative                   // a CTA on each SM, which share every row; rings in shared memory
	GridSharedMemory                  // a few rows in the shared memory of all SMs
	Stream                            // a row is read once and not kept
	TwoPasses                         // chunks of rows are reduced, then mapped
	ByColumns                         // RMSNorm backward: row sums first, then dx and dw by columns
	Elementwise                       // nothing is reduced: any number of threads share a row
)

// Count is a number of rows, absolute or for each SM. The zero value is no limit.
type Count struct {
	N     int64
	PerSM bool
}

// On is the number on a device.
func (c Count) On(sms int) int64 {
	if c.PerSM {
		return c.N * int64(sms)
	}
	return c.N
}

// Row is one choice. Lengths count 16-byte vectors that a row of the matrix may touch.
type Row struct {
	For         uint16 // bit i: algorithm i of package ops may take it; auto is 0
	Over        int64  // for rows longer than this,
	UpTo        int64  // and up to this; 0 for no limit
	From, Below Count  // for at least From rows of the matrix, and fewer than Below
	MinKiB      int64  // for x of at least so many KiB for each SM,
	MaxKiB      int64  // and at most so many; 0 for no limit
	NoClusters  bool   // for devices without clusters
	OneWave     bool   // where all CTAs are resident at once
	Bits        int64  // for elements of so many bits, 16 or 32; 0 for any
	WideWeights bool   // for 16-bit rows with float32 weights
	Only        uint8  // bit i: for device i of those that have the list; 0 for all of them

	Regime           Regime
	Threads, Vectors int // of a CTA for each row, and 16-byte vectors for each thread and input
	RowsPerStep      int // GridCooperative: rows that are taken together
	MinCTAs, MaxCTAs int // of a cluster; 0 where a CTA takes a row
	Resident         int // CTAs for each SM: of a persistent grid, or that rows are split for; 0 for one
	Stages           int // PersistentRing: rows in flight

	Ratio    float64 // the best plain kernel's time over this one's; 0 where not measured
	RunnerUp string  // the next best and its ratio, where measured
}

// Takes tells whether an algorithm may take the row.
func (r *Row) Takes(algorithm int32) bool { return r.For>>uint32(algorithm)&1 != 0 }

// TakesType tells whether the row is for elements of that type.
func (r *Row) TakesType(x kernels.DType) bool { return r.Bits == 0 || r.Bits == 8*x.Size() }

// IsFor tells whether the row is for a device that has its list.
func (r *Row) IsFor(d Device) bool { return r.Only == 0 || r.Only>>d&1 != 0 }

// Rows returns the choices for a request, in order.
func Rows(d Device, op Operator, x kernels.DType, l Layout) []Row { return tables[d][op][x][l] }
