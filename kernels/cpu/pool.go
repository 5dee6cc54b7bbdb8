package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A call runs its tasks on the caller's goroutine and on helpers, the goroutines of a worker pool.
// A helper that has finished a job spins for a moment before it ends: waking a sleeping thread takes tens of
// microseconds, as long as a call on 1 MiB takes. No call waits for a helper that has not started: the caller
// runs the tasks that are left.

// Workers are those of a call, with what they do next.
type Workers interface{ RunWorker(i int) }

// ParallelFor calls w.RunWorker(i) once for each i from 0 to n-1, at the same time if it can, and returns
// when all calls have returned. It may leave some out: the others take over their tasks. It returns false,
// without having called anything, to leave the tasks to helpers.
type ParallelFor func(n int, w Workers) bool

// foreign is what SetParallelFor has set.
var foreign atomic.Pointer[ParallelFor]

// SetParallelFor makes calls run on the threads of the caller's framework in place of helpers, or on helpers
// again if f is nil. Such threads spin after a call as helpers do, so that both would compete for the
// processors.
func SetParallelFor(f ParallelFor) {
	if f == nil {
		foreign.Store(nil)
		return
	}
	foreign.Store(&f)
}

// HasParallelFor tells whether SetParallelFor has set a function.
func HasParallelFor() bool { return foreign.Load() != nil }

// group is the set of helpers that work on the current tasks of a call. Each set of tasks is a generation.
// A helper can join a generation until the caller finishes it.
//
// From its high to its low bits, state is the generation, whether the caller sleeps, and the number of
// members.
type group struct {
	state    atomic.Uint64
	awake    chan struct{}       // wakes the sleeping caller
	panicked atomic.Pointer[any] // the first panic of a helper
}

const (
	groupMember     = 1
	groupSleeping   = 1 << 31
	groupGeneration = 1 << 32
)

// generation is the one that helpers can join now.
func (g *group) generation() uint64 { return g.state.Load() / groupGeneration }

func (g *group) join(generation uint64) bool {
	for {
		s := g.state.Load()
		if s/groupGeneration != generation {
			return false
		}
		if g.state.CompareAndSwap(s, s+groupMember) {
			return true
		}
	}
}

// catch must be deferred. It recovers a panic and keeps the first one for the caller: a panic that leaves a
// goroutine ends the process.
func (g *group) catch() {
	if p := recover(); p != nil {
		g.panicked.CompareAndSwap(nil, &p)
	}
}

// leave must be called by a helper that has joined.
func (g *group) leave() {
	if uint32(g.state.Add(^uint64(groupMember-1))) == groupSleeping {
		g.awake <- struct{}{}
	}
}

// finish ends the generation, waits until all members have left, and panics if one of them did.
func (g *group) finish() {
	g.wait()
	g.raise()
}

// raise panics if a member did.
func (g *group) raise() {
	if p := g.panicked.Swap(nil); p != nil {
		panic(*p)
	}
}

func (g *group) wait() {
	const limit = 50 * time.Microsecond
	if uint32(g.state.Add(groupGeneration)) == 0 {
		return
	}
	// Yielding would put the caller's thread to sleep, because a goroutine that was called from C is locked
	// to its thread. With one processor it has to yield, or no helper could run.
	if spin(limit, runtime.GOMAXPROCS(0) == 1, func() bool { return uint32(g.state.Load()) == 0 }) {
		return
	}
	if uint32(g.state.Add(groupSleeping)) != groupSleeping {
		<-g.awake
	}
	g.state.Add(^uint64(groupSleeping - 1))
}

// job asks a helper to work on one generation of a group. It is dropped if that generation has ended.
type job struct {
	group      *group
	generation uint64
	worker     interface{ runTasks() }
}

func (j *job) run() {
	if j.group.join(j.generation) {
		defer j.group.leave()
		defer j.group.catch()
		j.worker.runTasks()
	}
}

// helper is a goroutine of the pool.
type helper struct {
	next  job
	ready atomic.Bool // next is set
}

// idle are the helpers that spin while they wait for a job. They are fewer than GOMAXPROCS, so that a caller
// can always run.
var idle [64]atomic.Pointer[helper]

var helpers = sync.Pool{New: func() any { return new(helper) }}

// submit gives a job to an idle helper. If there is none it starts a goroutine, where mayStart allows that:
// starting one can wake a thread.
func submit(j job, mayStart bool) {
	for i := range min(len(idle), runtime.GOMAXPROCS(0)-1) {
		if h := idle[i].Load(); h != nil && idle[i].CompareAndSwap(h, nil) {
			h.next = j
			h.ready.Store(true)
			return
		}
	}
	if mayStart {
		go runHelper(j)
	}
}

func runHelper(j job) {
	h := helpers.Get().(*helper)
	h.next = j
	for ok := true; ok; ok = h.awaitJob() {
		h.next.run()
		h.next = job{}
	}
	helpers.Put(h)
}

// awaitJob spins until the helper has a next job. It returns false if none came in time.
func (h *helper) awaitJob() bool {
	const limit = 100 * time.Microsecond
	for i := range min(len(idle), runtime.GOMAXPROCS(0)-1) {
		if !idle[i].CompareAndSwap(nil, h) {
			continue
		}
		ready := func() bool { return h.ready.Load() }
		if !spin(limit, true, ready) && idle[i].CompareAndSwap(h, nil) {
			return false
		}
		for !ready() { // submit has taken h from idle, and is about to set ready
			runtime.Gosched()
		}
		h.ready.Store(false)
		return true
	}
	return false
}

// spin polls a condition until it holds or the time limit has passed, and returns whether it holds.
// With yield it lets other goroutines run between polls.
func spin(limit time.Duration, yield bool, done func() bool) bool {
	began := time.Now()
	for {
		for range 64 {
			if done() {
				return true
			}
			pause(4)
		}
		if time.Since(began) > limit {
			return done()
		}
		if yield {
			runtime.Gosched()
		}
	}
}
