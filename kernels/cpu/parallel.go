package cpu

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// How a call is cut into work depends on the shape alone, never on the number of workers, and every sum has a fixed
// order: so the number of workers changes no bit of a result.
const (
	block         = 2048      // elements that one primitive works on: what the first-level cache holds several of
	longRow       = 128 << 10 // beyond this many elements a row is worked on in two passes over memory
	reusedRow     = block     // beyond this many, widening again costs less than going back to what was widened before
	chunk         = 8 * block // elements of a long row that make a task where rows are shared among workers
	maxTasks      = 256       // tasks that the rows are dealt into
	streamBytes   = 32 << 20  // from this much on little of a result would be in the cache for who reads it next
	startBytes    = 512 << 10 // below this much memory traffic, waking other threads costs more than they save
	parallelBytes = 256 << 10 // likewise, threads that are awake
)

// operands are what a call reads and writes; each op uses some.
type operands struct {
	x, y, dy, dx     kernels.Matrix
	weight, rstd, dw kernels.Vector
	norm             RMSNormOptions
	ce               kernels.CrossEntropy // less its X and DX, which are x and dx
	reuseUpTo        int                  // elements up to which the second pass over a row uses what the first made
}

func (o *operands) bytes() int {
	total := 0
	for _, m := range [...]*kernels.Matrix{&o.x, &o.y, &o.dy, &o.dx} {
		total += int(m.Rows * m.Cols * m.DType.Size())
	}
	return total
}

// op is a reduction over rows: a first pass over each block of a row, whose results join into what the second
// pass over the blocks needs. run says in which order, plan how many tasks and how much workspace that takes.
type op[T float] interface {
	plan(c *call[T], workers int)
	run(c *call[T])
	firstPass(w *worker[T], row, lo, hi int, partials []partial)
	combine(w *worker[T], row int, partials []partial) rowStats
	secondPass(w *worker[T], row, lo, hi int, partials []partial, s rowStats)
}

// part is what the first pass leaves of one block, stats what they join into. Ops give a, b and c their meaning.
type partial struct{ max, sum float64 }
type rowStats struct{ a, b, c float64 }

// plan is how a call's rows are cut into tasks, and what workspace that takes beside the workers' buffers.
type plan struct {
	splitRows bool // a row is shared among workers: the partials and stats of all rows are kept
	tasks     int  // of the step with the most
	weights   int  // elements of RMSNorm's weight, widened, or ones
	sums      int  // rows of partial sums of dw
	columns   int  // of dw that a task sums over all rows
}

// step is a set of tasks that can be done in any order.
type step[T float] interface {
	do(w *worker[T], task int)
}

// call is one call under way. Calls are pooled with some workspace, so that small ones allocate nothing.
type call[T float] struct {
	operands
	plan       plan
	funcs      *rowFuncs[T]
	op         op[T]
	rows, cols int
	blocks     int  // of a row
	reuse      bool // what the first pass over a row made is kept for the second
	long       bool // longer than longRow
	stream     bool // what is written is not to push out of the cache what is read

	step      step[T]
	tasks     int
	active    int // workers that tasks are dealt to
	blockRoom int // elements of a buffer for a block
	workers   []worker[T]
	group     group
	mayStart  bool // it is worth a thread's waking up

	losses  [maxTasks]struct{ loss, weight float64 }
	divisor float64 // of the gradient that cross-entropy's forward pass makes

	fixed         []byte     // workspace that lasts as long as the call is pooled
	mapped        []byte     // workspace instead of own where that is too small
	splitPartials []partial  // of all rows, where they are shared among workers
	splitStats    []rowStats // likewise
	weights       []T        // RMSNorm's weight, widened, or ones
	sums          []float64  // partial sums of dw
}

type worker[T float] struct {
	*call[T]
	number      int
	queue       taskQueue
	task        int
	buffer      []T // rows or blocks of two operands, and blocks of the weight: see scratch
	partials    []partial
	targetLogit float64   // logit of the current row's class
	sum         []float64 // of dw: columns from sumFrom on
	sumFrom     int
	columns     []float64       // room for sum where rows are long
	_           [cacheLine]byte // keeps two workers out of one cache line
}

type engine[T float] struct {
	funcs *rowFuncs[T]
	pool  sync.Pool
}

var (
	engine32 = engine[float32]{funcs: chooseRowFuncs()}
	engine64 = engine[float64]{funcs: &portable64}
)

// run carries out an op, in float64 where x is. Its error is a *MemoryError.
func run(o *operands, workers int, op32 op[float32], op64 op[float64]) error {
	if o.x.DType == kernels.Float64 {
		return engine64.run(o, workers, op64)
	}
	return engine32.run(o, workers, op32)
}

