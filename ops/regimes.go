package ops

import (
	"fmt"
	"math/bits"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// regimes has a function for each regime of the policy. It makes a plan for a request by a row of the policy,
// or returns nil if the row's kernel cannot serve the request on this device. It changes neither argument.
//
// In this file a variable named row is a row of the policy, never a row of the matrix. Figures such as 0.97
// are shares of the limit: the speed relative to the fastest kernel that only moves the same bytes.
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

// kernelKey is what kernels are looked up by, before their tile.
type kernelKey struct {
	op        kernels.Op
	shape     kernels.Shape
	x         kernels.DType
	unaligned bool
	cluster   bool
}

// kernelsOf lists the kernels of each key, in the order of kernels.Variants.
var kernelsOf = func() map[kernelKey][]*kernels.Variant {
	t := map[kernelKey][]*kernels.Variant{}
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		k := kernelKey{v.Op, v.Shape, v.Family.DType(), v.Unaligned, v.Cluster}
		t[k] = append(t[k], v)
	}
	return t
}()

// kernel returns the kernel with the tile of a policy row, or nil. There can be two, one of which requires
// that all operands have the same offset from a 16-byte boundary. If they have, that one is returned.
func (q *query) kernel(shape kernels.Shape, row *policy.Row, cluster bool) *kernels.Variant {
	var found *kernels.Variant
	for _, v := range kernelsOf[kernelKey{q.op, shape, q.x, q.unaligned, cluster}] {
		switch {
		case v.RowThreads != row.Threads || v.Vectors != row.Vectors || v.RowsPerStep != row.RowsPerStep:
		case v.NoClusters && q.facts.Major >= 9, q.facts.Major == 12 && !v.In("sm_120"):
		case v.SameOffset && q.layout == policy.SameOffset:
			return v
		case !v.SameOffset && found == nil:
			found = v
		}
	}
	return found
}

// chunkKernel returns the kernel of a shape whose CTAs each process a chunk of a row, or nil.
func (q *query) chunkKernel(shape kernels.Shape) *kernels.Variant {
	all := kernelsOf[kernelKey{q.op, shape, q.x, q.unaligned, false}]
	if len(all) == 0 {
		return nil
	}
	return all[0]
}

// registers holds each row in the registers of a CTA, or of a part of one.
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
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d threads", q.vectors,
		min(q.threads(v, 1), int64(v.RowThreads)))
	return p
}

// clusterSize returns how many CTAs of a kernel hold a row of the matrix, or 0 if the policy row or the
// device does not allow that many. One CTA is no cluster: its kernel would fault. The fewest are best, even
// where more would leave fewer threads idle, where the row does not say otherwise.
func (q *query) clusterSize(v *kernels.Variant, row *policy.Row) int64 {
	ctas := max(ceil(q.vectors, v.Capacity()), int64(row.MinCTAs))
	if ctas < 2 || ctas > min(int64(row.MaxCTAs), q.maxCluster) {
		return 0
	}
	return ctas
}

// clusterRegisters holds each row in the registers of a cluster, with as few CTAs as the policy row allows.
// It serves rows that one CTA cannot hold, and rows so few that one CTA for each would leave SMs idle.
func clusterRegisters(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.InRegisters, row, true)
	if v == nil || q.layout == policy.MixedTypes || q.dw {
		return nil
	}
	ctas := q.clusterSize(v, row)
	if ctas == 0 {
		return nil
	}
	p := q.begin()
	q.add(p, v, q.m*ctas, ctas, 0)
	p.taken = Cluster
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d CTAs", q.vectors, ctas)
	return p
}

// sharedMemory copies each row into the shared memory of a CTA, or of a cluster of two or more.
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
	if ctas == 0 || q.vectors > ctas*v.Capacity() || row.OneWave && q.m*ctas > q.resident(v, ctas) {
		return nil
	}
	threads := q.threads(v, ctas)
	p := q.begin()
	p.taken = Medium
	if inCluster {
		p.taken = Extreme
	}
	q.add(p, v, q.m*ctas, ctas, uint32(threads*int64(v.Vectors)*16))
	p.why = fmt.Sprintf("%d CTAs of %d threads copy a row of %d vectors into shared memory",
		ctas, threads, q.vectors)
	return p
}

// persistentCTAs returns the size of a persistent grid: as many CTAs per SM as the policy row says, or as
// many as can be resident at once if it says nothing.
func (q *query) persistentCTAs(v *kernels.Variant, row *policy.Row) int64 {
	if row.Resident > 0 {
		return int64(q.facts.SMs * row.Resident)
	}
	return q.resident(v, 1)
}

