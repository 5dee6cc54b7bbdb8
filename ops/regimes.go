package ops

import (
	"fmt"
	"math/bits"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// regimes make a plan by a row of the policy, or nil where the row's kernel cannot serve the request on
// this device. They change neither.
var regimes = [...]func(*query, *policy.Row) *plan{
	policy.Registers:           registers,
	policy.ClusterRegisters:    clusterRegisters,
	policy.SharedMemory:        sharedMemory,
	policy.ClusterSharedMemory: sharedMemory,
	policy.PersistentLoop:      persistentLoop,
	policy.PersistentLanes:     persistentLanes,
	policy.PersistentRing:      persistentRing,
	policy.GridCooperative:     gridCooperative,
	policy.GridSharedMemory:    gridSharedMemory,
	policy.Stream:              stream,
	policy.TwoPasses:           twoPasses,
	policy.ByColumns:           byColumns,
	policy.Elementwise:         elementwise,
}

// kernelKey finds kernels by what they do.
type kernelKey struct {
	op      kernels.Op
	shape   kernels.Shape
	x       kernels.DType
	general bool
	cluster bool
}

// kernelsOf has them in the table's order.
var kernelsOf = func() map[kernelKey][]*kernels.Variant {
	t := map[kernelKey][]*kernels.Variant{}
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		k := kernelKey{v.Op, v.Shape, v.Family.DType(), v.General, v.Cluster}
		t[k] = append(t[k], v)
	}
	return t
}()

func kernelOf(k kernelKey, threads, each int64) *kernels.Variant {
	for _, v := range kernelsOf[k] {
		if int64(v.RowThreads) == threads && int64(v.Vectors) == each {
			return v
		}
	}
	return nil
}

// kernel returns the kernel with a row's tile, or nil. Of two with the same tile, the one that wants all
// operands at the same offset is taken where they are.
func (q *query) kernel(shape kernels.Shape, row *policy.Row, clusters bool) *kernels.Variant {
	var found *kernels.Variant
	for _, v := range kernelsOf[kernelKey{q.op, shape, q.x, q.unaligned, clusters}] {
		switch {
		case v.RowThreads != row.Threads || v.Vectors != row.Vectors || v.Together != row.Together:
		case v.Alike && q.layout == policy.SameOffset:
			return v
		case !v.Alike && found == nil:
			found = v
		}
	}
	return found
}

// chunkKernel is the kernel that reduces or maps chunks of rows.
func (q *query) chunkKernel(shape kernels.Shape) *kernels.Variant {
	return kernelsOf[kernelKey{q.op, shape, q.x, q.unaligned, false}][0]
}

// registers gives each row to a CTA, or to a part of one, that holds it in registers.
func registers(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.InRegisters, row, false)
	if v == nil || q.layout == policy.MixedTypes || q.dw || q.vectors > v.Capacity() {
		return nil
	}
	p := q.begin()
	q.add(p, v, ceil(q.m, v.RowsPerCTA()), 1, 0)
	p.taken = Register
	if v.RowThreads <= lanesPerWarp {
		p.taken = Warp
	}
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d threads", q.vectors, v.RowThreads)
	return p
}

// clusterSize is how many CTAs of a kernel take a row, within the policy's limits; 0 where they cannot.
func (q *query) clusterSize(v *kernels.Variant, row *policy.Row) int64 {
	ctas := max(ceil(q.vectors, v.Capacity()), int64(row.MinCTAs))
	if ctas > min(int64(row.MaxCTAs), q.maxCluster) {
		return 0
	}
	return ctas
}

// clusterRegisters gives each row to as few CTAs of a cluster as hold it: where one CTA cannot, or where
// rows are so few that one CTA each would leave SMs idle.
func clusterRegisters(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.InRegisters, row, true)
	if v == nil || q.layout == policy.MixedTypes || q.dw {
		return nil
	}
	ctas := q.clusterSize(v, row)
	full := ceil(q.vectors, v.Capacity()) * v.Capacity()
	if ctas == 0 || 100*q.vectors <= row.MinFill*full {
		return nil
	}
	p := q.begin()
	q.add(p, v, q.m*ctas, ctas, 0)
	p.taken = Cluster
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d CTAs", q.vectors, ctas)
	return p
}

// sharedMemory copies each row into the shared memory of a CTA, or of a cluster of at least two.
func sharedMemory(q *query, row *policy.Row) *plan {
	inCluster := row.Regime == policy.ClusterSharedMemory
	v := q.kernel(kernels.Staged, row, inCluster)
	if v == nil || v.Capacity()*16+4<<10 > int64(q.facts.SharedPerBlock) {
		return nil
	}
	ctas := int64(1)
	if inCluster {
		ctas = q.clusterSize(v, row)
	}
	if ctas == 0 || q.vectors > ctas*v.Capacity() || row.OneWave && q.m*ctas > q.resident(v) {
		return nil
	}
	p := q.begin()
	p.taken = Medium
	if inCluster {
		p.taken = Extreme
	}
	q.add(p, v, q.m*ctas, ctas, uint32(v.Capacity()*16))
	p.why = fmt.Sprintf("%d x %d threads copy a row of %d vectors into shared memory",
		ctas, v.Threads, q.vectors)
	return p
}

