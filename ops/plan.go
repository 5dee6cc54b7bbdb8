package ops

import (
	"fmt"
	"math/bits"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

// request is all that a plan follows from, beside the device.
type request struct {
	Choice
	op      kernels.Op
	x       kernels.DType
	general bool // some row is not made of aligned 16-byte vectors, or types differ
	mixed   bool // the second input has not x's type
	alike   bool // general: all operands' rows lie alike in their 16-byte vectors
	dw      bool // RMSNorm backward: dw is wanted
	total   bool // cross-entropy: a total or the denominator is wanted
	onePass bool // cross-entropy: forward's gradient is that of the mean; backward may find its work done
	m, n    int64
}

// launch is one kernel of a plan.
type launch struct {
	variant  *kernels.Variant
	geometry kernels.Geometry
}

// plan says which kernels serve a request, in order, and what they need. It is immutable.
type plan struct {
	launches  []launch
	chunk     int64 // vectors of a row per CTA
	splits    int32 // CTAs per row where rows are split
	stages    int32 // rows in the ring of a CTA, or steps in a team's
	lag       int32 // of a team's, those that are summed before one is mapped; of held rows, tiles in shared memory
	ahead     int32 // rows from a CTA's to those that it has L2 fetch for a later one; 0 where it does not
	aheadFrom int32 // the first CTA, or cluster, that does
	partials  int32 // rows of partial dw
	totalHere bool  // the only CTA makes the total as well
	scratch   scratch
	taken     Algorithm // the one whose regime this is, where the op has several
	why       string    // for people
}

// scratch is the layout of the call's temporary device memory: offsets in bytes.
type scratch struct {
	partial, dwPartial, rowLosses, logits, denominator uint64
	size                                               uint64
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

// variantsOf finds variants by what they do, sorted as in the table: from short to long rows.
var variantsOf = func() map[variantKey][]*kernels.Variant {
	t := map[variantKey][]*kernels.Variant{}
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		k := variantKey{v.Op, v.Shape, v.Family.DType(), v.General, v.Cluster}
		t[k] = append(t[k], v)
	}
	return t
}()

type variantKey struct {
	op      kernels.Op
	shape   kernels.Shape
	x       kernels.DType
	general bool
	cluster bool
}

// fitting returns the first of the variants that holds `vectors` in at most `ctas` CTAs, with the number of them.
func fitting(variants []*kernels.Variant, vectors int64, ctas int64) (*kernels.Variant, int64) {
	for _, v := range variants {
		if c := ceil(vectors, v.Capacity()); c <= ctas {
			return v, c
		}
	}
	return nil, 0
}

// shaped returns the variant of so many threads and vectors each, or nil.
func shaped(variants []*kernels.Variant, threads, each int64) *kernels.Variant {
	for _, v := range variants {
		if int64(v.RowThreads) == threads && int64(v.Vectors) == each {
			return v
		}
	}
	return nil
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }

// powerOfTwo returns the smallest power of two that is at least n.
func powerOfTwo(n int64) int64 { return 1 << bits.Len64(uint64(max(n, 1)-1)) }

// maxCluster is the largest cluster that the device can hold.
func maxCluster(f *driver.Facts) int64 {
	for c := len(f.Clusters) - 1; c > 1; c-- {
		if f.Clusters[c] > 0 {
			return int64(c)
		}
	}
	return 1
}

// planner makes one plan.
type planner struct {
	*plan
	request
	facts   *driver.Facts
	vectors int64 // 16-byte vectors that a row may touch
}

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
	if p, _, err = attempt(f, r); err != nil {
		return nil, err
	}
	p.why = fmt.Sprintf("%v cannot serve these rows: %s", asked, p.why)
	return p, nil
}

