package cpu

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// Every row is reduced in the same blocks, and every sum has a fixed order. So a result has the same bits for
// every number of workers.
const (
	block        = 2048      // elements that one row function works on; several blocks fit in the L1 cache
	longRow      = 128 << 10 // in a row of more elements, the second pass reads memory again
	reusedRow    = block     // in a row of more elements, converting again is cheaper than reading a copy
	chunk        = 8 * block // elements per task where the row is split among workers
	maxTasks     = 256       // the most tasks that whole rows are grouped into
	maxTogether  = 32        // the most short rows that one pass goes over before the next one does
	startWork    = 512 << 10 // bytes: in smaller calls, starting goroutines costs more than it saves
	parallelWork = 256 << 10 // bytes: in smaller calls, using idle helpers costs more than it saves
	batchWork    = 256 << 10 // bytes of the tasks that a worker takes from its queue at a time
)

// Tests lower these.
var (
	streamBytes = 32 << 20 // bytes: calls of this size write past the cache, which would keep little of them
	loopedRow   = block    // the longest row for which some operators have a loop of their own (*Step)
)

// operands are what a call reads and writes. Each op uses some of them.
type operands struct {
	x, y, dy, dx kernels.Matrix
	reuseUpTo    int  // the longest row whose second pass reuses results of the first
	exponentials bool // the call computes one for each element
}

// more are further operands, nil for ops without them. operands is copied to the heap, but these pointers are
// not. Since they are apart, the compiler sees this and leaves what they point to on the caller's stack.
type more struct {
	norm   *kernels.Norm
	ce     *kernels.CrossEntropy
	masked *kernels.MaskedSoftmax
	glu    *kernels.GLU
	rotary *kernels.Rotary
	qkNorm *kernels.QKNormRotary
	tokens *kernels.TokenStatistics  // with ce, its CrossEntropy
	soft   *kernels.SoftCrossEntropy // likewise
}

func bytesOf(all ...*kernels.Matrix) int {
	total := 0
	for _, m := range all {
		total += int(m.Rows * m.Cols * m.DType.Size())
	}
	return total
}

// op is a reduction over rows. The first pass reduces each block of a row to a partial result, combine turns
// a row's partial results into its statistics, and the second pass uses those to write the row.
type op[T float] interface {
	plan(c *call[T], workers int) // sets c.plan
	run(c *call[T])               // runs the passes over all rows
	firstPass(w *worker[T], row, lo, hi int, partials []partial)
	combine(w *worker[T], row int, partials []partial) rowStats
	secondPass(w *worker[T], row, lo, hi int, partials []partial, s rowStats)
}

// partial is the result of the first pass over one block. Each op uses some of the numbers.
type partial struct{ max, sum, mean float64 }

// rowStats is what the second pass needs. Each op documents the meaning of the numbers at its combine.
type rowStats struct{ a, b, c, d float64 }

// plan is how a call is split into tasks, and the workspace that it needs besides the workers' buffers.
type plan struct {
	splitRows bool // workers share a row; partials and statistics of all rows are stored
	tasks     int  // of the step that has the most
	together  int  // rows of one block that a pass goes over before the next one does; 0: see runRows
	two       bool // parts 0 and 1 of the scratch space hold together rows each, not part 0 alone
	weights   int  // elements of the converted weight, or of a block of ones
	biases    int  // elements of the converted bias, or of a block of zeros
	vectors   int  // that are sums over rows: dw and db, as far as they are present
	sums      int  // rows of partial sums of those
	columns   int  // numbers that one task sums over all rows
	recent    int  // numbers that a worker sums over some rows, in T
	perTask   int  // numbers that each task sums
	tokens    bool // the first pass has a tokenPartial for each block
	soft      bool // the first pass has a softPartial for each block
	raw       bool // rows are processed as they lie in memory, without a conversion to T
}

// step is a set of tasks that can run in any order.
type step[T float] interface {
	do(w *worker[T], task int)
}

