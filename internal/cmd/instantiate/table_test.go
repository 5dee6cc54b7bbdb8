package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

func TestARowIsAKernelForEachType(t *testing.T) {
	variants, err := parse([]byte(`
# The table.
[rmsnorm_forward]
# A reason.
rows 64x4  aligned     10 16-bit  late-wide-weights 8x=9 12x=0
rows 512x8 same-offset  2 float32 cluster all-threads not=12x
[rmsnorm_backward]
lanes 8x2  unaligned    2 float32 stages=3
grid_cooperative 160x1x2 aligned 1 float16 min-stages=12
`))
	require.NoError(t, err)
	short := kernels.Variant{
		Symbol: "rmsnorm_forward_rows_float16_64x4", Op: kernels.RMSNormForward,
		Family:  kernels.FamilyOf(kernels.RMSNormForward, kernels.Float16),
		Threads: 128, RowThreads: 64, Vectors: 4, Resident: 10, LateWideWeights: true,
		Elsewhere: []kernels.Residency{{Major: 8, Resident: 9}, {Major: 12, Resident: 0}},
	}
	grid := kernels.Variant{
		Symbol: "rmsnorm_backward_grid_cooperative_float16_160x1x2", Op: kernels.RMSNormBackward,
		Shape: kernels.GridCooperative, Family: short.Family,
		Threads: 512, RowThreads: 160, Vectors: 1, RowsPerStep: 2, ComputeGroups: 2, MinStages: 12, Resident: 1,
	}
	bfloat16 := short
	bfloat16.Symbol, bfloat16.Family = "rmsnorm_forward_rows_bfloat16_64x4", short.Family+1
	assert.Equal(t, []kernels.Variant{short, grid, bfloat16, {
		Symbol: "rmsnorm_forward_rows_float32_512x8_same_offset_cluster", Op: kernels.RMSNormForward,
		Family: short.Family + 2, Threads: 512, RowThreads: 512, Vectors: 8, Resident: 2,
		Unaligned: true, SameOffset: true, Cluster: true, Without: 12,
	}, {
		Symbol: "rmsnorm_backward_lanes_float32_8x2_unaligned", Op: kernels.RMSNormBackward,
		Shape: kernels.Lanes, Family: short.Family + 2, Threads: 256, RowThreads: 8, Vectors: 2, Resident: 2,
		Unaligned: true, Stages: 3, Shared: 3 * 256 * (2*16*2 + 4),
	}}, variants)
}

func TestARowThatIsNoKernelIsRefused(t *testing.T) {
	const section = "[softmax_forward]\n"
	for text, want := range map[string]string{
		"rows 8x1 aligned 16 any":                       "line 1: a row before the first section",
		"[softmin]":                                     `line 1: there is no op "softmin"`,
		section + "columns 8x1":                         "line 2: \"columns 8x1\", expected shape, tile, layout",
		section + "row 8x1 aligned 16 any":              `line 2: there is no shape "row"`,
		section + "rows 8 aligned 16 any":               `line 2: tile "8", expected threads x vectors`,
		section + "rows 8x1x2 aligned 16 any":           `line 2: tile "8x1x2", expected threads x vectors`,
		section + "grid_cooperative 8x1 aligned 1 any":  `line 2: tile "8x1", expected threads x vectors`,
		section + "rows 8x1 mixed 16 any":               `line 2: layout "mixed", expected aligned`,
		section + "rows 8x1 aligned 0 any":              `line 2: "0" CTAs per SM`,
		section + "rows 512x4 aligned 5 any":            "line 2: 5 CTAs of 512 threads, expected at most 2048",
		section + "rows 8x1 aligned 16 int32":           `line 2: type "int32", expected any`,
		section + "rows 8x1 aligned 16 any fast":        `line 2: option "fast"`,
		section + "rows 8x1 aligned 16 any keeps-exp=2": `line 2: option "keeps-exp=2"`,
		section + "rows 8x1 aligned 16 any 12x=16":      "line 2: 12x=16, expected less than on sm_90, 16",
		section + "rows 8x1 aligned 16 any cluster only=8x": "line 2: cluster and only=8x: 8.x has no " +
			"clusters",
		section + "rows 8x1 aligned 16 any late-weights": "line 2: late-weights, which a kernel " +
			"softmax_forward_rows_float16 aligned does not ask about",
		section + "rows 8x1 aligned 16 any\nrows 8x1 aligned 12 float32": "line 3: there is a row for " +
			"softmax_forward_rows_float32_8x1 already",
		section + "rows 8x1 aligned 16 any keeps-exp keeps-exp": "line 2: keeps-exp stands twice",
		"[rmsnorm_backward]\nlanes 8x1 aligned 3 any":           "line 2: stages is missing",
		section + "grid_cooperative 512x2x1 aligned 1 any":      "line 2: min-stages is missing",
	} {
		_, err := parse([]byte(text))
		assert.ErrorContains(t, err, want, text)
	}
}
