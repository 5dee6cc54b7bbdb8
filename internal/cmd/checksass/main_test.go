package main

import (
	"testing"

	"github.com/gander-go/gander/kernels"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Lines of nvdisasm 13.2: a softmax kernel, then a kernel that spills.
const text = `	.target	sm_90

//--------------------- .text.softmax_forward_rows_bfloat16_8x1 --------------------------
	.section	.text.softmax_forward_rows_bfloat16_8x1,"ax",@progbits
	.align	128
        .global         softmax_forward_rows_bfloat16_8x1
softmax_forward_rows_bfloat16_8x1:
.text.softmax_forward_rows_bfloat16_8x1:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0190*/               @P0 BRA ` + "`(.L_x_3) ;" + `
        /*01a0*/              @!P1 LDG.E.EF.128 R4, desc[UR4][R26.64] ;
        /*01b0*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*01b8*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR4][R2.64] ;
        /*01c0*/                   LDG.E R7, desc[UR4][R2.64] ;
        /*01d0*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0690*/                   STG.E.EF.128 desc[UR4][R26.64], R4 ;
.L_x_3:
        /*06a0*/                   EXIT ;
	.section	.nv.shared.softmax_forward_rows_bfloat16_8x1,"aw",@nobits
	.section	.text.spiller,"ax",@progbits
        /*0010*/                   STL [R1+0x4], R5 ;
        /*0020*/              @!P0 LDL.LU R5, [R1+0x4] ;
        /*0028*/                   ACQBULK ;
        /*0030*/                   UBLKCP.S.G [UR8], [UR12], UR5 ;
        /*0040*/             @!UP1 STG.E.EF.U16 desc[UR4][R26.64], R4 ;
`

func TestParse(t *testing.T) {
	assert.Equal(t, map[string]moves{
		"softmax_forward_rows_bfloat16_8x1": {loads: 3, stores: 1},
		"spiller":                           {copies: 1, narrow: 1, waits: 1, local: 2},
	}, parse(text))
}

func TestAgainst(t *testing.T) {
	good := moves{loads: 4, stores: 2, copies: 1, waits: 1}
	assert.Empty(t, good.against(good, false))
	assert.Empty(t, moves{narrow: 16}.against(moves{}, true))
	for _, problem := range []struct {
		got  moves
		says string
	}{
		{moves{loads: 3, stores: 2, copies: 1, waits: 1},
			"has 3 loads LDG.E.128 or LDGSTS.E.128 of rows, expected 4 or more"},
		{moves{loads: 4, stores: 1, copies: 1, waits: 1}, "has 1 stores STG.E.EF.128 of rows, expected 2 or more"},
		{moves{loads: 4, stores: 2, copies: 1},
			"has 0 waits ACQBULK for the launch before, expected 1 or more"},
		{moves{loads: 4, stores: 2, waits: 1}, "has 0 bulk copies UBLKCP of rows, expected 1 or more"},
		{moves{loads: 4, stores: 2, copies: 1, waits: 1, narrow: 8}, "writes rows in less than 16 bytes, 8 times"},
		{moves{loads: 4, stores: 2, copies: 1, waits: 1, local: 1},
			"has 1 instructions LDL or STL: it spills or has arrays on the stack"},
	} {
		assert.Equal(t, []string{problem.says}, problem.got.against(good, false))
	}
}

func TestExpected(t *testing.T) {
	want := map[string]moves{
		"cross_entropy_backward_elementwise_float32_256x4":   {loads: 4, stores: 4},
		"softmax_backward_rows_float32_128x2":                {loads: 4, stores: 2},
		"softmax_backward_rows_float32_128x2_unaligned":      {loads: 4, stores: 2},
		"softmax_backward_partial_float16_256x2":             {loads: 4},
		"rmsnorm_backward_ring_bfloat16_512x2_cluster":       {copies: 2, stores: 2},
		"rmsnorm_backward_grid_cooperative_bfloat16_512x2x1": {copies: 2, stores: 2},
		"rmsnorm_backward_columns_float32_256x1":             {loads: 2, stores: 1, waits: 1},
		"rmsnorm_backward_columns_float32_256x1_unaligned":   {waits: 1},
		"weight_gradient_finish_float16_32x1_unaligned":      {waits: 1},
		"denominator_finish_float32_1024x1_unaligned":        {},
		"softmax_backward_grid_shared_memory_float32_256x2":  {copies: 2, loads: 4, stores: 2},
		"cross_entropy_forward_rows_float32_512x4":           {loads: 4},
		"cross_entropy_forward_apply_float32_256x4":          {waits: 1},
		"cross_entropy_forward_dx_apply_float32_256x4":       {loads: 4, stores: 4, waits: 1},
	}
	found := 0
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		if least, ok := want[v.Symbol]; ok {
			found++
			assert.Equal(t, least, expected(v), v.Symbol)
		}
	}
	assert.Equal(t, len(want), found)
}

func TestAKernelThatIsMissingIsReported(t *testing.T) {
	v := &kernels.Variants[0]
	require.ErrorContains(t, review(v.Family, map[string]moves{}), v.Symbol+" is not in the image")
	for i := range kernels.Variants {
		if v := &kernels.Variants[i]; v.NoClusters {
			require.NotContains(t, review(v.Family, map[string]moves{}).Error(), v.Symbol+" ")
			err := review(v.Family, map[string]moves{v.Symbol: expected(v)})
			require.ErrorContains(t, err, v.Symbol+" is in the image, but no plan for sm_90 launches it")
		}
	}
}
