package ops

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

// testDevices are those known by name, an H100 without clusters (forced PTX of compute_80), a small Ampere
// GPU, a slice of an H100 (MIG), and a large consumer GPU.
var testDevices = func() map[string]*driver.Facts {
	all := map[string]*driver.Facts{
		"ptx80": {Major: 8, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10, L2Bytes: 50 << 20},
		"a2":    {Major: 8, Minor: 6, SMs: 10, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10, L2Bytes: 2 << 20},
		"mig": {Major: 9, SMs: 14, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10, L2Bytes: 6 << 20,
			Clusters: [17]int{1: 14, 7, 4, 3, 2, 2, 2, 1}},
		"sm120": {Major: 12, SMs: 170, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10, L2Bytes: 96 << 20,
			Clusters: [17]int{1: 170, 85, 56, 40, 32, 28, 24, 20}},
	}
	for name, facts := range devices {
		all[name] = &facts
	}
	return all
}()

var rowOps = []kernels.Op{
	kernels.SoftmaxForward, kernels.SoftmaxBackward, kernels.RMSNormForward, kernels.RMSNormBackward,
	kernels.CrossEntropyForward, kernels.CrossEntropyForwardDX, kernels.CrossEntropyBackward,
	kernels.NormForward, kernels.NormBackward, kernels.MaskedSoftmaxForward, kernels.MaskedSoftmaxBackward,
	kernels.Rescale, kernels.LayerNormForward, kernels.LayerNormBackward,
	kernels.RMSNormResidualForward, kernels.RMSNormResidualBackward,
	kernels.GeneralCrossEntropyForward, kernels.GeneralCrossEntropyForwardDX,
	kernels.GeneralCrossEntropyBackward, kernels.GLUForward, kernels.GLUBackward,
	kernels.TokenStatisticsForward, kernels.AllTokenStatisticsForward, kernels.TokenStatisticsBackward,
	kernels.SoftCrossEntropyForward, kernels.SoftCrossEntropyBackward,
}

var headOps = []kernels.Op{kernels.Rotate, kernels.QKNormRotate, kernels.QKNormRotateBackward}

// everything tells whether tests that enumerate do so, as in CI, or take a sample.
var everything = os.Getenv("GANDER_TEST") == "all"

// sample returns f, or if not everything is tested, a function that passes on one call of 29.
func sample(f func(request)) func(request) {
	if everything {
		return f
	}
	calls := 0
	return func(r request) {
		if calls++; calls%29 == 1 {
			f(r)
		}
	}
}

// everyRequest calls f for a grid of requests that a caller can make, or a sample of them.
func everyRequest(f func(request)) { enumerate(sample(f)) }

// enumerate calls f for a grid of requests that a caller can make.
func enumerate(f func(request)) {
	lengths := []int64{
		1, 3, 7, 8, 31, 40, 64, 80, 96, 101, 127, 128, 192, 256, 501, 512, 513, 768, 1000, 1024, 1025, 1536, 1801,
		2048, 2049,
		2560, 3072, 3501, 4096, 4097, 5120, 6144, 7001, 7168, 8192, 8193, 11008, 12288, 14336, 15001, 16384, 20480,
		24577, 30001, 32768, 40960, 50257, 65536,
		100001, 131072, 151936, 262144, 300001, 1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 25, 1<<31 + 8,
	}
	for _, m := range []int64{1, 8192, 1 << 20} {
		for _, total := range []bool{false, true} {
			f(request{op: kernels.CombineSlices, x: kernels.Float32, layout: policy.MixedOffsets, m: m, n: 128256,
				total: total})
		}
		f(request{op: kernels.CombineTokenStatistics, x: kernels.Float32, layout: policy.MixedOffsets, m: m,
			n: 128256})
	}
	everyHead(f)
	for _, op := range rowOps {
		for x := kernels.Float16; x <= kernels.Float32; x++ {
			for _, n := range lengths {
				for _, m := range []int64{1, 2, 4, 16, 128, 1000, 8192, 32768, 1 << 20} {
					for _, unaligned := range []bool{false, true} {
						r := request{op: op, x: x, m: m, n: n}
						switch {
						case unaligned:
							r.layout = policy.MixedOffsets
						case n*x.Size()%16 != 0:
							r.layout = policy.SameOffset
						}
						if op == kernels.MaskedSoftmaxForward || op == kernels.MaskedSoftmaxBackward {
							r.layout = min(r.layout, policy.SameOffset) * policy.MixedOffsets // there is no other layout
						}
						switch op {
						case kernels.NormForward, kernels.NormBackward:
							everyNorm(r, f)
							continue
						case kernels.LayerNormForward, kernels.LayerNormBackward,
							kernels.RMSNormResidualForward, kernels.RMSNormResidualBackward:
							if r.layout == policy.Aligned {
								everyAlignedNorm(r, f)
							}
							continue
						}
						f(r)
						if op == kernels.RMSNormForward && x != kernels.Float32 {
							r.wideWeights = true
							f(r)
						}
						if op == kernels.RMSNormBackward {
							r.dw = true
							f(r)
							r.layout = policy.MixedTypes
							f(r)
						}
						switch op {
						case kernels.CrossEntropyForward, kernels.GeneralCrossEntropyForward:
							r.total = true
							f(r)
						case kernels.CrossEntropyForwardDX, kernels.GeneralCrossEntropyForwardDX:
							r.total = true
							f(r)
							r.onePass = true
							f(r)
						case kernels.CrossEntropyBackward, kernels.GeneralCrossEntropyBackward, kernels.Rescale:
							r.onePass = true
							f(r)
						}
						if op == kernels.GeneralCrossEntropyForwardDX || op == kernels.GeneralCrossEntropyBackward {
							r.weights = true
							f(r)
						}
					}
				}
			}
		}
	}
}

