//go:build cuda && cgo && linux && amd64

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// withDriver returns true in a process with the fake CUDA driver of internal/driver. Otherwise it runs the
// test in such a process, with the given environment, and returns false: a process binds a driver only once.
func withDriver(t *testing.T, environment ...string) bool {
	const inside = "FAKE_LOG"
	if os.Getenv(inside) != "" {
		return true
	}
	folder := t.TempDir()
	// The shell splits CGO_CFLAGS as Go does, with quotes.
	compile := "exec gcc " + os.Getenv("CGO_CFLAGS") + ` -shared -fPIC -pthread "$@"`
	out, err := exec.Command("sh", "-c", compile, "gcc", "-o", filepath.Join(folder, "libcuda.so.1"),
		"../internal/driver/testdata/fake.c").CombinedOutput()
	require.NoError(t, err, string(out))
	command := exec.Command(os.Args[0], "-test.count=1", "-test.v", "-test.run=^"+t.Name()+"$")
	command.Env = append(os.Environ(), "LD_LIBRARY_PATH="+folder, inside+"="+filepath.Join(folder, "log"),
		"GANDER_FORCE_PTX=")
	command.Env = append(command.Env, environment...)
	out, err = command.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "--- PASS: "+t.Name())
	return false
}

// onDevice makes a tensor of compact bfloat16 rows in device memory, which is never accessed.
func onDevice(t *testing.T, at uintptr, m, n int64) *dlpack.Tensor {
	x, err := dlpack.New(dlpack.BFloat16, m, n)
	require.NoError(t, err)
	x.Device = dlpack.Device{Type: dlpack.CUDA}
	*(*uintptr)(unsafe.Pointer(&x.Data)) = at
	return x
}

// If a query of the device fails temporarily, the call fails rather than use another plan, and the next call
// queries again. Only the image that the call needs is loaded.
func TestFailedQueryChangesNoPlan(t *testing.T) {
	if !withDriver(t, "FAKE_FAIL=cuOccupancyMaxActiveClusters=2", "FAKE_FAIL_AFTER=3") {
		return
	}
	const m, n = 64, 65536 // rows of 128 KiB take clusters
	x, y := onDevice(t, 1<<20, m, n), onDevice(t, 1<<30, m, n)
	call := func() error { return ops.RMSNormForward{X: x, Y: y}.Run(nil) }
	explain := func() (string, error) {
		return ops.Explain("rmsnorm_forward", m, n, dlpack.BFloat16, x.Device, ops.Choice{})
	}
	log := func() string {
		text, err := os.ReadFile(os.Getenv("FAKE_LOG"))
		require.NoError(t, err)
		return string(text)
	}
	for range 2 {
		err := call()
		var refused *ops.Error
		require.ErrorAs(t, err, &refused)
		assert.Equal(t, ops.StatusMemory, refused.Status)
		assert.ErrorContains(t, err, "cuOccupancyMaxActiveClusters of rmsnorm_")
		_, err = explain()
		assert.ErrorContains(t, err, "cuOccupancyMaxActiveClusters of rmsnorm_")
	}
	assert.NotContains(t, log(), "cuLaunchKernel")

	require.NoError(t, os.Unsetenv("FAKE_FAIL"))
	require.NoError(t, call())
	assert.Regexp(t, `cuLaunchKernelEx rmsnorm_forward_\S+_cluster .* cluster [2-9]`, log())
	assert.Equal(t, 1, strings.Count(log(), "cuModuleLoadData"))
	text, err := explain()
	require.NoError(t, err)
	assert.Contains(t, text, "in clusters of")
}

// The fake driver logs an image as a string.
func TestKernelsComeFromTheOpenedFolder(t *testing.T) {
	if !withDriver(t) {
		return
	}
	images := map[string][]byte{}
	for family := range kernels.Family(kernels.Families) {
		images[family.String()+".sm_90.fatbin"] = []byte("opened " + family.String() + "\x00")
	}
	images[kernels.SumsFile] = kernels.Sums(images)
	folder := t.TempDir()
	for name, data := range images {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), data, 0o600))
	}
	x, y := onDevice(t, 1<<20, 64, 65536), onDevice(t, 1<<30, 64, 65536)
	require.NoError(t, ops.OpenImages(folder))
	require.NoError(t, ops.SoftmaxForward{X: x, Y: y}.Run(nil))
	log, err := os.ReadFile(os.Getenv("FAKE_LOG"))
	require.NoError(t, err)
	assert.Contains(t, string(log), "cuModuleLoadData opened softmax_bfloat16|")
	assert.Regexp(t, "cuLaunchKernel(Ex)? softmax_forward_", string(log))

	err = ops.OpenImages(folder)
	assert.ErrorIs(t, err, ops.StatusOption)
	assert.ErrorContains(t, err, "open already, expected one call in a process")
}

func TestImpossibleDeviceIsRefused(t *testing.T) {
	if !withDriver(t, "FAKE_ATTRIBUTE_16=0") { // no SMs
		return
	}
	x, y := onDevice(t, 1<<20, 64, 65536), onDevice(t, 1<<30, 64, 65536)
	_, explained := ops.Explain("softmax_forward", 64, 65536, dlpack.BFloat16, x.Device, ops.Choice{})
	for _, err := range []error{ops.SoftmaxForward{X: x, Y: y}.Run(nil), explained, ops.Warmup(x.Device)} {
		var refused *ops.Error
		require.ErrorAs(t, err, &refused)
		assert.Equal(t, ops.StatusUnsupported, refused.Status)
		assert.ErrorContains(t, err, "multiprocessors: 0, expected 1 to 65536")
	}
}
