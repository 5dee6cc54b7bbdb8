package cpu

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// fakeSystem counts the memory that calls map, and refuses when refuse says so.
type fakeSystem struct {
	lock            sync.Mutex
	refuse          func(bytes int) bool
	refused, mapped int // calls of allocate
	used            int // bytes
}

var errRefused = errors.New("refused by the test")

// simulate replaces allocate and release for a test. Free memory is released before and after it.
func simulate(t *testing.T) *fakeSystem {
	s := &fakeSystem{refuse: func(int) bool { return false }}
	freeMemory.shrink(0)
	previous, giveBack := allocate, release
	t.Cleanup(func() {
		freeMemory.shrink(0)
		allocate, release = previous, giveBack
		assert.Zero(t, s.used, "memory was not released")
	})
	allocate = func(n int) ([]byte, error) {
		s.lock.Lock()
		defer s.lock.Unlock()
		if s.refuse(n) {
			s.refused++
			return nil, errRefused
		}
		s.mapped++
		s.used += n
		return previous(n)
	}
	release = func(memory []byte) {
		s.lock.Lock()
		defer s.lock.Unlock()
		s.used -= len(memory)
		giveBack(memory)
	}
	return s
}

// TestNoMemory: an op that cannot map its workspace fails before it writes anything.
func TestNoMemory(t *testing.T) {
	const workers = 16 // their buffers alone exceed fixedBytes
	s := simulate(t)
	for _, dtype := range floatTypes[1:] { // Float16 takes the path of BFloat16
		for _, shape := range parallelShapes {
			rows, n := shape[0], shape[1]
			var outputs []*buffer
			stat := statistics(dtype)
			matrix := func() kernels.Matrix {
				m := newMatrix(dtype, rows, n, 0, 0)
				outputs = append(outputs, m.buffer)
				return m.Matrix
			}
			vector := func(dtype kernels.DType, n int) kernels.Vector {
				b, p := newBuffer(dtype, n, 0)
				outputs = append(outputs, b)
				return kernels.Vector{Data: p, DType: dtype, Len: int64(n), Stride: 1}
			}
			one := func(int) float64 { return 1 }
			x := newMatrix(dtype, rows, n, 0, 0).fill(digits).Matrix
			weight, rstd := newVector(dtype, n, one), newVector(stat, rows, one)
			perRow := func() kernels.Vector { return vector(stat, rows) }
			a := kernels.CrossEntropy{X: x, Target: newTargets(make([]int64, rows)...), IgnoreIndex: -1,
				Loss: perRow(), Max: perRow(), LogSum: perRow(), Denominator: vector(stat, 1), DX: matrix()}
			b := a
			b.Max, b.LogSum, b.DLoss, b.DX = rstd, rstd, rstd, matrix()
			s.refuse = func(int) bool { return true }
			for name, call := range map[string]func() error{
				"softmax forward":  func() error { return SoftmaxForward(x, matrix(), workers) },
				"softmax backward": func() error { return SoftmaxBackward(x, x, matrix(), workers) },
				"rmsnorm forward": func() error {
					return RMSNormForward(x, weight, matrix(), perRow(), 1e-6, workers)
				},
				"rmsnorm backward": func() error {
					dx, dw := matrix(), vector(dtype, n)
					return RMSNormBackward(x, weight, x, rstd, dx, dw, workers)
				},
				"layernorm with residual": func() error {
					return NormForward(&kernels.Norm{X: x, Residual: x, Weight: weight, Y: matrix(),
						ResidualOut: matrix(), Mean: perRow(), Rstd: perRow(), Center: true}, workers)
				},
				"layernorm backward": func() error {
					return NormBackward(&kernels.Norm{X: x, Weight: weight, Mean: rstd, Rstd: rstd, DOut: x,
						DX: matrix(), DResidual: matrix(), DW: vector(dtype, n), DB: vector(dtype, n),
						Center: true}, workers)
				},
				"masked softmax forward": func() error {
					return MaskedSoftmaxForward(&kernels.MaskedSoftmax{X: x, Y: matrix(), Scale: 1}, workers)
				},
				"masked softmax backward": func() error {
					return MaskedSoftmaxBackward(&kernels.MaskedSoftmax{DY: x, Y: x, DX: matrix(), Scale: 1}, workers)
				},
				"cross-entropy forward":  func() error { return CrossEntropyForward(&a, workers) },
				"cross-entropy backward": func() error { return CrossEntropyBackward(&b, workers) },
			} {
				var missing *MemoryError
				require.ErrorAs(t, call(), &missing, "%s %v %v", name, dtype, shape)
				require.ErrorIs(t, missing, errRefused)
				require.Greater(t, missing.Bytes, fixedBytes)
			}
			for _, b := range outputs {
				require.Equal(t, len(b.bytes), bytes.Count(b.bytes, []byte{0xa5}), "an output was written")
			}

			zeros := func(_, _ int) float64 { return 0 }
			small, y := newMatrix(dtype, 1, 4, 0, 0).fill(zeros), newMatrix(dtype, 1, 4, 0, 0)
			require.NoError(t, SoftmaxForward(small.Matrix, y.Matrix, workers), "it needs no mapped memory")
			require.Equal(t, 0.25, y.at(0, 3))
		}
	}
	s.refuse = func(int) bool { return false }
	requireStillWorks(t)
}