// attempt makes a plan where the algorithm that is asked for serves the request.
func attempt(f *driver.Facts, r request) (_ *plan, served bool, _ error) {
	r.alike = r.alike && !r.BatchInvariant // which counts vectors from each row's first element
	p := planner{plan: &plan{chunk: wholeRow, splits: 1}, request: r, facts: f}
	p.vectors = ceil(r.n, r.elements())
	if r.general {
		p.vectors = ceil(r.n+r.elements()-1, r.elements()) // the row may begin anywhere in a vector
	}
	if r.onePass && r.op == kernels.CrossEntropyForwardDX {
		p.scratch.denominator = p.scratch.take(4)
		p.sumRows(kernels.Denominator)
	}
	if r.m > 0 && !p.rows() {
		return nil, false, nil
	}
	p.finish()
	for _, l := range p.launches {
		if l.geometry.Grid == 0 {
			return nil, false, errorf(StatusUnsupported,
				"%d rows of %d elements need more than %d thread blocks; pass fewer rows at a time", r.m, r.n, maxGrid)
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
	return p.plan, true, nil
}

// add appends a launch; a grid that cannot be is marked by 0 and refused at the end.
func (p *planner) add(op kernels.Op, s kernels.Shape, general bool, v *kernels.Variant, grid, cluster int64, shared uint32) {
	if v == nil {
		v = variantsOf[variantKey{op, s, p.x, general, false}][0]
	}
	if grid > maxGrid {
		grid = 0
	}
	if v.Shape == kernels.InRegisters || v.Shape == kernels.Staged {
		p.lookAhead(v, grid, cluster)
	}
	p.launches = append(p.launches, launch{v, kernels.Geometry{
		Grid: uint32(grid), Cluster: uint32(cluster), Shared: shared,
		// Every kernel that can come second waits by itself where the architecture lets it start early.
		Dependent: len(p.launches) > 0 && p.facts.Major >= 9,
	}})
}

// lookAhead has a CTA tell L2 to fetch the rows of a later one, where more CTAs come than are resident from the start and rows are
// written: reads alone keep the memory busy, and so do long aligned rows of two inputs. Measured over the plain kernel, 1 to 4 MiB ahead
// alike to 0.01: on an H100 loss and gradient of 32768 x 512 bfloat16 0.95 to 0.98, softmax of 32768 x 256 float32 0.97 to 1.01 and its
// backward of 32768 x 1001 bfloat16 0.85 to 0.95; on an H200 softmax of 32768 x 8192 bfloat16 0.95 to 1.00, its backward 1.00 to 0.98. What
// those that are resident from the start read is on its way: to fetch it again costs loss and gradient of 32768 x 256 bfloat16 0.04.
func (p *planner) lookAhead(v *kernels.Variant, grid, cluster int64) {
	inputs := int64(p.op.Inputs())
	if p.op == kernels.CrossEntropyForward || inputs > 1 && !p.general && p.vectors > 256 {
		return
	}
	resident, rows := p.resident(v)/cluster, v.RowsPerCTA()
	if grid/cluster <= resident {
		return
	}
	far := (4 - inputs) << 20 // bytes
	ctas := max(far/(p.n*p.x.Size()*inputs*rows), 1)
	p.ahead, p.aheadFrom = int32(ctas*rows), int32(max(resident-ctas, 0))
}

// resident is how many CTAs of an InRegisters, Staged, Loop or Lanes variant the device holds at a time.
func (p *planner) resident(v *kernels.Variant) int64 {
	perSM := int64(v.Resident)
	if v.Shape == kernels.Staged {
		perSM = min(perSM, int64(p.facts.SharedPerSM)/(v.Capacity()*16+1024))
	}
	return int64(p.facts.SMs) * perSM
}

// rows chooses the kernels that go over the rows, and tells whether the algorithm that is asked for has any.
func (p *planner) rows() (served bool) {
	switch {
	case p.Algorithm != Auto:
		served = p.forced()
	case p.dw:
		switch {
		case p.n < 4: // x * rstd is nearly 1, and its rounding errs to one side, which a sum shows: `columns` does without
			p.columns()
		case p.x == kernels.Float32 && p.expected() <= 4 && p.vectors > 16384: // 4 x 114688: 14.8 us, in a ring 16.7
			p.columns()
		case p.bestInTeam(), p.inLanes(), p.inRing(1, 16), p.inTeam():
		default:
			p.columns()
		}
		served = true
	default:
		p.fastest()
		served = true
	}
	if served && p.dw {
		p.scratch.dwPartial = p.scratch.take(int64(p.partials) * p.n * p.accumulatorBytes())
	}
	return served
}

// fastest is auto, but for RMSNorm backward with dw.
func (p *planner) fastest() {
	switch {
	case p.op == kernels.CrossEntropyForward:
		if !(p.few() && p.inCluster(p.tiles(true)) || p.inOneCTA(p.tiles(false))) {
			p.stream()
		}
	case p.op == kernels.CrossEntropyBackward:
		if !p.inOneCTA(p.tiles(false)) {
			p.elementwise()
		}
	case p.mixed:
		p.split("the second input has another type than x")
	case p.expected() <= 16 && p.vectors > p.splitFrom():
		if !p.held() {
			p.split("a few rows this long fill the device only when split")
		}
	case p.bestInTeam():
	case p.op == kernels.RMSNormForward && p.inLoop():
	case p.op == kernels.RMSNormForward && !(p.general && p.few()) && p.vectors > p.stagedFrom() && p.inStaged(1, 16):
	case p.few() && p.inCluster(p.tiles(true, 256, 256)) || p.inOneCTA(p.lasting(p.tiles(false))) || p.inCluster(p.thrifty(p.tiles(true))):
	case p.inStaged(2, 16), p.inTeam(), p.inCluster(largest(p.tiles(true))):
	default:
		p.split("the row is longer than a cluster holds")
	}
}

// splitFrom is the vectors of a row from which few rows are better split than spread over clusters. Measured on an H100: 4 x 114688 of
// float32, softmax 8.0 to 8.6 us and 8.1 in clusters, its backward 8.7 and 7.7, RMSNorm 7.3 and 6.9; 4 x 262144 of bfloat16, softmax 7.95
// and 8.24.
func (p *planner) splitFrom() int64 {
	switch {
	case p.general || p.expected() < 4 || p.op == kernels.CrossEntropyForwardDX:
		return 16384
	case p.op == kernels.SoftmaxForward && p.expected() < 16:
		return 28672
	}
	return 32768
}

// forced takes the regime that the algorithm names, where that has kernels for the request.
func (p *planner) forced() bool {
	switch a := p.Algorithm; {
	case a == Arbitrary || a == SplitK:
		return p.twoPasses()
	case a == Block:
		return p.dw && p.inRing(1, 1, 256) || !p.dw && !p.mixed && p.inOneCTA(p.tiles(false, 256, 256)) || p.twoPasses()
	case p.mixed:
		return false
	case p.dw && (a == Warp || a == Register):
		return p.inLanes()
	case p.op == kernels.RMSNormForward && a == Medium:
		return p.inStaged(1, 1)
	case p.dw && a == Medium:
		return p.inRing(1, 1)
	case p.dw: // Extreme, Cluster
		return a == Extreme && p.bestInTeam() || p.inRing(2, 16) || a == Extreme && p.inTeam()
	case a == Warp:
		return p.inLoop() || p.inOneCTA(p.tiles(false, 1, lanesPerWarp))
	case a == Register:
		return p.inOneCTA(p.tiles(false))
	case a == Medium:
		return p.inOneCTA(largest(p.tiles(false)))
	case a == Extreme:
		return p.bestInTeam() || p.inStaged(2, 16) || p.inCluster(largest(p.tiles(true))) || p.inTeam()
	}
	return p.inCluster(p.tiles(true)) || p.inStaged(2, 16)
}

// expected is how many rows a choice is made for: with BatchInvariant as for many, whatever M is.
func (p *planner) expected() int64 {
	if p.BatchInvariant {
		return 1 << 30
	}
	return p.m
}

// tiles returns the variants that hold rows in registers, of one CTA or of a cluster, from short rows to long; only those with
// row threads in the given range, if one is given.
func (p *planner) tiles(cluster bool, threads ...int) []*kernels.Variant {
	var some []*kernels.Variant
	for _, v := range variantsOf[variantKey{p.op, kernels.InRegisters, p.x, p.general, cluster}] {
		if threads != nil && (v.RowThreads < threads[0] || v.RowThreads > threads[1]) || v.Alike && !p.alike {
			continue
		}
		some = append(some, v)
	}
	return some
}

func largest(variants []*kernels.Variant) []*kernels.Variant {
	return variants[max(0, len(variants)-1):]
}

// inOneCTA gives each row to a CTA, or to a part of one, that holds it in registers.
func (p *planner) inOneCTA(variants []*kernels.Variant) bool {
	v, c := fitting(variants, p.vectors, 1)
	if c == 0 {
		return false
	}
	p.add(p.op, v.Shape, p.general, v, ceil(p.m, v.RowsPerCTA()), 1, 0)
	p.taken = Register
	if v.RowThreads <= lanesPerWarp {
		p.taken = Warp
	}
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d threads", p.vectors, v.RowThreads)
	return true
}

// inLoop lets lanes go from row to row, where there are more short rows than the device holds at a time. Measured on an H100 with
// 32768 rows of bfloat16, over the plain kernel: N = 256 0.96 (a CTA for every 16 rows: 0.85), 512 0.98 (0.95).
func (p *planner) inLoop() bool {
	v, _ := fitting(variantsOf[variantKey{p.op, kernels.Loop, p.x, p.general, false}], p.vectors, 1)
	if v == nil {
		return false
	}
	resident := p.resident(v)
	if ceil(p.expected(), v.RowsPerCTA()) <= resident || p.vectors*4 <= v.Capacity() {
		return false
	}
	p.add(p.op, v.Shape, false, v, min(resident, ceil(p.m, v.RowsPerCTA())), 1, 0)
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors while they load the next", v.RowThreads, p.vectors)
	return true
}

// inCluster gives each row to as few CTAs of a cluster as can hold it, and to two at least: where one CTA cannot hold it, or where
// rows are so few that one CTA each would leave SMs idle. Those are best off with the smallest CTAs: measured on an H100 with 1
// to 128 rows of 32768 and 131072 bfloat16.
func (p *planner) inCluster(variants []*kernels.Variant) bool {
	limit := maxCluster(p.facts)
	v, c := fitting(variants, p.vectors, limit)
	if v == nil || limit < 2 {
		return false
	}
	c = max(c, 2)
	p.add(p.op, v.Shape, p.general, v, p.m*c, c, 0)
	p.taken = Cluster
	p.why = fmt.Sprintf("a row of %d vectors fits the registers of %d CTAs", p.vectors, c)
	return true
}

// thrifty leaves the smallest CTAs aside, where the next hold a row with little left over; not those of aligned rows of one input,
// which are the best for all that they hold. Measured on an H100 over the plain kernel: unaligned, softmax of 50257 bfloat16 in 7 CTAs of
// 1024 vectors 0.86, in 4 of 2048 0.95.
func (p *planner) thrifty(variants []*kernels.Variant) []*kernels.Variant {
	if p.op.Inputs() == 1 && !p.general {
		return variants
	}
	const small = 8 // CTAs: more of the smallest have too much to wait for
	if p.op.Inputs() == 1 && variants[1].RowThreads == variants[0].RowThreads {
		variants = variants[1:]
		if _, c := fitting(variants[:1], p.vectors, 16); c > 0 {
			return variants
		}
		return variants[1:]
	}
	v, c := fitting(variants[1:], p.vectors, maxCluster(p.facts))
	if _, least := fitting(variants[:1], p.vectors, small); v != nil && (least == 0 || 5*p.vectors > 4*c*v.Capacity()) {
		return variants[1:]
	}
	return variants
}

// lasting leaves large CTAs aside, where there are clusters: for longer aligned rows of one input (measured on an H100, 50256 of bfloat16:
// softmax 0.986 of the plain kernel, in seven smaller CTAs 0.996), and for others those of which an SM holds one, where rows are
// too few to even out what the last of them leave idle.
func (p *planner) lasting(variants []*kernels.Variant) []*kernels.Variant {
	if maxCluster(p.facts) == 1 {
		return variants
	}
	if p.op.Inputs() == 1 && !p.general && p.vectors > 2560 {
		return nil
	}
	for i, v := range variants {
		if p.expected() < 8*int64(p.facts.SMs) && v.Threads == 1024 && v.Resident == 1 && i > 0 {
			return variants[:i]
		}
	}
	return variants
}

// few says whether a CTA for each row would leave SMs idle, and a row is long enough for several small ones.
func (p *planner) few() bool {
	clusters := p.tiles(true)
	return p.expected() < int64(p.facts.SMs) && len(clusters) > 0 && p.vectors > clusters[0].Capacity()
}

// chunks divides rows so that the device is filled `waves` CTAs of ChunkThreads deep per SM, or as was asked for.
func (p *planner) chunks(waves int64) {
	const least = 4 * kernels.ChunkThreads // vectors that are worth a CTA
	want := max(1, ceil(int64(p.facts.SMs)*waves, p.m))
	if p.BatchInvariant { // one row alone should fill the device, and 1024 states are merged at once
		want = min(ceil(p.vectors, 4*least), 1024)
	}
	switch p.Algorithm {
	case Block:
		want = 1
	case SplitK:
		want = max(want, 2)
	}
	p.chunk = min(max(ceil(ceil(p.vectors, want), least)*least, least), maxChunk)
	p.splits = int32(ceil(p.vectors, p.chunk))
	p.taken = Arbitrary
	if p.splits > 1 {
		p.taken = SplitK
	}
}

// twoPasses reads rows twice, in as many CTAs as the algorithm asks for; few rows perhaps once, if it asks for several to each.
func (p *planner) twoPasses() bool {
	switch {
	case p.dw:
		p.columns()
	case p.Algorithm == SplitK && p.held():
		return true
	default:
		p.split("")
		p.why = fmt.Sprintf("%d CTAs to a row, two passes", p.splits)
	}
	switch p.Algorithm {
	case Block:
		return p.splits == 1
	case SplitK:
		return p.splits > 1
	}
	return true
}

// split reads rows twice: once for their states, once to map them.
func (p *planner) split(why string) {
	p.chunks(16)
	grid := p.m * int64(p.splits)
	p.scratch.partial = p.scratch.take(grid * p.stateBytes())
	if p.op == kernels.CrossEntropyForwardDX {
		p.scratch.logits = p.scratch.take(p.m * 4)
	}
	p.add(p.op, kernels.Partial, p.general, nil, grid, 1, 0)
	p.add(p.op, kernels.Apply, p.general, nil, grid, 1, 0)
	p.why = why + ": two passes"
}

// held reads a few rows of more than a few MB once, as far as the shared memory of all SMs holds them, and the rest twice. Measured on an
// H100, two passes and this, times a copy: bfloat16 softmax 4 x 2^22 1.37 and 1.19, 1 x 2^25 1.53 and 1.29, RMSNorm 1.55 and 1.35, 1.94 and 1.78;
// 4 x 2^20 1.37 and 1.40, 1.40 and 1.37; softmax 16 x 2^23 1.49 and 1.55.
func (p *planner) held() bool {
	const (
		mostRows = 16
		perSM    = 2    // CTAs
		static   = 768  // bytes of shared memory of each, and
		reserved = 1024 // what the system takes
		least    = 192 << 10
	)
	variants := variantsOf[variantKey{p.op, kernels.Held, p.x, p.general, false}]
	sms := int64(p.facts.SMs)
	if variants == nil || p.mixed || p.facts.Major < 9 || p.facts.SharedPerSM < least || p.expected() > mostRows {
		return false
	}
	from, to := int64(60<<10), int64(4<<20) // bytes of x for each SM
	switch p.op {
	case kernels.SoftmaxForward:
		from, to = 90<<10, 1280<<10
	case kernels.SoftmaxBackward: // which reads as much again
		from, to = 30<<10, 1024<<10
	case kernels.RMSNormForward:
		if p.m == 1 { // whose weights are as much again, and no other row's
			from = 90 << 10
		}
	}
	if size := p.m * p.vectors * 16; size < from*sms || size > to*sms {
		return false
	}
	const whole = 8 // vectors: 128 bytes, which memory moves at once
	v := variants[0]
	parts := sms * perSM / p.m
	if parts < 2 {
		return false
	}
	p.chunk = ceil(ceil(p.vectors, parts), whole) * whole
	if p.chunk > maxChunk {
		return false
	}
	p.splits = int32(ceil(p.vectors, p.chunk))
	tile, room := int64(p.op.Inputs())*v.Capacity()*16, min(int64(p.facts.SharedPerSM)/perSM-reserved, int64(p.facts.SharedPerBlock))-static
	p.lag = int32(min(ceil(p.chunk, v.Capacity()), room/tile, kernels.HeldTiles))
	p.clear(p.m * int64(p.splits))
	p.add(p.op, v.Shape, false, v, p.m*int64(p.splits), 1, uint32(int64(p.lag)*tile))
	p.taken = SplitK
	each := int64(p.op.Inputs()) * p.chunk * 16
	p.why = fmt.Sprintf("%d CTAs to a row hold %d of %d KiB each in shared memory", p.splits, min(int64(p.lag)*tile, each)>>10, each>>10)
	return true
}

// clear appends what clears the memory through which CTAs share what their parts of rows came to.
func (p *planner) clear(shares int64) {
	op := kernels.RMSNormClear
	if p.op == kernels.SoftmaxForward || p.op == kernels.SoftmaxBackward {
		op = kernels.SoftmaxClear
	}
	v := variantsOf[variantKey{op, kernels.Finish, p.x, true, false}][0]
	grid := ceil(shares, int64(v.Threads))
	p.scratch.partial = p.scratch.take(grid * int64(v.Threads) * 16)
	p.add(v.Op, v.Shape, true, v, grid, 1, 0)
}

// stream reads rows once and keeps nothing of them.
func (p *planner) stream() {
	p.why = fmt.Sprintf("a row of %d vectors streams through a CTA", p.vectors)
	p.chunks(4)
	if p.splits == 1 {
		p.add(p.op, kernels.Partial, p.general, p.streamer(), p.m, 1, 0)
		return
	}
	p.why = fmt.Sprintf("%d rows would leave SMs idle: %d CTAs share each", p.m, p.splits)
	p.scratch.partial = p.scratch.take(p.m * int64(p.splits) * p.stateBytes())
	p.scratch.logits = p.scratch.take(p.m * 4)
	p.add(p.op, kernels.Partial, p.general, nil, p.m*int64(p.splits), 1, 0)
	p.add(p.op, kernels.Apply, p.general, nil, p.m, 1, 0)
}

// streamer is the kernel that takes a whole row. Measured on an H100 with 4099 rows of bfloat16, over the plain kernel: 40960 in 256 x 4
// threads and vectors 0.95, in 512 x 8 less than 0.91; 128256 0.96 and 0.97; unaligned, 50257 in 256 x 2 0.87, in 256 x 8 0.91.
func (p *planner) streamer() *kernels.Variant {
	all := variantsOf[variantKey{p.op, kernels.Partial, p.x, p.general, false}]
	if last := all[len(all)-1]; last.Alike && p.alike || !p.general && p.vectors > 6144 {
		return last
	}
	return all[0]
}

// elementwise maps rows whose statistics are known.
func (p *planner) elementwise() {
	p.chunk = 4 * kernels.ChunkThreads
	if p.onePass {
		p.chunk = min(p.vectors, maxChunk) // few CTAs: most often all they do is look and leave
	}
	p.splits = int32(ceil(p.vectors, p.chunk))
	p.add(p.op, kernels.Apply, p.general, nil, p.m*int64(p.splits), 1, 0)
	p.why = "no row needs another element: chunks of 1024 vectors"
}

// elements is how many of x a 16-byte vector holds.
func (r *request) elements() int64 { return 16 / r.x.Size() }

// accumulatorBytes is the size of what sums that span threads are taken in: Accumulator in cuda/reduce.cuh.
func (r *request) accumulatorBytes() int64 {
	if r.x == kernels.Float32 {
		return 8
	}
	return 4
}

// stateBytes is the size of the largest state of a row, a maximum and a sum: MaxSum in cuda/reduce.cuh.
func (r *request) stateBytes() int64 { return 2 * r.accumulatorBytes() }

// stagedFrom is the vectors of a row from which many of RMSNorm forward gain by shared memory.
func (p *planner) stagedFrom() int64 {
	if p.general {
		return 1280
	}
	return 1024
}

// stage is how rows of up to `vectors` vectors are staged: CTA shape, and whether a cluster takes as many as hold them.
type stage struct {
	vectors, threads, each int64
	cluster                bool
}

// Measured on an H100 over the plain kernel, bfloat16 and float32.
var (
	staging = []stage{
		{16384, 256, 4, true}, // 0.99 to 1.00; 128 rows of 131072 0.94
		{32768, 256, 8, true}, // 262144 of bfloat16 0.98; 128 rows of 65536 0.91 (256 x 4 0.88)
		{65536, 512, 8, true}, // 0.98
		{4096, 512, 8, false}, // where there are no clusters: 0.99
		{8192, 1024, 8, false},
	}
	stagingUnaligned = []stage{
		{3840, 512, 8, false},  // 0.84 to 0.95
		{8192, 1024, 8, false}, // 0.85 to 0.94
		{4096, 512, 8, false},  // where that has too little shared memory, or would leave SMs idle
		{16384, 256, 8, true},  // 0.86 to 0.90
		{65536, 512, 8, true},  // 0.86
	}
)

// inStaged brings each row into the shared memory of a CTA, or of a cluster of at least two. All CTAs of a few rows should be resident at
// once.
func (p *planner) inStaged(least, most int64) bool {
	if p.op != kernels.RMSNormForward || p.general && !p.alike || p.mixed {
		return false
	}
	atOnce := func(v *kernels.Variant, ctas int64) bool { return p.m*ctas <= p.resident(v) }
	return p.expected() < int64(p.facts.SMs) && p.stagedWhere(least, most, atOnce) ||
		p.stagedWhere(least, most, func(*kernels.Variant, int64) bool { return true })
}

func (p *planner) stagedWhere(least, most int64, suits func(v *kernels.Variant, ctas int64) bool) bool {
	table := staging
	if p.general {
		table = stagingUnaligned
	}
	most = min(most, maxCluster(p.facts))
	for _, s := range table {
		ctas := int64(1)
		if s.cluster {
			ctas = max(2, ceil(p.vectors, s.threads*s.each))
		}
		// An SM holds one CTA of 1024: not where rows are too few to even out what the last of them leave idle, or fill less than
		// three quarters of it with the many instructions that unaligned rows take.
		wasteful := s.threads == 1024 && most > 1 && (p.expected() < 8*int64(p.facts.SMs) || p.general && p.vectors <= 5632)
		if p.vectors > s.vectors || ctas < least || ctas > most || wasteful {
			continue
		}
		v := shaped(variantsOf[variantKey{p.op, kernels.Staged, p.x, p.general, s.cluster}], s.threads, s.each)
		if v == nil || v.Capacity()*16+4<<10 > int64(p.facts.SharedPerBlock) || !suits(v, ctas) {
			continue
		}
		p.taken = Medium
		if s.cluster {
			p.taken = Extreme
		}
		p.add(p.op, v.Shape, p.general, v, p.m*ctas, ctas, uint32(v.Capacity()*16))
		p.why = fmt.Sprintf("%d x %d threads copy a row of %d vectors into shared memory", ctas, v.Threads, p.vectors)
		return true
	}
	return false
}

// ring is how RMSNorm backward brings rows of up to `vectors` vectors through shared memory: CTA shape, cluster, CTAs per SM and rows
// in flight.
type ring struct {
	vectors, threads, each, cluster, resident, stages int64
}

// Measured with 32768 rows or tensors of 256 MiB to 4 GiB, over the plain kernel of the same traffic: bfloat16 / float32.
var (
	ringsH100 = []ring{
		{128, 128, 1, 1, 5, 6},    // 0.92 / 0.93
		{256, 256, 1, 1, 2, 3},    // 0.96 / 0.95 (three CTAs per SM: 0.93)
		{512, 256, 2, 1, 1, 4},    // 0.96 / 0.97
		{1024, 256, 2, 2, 1, 8},   // 0.95 / 0.96
		{1024, 512, 2, 1, 1, 3},   // 0.95 / 0.95: `medium`
		{2048, 512, 2, 2, 1, 3},   // 0.95 / 0.95
		{3072, 512, 2, 3, 1, 2},   // 20480: 0.91
		{4096, 512, 2, 4, 1, 2},   // 0.94 / 0.94
		{5120, 512, 2, 5, 1, 3},   // 36864: 0.95 (clusters of 8: 0.82)
		{6144, 512, 2, 6, 1, 3},   // 43008: 0.96
		{7168, 512, 2, 7, 1, 3},   // 50256: 0.97; 50257, unaligned: 0.85
		{8192, 512, 2, 8, 1, 2},   // 0.95 / 0.97
		{16384, 512, 2, 16, 1, 3}, // 0.97 / 0.97
		{32768, 512, 4, 16, 1, 2}, // float32 0.96
	}
	// As many SMs with 1.4 times the bandwidth. In brackets with the H100's.
	ringsH200 = []ring{
		{128, 128, 1, 1, 6, 3},  // 0.87 (0.86)
		{256, 256, 1, 1, 3, 3},  // 0.94 / 0.95
		{512, 256, 2, 1, 2, 2},  // 0.93 (0.89)
		{1024, 512, 2, 1, 1, 2}, // 0.94 / 0.95 (0.77 / 0.81)
		{1024, 256, 2, 2, 1, 8}, // `cluster`
		{2048, 512, 2, 2, 1, 2}, // 0.94 (0.91)
		{3072, 512, 2, 3, 1, 2},
		{4096, 512, 2, 4, 1, 3}, // 0.95 / 0.96 (0.94 / 0.94)
		{5120, 512, 2, 5, 1, 3},
		{6144, 512, 2, 6, 1, 3},
		{7168, 512, 2, 7, 1, 3},
		{8192, 512, 2, 8, 1, 4},   // 0.97 (0.96)
		{16384, 512, 2, 16, 1, 4}, // float32 0.96 (0.95)
		{32768, 512, 4, 16, 1, 2},
	}
)

// rings is the table of the part whose memory is about as fast, with about as many SMs: 3350 GB/s, or 4800.
func (p *planner) rings() []ring {
	if p.facts.MemoryGBs > 4100 {
		return ringsH200
	}
	return ringsH100
}

// inLanes gives rows to persistent parts of warps, whose threads keep fixed columns' part of dw in registers.
func (p *planner) inLanes() bool {
	v, c := fitting(variantsOf[variantKey{p.op, kernels.Lanes, p.x, p.general, false}], p.vectors, 1)
	if c == 0 || p.mixed || p.general && !p.alike {
		return false
	}
	grid := min(p.resident(v), ceil(p.m, v.RowsPerCTA()))
	if p.general { // so that a CTA's rows lie alike
		grid = max(grid/p.elements(), 1) * p.elements()
	}
	p.partials = int32(grid)
	p.add(p.op, v.Shape, false, v, grid, 1, uint32(v.Shared))
	p.taken = Warp
	p.why = fmt.Sprintf("%d lanes hold a row of %d vectors and its part of dw", v.RowThreads, p.vectors)
	return true
}

// bestInTeam spreads rows over a CTA on each SM where they are so long that this is better than a cluster.
func (p *planner) bestInTeam() bool {
	from := int64(32768) // vectors
	switch {
	case p.dw && p.x != kernels.Float32: // for whose dw the registers of a cluster do not suffice
		from = 16384
	case p.op == kernels.RMSNormForward, p.op == kernels.SoftmaxForward: // whose rows a cluster holds
		from = 65536
	}
	return p.vectors > from && p.inTeam()
}

// inTeam spreads each row over a CTA on each SM. Measured on an H100, over the plain kernel: N = 262144 of float32, RMSNorm backward 0.97
// (two passes: 0.58), softmax backward 0.97 (0.90); RMSNorm backward of bfloat16 with N = 262144 0.95 (one row after the other: 0.87),
// 151936 0.92; softmax forward with N = 2^20 0.95 (0.84). The ring hides what CTAs tell each other, which takes several us, if some
// 64 KiB of it are on their way.
func (p *planner) inTeam() bool {
	const (
		mostLag = kernels.TeamSteps/2 - 1
		static  = 12 << 10 // of shared memory
	)
	members := int64(p.facts.SMs)
	if p.mixed || p.facts.Major < 9 || p.vectors <= 16*powerOfTwo(members) || p.op == kernels.RMSNormBackward && !p.dw {
		return false
	}
	for _, v := range variantsOf[variantKey{p.op, kernels.Team, p.x, p.general, false}] {
		stage := int64(p.op.Inputs()*v.Together) * ceil(p.vectors, members) * 16
		stages := min((int64(p.facts.SharedPerBlock)-static)/stage, kernels.TeamStages)
		least := int64(4)
		if v.Together > 1 {
			least = 12
		}
		// Of the members as many as are a power of two, as of a cluster's: so the longest limit is a power of two.
		missing := p.facts.Major == 12 && !v.In("sm_120")
		if v.Capacity()*(powerOfTwo(members+1)/2) < p.vectors || stages < least || missing {
			continue
		}
		p.splits, p.stages = int32(members)*int32(v.Together), int32(stages)
		if p.dw {
			p.partials = int32(v.Groups)
		}
		p.lag = int32(max(1, min(stages-max(2, 64<<10/stage), mostLag)))
		p.clear(members * kernels.TeamSteps * int64(v.Together))
		p.add(p.op, v.Shape, p.general, v, members, 1, uint32(stages*stage))
		last := &p.launches[len(p.launches)-1].geometry
		last.Cooperative, last.Dependent = true, false
		p.taken = Extreme
		p.why = fmt.Sprintf("%d CTAs hold a row between them; %d rows in flight", members, stages*int64(v.Together))
		return true
	}
	return false
}

// inRing brings rows through shared memory, where there is a ring for their length of so many CTAs, with `threads` threads if that
// is given.
func (p *planner) inRing(least, most int64, threads ...int64) bool {
	if p.mixed || p.facts.Major < 9 || p.general && p.BatchInvariant {
		return false
	}
	rings := p.rings()
	for i, r := range rings {
		if p.vectors > r.vectors || r.cluster < least || r.cluster > most || r.cluster > 1 && p.facts.Clusters[r.cluster] == 0 ||
			threads != nil && r.threads != threads[0] {
			continue
		}
		// Few rows to each: larger CTAs by themselves begin and end sooner. 2048 x 8192 of bfloat16: 46.5 us, in clusters of two 48.5.
		if r.cluster > least && p.expected() < 32*int64(p.facts.SMs) && i+1 < len(rings) && rings[i+1].vectors == r.vectors {
			continue
		}
		v := shaped(variantsOf[variantKey{p.op, kernels.Ring, p.x, p.general, r.cluster > 1}], r.threads, r.each)
		if v == nil {
			continue
		}
		// Some parts have less shared memory than the ring was measured with; the kernel itself needs a little.
		if fits := (int64(p.facts.SharedPerBlock) - 4<<10) / p.ringStage(v); fits >= 2 {
			p.ring(v, r.cluster, r.resident, min(r.stages, fits))
			return true
		}
	}
	return false
}

// ringStage is the bytes of shared memory that one row's slices of the inputs take.
func (p *planner) ringStage(v *kernels.Variant) int64 {
	vectors := v.Capacity()
	if v.General {
		vectors++
	}
	return int64(p.op.Inputs()) * vectors * 16
}

func (p *planner) ring(v *kernels.Variant, cluster, resident, stages int64) {
	// No more clusters than are resident at once: one that waits for another to end doubles the time. A CTA has some shared memory of its
	// own and 1 KiB that is reserved for it.
	resident = max(1, min(resident, int64(p.facts.SharedPerSM)/(stages*p.ringStage(v)+2<<10)))
	// Each leaves a row of partial dw. Measured on an H100, 4099 x 1000 of bfloat16: 0.65 with five on an SM, 0.69 with three.
	resident = min(resident, max(3, p.m/(8*int64(p.facts.SMs))))
	clusters := int64(p.facts.SMs) * resident
	if cluster > 1 {
		clusters = int64(p.facts.Clusters[cluster]) * resident
	}
	clusters = min(clusters, p.m)
	p.stages = int32(min(stages, max(2, ceil(p.m, clusters))))
	p.partials = int32(clusters)
	if p.general { // one for each piece of its rows that lies alike: deal_rows in cuda/rmsnorm.cuh
		p.partials += int32(p.elements() - 1)
	}
	p.taken = Medium
	if cluster > 1 {
		p.taken = Extreme
	}
	p.add(p.op, v.Shape, p.general, v, clusters*cluster, cluster, uint32(int64(p.stages)*p.ringStage(v)))
	p.why = fmt.Sprintf("%d x %d threads keep the weights of their columns and dw; %d rows in flight",
		cluster, v.Threads, p.stages)
}

// columns serves what no persistent kernel does: row sums first, then dx and dw by columns.
func (p *planner) columns() {
	p.chunks(4)
	p.scratch.partial = p.scratch.take(p.m * int64(p.splits) * p.stateBytes())
	p.add(p.op, kernels.Partial, p.general, nil, p.m*int64(p.splits), 1, 0)
	tiles := ceil(p.n, kernels.ChunkThreads*p.elements())
	blocks := min(max(int64(p.facts.SMs)*8/tiles, 1), p.m)
	p.partials = int32(blocks)
	p.add(p.op, kernels.Columns, p.general, nil, tiles*blocks, 1, 0)
	p.why = "row sums first, then dx and dw by columns: two passes"
}

// finish appends what completes sums over rows.
func (p *planner) finish() {
	switch {
	case p.dw:
		// Measured on an H100: 256 columns, 32 threads to each, 0.92 of the plain kernel (8: 0.86); 16384 0.92 and 0.94.
		variants := variantsOf[variantKey{kernels.WeightGradient, kernels.Finish, p.x, true, false}]
		v := variants[0]
		switch {
		case p.n > 32768: // a few rows of partial dw, of clusters or of a team
			v = variants[2]
		case p.n > 2048:
			v = variants[1]
		}
		p.add(v.Op, v.Shape, true, v, ceil(p.n, v.RowsPerCTA()), 1, 0)
	case p.total:
		if last := len(p.launches) - 1; last >= 0 {
			l := p.launches[last]
			// total_if_single in cuda/cross_entropy.cuh is made for these sizes.
			if t := l.variant.Threads; l.geometry.Grid == 1 && (t == 128 || t == kernels.ChunkThreads) {
				p.totalHere = true // its rows' losses stay in shared memory
				return
			}
		}
		p.scratch.rowLosses = p.scratch.take(p.m * 8)
		p.sumRows(kernels.Total)
	}
}

// sumRows appends what sums a number of each row.
func (p *planner) sumRows(op kernels.Op) {
	const alone = 16384 // rows that one CTA sums as fast as a cluster would
	if c := min(maxCluster(p.facts), 8); p.m > alone && c > 1 {
		v := variantsOf[variantKey{op, kernels.Finish, p.x, true, true}][0]
		p.add(op, v.Shape, true, v, c, c, 0)
		return
	}
	p.add(op, kernels.Finish, true, nil, 1, 1, 0)
}