// everyHead calls f for requests of what rotates heads.
func everyHead(f func(request)) {
	for _, op := range headOps {
		for x := kernels.Float16; x <= kernels.Float32; x++ {
			for _, layout := range []policy.Layout{policy.Aligned, policy.MixedOffsets} {
				for _, m := range []int64{1, 1000, 8192 * 40 * 16, 1 << 30} {
					for _, n := range []int64{1, 40, 128, 512} {
						if op == kernels.Rotate {
							f(request{op: op, x: x, layout: layout, m: m, n: n})
							continue
						}
						for _, heads := range [][2]int64{{1, 0}, {32, 8}, {7, 3}, {1 << 16, 5}} {
							r := request{op: op, x: x, layout: layout, m: m, n: n, qHeads: heads[0], kHeads: heads[1]}
							f(r)
							if op == kernels.QKNormRotateBackward {
								r.dw = true
								f(r)
								r.m = 0
								f(r)
							}
						}
					}
				}
			}
		}
	}
}

// everyNorm calls f for all operands that a norm's request can have.
func everyNorm(r request, f func(request)) {
	r.layout = min(r.layout, policy.SameOffset) * policy.MixedOffsets // there is no other layout
	if r.op == kernels.NormForward {
		for _, r.norm.second = range []int8{0, 2, 4} {
			f(r)
		}
		return
	}
	for _, r.norm.second = range []int8{2, 4} {
		for _, r.norm.sums = range []int8{0, 2} {
			for _, r.norm.third = range []bool{false, true} {
				for _, r.norm.bulk = range []bool{false, true} {
					r.norm.compact = r.norm.bulk && r.m != 16
					f(r)
				}
			}
		}
	}
	if r.m%8 == 0 {
		r.norm = normOperands{second: int8(r.x.Size()), sums: 2, compact: true, bulk: true, heads: r.m / 4}
		if r.m > 1000 {
			r.norm.heads = 8
		}
		f(r)
	}
}

// everyAlignedNorm calls f for all operands that the norms of cuda/aligned_norm.cuh can have.
func everyAlignedNorm(r request, f func(request)) {
	switch r.op {
	case kernels.LayerNormForward:
		f(r)
		return
	case kernels.RMSNormResidualForward:
		r.norm.second = int8(r.x.Size())
		f(r)
		return
	}
	for _, sums := range []int8{1, 2} {
		for _, compact := range []bool{false, true} {
			r.norm = normOperands{second: int8(r.x.Size()), sums: sums, compact: compact, bulk: true, heads: 1}
			r.norm.third = r.op == kernels.RMSNormResidualBackward
			f(r)
		}
	}
}

// TestPlansCoverTheirRows checks what a wrong plan would read or write out of bounds, or miss.
func TestPlansCoverTheirRows(t *testing.T) {
	for name, f := range testDevices {
		everyRequest(func(r request) {
			p, err := makePlan(f, r)
			what := lazy(func() string { return fmt.Sprintf("%s %+v", name, r) })
			if err != nil {
				// Only a grid that cannot be: more work than 2^31 CTAs take.
				require.Greater(t, r.m*max(r.n, r.qHeads+r.kHeads), int64(1)<<40, what)
				return
			}
			requireCovered(t, f, r, p, what)
		})
	}
}

