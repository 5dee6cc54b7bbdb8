package ops

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

var choosableOps = []kernels.Op{
	kernels.SoftmaxForward, kernels.SoftmaxBackward, kernels.RMSNormForward, kernels.RMSNormBackward,
}

// shapesOf returns the shapes of a plan's kernels that process the rows.
func shapesOf(p *plan) (shapes []kernels.Shape) {
	for _, l := range p.launches {
		if l.variant.Shape != kernels.Finish {
			shapes = append(shapes, l.variant.Shape)
		}
	}
	return shapes
}

// TestAlgorithmsAreWhatTheySay tries every algorithm on every shape. The plan must match the algorithm's
// description, or the error must name a limit.
func TestAlgorithmsAreWhatTheySay(t *testing.T) {
	served := map[string]bool{}
	for name, f := range testDevices {
		for _, op := range choosableOps {
			for _, n := range []int64{
				1, 3, 64, 500, 1024, 4096, 4097, 8192, 16384, 50257, 65536, 114688, 1 << 20, 1 << 25,
			} {
				for _, m := range []int64{1, 4, 128, 2048, 1 << 20} {
					for _, x := range []kernels.DType{kernels.BFloat16, kernels.Float32} {
						for a := Warp; a <= SplitK; a++ {
							for _, dw := range []bool{false, op == kernels.RMSNormBackward} {
								r := request{op: op, x: x, m: m, n: n, dw: dw, Choice: Choice{Algorithm: a}}
								if n*x.Size()%16 != 0 {
									r.layout = policy.MixedOffsets
								}
								what := lazy(func() string { return fmt.Sprintf("%s %+v", name, r) })
								p, err := makePlan(f, r)
								if err != nil {
									requireLimit(t, r, err, what)
									continue
								}
								requireCovered(t, f, r, p, what)
								requireTrue(t, a, p, what)
								served[fmt.Sprint(op, dw, a)] = true
							}
						}
					}
				}
			}
		}
	}
	for _, op := range choosableOps {
		for a := Warp; a <= SplitK; a++ {
			assert.True(t, served[fmt.Sprint(op, false, a)], "%v %v", op, a)
		}
	}
}

// requireLimit checks that an error names a limit of the algorithm, or of the grid's size.
func requireLimit(t *testing.T, r request, err error, what lazy) {
	a := r.Algorithm
	limit := fmt.Sprintf(`^%v: algorithm "%v" (holds|splits|takes|needs) .*; use .*"auto"$`, r.op, a)
	assert.Regexp(t, limit+"|thread blocks; pass fewer rows", err.Error(), what)
	splits := strings.Contains(err.Error(), " splits rows")
	assert.Equal(t, a == SplitK && r.layout != policy.MixedTypes, splits, what)
}

// requireTrue compares a plan with the algorithm's description.
func requireTrue(t *testing.T, a Algorithm, p *plan, what lazy) {
	first := p.launches[0]
	v, cluster := first.variant, first.geometry.Cluster
	streams := v.Shape == kernels.Partial
	require.Equal(t, a, p.taken, what)
	require.Contains(t, p.String(), a.String()+": ", what)
	switch a {
	case Warp:
		require.LessOrEqual(t, v.RowThreads, 32, what)
	case Block:
		require.LessOrEqual(t, first.geometry.Threads, uint32(256), what)
		require.EqualValues(t, 1, v.RowsPerCTA(), what)
		require.EqualValues(t, 1, cluster, what)
		require.EqualValues(t, 1, p.splits, what)
	case Register:
		require.False(t, streams || v.Shape == kernels.Ring || v.Shape == kernels.Staged, what)
		require.EqualValues(t, 1, cluster, what)
	case Medium:
		require.False(t, streams, what)
		require.EqualValues(t, 1, cluster, what)
		require.GreaterOrEqual(t, v.Threads, 128, what)
	case Extreme:
		require.False(t, streams, what)
		require.True(t, v.Cluster || p.launches[1].variant.Shape == kernels.GridCooperative, what)
	case Cluster:
		require.False(t, streams, what)
		require.Greater(t, cluster, uint32(1), what)
	case Arbitrary:
		require.True(t, streams, what)
	case SplitK:
		require.True(t, streams || p.launches[1].variant.Shape == kernels.GridSharedMemory, what)
		require.Greater(t, p.splits, int32(1), what)
	}
}