// persistentLoop launches a persistent grid in which parts of warps loop over rows. It serves more rows than
// the grid processes at a time, or where the policy's row says one wave, no more than that.
func persistentLoop(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Loop, row, false)
	if v == nil || q.vectors > v.Capacity() {
		return nil
	}
	resident := q.persistentCTAs(v, row)
	if once := ceil(q.expected(), v.RowsPerCTA()) <= resident; once != row.OneWave {
		return nil
	}
	p := q.begin()
	q.add(p, v, min(resident, ceil(q.m, v.RowsPerCTA())), 1, 0)
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors while they load the next", v.RowThreads, q.vectors)
	return p
}

// persistentLanes launches a persistent grid in which parts of warps loop over rows. A thread works on the
// same columns of each row, and keeps their dw in registers.
func persistentLanes(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Lanes, row, false)
	if v == nil || !q.dw || q.vectors > v.Capacity() || q.layout > policy.SameOffset {
		return nil
	}
	grid := min(q.persistentCTAs(v, row), ceil(q.m, v.RowsPerCTA()))
	if q.unaligned { // a multiple of this many CTAs, so that all rows of a CTA have the same offset
		grid = max(grid/q.elements(), 1) * q.elements()
	}
	p := q.begin()
	p.partials = int32(grid)
	q.add(p, v, grid, 1, uint32(v.Shared))
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors and its part of dw", v.RowThreads, q.vectors)
	return p
}

// persistentRing launches a persistent grid in which CTAs or clusters loop over rows. Shared memory is a ring
// buffer into which the next rows are copied. The weights and dw of a thread's columns stay in registers.
func persistentRing(q *query, row *policy.Row) *plan {
	cluster := max(1, int64(row.MaxCTAs))
	v := q.kernel(kernels.Ring, row, cluster > 1)
	switch {
	case v == nil, !q.dw && !isNormBackward(q.op), q.vectors > cluster*v.Capacity():
		return nil
	case q.layout == policy.MixedTypes, q.unaligned && q.BatchInvariant:
		return nil
	case q.facts.Major < 9, cluster > 1 && q.facts.Clusters[cluster] == 0:
		return nil
	case isNormBackward(q.op) && !q.norm.bulk:
		return nil
	case q.op == kernels.NormBackward && v.RowsPerCTA() > 1 && !q.norm.compact && q.heads() == 1:
		return nil
	}
	// Bytes of a CTA's part of a row, or of its rows, for all inputs.
	threads := q.threads(v, cluster)
	vectors := threads * int64(v.Vectors)
	stage := vectors * 16 * q.inputs()
	switch {
	case v.Unaligned:
		stage += 16 * q.inputs()
	case q.op == kernels.NormBackward: // the second input may have another type
		stage += vectors * q.elements() * (int64(q.norm.second) - q.x.Size())
	}
	// Some devices have less shared memory than those the policy was measured on. 4 KiB are left for static
	// shared memory.
	stages := min(int64(row.Stages), (int64(q.facts.SharedPerBlock)-4<<10)/stage)
	if stages < 2 {
		return nil
	}
	// No more clusters than can be resident at once: a second wave would double the time. Each CTA also needs
	// static shared memory, and 1 KiB is reserved for it.
	resident := max(1, min(int64(row.Resident), int64(q.facts.SharedPerSM)/(stages*stage+2<<10)))
	// Each cluster writes a row of partial dw. So for few rows of the matrix fewer clusters are faster. H100,
	// 4099 x 1000 bfloat16: 0.65 with five CTAs per SM, 0.69 with three.
	resident = min(resident, max(3, q.m/v.RowsPerCTA()/(8*int64(q.facts.SMs))))
	clusters := int64(q.facts.SMs) * resident
	if cluster > 1 {
		clusters = int64(q.facts.Clusters[cluster]) * resident
	}
	groups, heads := ceil(q.m/q.heads(), v.RowsPerCTA()), q.heads()
	clusters = min(max(clusters/heads, 1), groups) * heads // the rows of each are of one head
	p := q.begin()
	p.stages = int32(min(stages, max(2, ceil(groups, clusters/heads))))
	p.partials = int32(clusters)
	if q.unaligned { // one for each run of rows with the same offset: partition_rows in cuda/ring.cuh
		p.partials += int32(q.elements() - 1)
	}
	p.taken = Medium
	if cluster > 1 {
		p.taken = Extreme
	}
	q.add(p, v, clusters*cluster, cluster, uint32(int64(p.stages)*stage))
	p.why = fmt.Sprintf("%d CTAs of %d threads keep the weights and dw of their columns; %d rows in flight",
		cluster, threads, p.stages)
	return p
}

