package ops

import (
	"maps"
	"slices"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

// devices are the GPUs that ExplainDevice knows by name. SMs, memory sizes and bandwidths are from NVIDIA's
// datasheets for the SXM parts (for the A100, the one with 80 GB). Clusters is how many clusters of each size
// can be resident, as the CUDA driver reported it on an H100 and on an H200.
var devices = map[string]driver.Facts{
	"a100": {
		Major: 8, SMs: 108, SharedPerBlock: 163 << 10, SharedPerSM: 164 << 10,
		L2Bytes: 40 << 20, MemoryGBs: 2039,
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

// ExplainDevice is Explain for a GPU that this machine need not have: "a100", "h100" or "h200".
func ExplainDevice(op string, m, n int64, dtype dlpack.DType, device string, c Choice) (string, error) {
	k := check{op: "explain"}
	t := k.elementType(dtype)
	facts, ok := devices[device]
	if !ok {
		k.fail(StatusOption, "device is %.40q, expected a device of this machine or %s", device,
			strings.Join(slices.Sorted(maps.Keys(devices)), ", "))
	}
	if t == kernels.Float64 {
		k.noFloat64(device)
	}
	r := k.explain(op, m, n, t, dlpack.Device{Type: dlpack.CUDA}, c)
	if k.err != nil {
		return "", k.err
	}
	return explainPlan(&facts, r)
}