// lazy is a message that is made if a check fails: formatting millions of requests takes longer than planning
// them.
type lazy func() string

func (l lazy) String() string { return l() }

// quick hides Helper, which testify calls in each check and which walks the stack: half of the time of these
// tests.
type quick struct{ require.TestingT }

func requireCovered(test *testing.T, f *driver.Facts, r request, p *plan, what lazy) {
	t := quick{test}
	require.NotEmpty(t, p.launches, what)
	require.NotEmpty(t, p.why, what)
	elements := 16 / r.x.Size()
	vectors := ceil(r.n, elements)
	unaligned := r.layout != policy.Aligned
	if unaligned {
		vectors = ceil(r.n+elements-1, elements)
	}
	if p.chunk < wholeRow {
		require.GreaterOrEqual(t, p.chunk*int64(p.splits), vectors, what)
		require.Less(t, p.chunk*int64(p.splits)-p.chunk, vectors, "%s: an empty chunk", what)
	}
	require.LessOrEqual(t, p.chunk*elements, int64(1)<<30,
		"%s: elements of a chunk are counted in 32 bits", what)
	for i, l := range p.launches {
		v, g := l.variant, l.geometry
		require.Equal(t, i > 0 && f.Major >= 9 && !g.Cooperative, g.Dependent, what)
		require.Equal(t, v.Shape == kernels.GridCooperative, g.Cooperative, what)
		if v.Op == kernels.Denominator || v.Op == kernels.SoftmaxClear || v.Op == kernels.RMSNormClear {
			require.Zero(t, i, "%s: it is read by the next launch", what)
		}
		if v.Shape != kernels.Finish {
			if general, ok := generalOps[r.op]; !ok || v.Op != general {
				require.Equal(t, r.op, v.Op, what)
			}
			anyRows := v.Op == kernels.NormBackward && v.Shape == kernels.Columns
			readsNoRow := v.Shape == kernels.Apply && newQuery(f, r).onlyLosses()
			require.Equal(t, unaligned && !readsNoRow || anyRows, v.Unaligned, what)
		}
		require.Equal(t, r.x, v.Family.DType(), what)
		require.Equal(t, v.Cluster, g.Cluster > 1 || v.Cluster && g.Cluster == 1, what)
		require.Zero(t, g.Grid%g.Cluster, what)
		if g.Cluster > 1 {
			require.LessOrEqual(t, int64(g.Cluster), newQuery(f, r).maxCluster, what)
		}
		ctas := int64(g.Grid)
		require.LessOrEqual(t, int(g.Threads), v.Threads, what)
		holds := v.Capacity() // vectors of a row in a CTA
		if int(g.Threads) < v.Threads {
			require.Zero(t, g.Threads%32, what)
			holds = int64(g.Threads) * int64(v.Vectors)
			idle := (holds - 32*int64(v.Vectors)) * int64(g.Cluster)
			require.Less(t, idle, vectors, "%s: a warp less in each CTA would do", what)
		}
		switch v.Shape {
		case kernels.InRegisters, kernels.Staged:
			require.NotEqual(t, policy.MixedTypes, r.layout, what)
			if v.Shape == kernels.Staged {
				require.EqualValues(t, holds*16, g.Shared, what)
				require.LessOrEqual(t, int(g.Shared)+4<<10, f.SharedPerBlock, what)
				require.LessOrEqual(t, r.layout, policy.SameOffset, what)
			}
			require.GreaterOrEqual(t, holds*int64(g.Cluster), vectors, what)
			require.GreaterOrEqual(t, ctas/int64(g.Cluster)*v.RowsPerCTA(), r.m, what)
			require.Zero(t, int64(p.prefetch)%v.RowsPerCTA(), "%s: no CTA's rows begin there", what)
			if bytes := holds * 16 * v.RowsPerCTA(); p.prefetch > 0 { // the instruction has 16 bits for vectors
				require.Less(t, bytes+2*16, int64(1<<20), what)
			}
		case kernels.Loop:
			require.GreaterOrEqual(t, v.Capacity(), vectors, what)
			require.LessOrEqual(t, ctas, ceil(r.m, v.RowsPerCTA()), what)
		case kernels.Partial:
			require.Equal(t, r.m*int64(p.splits), ctas, what)
		case kernels.Elementwise:
			if slices.Contains(headOps, r.op) {
				requireHeadsCovered(test, r, p, v, ctas, what)
				continue
			}
			threads := int64(p.rowThreads)
			require.Positive(t, threads, what)
			require.LessOrEqual(t, threads, int64(v.Threads), what)
			rows := int64(p.rowsPerCTA)
			require.LessOrEqual(t, rows*threads, int64(v.Threads), what)
			require.EqualValues(t, ceil(r.m, rows)*int64(p.splits), p.parts, what)
			if ctas != int64(p.parts) { // they take turns
				require.True(t, r.onePass, what)
				require.Less(t, ctas, int64(p.parts), what)
				require.Zero(t, p.prefetch, what)
			}
			require.GreaterOrEqual(t, int64(p.splits)*p.chunk, vectors, what)
			if p.prefetch > 0 { // either rows or chunks
				require.True(t, rows == 1 || p.splits == 1, what)
				require.Less(t, min(p.chunk, vectors)*16*rows+2*16, int64(1<<20), what)
			}
		case kernels.Apply:
			if r.onlyLosses() {
				require.Equal(t, r.m, ctas, what)
			} else {
				require.Equal(t, r.m*int64(p.splits), ctas, what)
			}
		case kernels.GridSharedMemory:
			require.Equal(t, r.m*int64(p.splits), ctas, what)
			require.LessOrEqual(t, ctas, 2*int64(f.SMs), "%s: all of them run at once", what)
			require.False(t, unaligned || r.BatchInvariant, what)
			require.GreaterOrEqual(t, f.Major, 9, what)
			require.Greater(t, p.splits, int32(1), what)
			require.Positive(t, p.depth, what)
			require.LessOrEqual(t, p.depth, int32(16), what)
			tile := int64(r.op.Inputs()) * v.Capacity() * 16
			require.Equal(t, int64(p.depth)*tile, int64(g.Shared), what)
			require.Less(t, int64(p.depth-1)*v.Capacity(), p.chunk, "%s: a tile that is none", what)
			require.LessOrEqual(t, 2*(int(g.Shared)+2<<10), f.SharedPerSM+1<<10, what)
			cleared := p.launches[i-1]
			require.GreaterOrEqual(t, int64(cleared.geometry.Grid)*int64(cleared.variant.Threads), ctas, what)
			slots := uint64(cleared.geometry.Grid) * uint64(cleared.variant.Threads)
			require.GreaterOrEqual(t, p.scratch.size-p.scratch.partial, 16*slots, what)
		case kernels.Ring, kernels.Lanes:
			require.GreaterOrEqual(t, holds*int64(g.Cluster), vectors, what)
			parts, alone := ctas/int64(g.Cluster), r.m
			if unaligned && v.Shape == kernels.Lanes {
				require.Zero(t, ctas%elements, "%s: rows of a CTA with several offsets", what)
				require.Equal(t, policy.SameOffset, r.layout, what)
				alone = max(r.m, elements)
			}
			require.LessOrEqual(t, parts, alone, what)
			if unaligned && v.Shape == kernels.Ring {
				parts += elements - 1
			}
			if r.dw {
				require.Equal(t, int64(p.partials), parts, what)
				require.NotEqual(t, policy.MixedTypes, r.layout, what)
			}
			if v.Shape == kernels.Ring {
				require.GreaterOrEqual(t, f.Major, 9, what)
				require.LessOrEqual(t, int(g.Shared)+4<<10, f.SharedPerBlock, what)
				require.GreaterOrEqual(t, p.stages, int32(2), what)
				slice := holds
				if v.Unaligned {
					slice++
				}
				row := r.inputs() * slice * 16
				if isNormBackward(r.op) {
					require.True(t, r.norm.bulk, what)
					require.True(t, r.norm.compact || r.heads() > 1 || v.RowsPerCTA() == 1, what)
					require.Equal(t, int64(p.partials), parts, what)
					require.Zero(t, parts%r.heads(), "%s: heads without a CTA", what)
					row += slice * elements * (int64(r.norm.second) - r.x.Size())
				}
				require.Equal(t, int64(p.stages)*v.RowsPerCTA()*row, int64(g.Shared), what)
			}
		case kernels.GridCooperative:
			members, rowsPerStep := int64(f.SMs), int64(v.RowsPerStep)
			require.Equal(t, members*rowsPerStep, int64(p.splits), what)
			require.GreaterOrEqual(t, v.Capacity()*members, vectors, what)
			require.GreaterOrEqual(t, vectors, members, "%s: a CTA without columns", what)
			require.Equal(t, r.dw, p.partials == int32(v.ComputeGroups), what)
			require.Equal(t, members, ctas, what)
			require.Equal(t, f.SMs, int(g.Grid), "%s: all must be resident", what)
			require.LessOrEqual(t, int(g.Shared)+12<<10, f.SharedPerBlock, what)
			require.GreaterOrEqual(t, p.stages-p.depth, int32(2), what)
			require.GreaterOrEqual(t, p.depth, int32(1), what)
			require.GreaterOrEqual(t, int32(kernels.GridSteps), 2*p.depth+2, what)
			slice := int64(r.op.Inputs()) * ceil(vectors, members) * 16
			require.Equal(t, int64(p.stages)*rowsPerStep*slice, int64(g.Shared), what)
			end := p.scratch.size
			if r.dw {
				end = p.scratch.dwPartial
			}
			require.LessOrEqual(t, uint64(p.splits)*kernels.GridSteps*16, end-p.scratch.partial, what)
		case kernels.Columns:
			tile := kernels.ChunkThreads * elements
			require.Equal(t, ceil(r.n, tile)*int64(p.partials), ctas, what)
			require.Zero(t, int64(p.partials)%r.heads(), "%s: heads without a CTA", what)
			require.LessOrEqual(t, int64(p.partials), r.m, what)
		case kernels.Finish:
			switch v.Op {
			case kernels.WeightGradient:
				require.Equal(t, ceil(r.n, v.RowsPerCTA()), ctas, what)
			case kernels.NormGradient:
				require.Equal(t, ceil(r.n*int64(r.norm.sums)*r.heads(), v.RowsPerCTA()), ctas, what)
			}
		}
	}
	if sums := int64(r.norm.sums); r.dw || sums > 0 {
		bytes := int64(p.partials) * r.n * max(sums, 1) * r.accumulatorBytes()
		require.GreaterOrEqual(t, p.scratch.size, uint64(bytes), what)
	}
	if r.total {
		last := p.launches[len(p.launches)-1]
		require.True(t, p.singleCTATotal || last.variant.Op == kernels.Total, what)
		if p.singleCTATotal {
			require.EqualValues(t, 1, last.geometry.Grid, what)
			require.LessOrEqual(t, r.m, int64(16), "%s: kMaxRowsPerCTA in cuda/cross_entropy.cuh", what)
		}
	}
}

