package cpu

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// panickingOp is softmax whose first pass calls a function before it reads a row.
type panickingOp struct {
	softmaxForward[float32]
	before func(worker int)
}

func (f panickingOp) run(c *call[float32]) { c.runRows() }

func (f panickingOp) firstPass(w *worker[float32], row, lo, hi int, partials []partial) {
	f.before(w.number)
	f.softmaxForward.firstPass(w, row, lo, hi, partials)
}

// panicOf runs a call that is large enough for helpers, and returns the value that it panics with.
func panicOf(x, y matrix, before func(worker int)) (p any) {
	defer func() { p = recover() }()
	o := operands{x: x.Matrix, y: y.Matrix, reuseUpTo: longRow}
	engine32.run(&o, more{}, 4, panickingOp{before: before})
	return nil
}

func until(done func() bool) {
	for !done() {
		runtime.Gosched()
	}
}

// requireStillWorks runs all ops with helpers, first with calls from the pool.
func requireStillWorks(t *testing.T) {
	t.Helper()
	shape := parallelShapes[0]
	want := runAllOps(kernels.Float32, shape[0], shape[1], 1, false)
	for range 2 {
		got := runAllOps(kernels.Float32, shape[0], shape[1], 4, false)
		for name := range want {
			require.True(t, bytes.Equal(want[name], got[name]), name)
		}
	}
}

func digits(_, j int) float64 { return float64(j % 5) }

// TestPanicOfHelper: the panic reaches the caller after all helpers have stopped, for whole rows and for
// split rows.
func TestPanicOfHelper(t *testing.T) {
	for _, shape := range parallelShapes {
		x := newMatrix(kernels.Float32, shape[0], shape[1], 0, 0).fill(digits)
		y := newMatrix(kernels.Float32, shape[0], shape[1], 0, 0)
		for range 5 {
			var panicked, working atomic.Int64
			p := panicOf(x, y, func(worker int) {
				working.Add(1)
				defer working.Add(-1)
				if worker == 0 {
					until(func() bool { return panicked.Load() > 0 })
					return
				}
				panicked.Add(1)
				time.Sleep(time.Millisecond)
				panic("a helper's defect")
			})
			require.Zero(t, working.Load(), "a helper still runs after the call")
			require.Equal(t, "a helper's defect", p)
		}
	}
	requireStillWorks(t)
}

// TestPanicOfCaller: the call does not return before the helpers have stopped writing.
func TestPanicOfCaller(t *testing.T) {
	x := newMatrix(kernels.Float32, 900, 600, 0, 0).fill(digits)
	y := newMatrix(kernels.Float32, 900, 600, 0, 0)
	for range 5 {
		var came, left atomic.Bool
		var working atomic.Int64
		p := panicOf(x, y, func(worker int) {
			if worker == 0 {
				until(came.Load)
				left.Store(true)
				panic("the caller's defect")
			}
			working.Add(1)
			defer working.Add(-1)
			if !came.Swap(true) {
				until(left.Load)
				time.Sleep(time.Millisecond)
			}
		})
		written := y.clone()
		require.Zero(t, working.Load(), "a helper still runs after the call")
		require.Equal(t, "the caller's defect", p)
		time.Sleep(time.Millisecond)
		require.True(t, bytes.Equal(written.bytes, y.bytes), "a helper wrote after the call")
	}
	requireStillWorks(t)
}

// TestPanicOfBoth: one of the two panics reaches the caller, and the group's next use sees none.
func TestPanicOfBoth(t *testing.T) {
	g := newGroup()
	for _, want := range []any{"a helper's defect", nil} {
		var joined atomic.Bool
		submit(job{g, g.generation(), tasks(func() {
			joined.Store(true)
			if want != nil {
				panic(want)
			}
		})}, true)
		until(joined.Load)
		func() {
			defer func() { assert.Equal(t, want, recover()) }()
			defer g.finish()
			if want != nil {
				panic("the caller's defect")
			}
		}()
		assert.Nil(t, g.panicked.Load())
	}
}

// TestForeignThreads: the caller's threads may run at the same time, one after the other, or not all of them.
// A panic on one reaches the caller after all have returned.
func TestForeignThreads(t *testing.T) {
	defer SetParallelFor(nil)
	x := newMatrix(kernels.Float32, 900, 600, 0, 0).fill(digits)
	want := newMatrix(kernels.Float32, 900, 600, 0, 0)
	require.NoError(t, SoftmaxForward(x.Matrix, want.Matrix, 1))
	for name, parallelFor := range map[string]ParallelFor{
		"together": func(n int, w Workers) bool {
			var all sync.WaitGroup
			for i := range n {
				all.Go(func() { w.RunWorker(i) })
			}
			all.Wait()
			return true
		},
		"in turn": func(n int, w Workers) bool {
			for i := range n {
				w.RunWorker(i)
			}
			return true
		},
		"one":     func(n int, w Workers) bool { w.RunWorker(n - 1); return true },
		"none":    func(int, Workers) bool { return true },
		"helpers": func(int, Workers) bool { return false },
	} {
		called := 0
		SetParallelFor(func(n int, w Workers) bool {
			called++
			assert.Equal(t, 4, n)
			return parallelFor(n, w)
		})
		y := newMatrix(kernels.Float32, 900, 600, 0, 0)
		require.NoError(t, SoftmaxForward(x.Matrix, y.Matrix, 4))
		require.Equal(t, want.bytes, y.bytes, name)
		require.Equal(t, 1, called, name)
		if name == "none" {
			continue
		}
		var panicked atomic.Bool
		require.Equal(t, "a defect", panicOf(x, y, func(int) {
			if !panicked.Swap(true) {
				panic("a defect")
			}
		}), name)
	}
	requireStillWorks(t)
}