func (e *engine[T]) run(o *operands, workers int, op op[T]) error {
	c, _ := e.pool.Get().(*call[T])
	if c == nil {
		c = &call[T]{group: group{awake: make(chan struct{}, 1)}, fixed: make([]byte, fixedBytes)}
	}
	bytes := o.bytes()
	if bytes < parallelBytes {
		workers = 1
	}
	c.operands, c.funcs, c.op, c.mayStart = *o, e.funcs, op, bytes >= startBytes
	c.rows, c.cols = int(o.x.Rows), int(o.x.Cols)
	c.blocks = (c.cols + block - 1) / block
	c.reuse, c.long, c.stream = c.cols <= o.reuseUpTo, c.cols > longRow, bytes >= streamBytes
	op.plan(c, workers)
	c.prepare(max(min(workers, c.plan.tasks), 1))
	err := c.run() // a call that panics is not pooled again
	e.pool.Put(c)
	return err
}

// run gets all workspace before anything is written.
func (c *call[T]) run() error {
	defer c.reset()
	if err := c.reserve(); err != nil {
		return err
	}
	c.op.run(c)
	return nil
}

// planRows is the plan of runRows.
func (c *call[T]) planRows(workers int) {
	c.plan = plan{tasks: min(c.rows, maxTasks)}
	if c.long && c.rows < 4*workers && c.rows <= maxTasks && workers > 1 {
		c.plan = plan{splitRows: true, tasks: c.rows * c.chunks()}
	}
}

// reserve lays out the workspace, in the call's own memory or in mapped memory.
func (c *call[T]) reserve() (err error) {
	bytes := c.layOut(c.fixed)
	if bytes <= len(c.fixed) {
		return nil
	}
	c.mapped, err = freeMemory.get(bytes)
	if err == nil {
		c.layOut(c.mapped)
	}
	return err
}

// forget gives mapped memory back. No pointer to that or to the caller's memory stays: the addresses may
// become part of Go's heap, whose pointers the garbage collector checks.
func (c *call[T]) reset() {
	if c.mapped != nil {
		c.layOut(nil)
		freeMemory.put(c.mapped)
	}
	c.mapped, c.operands, c.op, c.step = nil, operands{}, nil, nil
}

// layOut says where everything lies in a workspace, and how large that has to be.
func (c *call[T]) layOut(memory []byte) int {
	a := arena{memory: memory}
	shared, blocks := 0, c.blocks // partials of all rows, or each worker's of its row
	if c.plan.splitRows {
		shared, blocks = c.rows, 0
	}
	c.splitPartials, c.splitStats = take[partial](&a, shared*c.blocks), take[rowStats](&a, shared)
	c.weights, c.sums = take[T](&a, c.plan.weights), take[float64](&a, c.plan.sums*c.cols)
	c.blockRoom = min(c.cols+15, block) &^ 15 // whole cache lines
	first := c.blockRoom
	if c.reuse && c.x.DType != native[T]() {
		first = c.cols
	}
	for i := range c.workers {
		w := &c.workers[i]
		w.buffer = take[T](&a, first+2*c.blockRoom)
		w.partials, w.columns, w.sum = take[partial](&a, blocks), take[float64](&a, c.plan.columns), nil
	}
	return a.used
}

func (c *call[T]) prepare(workers int) {
	if workers > cap(c.workers) {
		all := make([]worker[T], workers)
		copy(all, c.workers[:cap(c.workers)])
		c.workers = all
	}
	c.workers = c.workers[:workers]
	for i := range c.workers {
		c.workers[i].call, c.workers[i].number = c, i
	}
}

// deal is the tasks that are left of those dealt to a worker, from the first in the high half to before the last in the low half.
type taskQueue struct{ left atomic.Uint64 }

func (q *taskQueue) set(lo, hi int) { q.left.Store(uint64(lo)<<32 | uint64(hi)) }

// take removes the first task, or the last for another worker than the one it was dealt to.
func (q *taskQueue) take(last bool) (task int, ok bool) {
	for {
		left := q.left.Load()
		lo, hi := left>>32, left&(1<<32-1)
		if lo == hi {
			return 0, false
		}
		if last {
			if q.left.CompareAndSwap(left, left-1) {
				return int(hi - 1), true
			}
		} else if q.left.CompareAndSwap(left, left+1<<32) {
			return int(lo), true
		}
	}
}

// each does the tasks of a step, the caller being worker 0, and returns when all are done. A worker gets the
// same tasks call after call, whose data its cache may still hold, and others' only when it has done its own.
// A panic of a worker becomes one of the caller, after all helpers have left: none writes to the caller's
// memory any more.
func (c *call[T]) runStep(s step[T], tasks int) {
	c.step, c.tasks, c.active = s, tasks, max(min(len(c.workers), tasks), 1)
	if c.active == 1 {
		for task := range tasks {
			s.do(&c.workers[0], task)
		}
		return
	}
	for i := range c.active {
		c.workers[i].queue.set(subrange(tasks, i, c.active))
	}
	generation := c.group.generation()
	defer c.group.finish()
	for i := 1; i < c.active; i++ {
		submit(job{&c.group, generation, &c.workers[i]}, c.mayStart)
	}
	c.workers[0].runTasks()
}