func TestScratchDoesNotOverlap(t *testing.T) {
	p, err := makePlan(testDevices["h100"], request{
		op: kernels.CrossEntropyForward, x: kernels.BFloat16, m: 3, n: 1 << 22, total: true,
	})
	require.NoError(t, err)
	require.Greater(t, p.splits, int32(1))
	s := p.scratch
	assert.Zero(t, s.partial)
	assert.GreaterOrEqual(t, s.logits, uint64(p.splits)*3*8)
	assert.GreaterOrEqual(t, s.rowLosses, s.logits+3*4)
	assert.GreaterOrEqual(t, s.size, s.rowLosses+3*8)
	for _, offset := range []uint64{s.logits, s.rowLosses} {
		assert.Zero(t, offset%256)
	}
}

func TestPlanLookAhead(t *testing.T) {
	for _, c := range []struct {
		request
		distance, from int32 // rows of 3 MiB rowsPerStep, 2 of two inputs; CTAs or clusters
	}{
		{request{op: kernels.SoftmaxForward, x: kernels.BFloat16, m: 32768, n: 4096}, 384, 132*16 - 384},
		{request{op: kernels.SoftmaxBackward, x: kernels.BFloat16, m: 32768, n: 2048}, 256, 132*12 - 256},
		{request{op: kernels.CrossEntropyForwardDX, x: kernels.BFloat16, m: 32768, n: 512}, 3072, 132*12 - 384},
		{request{op: kernels.CrossEntropyForwardDX, x: kernels.BFloat16, m: 32768, n: 256}, 6144, 132*12 - 384},
		{request{op: kernels.RMSNormForward, x: kernels.Float32, m: 8192, n: 262144}, 3, 132*2/16 - 3},
		{request{op: kernels.SoftmaxForward, x: kernels.BFloat16, layout: policy.MixedOffsets, m: 4099, n: 50257},
			31, 132*5/7 - 31},
		{request{op: kernels.SoftmaxBackward, x: kernels.BFloat16, m: 32768, n: 4096}, 0, 0},    // long
		{request{op: kernels.SoftmaxForward, x: kernels.BFloat16, m: 32768, n: 256}, 0, 0},      // one wave
		{request{op: kernels.CrossEntropyForward, x: kernels.BFloat16, m: 32768, n: 512}, 0, 0}, // only reads
		{request{op: kernels.RMSNormForward, x: kernels.BFloat16, m: 32768, n: 512}, 0, 0},      // a loop
	} {
		p, err := makePlan(testDevices["h100"], c.request)
		require.NoError(t, err)
		assert.Equal(t, []int32{c.distance, c.from}, []int32{p.prefetch, p.prefetchFrom}, "%+v", c.request)
	}
}

