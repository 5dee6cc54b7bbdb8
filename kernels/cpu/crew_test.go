package cpu

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

type job func()

func (f job) work() { f() }

func newCrew() *crew { return &crew{awake: make(chan struct{}, 1)} }

// TestCloseWaitsForThoseWhoJoined has helpers that come at any time, and that take longer than a caller's patience now and then.
func TestCloseWaitsForThoseWhoJoined(t *testing.T) {
	c := newCrew()
	var working, joined atomic.Int64
	for round := range 300 {
		set := c.open()
		for i := range 4 {
			summon(share{c, set, job(func() {
				joined.Add(1)
				working.Add(1)
				if round%20 == 0 && i == 0 {
					time.Sleep(time.Millisecond) // the caller goes to sleep
				}
				working.Add(-1)
			})}, true)
		}
		if round%3 == 0 {
			time.Sleep(50 * time.Microsecond)
		}
		c.close()
		require.Zero(t, working.Load(), "somebody is at work on a closed set of tasks")
		require.NotEqual(t, set, c.open())
	}
	assert.Positive(t, joined.Load(), "nobody ever came in time")
}

func TestNobodyJoinsAClosedSet(t *testing.T) {
	c := newCrew()
	set := c.open()
	c.close()
	assert.False(t, c.join(set))
	assert.True(t, c.join(c.open()))
	c.leave()
	c.close()
}

// TestHelpersStayAwake sees that a helper takes another share without a goroutine's being started, and leaves after a while.
func TestHelpersStayAwake(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("with one processor nobody may stay awake")
	}
	idleNow := func() (n int) {
		for i := range idle {
			if idle[i].Load() != nil {
				n++
			}
		}
		return n
	}
	none := func() bool { return idleNow() == 0 }
	c := newCrew()
	done := make(chan struct{}, 1)
	work := share{c, c.open(), job(func() { done <- struct{}{} })}
	came := func() bool {
		require.Eventually(t, none, 10*time.Second, time.Millisecond)
		summon(work, false)
		select {
		case <-done:
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	}
	// A helper that another test woke may have been too late for it, and be awake now.
	require.Eventually(t, func() bool { return !came() }, 10*time.Second, time.Millisecond,
		"a helper comes although nobody is awake")
	again := 0
	for range 1000 {
		summon(work, true)
		<-done
		for range 100 { // until it lingers
			if idleNow() > 0 {
				break
			}
			pause(10)
		}
		summon(work, false)
		select {
		case <-done:
			again++
		case <-time.After(time.Millisecond): // it had left
		}
	}
	c.close()
	assert.Positive(t, again, "no helper ever stayed")
	require.Eventually(t, none, 10*time.Second, time.Millisecond, "a helper stays for ever")
}

// TestDeal has an owner and thieves take all tasks, each once.
func TestDeal(t *testing.T) {
	const tasks = 20000
	var d deal
	d.set(7, 7+tasks)
	var seen [7 + tasks]atomic.Int32
	finished := make(chan struct{})
	for thief := range 3 {
		go func() {
			for {
				task, ok := d.take(thief > 0)
				if !ok {
					break
				}
				seen[task].Add(1)
			}
			finished <- struct{}{}
		}()
	}
	for range 3 {
		<-finished
	}
	for i := range seen {
		require.EqualValues(t, min(i/7, 1), seen[i].Load(), "task %d", i)
	}
	d.set(0, 3)
	first, _ := d.take(false)
	last, _ := d.take(true)
	assert.Equal(t, []int{0, 2}, []int{first, last})
}