// persistent is how many CTAs go from row to row: as many as the policy's row names, or else all that are
// resident.
func (q *query) persistent(v *kernels.Variant, row *policy.Row) int64 {
	if row.Resident > 0 {
		return int64(q.facts.SMs * row.Resident)
	}
	return q.resident(v)
}

// persistentLoop lets parts of warps go from row to row, where there are more rows than the device holds at
// a time.
func persistentLoop(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Loop, row, false)
	if v == nil || q.vectors > v.Capacity() {
		return nil
	}
	resident := q.persistent(v, row)
	if ceil(q.expected(), v.RowsPerCTA()) <= resident {
		return nil
	}
	p := q.begin()
	q.add(p, v, min(resident, ceil(q.m, v.RowsPerCTA())), 1, 0)
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors while they load the next", v.RowThreads, q.vectors)
	return p
}

// persistentLanes gives rows to persistent parts of warps, whose threads keep fixed columns' part of dw in
// registers.
func persistentLanes(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Lanes, row, false)
	if v == nil || !q.dw || q.vectors > v.Capacity() || q.layout > policy.SameOffset {
		return nil
	}
	grid := min(q.persistent(v, row), ceil(q.m, v.RowsPerCTA()))
	if q.unaligned { // so that a CTA's rows all have the same offset
		grid = max(grid/q.elements(), 1) * q.elements()
	}
	p := q.begin()
	p.partials = int32(grid)
	q.add(p, v, grid, 1, uint32(v.Shared))
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors and its part of dw", v.RowThreads, q.vectors)
	return p
}

// persistentRing gives rows to persistent CTAs or clusters. The next rows come into a ring in shared
// memory; the weights of a CTA's columns and their dw stay in registers.
func persistentRing(q *query, row *policy.Row) *plan {
	cluster := max(1, int64(row.MaxCTAs))
	v := q.kernel(kernels.Ring, row, cluster > 1)
	switch {
	case v == nil, !q.dw, q.vectors > cluster*v.Capacity():
		return nil
	case q.layout == policy.MixedTypes, q.unaligned && q.BatchInvariant:
		return nil
	case q.facts.Major < 9, cluster > 1 && q.facts.Clusters[cluster] == 0:
		return nil
	}
	stage := v.Capacity() * 16 * int64(q.op.Inputs()) // bytes of a row's slices
	if v.General {
		stage += 16 * int64(q.op.Inputs())
	}
	// Some devices have less shared memory than the ring was measured with. The kernel itself needs a little.
	stages := min(int64(row.Stages), (int64(q.facts.SharedPerBlock)-4<<10)/stage)
	if stages < 2 {
		return nil
	}
	// No more clusters than are resident at once: one that waits for another to end doubles the time. A CTA
	// has some shared memory of its own and 1 KiB that is reserved for it.
	resident := max(1, min(int64(row.Resident), int64(q.facts.SharedPerSM)/(stages*stage+2<<10)))
	// Each leaves a row of partial dw. Measured on an H100, 4099 x 1000 bfloat16: 0.65 with five on an SM,
	// 0.69 with three.
	resident = min(resident, max(3, q.m/(8*int64(q.facts.SMs))))
	clusters := int64(q.facts.SMs) * resident
	if cluster > 1 {
		clusters = int64(q.facts.Clusters[cluster]) * resident
	}
	clusters = min(clusters, q.m)
	p := q.begin()
	p.stages = int32(min(stages, max(2, ceil(q.m, clusters))))
	p.partials = int32(clusters)
	if q.unaligned { // pieces whose rows have the same offset get one each: partition_rows in cuda/rmsnorm.cuh
		p.partials += int32(q.elements() - 1)
	}
	p.taken = Medium
	if cluster > 1 {
		p.taken = Extreme
	}
	q.add(p, v, clusters*cluster, cluster, uint32(int64(p.stages)*stage))
	p.why = fmt.Sprintf("%d x %d threads keep the weights of their columns and dw; %d rows in flight",
		cluster, v.Threads, p.stages)
	return p
}

// powerOfTwo returns the smallest power of two that is at least n.
func powerOfTwo(n int64) int64 { return 1 << bits.Len64(uint64(max(n, 1)-1)) }