func TestAlgorithmChoices(t *testing.T) {
	const (
		softmax, softmaxBack = kernels.SoftmaxForward, kernels.SoftmaxBackward
		norm, normBack       = kernels.RMSNormForward, kernels.RMSNormBackward
	)
	cases := []struct {
		device string
		r      request
		a      Algorithm
		want   string // the first kernel, or the error
	}{
		{"h100", request{op: softmax, m: 2048, n: 1024}, Warp, "softmax_forward_rows_bfloat16_32x4"},
		{"h100", request{op: softmax, m: 2048, n: 4096}, Warp,
			`softmax_forward: algorithm "warp" holds rows of up to 2048 bfloat16 elements on this device, ` +
				`these have 4096; use "block", "register", "medium", "extreme", "cluster", "arbitrary" or ` +
				`"auto"`},
		{"h100", request{op: norm, m: 32768, n: 256}, Warp, "rmsnorm_forward_loop_bfloat16_8x4"},
		{"h100", request{op: norm, m: 4, n: 256}, Warp, "rmsnorm_forward_rows_bfloat16_8x4"},
		{"h100", request{op: normBack, dw: true, m: 2048, n: 256}, Register,
			"rmsnorm_backward_lanes_bfloat16_16x2"},
		{"h100", request{op: softmax, m: 2048, n: 1024}, Block, "softmax_forward_rows_bfloat16_256x4"},
		{"h100", request{op: softmax, m: 2048, n: 65536}, Block, "softmax_forward_partial_bfloat16_256x4"},
		{"h100", request{op: normBack, dw: true, m: 2048, n: 4096}, Block,
			"rmsnorm_backward_ring_bfloat16_384x2"},
		{"h100", request{op: normBack, dw: true, m: 2048, n: 8192}, Block,
			"rmsnorm_backward_partial_bfloat16_256x2"},
		{"h100", request{op: softmax, m: 2048, n: 4096}, Register, "softmax_forward_rows_bfloat16_512x2"},
		{"h100", request{op: softmax, x: kernels.Float32, m: 1, n: 65536}, Register,
			`softmax_forward: algorithm "register" holds rows of up to 32768 float32 elements on this ` +
				`device, these have 65536; use "block", "extreme", "cluster", "arbitrary", "splitk" or ` +
				`"auto"`},
		{"h100", request{op: softmax, m: 4, n: 1024}, Medium, "softmax_forward_rows_bfloat16_1024x8"},
		{"h100", request{op: softmaxBack, m: 4, n: 1024}, Medium, "softmax_backward_rows_bfloat16_1024x4"},
		{"h100", request{op: norm, m: 4, n: 16384}, Medium, "rmsnorm_forward_staged_bfloat16_512x8"},
		{"h100", request{op: norm, layout: policy.MixedOffsets, m: 4, n: 1001}, Medium,
			`rmsnorm_forward: algorithm "medium" takes rows that are not whole, aligned 16-byte vectors ` +
				`only where all operands have the same offset; use "warp", "block", "register", ` +
				`"extreme", "cluster", "arbitrary" or "auto"`},
		{"h100", request{op: softmax, m: 4, n: 114688}, Extreme,
			"softmax_forward_rows_bfloat16_512x8_cluster"},
		{"h100", request{op: norm, m: 4, n: 114688}, Extreme,
			"rmsnorm_forward_staged_bfloat16_256x4_cluster"},
		{"h100", request{op: softmax, m: 128, n: 1024}, Cluster,
			"softmax_forward_rows_bfloat16_256x4_cluster"},
		{"a2", request{op: softmax, m: 4, n: 16384}, Cluster,
			`softmax_forward: algorithm "cluster" needs clusters of thread blocks that this device, of ` +
				`compute capability 8.6, does not have; use "block", "register", "medium", "arbitrary", ` +
				`"splitk" or "auto"`},
		{"h100", request{op: softmax, m: 128, n: 1024}, Arbitrary, "softmax_forward_partial_bfloat16_256x4"},
		{"h100", request{op: softmax, m: 1, n: 1 << 20}, SplitK, "softmax_forward_partial_bfloat16_256x4"},
		{"h100", request{op: softmax, m: 1, n: 1 << 25}, SplitK,
			"softmax_clear_finish_bfloat16_256x1_unaligned"},
		{"h100", request{op: softmax, m: 4, n: 8192}, SplitK,
			`softmax_forward: algorithm "splitk" splits rows of more than 8192 bfloat16 elements, these ` +
				`have 8192; use "block", "register", "medium", "extreme", "cluster", "arbitrary" or "auto"`},
		{"h100", request{op: normBack, layout: policy.MixedTypes, m: 4, n: 1024}, Register,
			`rmsnorm_backward: algorithm "register" takes dout of x's dtype only; use "block", ` +
				`"arbitrary" or "auto"`},
	}
	for _, c := range cases {
		if c.r.x == kernels.Float16 {
			c.r.x = kernels.BFloat16
		}
		c.r.Algorithm = c.a
		p, err := makePlan(testDevices[c.device], c.r)
		if err != nil {
			assert.Equal(t, c.want, err.Error())
			continue
		}
		assert.Equal(t, c.want, p.launches[0].variant.Symbol, "%+v: %s", c.r, p)
	}
}

