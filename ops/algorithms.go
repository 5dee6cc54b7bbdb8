package ops

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// Algorithm restricts which kernels the planner may choose for softmax and RMSNorm. The numbers are
// gander_algorithm of gander.h.
type Algorithm int32

// String returns the name that Explain and the Python package use.
func (a Algorithm) String() string {
	if a < 0 || int(a) >= len(algorithmNames) {
		return fmt.Sprintf("algorithm %d", int32(a))
	}
	return algorithmNames[a]
}

// Choice is what a caller asks of the planner. The zero value leaves every decision to it.
type Choice struct {
	Algorithm Algorithm // of softmax and RMSNorm
	IfServed  bool      // for rows that Algorithm cannot serve, use Auto and do not fail
	// BatchInvariant makes the bits of a row's results independent of the number of rows.
	// Where rows are not whole 16-byte vectors, the bits do not depend on a row's address either.
	// Rows of whole 16-byte vectors get different bits if an operand is not aligned to 16 bytes.
	// Sums over rows, such as dw, are not covered.
	BatchInvariant bool
}

// Choose decodes the number of the option algorithm, to which IfServed may be added. It keeps a number that
// is no algorithm as it is, so that the error can report it.
func Choose(a Algorithm, batchInvariant bool) Choice {
	c := Choice{Algorithm: a, BatchInvariant: batchInvariant}
	if bare := a &^ IfServed; bare >= 0 && int(bare) < len(algorithmNames) {
		c.Algorithm, c.IfServed = bare, bare != a
	}
	return c
}

// AlgorithmInfo describes an algorithm of one op.
type AlgorithmInfo struct {
	Name   string `json:"name"`
	What   string `json:"what"`
	Limits string `json:"limits"`
}

// what describes an algorithm of an op. dw says whether the op computes the gradient of the weight.
func (a Algorithm) what(op kernels.Op, dw bool) string {
	norm, ring := op == kernels.RMSNormForward, dw
	switch a {
	case Warp:
		return "one pass: each row in the registers of 8 to 32 threads of a warp, reduced by shuffles " +
			"without a barrier"
	case Block:
		return "one block of up to 256 threads for each row, tree reduction by shuffles and through shared " +
			"memory; a row that does not fit in the block's registers is read twice"
	case Register:
		return "one pass: each row in the registers of one block or less, in the smallest tile that holds it"
	case Medium:
		switch {
		case norm:
			return "one pass: each row in the shared memory of one block"
		case ring:
			return "one pass: persistent blocks, which load rows through a ring buffer in shared memory " +
				"into registers"
		}
		return "one pass: each row in the largest register tile of one block, where other libraries use " +
			"shared memory"
	case Extreme:
		switch {
		case norm:
			return "one pass: each row in the shared memory of a cluster of 2 to 16 blocks (unaligned rows " +
				"also in its registers); longer rows through ring buffers in the shared memory of one " +
				"block on each SM"
		case ring:
			return "one pass: persistent clusters, or one block on each SM, which load rows through ring " +
				"buffers in shared memory into registers"
		}
		return "one pass: each row in the largest register tiles of a cluster of as few blocks as " +
			"possible; longer rows in the shared memory of one block on each SM"
	case Cluster:
		switch {
		case norm:
			return "one pass: each row in the shared memory of a cluster of 2 to 16 blocks (unaligned rows " +
				"in its registers), which exchange partial results through distributed shared memory"
		case ring:
			return "one pass: a cluster of blocks for each row, which exchange partial sums through " +
				"distributed shared memory"
		}
		return "one pass: each row in the registers of a cluster of 2 to 16 blocks, which exchange partial " +
			"results through distributed shared memory"
	case Arbitrary:
		return "two passes: blocks reduce chunks of the rows; then other blocks merge the partial results " +
			"and write the output"
	case SplitK:
		return "every row split over several blocks, for few long rows: two passes like arbitrary, or one " +
			"pass with most of the rows in the shared memory of all SMs"
	}
	return "the algorithm that was fastest in measurements for the shape and the device"
}

