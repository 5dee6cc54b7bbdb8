package cpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// A call is shared with helpers: goroutines that come if they come in time, and that stay awake for a moment afterwards. To wake a
// thread takes tens of microseconds, as long as a call on a MiB does.

// crew counts the helpers that are at work on a call, and lets none join once its tasks are dealt out, so that nobody waits for a
// helper that has not woken up yet. From high to low bits: the number of the current set of tasks, whether the caller sleeps,
// and the helpers at work.
type crew struct {
	state    atomic.Uint64
	awake    chan struct{}       // of the sleeping caller
	panicked atomic.Pointer[any] // what the first helper that panicked did so with
}

const (
	crewMember  = 1
	crewSleeper = 1 << 31
	crewSet     = 1 << 32
)

// open is the number of the set of tasks that helpers may join.
func (c *crew) open() uint64 { return c.state.Load() / crewSet }

func (c *crew) join(set uint64) bool {
	for {
		s := c.state.Load()
		if s/crewSet != set {
			return false
		}
		if c.state.CompareAndSwap(s, s+crewMember) {
			return true
		}
	}
}

// leave is deferred by helpers. It keeps a helper's panic for the caller: in the helper's goroutine nobody
// else could recover it, and the process would end.
func (c *crew) leave() {
	if p := recover(); p != nil {
		first := p
		c.panicked.CompareAndSwap(nil, &first)
	}
	if uint32(c.state.Add(^uint64(crewMember-1))) == crewSleeper {
		c.awake <- struct{}{}
	}
}

// close lets nobody join any more, waits until all who did have left, and panics if one of them did.
func (c *crew) close() {
	c.wait()
	if p := c.panicked.Swap(nil); p != nil {
		panic(*p)
	}
}

func (c *crew) wait() {
	const patience = 50 * time.Microsecond
	if uint32(c.state.Add(crewSet)) == 0 {
		return
	}
	// Without giving way, unless it has to: a caller from C is tied to its thread, which goes to sleep for that.
	if spin(patience, runtime.GOMAXPROCS(0) == 1, func() bool { return uint32(c.state.Load()) == 0 }) {
		return
	}
	if uint32(c.state.Add(crewSleeper)) != crewSleeper {
		<-c.awake
	}
	c.state.Add(^uint64(crewSleeper - 1))
}

// share is a part of a call that another goroutine can take, if it joins the crew while that set of tasks is open.
type share struct {
	crew *crew
	set  uint64
	part interface{ work() }
}

func (s *share) do() {
	if s.crew.join(s.set) {
		defer s.crew.leave()
		s.part.work()
	}
}

// helper is a goroutine that is awake.
type helper struct {
	next  share
	ready atomic.Bool // next is there
}

// idle are the helpers that wait for more to do; fewer than there are processors for goroutines, so that one is left for callers.
var idle [64]atomic.Pointer[helper]

var helpers = sync.Pool{New: func() any { return new(helper) }}

// summon has an idle helper take a share, or a new goroutine if it may wake a thread for that.
func summon(s share, wake bool) {
	for i := range min(len(idle), runtime.GOMAXPROCS(0)-1) {
		if h := idle[i].Load(); h != nil && idle[i].CompareAndSwap(h, nil) {
			h.next = s
			h.ready.Store(true)
			return
		}
	}
	if wake {
		go assist(s)
	}
}

func assist(s share) {
	h := helpers.Get().(*helper)
	h.next = s
	for ok := true; ok; ok = h.linger() {
		h.next.do()
		h.next = share{}
	}
	helpers.Put(h)
}

// linger stays awake for a while and tells whether somebody asked for help.
func (h *helper) linger() bool {
	const patience = 100 * time.Microsecond
	for i := range min(len(idle), runtime.GOMAXPROCS(0)-1) {
		if !idle[i].CompareAndSwap(nil, h) {
			continue
		}
		asked := func() bool { return h.ready.Load() }
		if !spin(patience, true, asked) && idle[i].CompareAndSwap(h, nil) {
			return false
		}
		for !asked() { // it is on its way
			runtime.Gosched()
		}
		h.ready.Store(false)
		return true
	}
	return false
}

// spin waits for a condition without going to sleep, but not longer than its patience; it can give way to goroutines that want to run.
func spin(patience time.Duration, yield bool, done func() bool) bool {
	began := time.Now()
	for {
		for range 64 {
			if done() {
				return true
			}
			pause(4)
		}
		if time.Since(began) > patience {
			return done()
		}
		if yield {
			runtime.Gosched()
		}
	}
}