// call is the state of one call. Calls are pooled together with a small workspace, so that small ones
// allocate nothing.
type call[T float] struct {
	operands
	norm       kernels.Norm             // its X, Y, DOut and DX are unused: x, y, dy and dx take their place
	ce         kernels.CrossEntropy     // its X and DX are unused likewise
	masked     kernels.MaskedSoftmax    // its matrices are unused likewise
	glu        kernels.GLU              // of its matrices only DUp is used
	rotary     kernels.Rotary           // x stands for all its heads
	qkNorm     kernels.QKNormRotary     // its Rotary is unused
	tokens     kernels.TokenStatistics  // its CrossEntropy is unused: ce takes its place
	soft       kernels.SoftCrossEntropy // likewise, and its Probabilities: y takes their place
	plan       plan
	funcs      *rowFuncs[T]
	op         op[T]
	rows, cols int
	blocks     int  // per row
	reuse      bool // the second pass reuses what the first one computed
	long       bool // rows are longer than longRow
	stream     bool // outputs are written past the cache, so that inputs stay in it

	step      step[T]
	tasks     int
	batch     int // tasks that a worker takes from its queue at a time
	work      int // bytes that the call moves, and exponentials as if they were bytes
	active    int // workers that have tasks in this step
	blockRoom int // elements of a buffer for one block
	workers   []worker[T]
	group     group
	mayStart  bool // the call is large enough to start goroutines

	losses   [maxTasks]struct{ loss, weight float64 } // sums over the rows of each task
	divisor  float64                                  // of cross-entropy's gradient, and of a sum of losses
	upstream float64                                  // the gradient of the loss that dx is made for

	classWeights float64   // with label smoothing: the sum of the class weights
	blockWeights []float64 // and the sums of each block's, nil without class weights

	fixed         []byte         // the workspace that is pooled with the call
	mapped        []byte         // the workspace of this call, if fixed is too small
	splitPartials []partial      // of all rows, with plan.splitRows
	splitStats    []rowStats     // of all rows, with plan.splitRows
	splitTokens   []tokenPartial // the same with plan.tokens
	splitSoft     []softPartial  // the same with plan.soft
	taskSums      []float64      // of all tasks, with plan.perTask
	sums          []float64      // plan.sums rows, each of dw's and then db's partial sums

	weight, bias perColumn[T]
}

// worker is the state of one worker of a call. Worker 0 runs on the caller's goroutine, the others on
// helpers, or all on the threads that SetParallelFor has brought.
type worker[T float] struct {
	*call[T]
	number      int
	queue       taskQueue
	task        int            // the current one
	buffer      []T            // three parts, see scratch
	ahead       int            // elements of other rows in part 0, before the current one, with plan.together
	rounded     []T            // two blocks: one for roundTo, one for an intermediate result
	partials    []partial      // of the current row, or of plan.together rows of one block
	blockTokens []tokenPartial // of the current row, with plan.tokens
	blockSoft   []softPartial  // of the current row, with plan.soft
	dw, db      []float64      // sums over rows from column sumFrom on, nil for absent ones
	sumFrom     int            // column
	columns     []float64      // memory for dw and db, see plan.columns
	recent      []T            // sums over rows that are not in dw yet, see plan.recent
	together    together
	tanhs       []float64       // a block, of cross-entropy with a cap
	_           [cacheLine]byte // keeps workers apart, so that they do not write to the same cache line
}

// together is what a worker keeps of plan.together rows besides partials.
type together struct {
	leftOut [maxTogether]int       // a column that takes no part in the row's sum, or noColumn
	sums    [maxTogether]targetSum // the others are cross-entropy's
	exps    [maxTogether]float64   // of the target's logit, or of the others' maximum where that is smaller
	logs    [maxTogether]float64   // of the sums
	rstd    [maxTogether]float64   // RMSNorm's
}

// engine runs ops that compute in T.
type engine[T float] struct {
	funcs *rowFuncs[T]
	pool  sync.Pool // of *call[T]
}

var (
	engine32 = engine[float32]{funcs: chooseRowFuncs()}
	engine64 = engine[float64]{funcs: &portable64}
)

// run computes in float64 if x is float64, else in float32. Its error is a *MemoryError.
func run(o *operands, m more, workers int, op32 op[float32], op64 op[float64]) error {
	if o.x.DType == kernels.Float64 {
		return engine64.run(o, m, workers, op64)
	}
	return engine32.run(o, m, workers, op32)
}

