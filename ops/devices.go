package ops

import (
	"maps"
	"slices"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

// devices are the GPUs that ExplainDevice knows by name: at least one of each architecture that a wheel
// has machine code for. SMs, memory sizes and bandwidths are from NVIDIA's datasheets and architecture
// papers (of the A100, the H100, the H200 and the B200 for the SXM parts, the A100 with 80 GB). Clusters
// is how many clusters of each size can be resident, as the CUDA driver reported it on an H100 and on an
// H200. Of the B200 and the RTX 5090 it is an estimate, from 8 groups of 18 SMs and from 10 groups of 16,
// and not measured.
var devices = map[string]driver.Facts{
	"a100": {
		Major: 8, SMs: 108, SharedPerBlock: 163 << 10, SharedPerSM: 164 << 10,
		L2Bytes: 40 << 20, MemoryGBs: 2039,
	},
	"a10": {
		Major: 8, Minor: 6, SMs: 72, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 6 << 20, MemoryGBs: 600,
	},
	"rtx3090": {
		Major: 8, Minor: 6, SMs: 82, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 6 << 20, MemoryGBs: 936,
	},
	"l4": {
		Major: 8, Minor: 9, SMs: 58, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 48 << 20, MemoryGBs: 300,
	},
	"l40s": {
		Major: 8, Minor: 9, SMs: 142, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 96 << 20, MemoryGBs: 864,
	},
	"rtx4090": {
		Major: 8, Minor: 9, SMs: 128, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 72 << 20, MemoryGBs: 1008,
	},
	"b200": {
		Major: 10, SMs: 148, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10,
		L2Bytes: 126 << 20, MemoryGBs: 8000,
		Clusters: [17]int{1: 148, 72, 48, 32, 24, 24, 16, 16, 16, 8, 8, 8, 8, 8, 8, 8},
	},
	"rtx5090": {
		Major: 12, SMs: 170, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10,
		L2Bytes: 96 << 20, MemoryGBs: 1792,
		Clusters: [17]int{1: 170, 80, 50, 40, 30, 20, 20, 20},
	},
	"h100": {
		Major: 9, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10,
		L2Bytes: 50 << 20, MemoryGBs: 3352,
		Clusters: [17]int{1: 132, 66, 39, 31, 22, 17, 15, 15, 13, 12, 8, 8, 7, 7, 7, 7},
	},
	"h200": {
		Major: 9, SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10,
		L2Bytes: 60 << 20, MemoryGBs: 4917,
		Clusters: [17]int{1: 132, 66, 39, 31, 22, 17, 15, 15, 13, 12, 8, 8, 7, 7, 7, 7},
	},
}

// ExplainDevice is Explain for a GPU that this machine need not have, such as "h100". The message about
// another name lists them.
func ExplainDevice(op string, m, n int64, dtype dlpack.DType, device string, c Choice) (string, error) {
	k := check{op: "explain"}
	t := k.elementType(dtype)
	facts := k.named(device)
	if t == kernels.Float64 {
		k.noFloat64(device)
	}
	r := k.explain(op, m, n, t, dlpack.Device{Type: dlpack.CUDA}, c)
	if k.err != nil {
		return "", k.err
	}
	return explainPlan(facts, r)
}

// named is the GPU of a name.
func (k *check) named(device string) *driver.Facts {
	facts, ok := devices[device]
	if !ok {
		k.fail(StatusOption, "device is %.40q, expected a device of this machine or %s", device,
			strings.Join(slices.Sorted(maps.Keys(devices)), ", "))
	}
	return &facts
}