func TestPlanRegimes(t *testing.T) {
	cases := []struct {
		device string
		r      request
		shapes string // of the kernels
	}{
		{"h100", request{op: kernels.SoftmaxForward, m: 32768, n: 256}, "rows"},
		{"h100", request{op: kernels.SoftmaxForward, m: 32768, n: 65536}, "rows"},
		{"h100", request{op: kernels.SoftmaxForward, m: 1, n: 1 << 25}, "finish + grid_shared_memory"},
		{"h100", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 20}, "partial + apply"},
		{"h100", request{op: kernels.RMSNormForward, m: 4, n: 1 << 20}, "finish + grid_shared_memory"},
		{"h100", request{op: kernels.RMSNormForward, m: 4, n: 1 << 22, layout: policy.MixedOffsets},
			"partial + apply"},
		{"h100", request{op: kernels.SoftmaxBackward, m: 16, n: 1 << 23}, "partial + apply"},
		{"h100", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 22, Choice: Choice{Algorithm: Arbitrary}},
			"partial + apply"},
		{"h100", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 22, Choice: Choice{Algorithm: SplitK}},
			"finish + grid_shared_memory"},
		{"h100", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 22, Choice: Choice{BatchInvariant: true}},
			"partial + apply"},
		{"mig", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 20}, "finish + grid_shared_memory"},
		{"sm120", request{op: kernels.SoftmaxForward, m: 4, n: 1 << 22}, "partial + apply"},
		{"ptx80", request{op: kernels.SoftmaxForward, m: 64, n: 262144}, "partial + apply"},
		// Clusters of 8 at most, and 99 KiB of shared memory.
		{"sm120", request{op: kernels.SoftmaxForward, m: 4000, n: 300000}, "finish + grid_cooperative"},
		{"sm120", request{op: kernels.RMSNormForward, m: 4000, n: 300000}, "finish + grid_cooperative"},
		{"sm120", request{op: kernels.CrossEntropyForwardDX, m: 4000, n: 300000}, "rows"},
		{"sm120", request{op: kernels.RMSNormForward, m: 32768, n: 32768}, "staged"},
		{"h100", request{op: kernels.CrossEntropyForwardDX, m: 4000, n: 1 << 20}, "rows"},
		{"h100", request{op: kernels.CrossEntropyForward, m: 8192, n: 128256}, "rows"},
		{"h100", request{op: kernels.CrossEntropyForward, m: 8192, n: 262144}, "partial"},
		{"h100", request{op: kernels.CrossEntropyForward, m: 4, n: 256, total: true}, "rows"},
		{"h100", request{op: kernels.CrossEntropyForward, m: 32768, n: 256, total: true}, "rows + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 32768, n: 256, dw: true}, "lanes + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 32768, n: 4096, dw: true}, "ring + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 32768, n: 4097, layout: policy.MixedOffsets, dw: true},
			"ring + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 32768, n: 257, layout: policy.SameOffset, dw: true},
			"lanes + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 32768, n: 4097, layout: policy.MixedTypes, dw: true},
			"partial + columns + finish"},
		{"ptx80", request{op: kernels.RMSNormBackward, m: 32768, n: 4096, dw: true}, "partial + columns + finish"},
		{"h100", request{op: kernels.RMSNormBackward, m: 0, n: 4096, dw: true}, "finish"},
		{"h100", request{op: kernels.CrossEntropyForward, m: 0, n: 16, total: true}, "finish"},
	}
	for _, c := range cases {
		c.r.x = kernels.BFloat16
		p, err := makePlan(testDevices[c.device], c.r)
		require.NoError(t, err)
		var shapes []string
		for _, l := range p.launches {
			shapes = append(shapes, l.variant.Shape.String())
		}
		assert.Equal(t, c.shapes, strings.Join(shapes, " + "), "%s %+v: %s", c.device, c.r, p)
	}
}

