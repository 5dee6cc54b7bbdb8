package ops

import (
	"fmt"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
)

// TestEveryArchitectureHasADevice: of those that a wheel has machine code for.
func TestEveryArchitectureHasADevice(t *testing.T) {
	script, err := os.ReadFile("../build.sh")
	require.NoError(t, err)
	list := regexp.MustCompile(`WHEEL_ARCHS="(.*)"`).FindSubmatch(script)
	require.NotNil(t, list)
	known := map[string]bool{}
	for _, facts := range devices {
		known[fmt.Sprintf("sm_%d%d", facts.Major, facts.Minor)] = true
	}
	native := regexp.MustCompile(`sm_\d+`).FindAllString(string(list[1]), -1)
	require.NotEmpty(t, native)
	for _, arch := range native {
		assert.True(t, known[arch], "no device of %s", arch)
	}
}

// TestExplainDevice needs none of the GPUs that it names.
func TestExplainDevice(t *testing.T) {
	for name, facts := range devices {
		for op, r := range explained {
			text, err := ExplainDevice(op, 4096, 65536, dlpack.BFloat16, name, Choice{})
			require.NoError(t, err)
			r.x, r.m, r.n = kernels.BFloat16, 4096, 65536
			if r.norm.second > 0 {
				r.norm.second, r.norm.compact, r.norm.bulk = 2, true, true
			}
			want, err := makePlan(&facts, r)
			require.NoError(t, err)
			assert.Equal(t, want.String(), text, "%s on %s", op, name)
		}
	}
	for device, limit := range map[string]string{"h100": "", "a100": "needs clusters of thread blocks"} {
		c := Choice{Algorithm: Cluster}
		_, err := ExplainDevice("softmax_forward", 4096, 65536, dlpack.BFloat16, device, c)
		if limit == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, limit)
	}
	for _, c := range []struct {
		op, device string
		t          dlpack.DType
		status     Status
		message    string
	}{
		{"softmax_forward", "H100", dlpack.Float32, StatusOption,
			`explain: device is "H100", expected a device of this machine or a10, a100, b200, h100`},
		{"relu", "h100", dlpack.Float32, StatusOption, `explain: op is "relu"`},
		{"softmax_forward", "h100", dlpack.Int32, StatusDType, "dtype is int32, expected float16"},
		{"softmax_forward", "h100", dlpack.Float64, StatusUnsupported,
			"dtype is float64, expected float16, bfloat16 or float32 on h100"},
	} {
		_, err := ExplainDevice(c.op, 1, 1, c.t, c.device, Choice{})
		var e *Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, c.status, e.Status)
		assert.Contains(t, e.Message, c.message)
	}
}