// isNormBackward tells whether dw and db may be wanted.
func isNormBackward(op kernels.Op) bool {
	return op == kernels.NormBackward || generalOps[op] == kernels.NormBackward
}

// powerOfTwo returns the smallest power of two that is at least n.
func powerOfTwo(n int64) int64 { return 1 << bits.Len64(uint64(max(n, 1)-1)) }

// gridCooperative divides each row among one CTA on each SM. The CTAs exchange sums through global memory,
// which takes several us. The ring buffer hides that latency while some 64 KiB of it are being loaded.
//
// H100, with the regime that was used before in parentheses: float32, N = 262144, RMSNorm backward 0.97
// (0.58), softmax backward 0.97 (0.90); softmax forward, N = 2^20, 0.95 (0.84). RMSNorm backward in bfloat16:
// 0.95 at N = 262144 (0.87 with one row at a time instead of two), 0.92 at 151936.
func gridCooperative(q *query, row *policy.Row) *plan {
	const (
		maxDepth = kernels.GridSteps/2 - 1
		static   = 12 << 10 // bytes of static shared memory
		inFlight = 64 << 10 // bytes
	)
	ctas := int64(q.facts.SMs)
	v := q.kernel(kernels.GridCooperative, row, false)
	switch {
	case v == nil, q.layout == policy.MixedTypes, q.facts.Major < 9:
		return nil
	case q.op == kernels.RMSNormBackward && !q.dw:
		return nil
	case q.vectors <= 16*powerOfTwo(ctas):
		return nil
	case v.Capacity()*(powerOfTwo(ctas+1)/2) < q.vectors: // the longest row is a power of two of vectors
		return nil
	}
	stage := int64(q.op.Inputs()*v.RowsPerStep) * ceil(q.vectors, ctas) * 16
	stages := min((int64(q.facts.SharedPerBlock)-static)/stage, kernels.GridStages)
	if row.Stages > 0 {
		stages = min(stages, int64(row.Stages))
	}
	if stages < int64(v.MinStages) {
		return nil
	}
	p := q.begin()
	p.splits, p.stages = int32(ctas)*int32(v.RowsPerStep), int32(stages)
	if q.dw {
		p.partials = int32(v.ComputeGroups)
	}
	p.depth = int32(max(1, min(stages-max(2, inFlight/stage), maxDepth)))
	q.clear(p, ctas*kernels.GridSteps*int64(v.RowsPerStep))
	g := q.add(p, v, ctas, 1, uint32(stages*stage))
	g.Cooperative, g.Dependent = true, false
	p.taken = Extreme
	p.why = fmt.Sprintf("%d persistent CTAs share each row; %d rows in flight",
		ctas, stages*int64(v.RowsPerStep))
	return p
}

// gridSharedMemory keeps as much of a few long rows as the shared memory of all SMs holds, and reads only the
// rest a second time. Time relative to a copy of x in bfloat16 on an H100, of two passes and of this regime:
//
//	shape      softmax        RMSNorm
//	4 x 2^20   1.37 and 1.40  1.40 and 1.37
//	4 x 2^22   1.37 and 1.19  1.55 and 1.35
//	1 x 2^25   1.53 and 1.29  1.94 and 1.78
//	16 x 2^23  1.49 and 1.55
func gridSharedMemory(q *query, row *policy.Row) *plan {
	const (
		static      = 768       // bytes of static shared memory of each CTA
		reserved    = 1024      // bytes of shared memory that CUDA reserves for each CTA
		minPerSM    = 192 << 10 // bytes of shared memory
		granularity = 8         // vectors: 128 bytes, a cache line
	)
	v := q.kernel(kernels.GridSharedMemory, row, false)
	switch {
	case v == nil, q.layout == policy.MixedTypes, q.BatchInvariant:
		return nil
	case q.facts.Major < 9, q.facts.SharedPerSM < minPerSM:
		return nil
	}
	perSM := max(1, int64(row.Resident))
	parts := int64(q.facts.SMs) * perSM / q.m
	if parts < 2 {
		return nil
	}
	p := q.begin()
	p.chunk = ceil(ceil(q.vectors, parts), granularity) * granularity
	if p.chunk > maxChunk {
		return nil
	}
	p.splits = int32(ceil(q.vectors, p.chunk))
	inputs := int64(q.op.Inputs())
	tile := inputs * v.Capacity() * 16
	room := min(int64(q.facts.SharedPerSM)/perSM-reserved, int64(q.facts.SharedPerBlock)) - static
	p.depth = int32(min(ceil(p.chunk, v.Capacity()), room/tile, kernels.GridTiles))
	q.clear(p, q.m*int64(p.splits))
	q.add(p, v, q.m*int64(p.splits), 1, uint32(int64(p.depth)*tile))
	p.taken = SplitK
	each := inputs * p.chunk * 16
	p.why = fmt.Sprintf("%d CTAs per row each keep %d of %d KiB in shared memory", p.splits,
		min(int64(p.depth)*tile, each)>>10, each>>10)
	return p
}