func (e *engine[T]) run(o *operands, m more, workers int, op op[T]) error {
	clearUpperHalves() // which C code may have left in use on this thread
	c, _ := e.pool.Get().(*call[T])
	if c == nil {
		c = &call[T]{group: group{awake: make(chan struct{}, 1)}, fixed: make([]byte, fixedBytes)}
	}
	bytes := bytesOf(&o.x, &o.y, &o.dy, &o.dx)
	if n := m.norm; n != nil {
		c.norm = *n
		bytes += bytesOf(&n.Residual, &n.ResidualOut, &n.DResidualOut, &n.DResidual)
	}
	if m.ce != nil {
		c.ce = *m.ce
	}
	if m.masked != nil {
		c.masked = *m.masked
	}
	if m.glu != nil {
		c.glu = *m.glu
		bytes += bytesOf(&c.glu.DUp)
	}
	if m.rotary != nil {
		c.rotary = *m.rotary
	}
	if m.qkNorm != nil {
		c.qkNorm, c.rotary = *m.qkNorm, m.qkNorm.Rotary
	}
	if m.tokens != nil {
		c.tokens = *m.tokens
		c.tokens.CrossEntropy = kernels.CrossEntropy{}
	}
	if m.soft != nil {
		c.soft = kernels.SoftCrossEntropy{TargetWeight: m.soft.TargetWeight}
	}
	c.work = bytes
	if o.exponentials {
		c.work += int(o.x.Rows*o.x.Cols) * e.funcs.exponential
	}
	if c.work < parallelWork {
		workers = 1
	}
	c.operands, c.funcs, c.op, c.mayStart = *o, e.funcs, op, c.work >= startWork
	c.rows, c.cols = int(o.x.Rows), int(o.x.Cols)
	if c.rows == 0 && m.ce != nil {
		c.cols = 0 // a loss writes its total alone, and needs no workspace for a row, however long
	}
	c.blocks = (c.cols + block - 1) / block
	c.reuse, c.long, c.stream = c.cols <= o.reuseUpTo, c.cols > longRow, bytes >= streamBytes
	op.plan(c, workers)
	c.prepare(max(min(workers, c.plan.tasks), 1))
	err := c.run()
	if m.norm != nil {
		c.norm, c.weight, c.bias = kernels.Norm{}, perColumn[T]{}, perColumn[T]{}
	}
	if m.ce != nil {
		c.ce = kernels.CrossEntropy{}
	}
	if m.masked != nil {
		c.masked = kernels.MaskedSoftmax{}
	}
	if m.glu != nil {
		c.glu = kernels.GLU{}
	}
	if m.tokens != nil {
		c.tokens = kernels.TokenStatistics{}
	}
	if m.soft != nil {
		c.soft = kernels.SoftCrossEntropy{}
	}
	if m.rotary != nil || m.qkNorm != nil {
		c.rotary, c.qkNorm = kernels.Rotary{}, kernels.QKNormRotary{}
	}
	e.pool.Put(c) // not reached after a panic: that call's state is not reused
	return err
}

// run allocates all workspace first: a call that fails has written nothing.
func (c *call[T]) run() error {
	defer c.reset()
	if err := c.reserve(); err != nil {
		return err
	}
	c.op.run(c)
	return nil
}

// planRows sets the plan that runRows needs.
func (c *call[T]) planRows(workers int) {
	c.plan = plan{tasks: min(c.rows, maxTasks)}
	if c.long && c.rows < 4*workers && c.rows <= maxTasks && workers > 1 {
		c.plan = plan{splitRows: true, tasks: c.rows * c.chunks()}
	}
}

// reserve places the workspace in c.fixed, or in mapped memory if it is too large for that.
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

// reset gives mapped memory back and drops the pointers to it and to the caller's memory. engine.run drops
// those of norm, ce, masked, glu and rotary. If such an address later becomes part of Go's heap, a stale
// pointer to it would make the garbage collector abort.
func (c *call[T]) reset() {
	if c.mapped != nil {
		c.layOut(nil)
		freeMemory.put(c.mapped)
	}
	c.mapped, c.operands, c.op, c.step = nil, operands{}, nil, nil
}