// With IfServed, an algorithm that cannot serve the rows is no error.
func TestPreferredAlgorithm(t *testing.T) {
	f := testDevices["h100"]
	r := request{op: kernels.RMSNormBackward, x: kernels.BFloat16, m: 2048, n: 4096, dw: true,
		Choice: Choice{Algorithm: Register, IfServed: true}}
	p, err := makePlan(f, r)
	require.NoError(t, err)
	assert.Contains(t, p.String(), "register cannot serve these rows: auto takes medium: ")
	r.n = 256
	p, err = makePlan(f, r)
	require.NoError(t, err)
	assert.Contains(t, p.String(), "register: ")

	r = request{op: kernels.SoftmaxForward, x: kernels.BFloat16, m: 64, n: math.MaxInt64, Choice: r.Choice}
	_, err = makePlan(f, r)
	require.Error(t, err, "no algorithm serves such rows")
}

// TestAutoPlansAreThoseOfAnAlgorithm: auto reports which algorithm it takes. A request for that one gets the
// same kernels.
func TestAutoPlansAreThoseOfAnAlgorithm(t *testing.T) {
	for name, f := range testDevices {
		everyRequest(func(r request) {
			if !choosable(r.op) || r.layout == policy.MixedTypes {
				return
			}
			p, err := makePlan(f, r)
			if err != nil {
				return
			}
			r.Algorithm = p.taken
			forced, err := makePlan(f, r)
			what := lazy(func() string { return fmt.Sprintf("%s %+v", name, r) })
			require.NoError(t, err, what)
			require.NotEqual(t, Auto, p.taken, what)
			require.Equal(t, shapesOf(p), shapesOf(forced), what)
		})
	}
}

// TestBatchInvariantPlans checks that the order in which a row is summed does not depend on the number of
// rows.
func TestBatchInvariantPlans(t *testing.T) {
	type order struct {
		variant *kernels.Variant
		cluster uint32
		chunk   int64
		splits  int32
	}
	rows := []int64{1, 2, 3, 4, 16, 17, 64, 128, 1000, 1024, 32768, 1 << 20}
	for name, f := range testDevices {
		everyRequest(func(r request) {
			if r.m != 1 { // the numbers of rows follow below
				return
			}
			for a := Auto; a <= SplitK && (a == Auto || choosable(r.op)); a++ {
				r.Choice = Choice{Algorithm: a, BatchInvariant: true}
				var first []order
				for i, m := range rows {
					r.m = m
					p, served, err := attempt(f, r)
					if err != nil {
						require.Greater(t, r.m*r.n, int64(1)<<40,
							"%s %+v: more CTAs than a grid has", name, r)
						continue
					}
					var orders []order
					if served {
						for _, l := range p.launches {
							if l.variant.Shape != kernels.Finish {
								orders = append(orders,
									order{l.variant, l.geometry.Cluster, p.chunk, p.splits})
							}
						}
						if i == 0 {
							requireCovered(t, f, r, p, func() string { return fmt.Sprintf("%s %+v", name, r) })
						}
					}
					if i == 0 {
						first = orders
					} else if !slices.Equal(first, orders) {
						require.Equal(t, first, orders, "%s %+v", name, r)
					}
				}
				r.m = 1
			}
		})
	}
}

func TestListOfAlgorithms(t *testing.T) {
	list, err := Algorithms("softmax_forward")
	require.NoError(t, err)
	limits := map[string]string{}
	for i, a := range list {
		assert.Equal(t, Algorithm(i).String(), a.Name)
		assert.NotEmpty(t, a.What)
		limits[a.Name] = a.Limits
	}
	const tile = "rows of up to 128 KiB, unaligned ones of up to 64 KiB, or 128 KiB where all operands " +
		"have the same offset"
	assert.Equal(t, map[string]string{
		"auto":      "rows of any length",
		"warp":      "rows of up to 4 KiB, unaligned ones of up to 2 KiB",
		"block":     "rows of up to 1 GiB",
		"register":  tile,
		"medium":    tile,
		"extreme":   "rows of up to 4 MiB, unaligned ones of up to 1 MiB, on compute capability 9.0 or newer",
		"cluster":   "rows of up to 1 MiB, on compute capability 9.0 or newer",
		"arbitrary": "rows of any length",
		"splitk":    "rows of more than 16 KiB",
	}, limits)
	list, err = Algorithms("rmsnorm_backward")
	require.NoError(t, err)
	assert.Equal(t, "rows of up to 1 KiB, unaligned ones where all operands have the same offset",
		list[Register].Limits)
	assert.Equal(t, "rows of up to 16 KiB, on compute capability 9.0 or newer", list[Medium].Limits)
	list, err = Algorithms("cross_entropy_forward")
	require.NoError(t, err)
	assert.Len(t, list, 1)
	_, err = Algorithms("softmax")
	assert.ErrorContains(t, err, `algorithms: op is "softmax", expected cross_entropy_forward`)
}