// gridCooperative spreads each row over a CTA on each SM. Measured on an H100, over the plain kernel: N =
// 262144 float32, RMSNorm backward 0.97 (two passes 0.58), softmax backward 0.97 (0.90); RMSNorm backward
// bfloat16 262144 0.95 (one row after the other 0.87), 151936 0.92; softmax forward 2^20 0.95 (0.84). CTAs
// exchange sums through global memory, which takes several us. The ring hides that if some 64 KiB of it are
// in flight.
func gridCooperative(q *query, row *policy.Row) *plan {
	const (
		mostDepth = kernels.TeamSteps/2 - 1
		static    = 12 << 10 // of shared memory
		inFlight  = 64 << 10
	)
	ctas := int64(q.facts.SMs)
	v := q.kernel(kernels.Team, row, false)
	switch {
	case v == nil, q.layout == policy.MixedTypes, q.facts.Major < 9:
		return nil
	case q.op == kernels.RMSNormBackward && !q.dw:
		return nil
	case q.vectors <= 16*powerOfTwo(ctas):
		return nil
	case v.Capacity()*(powerOfTwo(ctas+1)/2) < q.vectors: // so that the longest row is a power of two
		return nil
	case q.facts.Major == 12 && !v.In("sm_120"):
		return nil
	}
	stage := int64(q.op.Inputs()*v.Together) * ceil(q.vectors, ctas) * 16
	stages := min((int64(q.facts.SharedPerBlock)-static)/stage, kernels.TeamStages)
	if row.Stages > 0 {
		stages = min(stages, int64(row.Stages))
	}
	if stages < 4 || v.Together > 1 && stages < 12 {
		return nil
	}
	p := q.begin()
	p.splits, p.stages = int32(ctas)*int32(v.Together), int32(stages)
	if q.dw {
		p.partials = int32(v.Groups)
	}
	p.depth = int32(max(1, min(stages-max(2, inFlight/stage), mostDepth)))
	q.clear(p, ctas*kernels.TeamSteps*int64(v.Together))
	g := q.add(p, v, ctas, 1, uint32(stages*stage))
	g.Cooperative, g.Dependent = true, false
	p.taken = Extreme
	p.why = fmt.Sprintf("%d persistent CTAs share each row; %d rows in flight",
		ctas, stages*int64(v.Together))
	return p
}

// gridSharedMemory reads a few long rows once, as far as the shared memory of all SMs holds them, and the
// rest twice. Measured on an H100, two passes and this, times a copy: bfloat16 softmax 4 x 2^22 1.37 and
// 1.19, 1 x 2^25 1.53 and 1.29, RMSNorm 1.55 and 1.35, 1.94 and 1.78; 4 x 2^20 1.37 and 1.40, 1.40 and
// 1.37; softmax 16 x 2^23 1.49 and 1.55.
func gridSharedMemory(q *query, row *policy.Row) *plan {
	const (
		static   = 768  // bytes of shared memory of each CTA, and
		reserved = 1024 // what the system takes
		least    = 192 << 10
		whole    = 8 // vectors: 128 bytes, which memory moves at once
	)
	v := q.kernel(kernels.Held, row, false)
	switch {
	case v == nil, q.layout == policy.MixedTypes, q.BatchInvariant:
		return nil
	case q.facts.Major < 9, q.facts.SharedPerSM < least:
		return nil
	}
	perSM := max(1, int64(row.Resident))
	parts := int64(q.facts.SMs) * perSM / q.m
	if parts < 2 {
		return nil
	}
	p := q.begin()
	p.chunk = ceil(ceil(q.vectors, parts), whole) * whole
	if p.chunk > maxChunk {
		return nil
	}
	p.splits = int32(ceil(q.vectors, p.chunk))
	inputs := int64(q.op.Inputs())
	tile := inputs * v.Capacity() * 16
	room := min(int64(q.facts.SharedPerSM)/perSM-reserved, int64(q.facts.SharedPerBlock)) - static
	p.depth = int32(min(ceil(p.chunk, v.Capacity()), room/tile, kernels.HeldTiles))
	q.clear(p, q.m*int64(p.splits))
	q.add(p, v, q.m*int64(p.splits), 1, uint32(int64(p.depth)*tile))
	p.taken = SplitK
	each := inputs * p.chunk * 16
	p.why = fmt.Sprintf("%d CTAs to a row keep %d of %d KiB each in shared memory", p.splits,
		min(int64(p.depth)*tile, each)>>10, each>>10)
	return p
}

// clear appends what clears the memory through which CTAs exchange the sums of their parts of rows.
func (q *query) clear(p *plan, sums int64) {
	op := kernels.RMSNormClear
	if q.op == kernels.SoftmaxForward || q.op == kernels.SoftmaxBackward {
		op = kernels.SoftmaxClear
	}
	v := kernelsOf[kernelKey{op, kernels.Finish, q.x, true, false}][0]
	grid := ceil(sums, int64(v.Threads))
	p.scratch.partial = p.scratch.take(grid * int64(v.Threads) * 16)
	q.add(p, v, grid, 1, 0)
}