// requireHeadsCovered checks a launch of what rotates heads.
func requireHeadsCovered(test *testing.T, r request, p *plan, v *kernels.Variant, ctas int64, what lazy) {
	t := quick{test}
	require.Zero(t, p.prefetch, what)
	threads := ctas * int64(v.Threads)
	switch r.op {
	case kernels.Rotate:
		require.GreaterOrEqual(t, int64(p.groups)*int64(v.Vectors), r.n, what)
		require.GreaterOrEqual(t, threads, r.m*int64(p.groups), what)
	case kernels.QKNormRotate, kernels.QKNormRotateBackward:
		groups, heads := int64(p.groups), int64(p.headsPerThread)
		require.GreaterOrEqual(t, int64(p.qParts)*heads, r.qHeads, what)
		require.GreaterOrEqual(t, (groups-int64(p.qParts))*heads, r.kHeads, what)
		require.EqualValues(t, ctas, p.partials, what)
		if r.op == kernels.QKNormRotate {
			require.LessOrEqual(t, heads, int64(v.Vectors), what)
			require.GreaterOrEqual(t, threads, r.m*groups, what)
		} else { // its CTAs take turns, and a thread keeps its part
			require.Less(t, threads-int64(v.Threads), r.m*groups, what)
			require.GreaterOrEqual(t, threads, min(r.m, lanesPerWarp)*groups, what)
		}
	}
}

