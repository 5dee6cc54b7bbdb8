package ops

import (
	"fmt"
	"os"
	"regexp"
	"strings"
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

func TestExplainHeads(t *testing.T) {
	host := dlpack.Device{Type: dlpack.CPU}
	for _, c := range []struct {
		op            string
		heads, n      int64
		t             dlpack.DType
		device, lines string
	}{
		{"rotary_forward", 40, 128, dlpack.BFloat16, "h100", "pairs are independent: a thread for 2 heads\n" +
			"rotate_elementwise_bfloat16_256x2: 5120 CTAs of 256 threads"},
		{"rotary_backward", 41, 126, dlpack.Float32, "a100", "pairs are independent: a thread for 4 heads\n" +
			"rotate_elementwise_float32_256x4_unaligned: 22176 CTAs of 256 threads"},
		{"qk_norm_rotary_forward", 40, 128, dlpack.Float16, "h100", "the lanes of a warp hold a head\n" +
			"qk_norm_rotate_elementwise_float16_256x4: 2560 CTAs of 256 threads"},
		{"qk_norm_rotary_backward", 40, 128, dlpack.BFloat16, "h100", "the lanes of a warp hold a head\n" +
			"qk_norm_rotate_backward_elementwise_bfloat16_256x4: 264 CTAs of 256 threads\n" +
			"qk_norm_weights_finish_bfloat16_256x1_unaligned: 8 CTAs of 256 threads\n" +
			"270336 bytes of scratch memory"},
	} {
		text, err := ExplainHeads(c.op, 8192, c.heads, c.n, c.t, host, c.device)
		require.NoError(t, err)
		assert.Equal(t, c.lines, text)
		none, err := ExplainHeads(c.op, 0, c.heads, c.n, c.t, host, c.device)
		require.NoError(t, err)
		assert.True(t, strings.HasPrefix(none, "there are no rows"), none)
	}
	text, err := ExplainHeads("rotary_forward", 8, 40, 128, dlpack.Float64, host, "")
	require.NoError(t, err)
	assert.Contains(t, text, "rotary_forward of 8 tokens of 40 heads of 128 float64 on cpu: Go with ")
	for _, c := range []struct {
		op               string
		tokens, heads, n int64
		t                dlpack.DType
		device, message  string
	}{
		{"rotary", 1, 1, 2, dlpack.Float32, "h100", `op is "rotary", expected qk_norm_rotary_backward, `},
		{"rotary_forward", -1, 1, 2, dlpack.Float32, "", "shape is (-1, 1, 2), expected M >= 0"},
		{"rotary_forward", 1, 1 << 20, 1 << 20, dlpack.Float32, "", "expected fewer than 2^31 elements of a token"},
		{"rotary_forward", 1 << 60, 1, 1, dlpack.Float32, "", "fewer than 2^57 in all"},
		{"qk_norm_rotary_forward", 1, 1, 513, dlpack.Float32, "", "expected at most 512 columns"},
		{"rotary_forward", 1, 1, 2, dlpack.Float32, "gpu", `device is "gpu", expected a device of this machine or`},
		{"rotary_forward", 1, 1, 2, dlpack.Float64, "h100", "bfloat16 or float32 on h100"},
		{"rotary_forward", 1, 1, 2, dlpack.Int32, "", "dtype is int32, expected float16"},
	} {
		_, err := ExplainHeads(c.op, c.tokens, c.heads, c.n, c.t, host, c.device)
		require.ErrorContains(t, err, c.message)
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