// TestSmallCallsMapNothing: one worker and rows of one block fit in the fixed workspace.
func TestSmallCallsMapNothing(t *testing.T) {
	s := simulate(t)
	for _, dtype := range floatTypes {
		runAllOps(dtype, 7, block, 1, false)
	}
	assert.Zero(t, s.mapped)
}

// TestWorkspaceIsReused: later calls of any op and type reuse it, and the most recently used blocks are kept.
func TestWorkspaceIsReused(t *testing.T) {
	s := simulate(t)
	for range 3 {
		runAllOps(kernels.Float32, 900, 600, 2, false)
	}
	assert.Equal(t, 1, s.mapped)
	runAllOps(kernels.Float64, 200, 300, 2, false)
	assert.Equal(t, 1, s.mapped)
	assert.Equal(t, freeMemory.bytes, s.used)

	const n = maxFreeBytes / 4
	var all [][]byte
	for range 6 {
		memory, err := freeMemory.get(n)
		require.NoError(t, err)
		require.Len(t, memory, n)
		all = append(all, memory)
	}
	for _, memory := range all {
		freeMemory.put(memory)
		require.LessOrEqual(t, freeMemory.bytes, maxFreeBytes)
	}
	assert.Equal(t, maxFreeBytes, s.used)
	require.Len(t, freeMemory.blocks, 4)
	for i, memory := range freeMemory.blocks {
		assert.Same(t, &all[2+i][0], &memory[0], "the oldest should be released")
	}
	memory, err := freeMemory.get(n + 1)
	require.NoError(t, err)
	assert.Len(t, memory, n+granularity)
	freeMemory.put(memory)
	memory, err = freeMemory.get(1)
	require.NoError(t, err)
	assert.Len(t, memory, n, "the smallest that is large enough")
	freeMemory.put(memory)
}

// TestFreeMemoryIsReleasedWhenMappingFails: after a failed mapping, unused blocks are released for another
// try.
func TestFreeMemoryIsReleasedWhenMappingFails(t *testing.T) {
	s := simulate(t)
	const limit = 8 * granularity
	s.refuse = func(bytes int) bool { return s.used+bytes > limit }
	small, err := freeMemory.get(5 * granularity)
	require.NoError(t, err)
	_, err = freeMemory.get(6 * granularity)
	require.Error(t, err)
	freeMemory.put(small)
	large, err := freeMemory.get(6 * granularity)
	require.NoError(t, err)
	assert.Equal(t, 2, s.refused)
	freeMemory.put(large)
}

// TestPanicGivesBackWorkspace: a call that panics returns its workspace, although the call itself is not
// reused.
func TestPanicGivesBackWorkspace(t *testing.T) {
	s := simulate(t)
	x := newMatrix(kernels.Float32, 900, 5000, 0, 0).fill(digits)
	for range 3 {
		require.Equal(t, "a defect", panicOf(x, x, func(int) { panic("a defect") }))
	}
	assert.Equal(t, freeMemory.bytes, s.used)
	assert.Positive(t, s.mapped)
}

// TestArena: slices start at cache lines and do not overlap. Without memory the bytes are still counted.
func TestArena(t *testing.T) {
	memory := make([]byte, fixedBytes)
	allocateAll := func(memory []byte) (int, [][2]uintptr) {
		var spans [][2]uintptr
		a := arena{memory: memory}
		span := func(p unsafe.Pointer, bytes uintptr) {
			spans = append(spans, [2]uintptr{uintptr(p), uintptr(p) + bytes})
		}
		for n := range 40 {
			f, d := take[float32](&a, n), take[float64](&a, n)
			p, s := take[partial](&a, n), take[rowStats](&a, n)
			if memory != nil {
				require.Equal(t, [4]int{n, n, n, n}, [4]int{len(f), len(d), len(p), len(s)})
			} else {
				require.Zero(t, len(f)+len(d)+len(p)+len(s))
			}
			span(unsafe.Pointer(unsafe.SliceData(f)), uintptr(4*n))
			span(unsafe.Pointer(unsafe.SliceData(d)), uintptr(8*n))
			span(unsafe.Pointer(unsafe.SliceData(p)), uintptr(16*n))
			span(unsafe.Pointer(unsafe.SliceData(s)), uintptr(24*n))
		}
		return a.used, spans
	}
	need, _ := allocateAll(nil)
	used, spans := allocateAll(memory)
	assert.Equal(t, need, used)
	end := uintptr(unsafe.Pointer(&memory[0]))
	for _, s := range spans {
		if s[0] == 0 {
			continue // no elements
		}
		require.Zero(t, s[0]%cacheLine)
		require.GreaterOrEqual(t, s[0], end)
		end = s[1]
	}
	require.LessOrEqual(t, end, uintptr(unsafe.Pointer(&memory[0]))+uintptr(used))
	a := arena{memory: memory[:need-1]}
	a.used = need - cacheLine
	assert.Nil(t, take[float64](&a, 8))
}

// TestConcurrentCalls: concurrent calls have separate workspaces.
func TestConcurrentCalls(t *testing.T) {
	shapes := [][2]int{{60, 600}, {40, 4097}, {300, 1000}, {5, 30000}}
	var group sync.WaitGroup
	for _, shape := range shapes {
		want := runAllOps(kernels.BFloat16, shape[0], shape[1], 1, false)
		for range 2 {
			group.Go(func() {
				for range 3 {
					got := runAllOps(kernels.BFloat16, shape[0], shape[1], 3, false)
					for name := range want {
						assert.True(t, bytes.Equal(want[name], got[name]), "%s %v", name, shape)
					}
				}
			})
		}
	}
	group.Wait()
}
