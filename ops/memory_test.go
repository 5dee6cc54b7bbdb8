//go:build linux && !race

// Not under the race detector, which maps memory of its own: the limit would make that fail.

package ops_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

const memoryChild = "GANDER_TEST_MEMORY_CHILD"

// TestMemoryLimit runs TestInMemoryLimit in a process of its own.
func TestMemoryLimit(t *testing.T) {
	program, err := os.Executable()
	require.NoError(t, err)
	child := exec.CommandContext(t.Context(), program, "-test.run=^TestInMemoryLimit$", "-test.v")
	// The stacks of threads are within the limit too, so there are few threads.
	child.Env = append(os.Environ(), memoryChild+"=1", "GOMAXPROCS=2")
	output, err := child.CombinedOutput()
	require.NoError(t, err, "%s", output)
	assert.Contains(t, string(output), "--- PASS: TestInMemoryLimit")
}

// TestInMemoryLimit: a call that cannot allocate its workspace returns an error and writes nothing. A smaller
// call then succeeds, and so does the same call once the limit is lifted.
func TestInMemoryLimit(t *testing.T) {
	if os.Getenv(memoryChild) == "" {
		t.Skip("TestMemoryLimit runs it in a process of its own")
	}
	const m, n = 512, 64 << 10 // 32 MiB of partial sums of dw
	d := dlpack.BFloat16
	x, weight := empty(t, d, n), tensor(t, d, ones(n), n)
	require.NoError(t, x.SetFloat64s(ones(n)))
	rows := view(t, x, 0, []int64{m, n}, []int64{0, 1})
	rstd := tensor(t, dlpack.Float32, ones(m), m)
	dx, dw := empty(t, d, m, n), empty(t, d, n)
	backward := func() error { return rmsNormBackward(rows, weight, rows, rstd, dx, dw) }

	var unlimited syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_AS, &unlimited))
	limit := unlimited
	limit.Cur = addressSpace(t) + 28<<20
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_AS, &limit))
	errs := make(chan error)
	const callers = 6
	for range callers {
		go func() { errs <- backward() }()
	}
	for range callers {
		var e *ops.Error
		require.ErrorAs(t, <-errs, &e)
		assert.Equal(t, ops.StatusMemory, e.Status)
		assert.Regexp(t, `^rmsnorm_backward: no memory for a workspace of 3[3-9]\d{6} bytes `+
			`\(cannot allocate memory\); free memory, raise the process's limit`, e.Message)
	}
	assert.Zero(t, nonzero(dx)+nonzero(dw), "a refused call has written")

	few := view(t, dx, 0, []int64{4, 8}, nil)
	require.NoError(t, softmaxForward(view(t, x, 0, []int64{4, 8}, nil), few))
	assert.Equal(t, 1./8, values(t, few)[31])

	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_AS, &unlimited))
	require.NoError(t, backward())
	assert.EqualValues(t, m, values(t, dw)[n-1])
}

// addressSpace is the size of this process in bytes.
func addressSpace(t *testing.T) uint64 {
	text, err := os.ReadFile("/proc/self/statm")
	require.NoError(t, err)
	var pages uint64
	_, err = fmt.Sscan(string(text), &pages)
	require.NoError(t, err)
	return pages * uint64(os.Getpagesize())
}

// nonzero counts the bytes of a compact tensor that are not 0.
func nonzero(v *dlpack.Tensor) int {
	all := unsafe.Slice((*byte)(v.Data), v.Len()*v.DType.Size())
	return len(all) - bytes.Count(all, []byte{0})
}