// clear appends the kernel that clears the memory through which CTAs exchange partial sums of rows.
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

// split chooses into how many chunks each row is divided, one CTA for each. There are chunks enough for perSM
// CTAs on each SM, unless the requested algorithm or BatchInvariant decides the number.
func (q *query) split(p *plan, perSM int) {
	const minChunk = 4 * kernels.ChunkThreads // vectors; less work is not worth a CTA
	want := max(1, ceil(int64(q.facts.SMs*max(1, perSM)), q.m))
	if q.BatchInvariant {
		// The number must not depend on M, and one row alone should fill the device. At most 1024 states can
		// be merged at once.
		want = min(ceil(q.vectors, 4*minChunk), 1024)
	}
	switch q.Algorithm {
	case Block:
		want = 1
	case SplitK:
		want = max(want, 2)
	}
	p.chunk = min(max(ceil(ceil(q.vectors, want), minChunk)*minChunk, minChunk), maxChunk)
	p.splits = int32(ceil(q.vectors, p.chunk))
	p.taken = Arbitrary
	if p.splits > 1 {
		p.taken = SplitK
	}
}

// splitAsRequested reports whether rows are divided as the requested algorithm promises.
func (q *query) splitAsRequested(p *plan) bool {
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
	reduce, apply := q.chunkKernel(kernels.Partial), q.chunkKernel(kernels.Apply)
	if q.dw || reduce == nil || apply == nil || q.onlyLosses() {
		return nil
	}
	p := q.begin()
	q.split(p, row.Resident)
	if !q.splitAsRequested(p) {
		return nil
	}
	grid := q.m * int64(p.splits)
	p.scratch.partial = p.scratch.take(grid * q.stateBytes())
	if q.lossesAndGradient() {
		p.scratch.logits = p.scratch.take(q.m * 4)
	}
	q.add(p, reduce, grid, 1, 0)
	q.add(p, apply, grid, 1, 0)
	why := "the row is longer than a cluster holds"
	switch {
	case q.Algorithm != Auto:
		why = fmt.Sprintf("%d CTAs per row", p.splits)
	case q.layout == policy.MixedTypes:
		why = "the second input has another type than x"
	case q.layout != policy.Aligned && (q.op == kernels.NormForward || q.op == kernels.NormBackward):
		why = "an operand is not made of whole, aligned 16-byte vectors"
	case row.Below.N > 0:
		why = "a few rows this long fill the device only when split"
	}
	p.why = why + ": two passes"
	return p
}

// byColumns serves RMSNorm backward where no persistent kernel does. The first pass computes the sums of
// rows. In the second, each CTA computes dx and dw of a tile of columns.
func byColumns(q *query, row *policy.Row) *plan {
	if !q.dw && q.op != kernels.NormBackward {
		return nil
	}
	p := q.begin()
	q.split(p, row.Resident)
	if !q.splitAsRequested(p) {
		return nil
	}
	p.scratch.partial = p.scratch.take(q.m * int64(p.splits) * q.stateBytes())
	q.add(p, q.chunkKernel(kernels.Partial), q.m*int64(p.splits), 1, 0)
	columns := kernelsOf[kernelKey{q.op, kernels.Columns, q.x, q.unaligned || q.op == kernels.NormBackward,
		false}][0]
	tiles := ceil(q.n, columns.Capacity()*q.elements())
	blocks := min(max(int64(q.facts.SMs)*8/(tiles*q.heads()), 1), q.m/q.heads()) * q.heads()
	p.partials = int32(blocks)
	q.add(p, columns, tiles*blocks, 1, 0)
	p.why = "row sums first, then dx and dw by columns: two passes"
	return p
}