func (w *worker[T]) runTasks() {
	for i := range w.active {
		victim := &w.workers[(w.number+i)%w.active]
		for {
			task, ok := victim.queue.take(i > 0)
			if !ok {
				break
			}
			w.step.do(w, task)
		}
	}
}

// runRows runs the op over all rows: row by row, or with the rows shared where they are long and too few.
func (c *call[T]) runRows() {
	if c.plan.splitRows {
		c.splitFirstPass()
		c.runStep(secondPassStep[T]{}, c.rows*c.chunks())
		return
	}
	c.runStep(rowsStep[T]{}, min(c.rows, maxTasks))
}

func (c *call[T]) chunks() int { return (c.cols + chunk - 1) / chunk }

// splitFirstPass does the first pass of all rows, many workers to a row, and joins each row's partials.
func (c *call[T]) splitFirstPass() {
	c.runStep(firstPassStep[T]{}, c.rows*c.chunks())
	for row := range c.rows {
		c.workers[0].task = row
		c.splitStats[row] = c.op.combine(&c.workers[0], row, c.splitRowPartials(row))
	}
}

func (c *call[T]) splitRowPartials(row int) []partial {
	return c.splitPartials[row*c.blocks : (row+1)*c.blocks]
}

type rowsStep[T float] struct{}

func (rowsStep[T]) do(w *worker[T], task int) {
	w.task = task
	lo, hi := subrange(w.rows, task, w.tasks)
	for row := lo; row < hi; row++ {
		w.row(row)
	}
}

// portion is one of several partials of n things, as equal as they can be.
func subrange(n, i, count int) (lo, hi int) {
	each, more := n/count, n%count
	lo = i*each + min(i, more)
	hi = lo + each
	if i < more {
		hi++
	}
	return lo, hi
}

func (w *worker[T]) row(row int) {
	w.op.firstPass(w, row, 0, w.cols, w.partials)
	w.op.secondPass(w, row, 0, w.cols, w.partials, w.op.combine(w, row, w.partials))
}

type firstPassStep[T float] struct{}

func (firstPassStep[T]) do(w *worker[T], task int) {
	row, lo := task/w.chunks(), task%w.chunks()*chunk
	w.op.firstPass(w, row, lo, min(lo+chunk, w.cols), w.splitRowPartials(row))
}

type secondPassStep[T float] struct{}

func (secondPassStep[T]) do(w *worker[T], task int) {
	row, lo := task/w.chunks(), task%w.chunks()*chunk
	w.op.secondPass(w, row, lo, min(lo+chunk, w.cols), w.splitRowPartials(row), w.splitStats[row])
}

// view is n elements of a row that are T in memory.
func view[T float](m *kernels.Matrix, row, j, n int) []T {
	return unsafe.Slice((*T)(rowAt(m, row, j)), n)
}

// scratch is room for n elements from column j on, in the worker's buffer 0, 1 or 2. Each holds a block.
// Buffer 0, the last in memory, holds a whole row where that is kept for the second pass.
func (w *worker[T]) scratch(number, j, n int) []T {
	from := (2 - number) * w.blockRoom
	if w.reuse {
		from += j
	}
	return w.buffer[from : from+n]
}

// read is n elements of a row: where they lie, or widened into a buffer.
func (w *worker[T]) read(number int, m *kernels.Matrix, row, j, n int) []T {
	if m.DType == native[T]() {
		return view[T](m, row, j, n)
	}
	s := w.scratch(number, j, n)
	w.funcs.load[m.DType](s, rowAt(m, row, j))
	return s
}

// again is what read gave in the first pass.
func (w *worker[T]) reread(number int, m *kernels.Matrix, row, j, n int) []T {
	if w.reuse && m.DType != native[T]() {
		return w.scratch(number, j, n)
	}
	return w.read(number, m, row, j, n)
}

// output is where to make n elements of a row: where they belong, or in a buffer for write.
func (w *worker[T]) output(number int, m *kernels.Matrix, row, j, n int) []T {
	if m.DType == native[T]() {
		return view[T](m, row, j, n)
	}
	return w.scratch(number, j, n)
}

// write brings what was made in output to where it belongs.
func (w *worker[T]) write(m *kernels.Matrix, row, j int, s []T) {
	if m.DType != native[T]() {
		w.funcs.store[m.DType](rowAt(m, row, j), s, 1)
	}
}