// Algorithms lists the algorithms of an op that Explain knows. Each has a description, and the rows that it
// serves on a device with clusters of up to 16 CTAs. These limits are found by asking the planner.
func Algorithms(op string) ([]AlgorithmInfo, error) {
	k := check{op: "algorithms"}
	k.explainable(op)
	if k.err != nil {
		return nil, k.err
	}
	r := explained[op]
	var list []AlgorithmInfo
	for a := range Algorithm(len(algorithmNames)) {
		if r.Algorithm = a; a != Auto && !choosable(r.op) {
			break
		}
		list = append(list, AlgorithmInfo{a.String(), a.what(r.op, r.dw), limits(r)})
	}
	return list, nil
}

// choosable reports whether an op has more than one algorithm.
func choosable(op kernels.Op) bool {
	switch op {
	case kernels.SoftmaxForward, kernels.SoftmaxBackward, kernels.RMSNormForward, kernels.RMSNormBackward:
		return true
	}
	return false
}

// The devices that limits are computed for: one with clusters of every size, and one without clusters.
var (
	ideal = driver.Facts{
		Major: 9, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10, L2Bytes: 50 << 20,
		Clusters: [17]int{1: 132, 66, 44, 33, 26, 22, 18, 16, 14, 13, 12, 11, 10, 9, 8, 8},
	}
	plain = driver.Facts{
		Major: 8, SMs: 132, SharedPerBlock: 163 << 10, SharedPerSM: 164 << 10, L2Bytes: 40 << 20,
	}
)

const (
	none    = -1 // instead of a logarithm: no row is served
	longest = 30 // log2 of the vectors in the longest row that is tried; if that is served, any length is
)

// reach asks the planner for the shortest and the longest row that an algorithm serves. It returns the base-2
// logarithms of their 16-byte vectors. It tries powers of two only, because every limit is one.
func reach(f *driver.Facts, r request) (low, high int) {
	low, high = none, none
	elements := 16 / r.x.Size()
	for i := 0; i <= longest; i++ {
		r.n = elements << i
		if r.layout != policy.Aligned {
			r.n -= elements - 1 // the row may begin anywhere in a vector
		}
		if _, served, err := attempt(f, r); served && err == nil {
			if high = i; low == none {
				low = i
			}
		}
	}
	return low, high
}

// limits describes the rows that an algorithm serves.
func limits(r request) string {
	r.x, r.m = kernels.BFloat16, 1
	low, high := reach(&ideal, r)
	_, without := reach(&plain, r)
	r.layout = policy.MixedOffsets
	_, unaligned := reach(&ideal, r)
	r.layout = policy.SameOffset
	_, sameOffset := reach(&ideal, r)
	var text []string
	switch {
	case low > 0:
		text = append(text, "rows of more than "+bytes(low-1))
	case high == longest:
		text = append(text, "rows of any length")
	default:
		text = append(text, "rows of up to "+bytes(high))
	}
	switch {
	case unaligned == none && sameOffset != none:
		text = append(text, "unaligned ones where all operands have the same offset")
	case unaligned < high && unaligned < sameOffset:
		text = append(text, fmt.Sprintf(
			"unaligned ones of up to %s, or %s where all operands have the same offset",
			bytes(unaligned), bytes(sameOffset)))
	case unaligned == none:
		text = append(text, "only of whole, aligned 16-byte vectors")
	case unaligned < high:
		text = append(text, "unaligned ones of up to "+bytes(unaligned))
	}
	switch {
	case without == none:
		text = append(text, "on compute capability 9.0 or newer")
	case without < high:
		text = append(text, "before compute capability 9.0 of up to "+bytes(without))
	}
	return strings.Join(text, ", ")
}

