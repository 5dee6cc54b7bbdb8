package cpu

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

type tasks func()

func (f tasks) runTasks() { f() }

func newGroup() *group { return &group{awake: make(chan struct{}, 1)} }

// TestFinishWaitsForMembers has helpers that start at any time. Some work for longer than finish spins.
func TestFinishWaitsForMembers(t *testing.T) {
	g := newGroup()
	var working, joined atomic.Int64
	for round := range 300 {
		generation := g.generation()
		for i := range 4 {
			submit(job{g, generation, tasks(func() {
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
		g.finish()
		require.Zero(t, working.Load(), "a helper works on a finished generation")
		require.NotEqual(t, generation, g.generation())
	}
	assert.Positive(t, joined.Load(), "no helper ever joined in time")
}

func TestFinishedGenerationCannotBeJoined(t *testing.T) {
	g := newGroup()
	generation := g.generation()
	g.finish()
	assert.False(t, g.join(generation))
	assert.True(t, g.join(g.generation()))
	g.leave()
	g.finish()
}

// TestHelpersStayAwake: a helper takes a second job without a new goroutine, and ends when none comes.
func TestHelpersStayAwake(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("with one processor no helper may spin")
	}
	countIdle := func() (n int) {
		for i := range idle {
			if idle[i].Load() != nil {
				n++
			}
		}
		return n
	}
	none := func() bool { return countIdle() == 0 }
	g := newGroup()
	done := make(chan struct{}, 1)
	work := job{g, g.generation(), tasks(func() { done <- struct{}{} })}
	ranWithoutStart := func() bool {
		require.Eventually(t, none, 10*time.Second, time.Millisecond)
		submit(work, false)
		select {
		case <-done:
			return true
		case <-time.After(10 * time.Millisecond):
			return false
		}
	}
	// A helper that another test started may only now become idle.
	require.Eventually(t, func() bool { return !ranWithoutStart() }, 10*time.Second, time.Millisecond,
		"a job runs although no helper is idle")
	again := 0
	for range 1000 {
		submit(work, true)
		<-done
		for range 100 { // until the helper is idle
			if countIdle() > 0 {
				break
			}
			pause(10)
		}
		submit(work, false)
		select {
		case <-done:
			again++
		case <-time.After(time.Millisecond): // the helper had ended
		}
	}
	g.finish()
	assert.Positive(t, again, "no helper ever took a second job")
	require.Eventually(t, none, 10*time.Second, time.Millisecond, "a helper spins for ever")
}

// TestTaskQueue has an owner and two thieves take all tasks, each once.
func TestTaskQueue(t *testing.T) {
	const count = 20000
	var q taskQueue
	q.set(7, 7+count)
	var seen [7 + count]atomic.Int32
	finished := make(chan struct{})
	for thief := range 3 {
		go func() {
			for {
				var from, to int
				if thief == 0 {
					from, to = q.take(3)
				} else {
					from, to = q.steal()
				}
				if from == to {
					break
				}
				for task := from; task < to; task++ {
					seen[task].Add(1)
				}
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
	q.set(0, 6)
	taken := func(from, to int) []int { return []int{from, to} }
	assert.Equal(t, []int{0, 2}, taken(q.take(2)))
	assert.Equal(t, []int{5, 6}, taken(q.steal()))
	assert.Equal(t, []int{2, 5}, taken(q.take(9)))
	assert.Equal(t, []int{5, 5}, taken(q.take(1)))
	assert.Equal(t, []int{5, 5}, taken(q.steal()))
}