// split divides rows so that the device is filled with so many CTAs of ChunkThreads per SM, or as was asked
// for.
func (q *query) split(p *plan, perSM int) {
	const least = 4 * kernels.ChunkThreads // vectors that are worth a CTA
	want := max(1, ceil(int64(q.facts.SMs*max(1, perSM)), q.m))
	if q.BatchInvariant { // one row alone should fill the device, and 1024 states are merged at once
		want = min(ceil(q.vectors, 4*least), 1024)
	}
	switch q.Algorithm {
	case Block:
		want = 1
	case SplitK:
		want = max(want, 2)
	}
	p.chunk = min(max(ceil(ceil(q.vectors, want), least)*least, least), maxChunk)
	p.splits = int32(ceil(q.vectors, p.chunk))
	p.taken = Arbitrary
	if p.splits > 1 {
		p.taken = SplitK
	}
}

// asked tells whether rows are divided as the algorithm promises.
func (q *query) asked(p *plan) bool {
	switch q.Algorithm {
	case Block:
		return p.splits == 1
	case SplitK:
		return p.splits > 1
	}
	return true
}

// twoPasses reads rows twice: once to reduce them, once to map them.
func twoPasses(q *query, row *policy.Row) *plan {
	if q.dw || q.op == kernels.CrossEntropyForward || q.op == kernels.CrossEntropyBackward {
		return nil
	}
	p := q.begin()
	q.split(p, row.Resident)
	if !q.asked(p) {
		return nil
	}
	grid := q.m * int64(p.splits)
	p.scratch.partial = p.scratch.take(grid * q.stateBytes())
	if q.op == kernels.CrossEntropyForwardDX {
		p.scratch.logits = p.scratch.take(q.m * 4)
	}
	q.add(p, q.chunkKernel(kernels.Partial), grid, 1, 0)
	q.add(p, q.chunkKernel(kernels.Apply), grid, 1, 0)
	why := "the row is longer than a cluster holds"
	switch {
	case q.Algorithm != Auto:
		why = fmt.Sprintf("%d CTAs to a row", p.splits)
	case q.layout == policy.MixedTypes:
		why = "the second input has another type than x"
	case row.Below.N > 0:
		why = "a few rows this long fill the device only when split"
	}
	p.why = why + ": two passes"
	return p
}

// byColumns serves RMSNorm backward where no persistent kernel does: row sums first, then dx and
// dw by columns.
func byColumns(q *query, row *policy.Row) *plan {
	if !q.dw {
		return nil
	}
	p := q.begin()
	q.split(p, row.Resident)
	if !q.asked(p) {
		return nil
	}
	p.scratch.partial = p.scratch.take(q.m * int64(p.splits) * q.stateBytes())
	q.add(p, q.chunkKernel(kernels.Partial), q.m*int64(p.splits), 1, 0)
	tiles := ceil(q.n, kernels.ChunkThreads*q.elements())
	blocks := min(max(int64(q.facts.SMs)*8/tiles, 1), q.m)
	p.partials = int32(blocks)
	q.add(p, q.chunkKernel(kernels.Columns), tiles*blocks, 1, 0)
	p.why = "row sums first, then dx and dw by columns: two passes"
	return p
}

// stream reads rows once and keeps nothing of them.
func stream(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Partial, row, false)
	if v == nil || q.op != kernels.CrossEntropyForward {
		return nil
	}
	p := q.begin()
	q.split(p, row.Resident)
	if p.splits == 1 {
		q.add(p, v, q.m, 1, 0)
		p.why = fmt.Sprintf("a row of %d vectors streams through a CTA", q.vectors)
		return p
	}
	p.scratch.partial = p.scratch.take(q.m * int64(p.splits) * q.stateBytes())
	p.scratch.logits = p.scratch.take(q.m * 4)
	q.add(p, q.chunkKernel(kernels.Partial), q.m*int64(p.splits), 1, 0)
	q.add(p, q.chunkKernel(kernels.Apply), q.m, 1, 0)
	p.why = fmt.Sprintf("%d rows would leave SMs idle: %d CTAs share each", q.m, p.splits)
	return p
}

// elementwise maps rows whose statistics are known.
func elementwise(q *query, _ *policy.Row) *plan {
	if q.op != kernels.CrossEntropyBackward {
		return nil
	}
	p := q.begin()
	p.chunk = 4 * kernels.ChunkThreads
	if q.onePass {
		p.chunk = min(q.vectors, maxChunk) // few CTAs: most often they find the work done
	}
	p.splits = int32(ceil(q.vectors, p.chunk))
	q.add(p, q.chunkKernel(kernels.Apply), q.m*int64(p.splits), 1, 0)
	p.why = "no row needs another element: chunks of 1024 vectors"
	return p
}