// bytes formats the size of 1 << log vectors of 16 bytes.
func bytes(log int) string {
	switch {
	case log < 6:
		return fmt.Sprintf("%d bytes", 16<<log)
	case log < 16:
		return fmt.Sprintf("%d KiB", 1<<(log-6))
	case log < 26:
		return fmt.Sprintf("%d MiB", 1<<(log-16))
	}
	return fmt.Sprintf("%d GiB", 1<<(log-26))
}

// chosen checks the algorithm that a caller asks for. The operands come first, because it needs their device.
// Host memory has one algorithm, which is batch-invariant.
func (k *check) chosen(c Choice, op kernels.Op) {
	switch {
	case c.Algorithm == Auto:
	case c.Algorithm < 0 || int(c.Algorithm) >= len(algorithmNames):
		k.fail(StatusOption, "algorithm is %d, expected 0 (%v) to %d (%v)", int32(c.Algorithm), Auto,
			len(algorithmNames)-1, Algorithm(len(algorithmNames)-1))
	case !choosable(op):
		k.fail(StatusOption, "algorithm is %q, expected %q: the op has no others; leave it out",
			c.Algorithm, Auto)
	case k.device.Host() && !c.IfServed:
		k.fail(StatusUnsupported, "algorithm is %q on %v, expected %q: host memory is served by one "+
			"algorithm; leave it out, or move the operands to a CUDA device", c.Algorithm, k.device, Auto)
	}
}

// refused explains why the algorithm cannot serve the request, and names the algorithms that can.
func refused(f *driver.Facts, r request) error {
	var limit string
	asked, aligned, same, anyBits := r.Algorithm, r, r, r
	aligned.layout = policy.Aligned
	if r.layout == policy.MixedOffsets {
		same.layout = policy.SameOffset
	}
	anyBits.BatchInvariant = false
	low, high := reach(f, r)
	_, alignedHigh := reach(f, aligned)
	_, sameHigh := reach(f, same)
	_, anyBitsHigh := reach(f, anyBits)
	rows, elements := "rows", 16/r.x.Size()
	if r.layout != policy.Aligned {
		rows = "rows that are not whole, aligned 16-byte vectors"
	}
	most := func(log int) int64 {
		if r.layout != policy.Aligned {
			return elements<<log - elements + 1
		}
		return elements << log
	}
	switch {
	case r.layout == policy.MixedTypes && high == none:
		limit = "takes dout of x's dtype only"
	case high == none && anyBitsHigh != none:
		limit = "takes rows that are not whole, aligned 16-byte vectors only without batch invariance: " +
			"their bits depend on their addresses"
	case high == none && sameHigh != none:
		limit = "takes rows that are not whole, aligned 16-byte vectors only where all operands have " +
			"the same offset"
	case high == none && alignedHigh != none:
		limit = "takes rows of whole, aligned 16-byte vectors only " +
			"(and a weight and results of x's dtype, aligned too)"
	case high == none:
		limit = fmt.Sprintf("needs clusters of thread blocks that this device, of compute capability %d.%d, "+
			"does not have", f.Major, f.Minor)
	case r.n > most(high):
		limit = fmt.Sprintf("holds %s of up to %d %v elements on this device, these have %d",
			rows, most(high), r.x, r.n)
	case low <= 0:
		limit = fmt.Sprintf("does not take %s of %d %v elements on this device", rows, r.n, r.x)
	default:
		limit = fmt.Sprintf("splits %s of more than %d %v elements, these have %d",
			rows, most(low-1), r.x, r.n)
	}
	var others []string
	for a := Auto + 1; int(a) < len(algorithmNames); a++ {
		r.Algorithm = a
		if _, served, err := attempt(f, r); served && err == nil {
			others = append(others, strconv.Quote(a.String()))
		}
	}
	instead := strconv.Quote(Auto.String())
	if others != nil {
		instead = strings.Join(others, ", ") + " or " + instead
	}
	return errorf(StatusUnsupported, "%v: algorithm %q %s; use %s", r.op, asked, limit, instead)
}