// TestEveryVariantIsUsed keeps kernels that no plan launches out of the library.
func TestEveryVariantIsUsed(t *testing.T) {
	used := map[string]bool{}
	for _, f := range testDevices {
		enumerate(func(r request) {
			// The other algorithms have no kernels of their own.
			for _, r.Algorithm = range []Algorithm{Auto, Warp, Medium, Extreme} {
				if r.Algorithm != Auto && !choosable(r.op) {
					continue
				}
				if p, served, err := attempt(f, r); served && err == nil {
					for _, l := range p.launches {
						used[l.variant.Symbol] = true
					}
				}
			}
		})
	}
	for _, v := range kernels.Variants {
		assert.True(t, used[v.Symbol], "%s is never launched", v.Symbol)
	}
}

// TestRequestsOfOneShapeKeepTheirPlans: a model makes them in turns.
func TestRequestsOfOneShapeKeepTheirPlans(t *testing.T) {
	r := request{x: kernels.BFloat16, m: 4096, n: 4096}
	seen := map[uint64]string{}
	add := func(r request) {
		slot, what := r.hash()%uint64(len(planCache{})), fmt.Sprintf("%+v", r)
		assert.Empty(t, seen[slot], what)
		seen[slot] = what
	}
	for _, r.op = range []kernels.Op{kernels.SoftmaxForward, kernels.RMSNormForward, kernels.RMSNormBackward} {
		add(r)
	}
	r.op, r.wideWeights = kernels.RMSNormForward, true
	add(r)
	r.op, r.wideWeights, r.dw = kernels.RMSNormBackward, false, true
	add(r)
	r.op, r.dw = kernels.RMSNormResidualForward, false
	add(r)
	r.op = kernels.NormForward
	for _, r.norm.second = range []int8{0, 2} {
		add(r)
	}
	r.op = kernels.NormBackward
	r.norm.heads = 32
	add(r)
	r.norm.heads = 0
	for _, r.norm.third = range []bool{false, true} {
		for _, r.norm.sums = range []int8{0, 1, 2} {
			add(r)
		}
	}
}

func TestPlansAreRemembered(t *testing.T) {
	f := testDevices["h100"]
	r := request{op: kernels.SoftmaxForward, x: kernels.BFloat16, m: 7, n: 4096}
	a, err := planFor(3, f, r)
	require.NoError(t, err)
	b, err := planFor(3, f, r)
	require.NoError(t, err)
	assert.Same(t, a, b)
	r.m++
	c, err := planFor(3, f, r)
	require.NoError(t, err)
	assert.NotSame(t, a, c)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = planFor(3, f, r) }))
}
