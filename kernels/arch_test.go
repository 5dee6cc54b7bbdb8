package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestSM90IsWhatTheTableSays(t *testing.T) {
	for i := range Variants {
		v := &Variants[i]
		assert.Equal(t, v.Resident, v.ResidentOn("sm_90"), v.Symbol)
		assert.Equal(t, !v.NoClusters, v.In("sm_90"), v.Symbol)
	}
}

func find(t *testing.T, symbol string) *Variant {
	for i := range Variants {
		if Variants[i].Symbol == symbol {
			return &Variants[i]
		}
	}
	t.Fatalf("there is no %s", symbol)
	return nil
}

func TestResidentOn(t *testing.T) {
	for symbol, want := range map[string]map[string]int{
		"rmsnorm_forward_rows_float32_8x4": {"sm_80": 9, "sm_86": 9, "sm_89": 9, "compute_80": 9,
			"sm_90": 10, "sm_100": 10, "sm_120": 10, "compute_90": 10},
		"rmsnorm_forward_rows_float16_8x4": {"sm_80": 9, "sm_90": 10, "sm_100": 9, "sm_103": 9,
			"sm_120": 9, "sm_121": 9, "compute_90": 9, "compute_100": 9, "compute_120": 9},
		"softmax_forward_apply_float32_256x2_unaligned": {"sm_86": 5, "compute_80": 5, "sm_90": 5, "sm_90a": 5,
			"sm_100": 5, "sm_120": 4, "compute_90": 4, "compute_120": 4},
		"rmsnorm_backward_grid_cooperative_float16_256x1x2": {"sm_90": 1, "sm_120": 0, "compute_90": 0},
	} {
		for arch, resident := range want {
			assert.Equal(t, resident, find(t, symbol).ResidentOn(arch), "%s on %s", symbol, arch)
		}
	}
}

func TestIn(t *testing.T) {
	for symbol, want := range map[string]map[string]bool{
		"softmax_forward_rows_float16_8x1": {"sm_80": true, "compute_80": true, "sm_120": true},
		"softmax_forward_rows_float16_256x4_cluster": {"sm_80": false, "sm_89": false, "compute_80": false,
			"sm_90": true, "compute_90": true, "sm_100": true, "sm_120": true},
		"rmsnorm_backward_ring_float32_512x4_cluster": {"sm_80": false, "sm_90": true, "sm_100": true,
			"sm_120": false, "sm_121": false, "compute_90": true, "compute_120": true},
		"rmsnorm_backward_ring_float32_512x2":              {"compute_80": false, "sm_120": true},
		"rmsnorm_clear_finish_float32_256x1_unaligned":     {"sm_86": false, "sm_90": true},
		"softmax_forward_grid_shared_memory_float32_256x4": {"sm_86": false, "sm_90": true},
		"softmax_backward_rows_float32_1024x2": {"sm_80": true, "compute_80": true, "sm_90": false,
			"compute_90": false, "sm_100": false, "sm_120": false},
	} {
		for arch, in := range want {
			assert.Equal(t, in, find(t, symbol).In(arch), "%s in %s", symbol, arch)
		}
	}
}