// stream computes statistics of rows in one pass over them, and writes no output of the rows' size.
func stream(q *query, row *policy.Row) *plan {
	v := q.kernel(kernels.Partial, row, false)
	if v == nil || !q.onlyLosses() {
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
	q.add(p, kernelsOf[kernelKey{op: q.op, shape: kernels.Apply, x: q.x}][0], q.m, 1, 0) // it reads no rows
	p.why = fmt.Sprintf("%d rows would leave SMs idle: %d CTAs share each", q.m, p.splits)
	return p
}

// idleWaves is how many times as many CTAs as the device holds are launched where forward has usually
// computed dx. They exit at once if it has. If not, they take turns, and do not prefetch: what is mapped a
// little later is already being loaded.
//
// Measured on an H200 with 8192 x 128256 bfloat16, us if dx is there and if it is not: 1 wave 4 and 1219,
// 2 waves 5 and 1202, 8 waves 7 and 1155, 2 with prefetching 5 and 1530, a CTA for each chunk 83 and 1050,
// and one CTA for each row 9 and 1391.
const idleWaves = 8

// manyVectors of an SM are several for each thread in each of several waves. From there on a CTA of the
// gradient of statistics takes longer chunks: its threads wait for seven scalars of the row at first. Rows of
// fewer than 512 vectors and unaligned ones were not measured. Few rows with BatchInvariant have the chunks
// of many: backward of 1 x 65536 bfloat16 takes 4.8 us in place of 3.1 (H200).
//
// Measured on an H200 with 8192 x 151936 and 1 MiB prefetched, by vectors of a thread, us: bfloat16 4 1250,
// 6 1215, 8 1187, 12 1226, 16 1380, below a cap 1338, 1266, 1211, 1232, 1389; float32 4 2358, 6 2336, 8 2380,
// 12 2583, below a cap 2666, 2477, 2350, 2596.
const manyVectors = 1 << 15

// elementwise computes each element of the output by itself. The rows' statistics are an input. Any number of
// threads can share a row, or a chunk of a long one.
//
// Measured on an H200 with 24 lengths, three numbers of rows and all layouts: bench/TRIED.md, "Fewer
// kernels".
func elementwise(q *query, _ *policy.Row) *plan {
	v := q.chunkKernel(kernels.Elementwise)
	if v == nil {
		return nil
	}
	p := q.begin()
	// Few vectors for each thread while all threads fit on the device at once: less waits for less. Two of each
	// of several inputs are as many loads in flight as four of one: GLU's backward of 2048 x 14336 bfloat16 is
	// at 0.99 of the limit with 2 and at 0.98 with 4 (H100).
	perThread := int64(4)
	if q.inputs() > 1 {
		perThread = 2
	}
	switch perSM := q.expected() * q.vectors / int64(q.facts.SMs); {
	case perSM <= 384:
		perThread = 1
	case perSM <= 1024:
		perThread = 2
	case perSM > manyVectors && q.vectors >= 512 && q.op == kernels.TokenStatisticsBackward && !q.unaligned:
		perThread = 8
		if q.x == kernels.Float32 {
			perThread = 6
		}
	}
	most := perThread * kernels.ChunkThreads
	if q.unaligned && perThread == 4 {
		most += most / 2
	}
	p.chunk = ceil(q.vectors, ceil(q.vectors, most))
	p.splits = int32(ceil(q.vectors, p.chunk))
	threads := powerOfTwo(ceil(p.chunk, perThread))
	if perThread >= 4 && p.chunk > 4 { // less than 64 adjacent bytes are slow
		threads = max(threads, 4)
	}
	if q.unaligned && p.chunk > 64 && threads*perThread > p.chunk { // more vectors for each, but nobody is idle
		threads /= 2
	}
	threads = min(threads, kernels.ChunkThreads)
	p.rowThreads, p.rowsPerCTA = int32(threads), int32(kernels.ChunkThreads/threads)
	grid := &q.add(p, v, ceil(q.m, int64(p.rowsPerCTA))*int64(p.splits), 1, 0).Grid
	p.parts = int32(*grid)
	if few := uint32(idleWaves * q.resident(v, 1)); q.onePass && *grid > few {
		*grid, p.prefetch = few, 0
	}
	p.why = fmt.Sprintf("nothing is reduced: %d threads for each chunk of %d vectors", p.rowThreads, p.chunk)
	return p
}
