package ops

import (
	"fmt"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// request is all that a plan follows from, beside the device.
type request struct {
	Choice
	op      kernels.Op
	x       kernels.DType
	layout  policy.Layout
	dw      bool // RMSNorm backward: dw is wanted
	total   bool // cross-entropy: a total or the denominator is wanted
	onePass bool // cross-entropy: forward's gradient is that of the mean; others may find their work done
	weights bool // general cross-entropy: gradients need the sum of the class weights
	norm    normOperands
	m, n    int64

	qHeads, kHeads int64 // QKNormRotate

	wideWeights bool // RMSNorm forward: weights of float32 for 16-bit rows
}

// launch is one kernel of a plan.
type launch struct {
	variant  *kernels.Variant
	geometry kernels.Geometry
}

// plan says which kernels serve a request, in order, and what they need. It is immutable once made.
type plan struct {
	launches       []launch
	chunk          int64 // vectors of a row per CTA
	splits         int32 // CTAs per row where rows are split
	stages         int32 // rows in a CTA's ring, or steps in a grid-cooperative kernel's
	depth          int32 // GridCooperative: steps summed before one is mapped; GridSharedMemory: tiles kept
	prefetch       int32 // rows from a CTA's to those that it prefetches into L2; 0 for none
	prefetchFrom   int32 // the first CTA, or cluster, that does
	rowThreads     int32 // Elementwise: threads of a CTA that share a row
	parts          int32 // Elementwise: rows or chunks that CTAs take in turns
	rowsPerCTA     int32 // Elementwise: rows of a CTA
	partials       int32 // rows of partial dw
	groups         int32 // Rotate: threads that share the heads of an item. QKNormRotate: those of a token
	qParts         int32 // QKNormRotate: groups that have heads of q
	headsPerThread int32 // QKNormRotate: at most
	singleCTATotal bool  // the only CTA makes the total as well
	scratch        scratch
	taken          Algorithm   // the one whose regime this is, where the op has several
	row            *policy.Row // the policy's, of the kernels that go over the rows
	why            string      // for people
}

// scratch is the layout of the call's temporary device memory: offsets in bytes.
type scratch struct {
	partial, dwPartial, rowLosses, logits, denominator, weights uint64
	size                                                        uint64
}

func (s *scratch) take(bytes int64) (offset uint64) {
	const alignment = 256
	offset = s.size
	s.size += (uint64(bytes) + alignment - 1) &^ (alignment - 1)
	return offset
}

const (
	wholeRow     = 1 << 27 // vectors: a chunk that holds any row that is not split
	maxGrid      = 1<<31 - 1
	maxChunk     = 1 << 26 // vectors: a chunk's elements are counted in 32 bits
	lanesPerWarp = 32
)

func ceil(a, b int64) int64 { return (a + b - 1) / b }

// makePlan is a pure function of its arguments.
func makePlan(f *driver.Facts, r request) (*plan, error) {
	p, served, err := attempt(f, r)
	switch {
	case err != nil:
		return nil, err
	case served:
		return p, nil
	case !r.IfServed:
		return nil, refused(f, r)
	}
	asked := r.Algorithm
	r.Algorithm = Auto
	p, served, err = attempt(f, r)
	switch {
	case err != nil:
		return nil, err
	case !served:
		return nil, refused(f, r)
	}
	p.why = fmt.Sprintf("%v cannot serve these rows: %s", asked, p.why)
	return p, nil
}

// attempt makes a plan where the algorithm that is asked for serves the request.
func attempt(f *driver.Facts, r request) (_ *plan, served bool, _ error) {
	return attemptBy(f, r, nil)
}

// attemptBy is attempt by other rows than the policy's, if any are given.
func attemptBy(f *driver.Facts, r request, rows []policy.Row) (_ *plan, served bool, _ error) {
	q := newQuery(f, r)
	p := q.begin()
	switch {
	case r.op == kernels.CombineSlices, r.op == kernels.CombineTokenStatistics:
		q.byRow(p)
	case r.op == kernels.Rotate:
		q.byHead(p)
	case r.op == kernels.QKNormRotate, r.op == kernels.QKNormRotateBackward:
		q.byLanes(p)
	case r.m > 0:
		ours := rows
		if ours == nil {
			ours = policy.Rows(deviceOf(f), q.operator(), q.x, q.layout)
		}
		p = q.choose(ours)
		if general, ok := generalOps[r.op]; p == nil && rows == nil && ok {
			r.op = general
			return attempt(f, r)
		}
		if p == nil {
			return nil, false, nil
		}
	}
	q.finish(p)
	for _, l := range p.launches {
		if l.geometry.Grid == 0 {
			return nil, false, errorf(StatusUnsupported,
				"%d rows of %d elements need more than %d thread blocks; pass fewer rows at a time",
				r.m, r.n, maxGrid)
		}
	}
	switch {
	case r.m == 0 || !choosable(r.op):
	case r.Algorithm == Auto:
		p.why = fmt.Sprintf("auto takes %v: %s", p.taken, p.why)
	default:
		p.taken = r.Algorithm
		p.why = fmt.Sprintf("%v: %s", p.taken, p.why)
	}
	return p, true, nil
}

// generalOps names the ops with kernels for rows that those of another op do not take.
var generalOps = map[kernels.Op]kernels.Op{
	kernels.LayerNormForward:  kernels.NormForward,
	kernels.LayerNormBackward: kernels.NormBackward,

	kernels.RMSNormResidualForward:  kernels.NormForward,
	kernels.RMSNormResidualBackward: kernels.NormBackward,
}

// query is a request on a device, with what most regimes ask about it. It does not change.
type query struct {
	request
	facts      *driver.Facts
	vectors    int64 // 16-byte vectors that a row may touch
	unaligned  bool  // some row is not made of whole, aligned vectors, or types differ
	maxCluster int64 // CTAs of the largest cluster that the device can hold
}

func newQuery(f *driver.Facts, r request) *query {
	q := &query{request: r, facts: f, unaligned: r.layout != policy.Aligned, maxCluster: 1}
	if r.BatchInvariant && r.layout == policy.SameOffset {
		q.layout = policy.MixedOffsets // vectors are counted from each row's first element
	}
	q.vectors = r.layout.Vectors(r.n, r.elements())
	for c := len(f.Clusters) - 1; c > 1; c-- {
		if f.Clusters[c] > 0 {
			q.maxCluster = int64(c)
			break
		}
	}
	return q
}

// elements is how many of x a 16-byte vector holds.
func (r *request) elements() int64 { return 16 / r.x.Size() }

// accumulatorBytes is the size of the sums that span threads: Accumulator in cuda/reduce.cuh.
func (r *request) accumulatorBytes() int64 {
	if r.x == kernels.Float32 {
		return 8
	}
	return 4
}

// stateBytes is the size of the largest state of a row: a maximum and a sum (MaxSum in cuda/reduce.cuh), or
// two sums.
func (r *request) stateBytes() int64 {
	switch {
	case r.op == kernels.GeneralCrossEntropyForward, r.op == kernels.GeneralCrossEntropyForwardDX,
		r.op == kernels.SoftCrossEntropyForward:
		return 16 // GeneralSum in cuda/general_cross_entropy.cuh
	case r.op == kernels.TokenStatisticsForward:
		return 16 // TokenSum in cuda/token_statistics.cuh
	case r.op == kernels.AllTokenStatisticsForward:
		return 32 // the same, of all statistics
	case r.op == kernels.NormForward: // and a number of elements: Moments in cuda/aligned_norm.cuh
		return 2*r.accumulatorBytes() + 8
	case r.op == kernels.NormBackward && r.x == kernels.Float32: // and a sum in float: GradientSums there
		return 2*r.accumulatorBytes() + 8
	}
	return 2 * r.accumulatorBytes()
}

// inputs is how many matrices are read.
func (r *request) inputs() int64 {
	switch r.op {
	case kernels.NormForward:
		if r.norm.second > 0 {
			return 2
		}
		return 1
	case kernels.NormBackward:
		if r.norm.third {
			return 3
		}
	}
	return int64(r.op.Inputs())
}

// onlyLosses tells whether an op writes nothing of the rows' size.
func (r *request) onlyLosses() bool {
	return r.op == kernels.CrossEntropyForward || r.op == kernels.GeneralCrossEntropyForward ||
		r.op == kernels.TokenStatisticsForward || r.op == kernels.AllTokenStatisticsForward ||
		r.op == kernels.SoftCrossEntropyForward
}

// lossesAndGradient tells whether an op computes both.
func (r *request) lossesAndGradient() bool {
	return r.op == kernels.CrossEntropyForwardDX || r.op == kernels.GeneralCrossEntropyForwardDX
}

// heads is how many rows the weight of a norm has, where the plan depends on that.
func (r *request) heads() int64 { return max(r.norm.heads, 1) }

// expected is how many rows a choice is made for: with BatchInvariant as for many, whatever M is.
func (r *request) expected() int64 {
	if r.BatchInvariant {
		return 1 << 30
	}
	return r.m
}

// begin is a plan without the kernels that go over the rows.
func (q *query) begin() *plan {
	p := &plan{chunk: wholeRow, splits: 1}
	if q.onePass && q.lossesAndGradient() {
		p.scratch.denominator = p.scratch.take(4)
		q.sumNumbers(p, kernels.Denominator, q.m)
	}
	if q.weights {
		p.scratch.weights = p.scratch.take(4)
		q.sumNumbers(p, kernels.ClassWeights, q.n)
	}
	return p
}

// threads is how many threads a CTA of a kernel has, where so many of them hold a row.
func (q *query) threads(v *kernels.Variant, cluster int64) int64 {
	return v.ThreadsFor(ceil(q.vectors, cluster))
}

// add appends a launch. A grid that is too large is marked by 0 and refused at the end.
func (q *query) add(p *plan, v *kernels.Variant, grid, cluster int64, shared uint32) *kernels.Geometry {
	if grid > maxGrid {
		grid = 0
	}
	threads := int64(v.Threads)
	// finish_launch in cuda/cross_entropy.cuh, with which one CTA also makes the total, is made for whole CTAs.
	if !q.total || grid != 1 {
		threads = q.threads(v, cluster)
	}
	switch v.Shape {
	case kernels.InRegisters, kernels.Staged:
		q.prefetchRows(p, v, v.RowsPerCTA(), grid, cluster)
	case kernels.Elementwise:
		if p.rowsPerCTA > 0 { // a CTA of what rotates heads has no rows
			q.prefetchRows(p, v, int64(p.rowsPerCTA), grid, 1)
		}
	}
	p.launches = append(p.launches, launch{v, kernels.Geometry{
		Grid: uint32(grid), Threads: uint32(threads), Cluster: uint32(cluster), Shared: shared,
		// Every kernel that can come second waits by itself where the architecture lets it start early.
		Dependent: len(p.launches) > 0 && q.facts.Major >= 9,
	}})
	return &p.launches[len(p.launches)-1].geometry
}

// prefetchRows has CTAs prefetch into L2 the rows of a CTA that starts later. Registers and shared memory
// alone do not hold enough loads in flight to saturate memory while rows are also written. Reads alone
// saturate it, and so do long aligned rows of two inputs. The CTAs of the first wave load their rows at
// once, so nobody prefetches those: with loss and gradient of 32768 x 256 bfloat16 that would cost 4 %.
//
// Measured over the plain kernel, without and with, and the same to 1 % from 1 to 4 MiB ahead. H100: loss
// and gradient of 32768 x 512 bfloat16 0.95 and 0.98, softmax of 32768 x 256 float32 0.97 and 1.01, its
// backward of 32768 x 1001 bfloat16 0.85 and 0.95. H200: softmax of 32768 x 8192 bfloat16 0.95 and 1.00,
// but its backward 1.00 and 0.98. The gradient of statistics of 32768 x 4096 bfloat16 takes 134 us with 1 MiB
// and 139 with 3; without 135, of 8192 x 151936 1187, 1189 and 1241 (H200).
func (q *query) prefetchRows(p *plan, v *kernels.Variant, rows, grid, cluster int64) {
	inputs := q.inputs()
	if q.onlyLosses() || q.op.Inputs() > 1 && !q.unaligned && q.vectors > 256 {
		return
	}
	const most = 1<<20 - 2*16 // bytes: the instruction has 16 bits for 16-byte vectors
	vectors := min(q.vectors, p.chunk) * rows
	firstWave := q.resident(v, cluster) / cluster
	if grid/cluster <= firstWave || cluster == 1 && vectors*16 > most || rows > 1 && p.splits > 1 {
		return
	}
	distance := (4 - inputs) << 20 // bytes
	if q.op == kernels.TokenStatisticsBackward {
		distance = 1 << 20
	}
	bytes := q.n * q.x.Size() * inputs * rows
	if p.splits > 1 {
		bytes = vectors * 16 * inputs
	}
	ctas := max(distance/bytes, 1)
	p.prefetch, p.prefetchFrom = int32(ctas*rows), int32(max(firstWave-ctas, 0))
	if v.Shape == kernels.Elementwise {
		p.prefetch = int32(ctas)
	}
}

// resident is how many CTAs of a kernel that is not persistent by nature the device holds at a time, where so
// many of them hold a row.
func (q *query) resident(v *kernels.Variant, cluster int64) int64 {
	threads := q.threads(v, cluster)
	perSM := perSM(v, v.Resident, threads)
	if v.Shape == kernels.Staged {
		perSM = min(perSM, int64(q.facts.SharedPerSM)/(threads*int64(v.Vectors)*16+1024))
	}
	return int64(q.facts.SMs) * perSM
}

// perSM is how many CTAs of some threads an SM has registers for, if it has them for so many whole ones.
func perSM(v *kernels.Variant, whole int, threads int64) int64 {
	const most = 32 // CTAs that an SM holds
	return min(int64(whole*v.Threads)/threads, most)
}

// finish appends what completes sums over rows.
func (q *query) finish(p *plan) {
	switch {
	case q.op == kernels.QKNormRotateBackward && q.dw:
		q.sumHeads(p)
	case q.norm.sums > 0:
		columns := q.n * int64(q.norm.sums)
		if q.m > 0 {
			p.scratch.dwPartial = p.scratch.take(int64(p.partials) * columns * q.accumulatorBytes())
		}
		q.sumColumns(p, kernels.NormGradient, columns*q.heads())
	case q.dw:
		if q.m > 0 {
			p.scratch.dwPartial = p.scratch.take(int64(p.partials) * q.n * q.accumulatorBytes())
		}
		q.sumColumns(p, kernels.WeightGradient, q.n)
	case q.total:
		if last := len(p.launches) - 1; last >= 0 && p.launches[last].geometry.Grid == 1 &&
			p.launches[last].variant.Shape != kernels.Finish {
			p.singleCTATotal = true // its rows' losses stay in shared memory
			return
		}
		p.scratch.rowLosses = p.scratch.take(q.m * 8)
		q.sumNumbers(p, kernels.Total, q.m)
	}
}

// byRow appends what computes a number for each row from a few of each.
func (q *query) byRow(p *plan) {
	v := kernelsOf[kernelKey{op: q.op, shape: kernels.Finish, x: q.x, unaligned: true}][0]
	q.add(p, v, ceil(q.m, int64(v.Threads)), 1, 0)
	p.why = "a thread for each row"
}

// headsPerThread is how many heads a thread takes if `groups` threads share what M counts: those of the tile,
// or fewer while all threads fit on the device at once. Less waits for less.
func (q *query) headsPerThread(v *kernels.Variant, groups func(perThread int64) int64) int64 {
	perThread, all := int64(v.Vectors), q.resident(v, 1)*int64(v.Threads)
	for perThread > 1 && q.m*groups(perThread)*2 <= all {
		perThread /= 2
	}
	return perThread
}

// byHead appends what rotates heads. The request has as M the items of all tokens, which their heads have
// alike, and as N the heads.
func (q *query) byHead(p *plan) {
	v := q.chunkKernel(kernels.Elementwise)
	perThread := q.headsPerThread(v, func(perThread int64) int64 { return ceil(q.n, perThread) })
	p.groups = int32(ceil(q.n, perThread))
	if q.m > 0 {
		q.add(p, v, ceil(q.m*int64(p.groups), int64(v.Threads)), 1, 0)
	}
	p.why = fmt.Sprintf("pairs are independent: a thread for %d heads", perThread)
}

// sumColumns appends what sums the rows of partial dw.
func (q *query) sumColumns(p *plan, op kernels.Op, columns int64) {
	for _, v := range kernelsOf[kernelKey{op: op, shape: kernels.Finish, x: q.x, unaligned: true}] {
		if v.UpTo == 0 || columns <= v.UpTo {
			q.add(p, v, ceil(columns, v.RowsPerCTA()), 1, 0)
			return
		}
	}
}

// sumNumbers appends what sums a number of each row, or class.
func (q *query) sumNumbers(p *plan, op kernels.Op, count int64) {
	key := kernelKey{op: op, shape: kernels.Finish, x: q.x, unaligned: true}
	v, ctas := kernelsOf[key][0], int64(1)
	if c := min(q.maxCluster, 8); count > v.UpTo && c > 1 {
		key.cluster = true
		v, ctas = kernelsOf[key][0], c
	}
	q.add(p, v, ctas, ctas, 0)
}