// layOut places all buffers in memory and returns the bytes that they need. If memory is too small, it leaves
// buffers nil.
func (c *call[T]) layOut(memory []byte) int {
	a := arena{memory: memory}
	splitRows, blocks := 0, c.blocks // partials are stored for all rows, or for each worker's current row
	if c.plan.splitRows {
		splitRows, blocks = c.rows, 0
	}
	c.splitPartials, c.splitStats = take[partial](&a, splitRows*c.blocks), take[rowStats](&a, splitRows)
	if c.plan.tokens {
		c.splitTokens = take[tokenPartial](&a, splitRows*c.blocks)
	}
	if c.plan.soft {
		c.splitSoft = take[softPartial](&a, splitRows*c.blocks)
	}
	c.weight.values, c.bias.values = take[T](&a, c.plan.weights), take[T](&a, c.plan.biases)
	c.taskSums = take[float64](&a, c.plan.perTask*c.plan.tasks)
	c.sums = take[float64](&a, c.plan.sums*c.plan.vectors*c.cols)
	c.blockRoom = min(c.cols+15, block) &^ 15 // whole cache lines
	first := c.blockRoom
	if together := c.cols * c.plan.together; together > 0 {
		first = max(first, together)
		if c.plan.two {
			c.blockRoom = first
		}
	} else if c.reuse && (c.x.DType != native[T]() || c.norm.Residual.Present() || c.roundsSum() ||
		c.masked.X.Present()) {
		first = c.cols
	}
	for i := range c.workers {
		w := &c.workers[i]
		w.buffer, w.rounded = take[T](&a, first+2*c.blockRoom), nil
		if c.norm.RoundNormalized || c.roundsSum() || c.glu.Gate.Present() {
			w.rounded = take[T](&a, 2*c.blockRoom)
		}
		w.partials = take[partial](&a, max(blocks, c.plan.together))
		w.blockTokens, w.blockSoft = nil, nil
		if c.plan.tokens {
			w.blockTokens = take[tokenPartial](&a, blocks)
		}
		if c.plan.soft {
			w.blockSoft = take[softPartial](&a, blocks)
		}
		w.columns = take[float64](&a, c.plan.columns)
		w.recent = take[T](&a, c.plan.recent)
		w.dw, w.db = nil, nil
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

// taskQueue is the range of tasks that a worker has not started. The high half of left is the first one, the
// low half the one after the last.
type taskQueue struct{ left atomic.Uint64 }

func (q *taskQueue) set(lo, hi int) { q.left.Store(uint64(lo)<<32 | uint64(hi)) }

// take removes at most n of the first tasks, for the queue's owner. Changing left takes a locked
// instruction, which waits until the rows written before have left the store buffer. So one change is for
// several short tasks.
func (q *taskQueue) take(n int) (from, to int) {
	for {
		left := q.left.Load()
		lo, hi := int(left>>32), int(left&(1<<32-1))
		n := min(n, hi-lo)
		if n == 0 || q.left.CompareAndSwap(left, left+uint64(n)<<32) {
			return lo, lo + n
		}
	}
}

// steal removes the last task, for another worker.
func (q *taskQueue) steal() (from, to int) {
	for {
		left := q.left.Load()
		lo, hi := int(left>>32), int(left&(1<<32-1))
		if lo == hi {
			return lo, hi
		}
		if q.left.CompareAndSwap(left, left-1) {
			return hi - 1, hi
		}
	}
}

// runStep runs the tasks of a step and returns when all are done. Each worker starts with the same tasks in
// every call, because its cache may still hold their data, and steals tasks when its queue is empty. A panic
// of a worker is raised again on the caller's goroutine after all others have left, when none of them can
// still write to the caller's memory.
func (c *call[T]) runStep(s step[T], tasks int) {
	c.step, c.tasks, c.active = s, tasks, max(min(len(c.workers), tasks), 1)
	c.batch = max(min(tasks*batchWork/max(c.work, 1), tasks/(2*c.active)), 1) // others can steal half
	if c.active == 1 {
		for task := range tasks {
			s.do(&c.workers[0], task)
		}
		return
	}
	for i := range c.active {
		c.workers[i].queue.set(subrange(tasks, i, c.active))
	}
	if parallelFor := foreign.Load(); parallelFor != nil && (*parallelFor)(c.active, c) {
		c.group.raise()
		c.workers[0].runTasks() // what is left if not all workers ran
		return
	}
	generation := c.group.generation()
	defer c.group.finish()
	for i := 1; i < c.active; i++ {
		submit(job{&c.group, generation, &c.workers[i]}, c.mayStart)
	}
	c.workers[0].runTasks()
}

// RunWorker runs what worker i does in the current step.
func (c *call[T]) RunWorker(i int) {
	defer c.group.catch()
	clearUpperHalves() // as in engine.run: this may be a thread of the caller's
	c.workers[i].runTasks()
}

func (w *worker[T]) runTasks() {
	for from, to := w.queue.take(w.batch); from < to; from, to = w.queue.take(w.batch) {
		w.runRange(from, to)
	}
	for i := 1; i < w.active; i++ {
		victim := &w.workers[(w.number+i)%w.active].queue
		for from, to := victim.steal(); from < to; from, to = victim.steal() {
			w.runRange(from, to)
		}
	}
}

func (w *worker[T]) runRange(from, to int) {
	for task := from; task < to; task++ {
		w.step.do(w, task)
	}
}

// runRows runs both passes over all rows. A task is a range of rows, or with plan.splitRows a chunk of one.
func (c *call[T]) runRows() {
	if c.plan.splitRows {
		c.splitFirstPass()
		c.runStep(secondPassStep[T]{}, c.rows*c.chunks())
		return
	}
	c.runStep(rowsStep[T]{}, c.plan.tasks)
}

func (c *call[T]) chunks() int { return (c.cols + chunk - 1) / chunk }

// splitFirstPass runs the first pass with several workers per row, and combines each row's partials.
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

// subrange is part i of 0 to n, divided into count parts whose sizes differ by at most 1.
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

// view is n elements of a row in place. Their type in memory is T.
func view[T float](m *kernels.Matrix, row, j, n int) []T {
	return unsafe.Slice((*T)(rowAt(m, row, j)), n)
}

// scratch is space for n elements from column j on in part 0, 1 or 2 of the worker's buffer. Each part holds
// a block, except that part 0, which is the last in memory, holds plan.together rows, or a whole row with
// w.reuse. With plan.two part 1 holds as many rows.
func (w *worker[T]) scratch(number, j, n int) []T {
	from := (2 - number) * w.blockRoom
	if number == 0 {
		from += w.ahead
	}
	if w.plan.together > 0 || number == 0 && w.reuse {
		from += j
	}
	return w.buffer[from : from+n]
}

// read is n elements of a row: in place if their type is T, else converted into the numbered scratch space.
func (w *worker[T]) read(number int, m *kernels.Matrix, row, j, n int) []T {
	if m.DType == native[T]() {
		return view[T](m, row, j, n)
	}
	s := w.scratch(number, j, n)
	w.funcs.load[m.DType](s, rowAt(m, row, j))
	return s
}

// reread is what read returned in the first pass. It converts again only without w.reuse.
func (w *worker[T]) reread(number int, m *kernels.Matrix, row, j, n int) []T {
	if w.reuse && m.DType != native[T]() {
		return w.scratch(number, j, n)
	}
	return w.read(number, m, row, j, n)
}

// readRows is n of plan.together rows, from one on: in place if their type is T, else converted into the
// numbered scratch space.
func (w *worker[T]) readRows(number int, m *kernels.Matrix, row, n int) strided {
	rows := w.outputRows(number, m, row, n)
	switch load := w.funcs.load[m.DType]; {
	case m.DType == native[T]():
	case int(m.Stride) == w.cols:
		load(w.scratch(number, 0, n*w.cols), rowAt(m, row, 0))
	default:
		for i := range n {
			load(w.scratch(number, i*w.cols, w.cols), rowAt(m, row+i, 0))
		}
	}
	return rows
}

// outputRows is where to compute n of plan.together rows, from one on: in place if their type is T, else in
// scratch space, from where writeRows converts them.
func (w *worker[T]) outputRows(number int, m *kernels.Matrix, row, n int) strided {
	if m.DType == native[T]() {
		return strided{rowAt(m, row, 0), int(m.Stride * m.DType.Size())}
	}
	s := w.scratch(number, 0, n*w.cols)
	return strided{unsafe.Pointer(&s[0]), w.cols * int(unsafe.Sizeof(s[0]))}
}

// writeRows converts what was computed in outputRows' scratch space and stores it in the rows.
func (w *worker[T]) writeRows(number int, m *kernels.Matrix, row, n int) {
	switch store := w.funcs.store[m.DType]; {
	case m.DType == native[T]():
	case int(m.Stride) == w.cols:
		store(rowAt(m, row, 0), w.scratch(number, 0, n*w.cols), 1)
	default:
		for i := range n {
			store(rowAt(m, row+i, 0), w.scratch(number, i*w.cols, w.cols), 1)
		}
	}
}

// output is where to compute n elements of a row: in place if their type is T, else in scratch space, from
// where write converts them.
func (w *worker[T]) output(number int, m *kernels.Matrix, row, j, n int) []T {
	if m.DType == native[T]() {
		return view[T](m, row, j, n)
	}
	return w.scratch(number, j, n)
}

// streams tells whether an output from p on is written past the cache.
func (w *worker[T]) streams(p unsafe.Pointer) bool { return w.stream && uintptr(p)%64 == 0 }

// write converts what was computed in output's scratch space and stores it in the row.
func (w *worker[T]) write(m *kernels.Matrix, row, j int, s []T) {
	if m.DType != native[T]() {
		w.funcs.store[m.DType](rowAt(m, row, j), s, 1)
	}
}
