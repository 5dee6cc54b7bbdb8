package kernels

import (
	"regexp"
	"strconv"
	"strings"
)

// elsewhere lists the variants that spill registers on other architectures than sm_90 when ptxas has to
// leave room for Resident CTAs per SM, with the largest number at which they do not. With 0, only the
// size of a CTA limits its registers, which makes ptxas choose differently. Found with nvcc 13.0.
// ./build.sh wheel compiles for all of these architectures and refuses spills.
var elsewhere = []struct {
	major    int // of the compute capability
	variants *regexp.Regexp
	resident int
}{
	{8, symbols(`rmsnorm_forward_rows_\w+_(8|16|32|64)x4`), 9},
	{8, symbols(`cross_entropy_forward_partial_\w+_256x8_same_offset`), 3},
	{8, symbols(`cross_entropy_forward_dx_rows_b?float16_(8|16)x4`), 10},
	{8, symbols(`cross_entropy_forward_dx_rows_b?float16_128x4`), 10},
	{8, symbols(`cross_entropy_forward_dx_rows_b?float16_256x4`), 5},
	{8, symbols(`cross_entropy_forward_dx_rows_b?float16_512x4`), 2},
	{8, symbols(`cross_entropy_forward_dx_rows_float32_32x8`), 7},
	{8, symbols(`cross_entropy_forward_dx_rows_float32_512x8`), 1},
	{8, symbols(`norm_backward_columns_b?float16_256x1_unaligned`), 3},
	{8, symbols(`masked_softmax_forward_rows_float16_64x4`), 6},
	{8, symbols(`norm_forward_rows_bfloat16_128x4`), 7},

	{10, symbols(`rmsnorm_forward_rows_b?float16_(8|16|32|64)x4`), 9},
	{10, symbols(`cross_entropy_forward_dx_rows_b?float16_(8|16)x4`), 10},
	{10, symbols(`norm_backward_columns_b?float16_256x1_unaligned`), 3},

	{12, symbols(`rmsnorm_forward_rows_b?float16_(8|16|32|64|128)x4`), 9},
	{12, symbols(`rmsnorm_forward_rows_b?float16_256x4`), 4},
	{12, symbols(`rmsnorm_forward_apply_b?float16_256x2_unaligned`), 3},
	{12, symbols(`rmsnorm_backward_ring_b?float16_256x1_unaligned`), 2},
	{12, symbols(`rmsnorm_backward_ring_\w+_(320|384)x2\w*`), 1},
	{12, symbols(`rmsnorm_backward_grid_cooperative_b?float16_(256x1x2|512x2x1)`), 0},
	{12, symbols(`norm_forward_rows_bfloat16_256x4_cluster`), 3},
	{12, symbols(`norm_forward_rows_bfloat16_512x4_cluster`), 1},
	{12, symbols(`layernorm_forward_rows_float32_512x8_cluster`), 1},
	{12, symbols(`norm_backward_columns_b?float16_256x1_unaligned`), 3},
	{12, symbols(`norm_backward_ring_\w+_\d+x1`), 2},
	{12, symbols(`softmax_forward_apply_\w+_256x2_unaligned`), 4},
	{12, symbols(`softmax_forward_rows_float32_(8|16|32)x4_unaligned`), 9},
	{12, symbols(`softmax_backward_apply_float32_256x1_unaligned`), 4},
	{12, symbols(`cross_entropy_forward_dx_rows_b?float16_(8|16)x4`), 10},
	{12, symbols(`cross_entropy_forward_dx_rows_b?float16_128x4`), 10},
	{12, symbols(`cross_entropy_forward_dx_rows_b?float16_256x4`), 5},
	{12, symbols(`cross_entropy_forward_dx_rows_\w+_256x4_cluster`), 5},
	{12, symbols(`cross_entropy_forward_dx_rows_\w+_512x4`), 2},
	{12, symbols(`cross_entropy_forward_dx_rows_\w+_256x8_same_offset_cluster`), 3},
	{12, symbols(`cross_entropy_forward_dx_rows_\w+_512x8_same_offset(_cluster)?`), 1},
	{12, symbols(`cross_entropy_forward_dx_rows_float32_512x8_cluster`), 1},
}

func symbols(pattern string) *regexp.Regexp { return regexp.MustCompile("^(" + pattern + ")$") }

// capability is the number in an architecture's name: 86 for sm_86 and for compute_86, which is PTX.
func capability(arch string) (number int, ptx bool) {
	kind, digits, _ := strings.Cut(arch, "_")
	number, _ = strconv.Atoi(strings.TrimRight(digits, "af"))
	return number, kind == "compute"
}

// ResidentOn is how many CTAs per SM the compiler leaves registers for in the image of an architecture,
// such as "sm_86" or "compute_80". 0 leaves the number to the compiler, which then leaves registers for
// at least one.
func (v *Variant) ResidentOn(arch string) int {
	number, ptx := capability(arch)
	resident := v.Resident
	for _, row := range elsewhere {
		applies := row.major == number/10
		if ptx && number >= 90 {
			applies = row.major >= number/10 // it runs on all of them
		}
		if applies && row.variants.MatchString(v.Symbol) {
			resident = min(resident, row.resident)
		}
	}
	return resident
}

// spillsOnSM120 spill whatever their limits are. The planner takes other kernels there.
var spillsOnSM120 = symbols("rmsnorm_backward_grid_cooperative_float16_512x2x1|" +
	"cross_entropy_forward_dx_rows_float32_1024x8_cluster")

// In tells whether the image of an architecture holds the variant. It leaves out what no plan launches there.
func (v *Variant) In(arch string) bool {
	number, ptx := capability(arch)
	switch {
	case number < 90: // no clusters, no bulk copies; and what clears memory for those that use them
		return !v.Cluster && v.Shape != Ring && v.Shape != GridCooperative && v.Shape != GridSharedMemory &&
			v.Op != SoftmaxClear && v.Op != RMSNormClear
	case v.NoClusters:
		return false
	case number/10 == 12 && !ptx: // 99 KiB of shared memory: not two rows of the longest ring
		return (v.Shape != Ring || v.Capacity() <= 1024) && !spillsOnSM120.MatchString(v.Symbol)
	}
	return true
}
