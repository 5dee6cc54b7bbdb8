package ops

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

// planCache is a direct-mapped cache of plans: a training loop repeats the same few requests. Entries are
// immutable. Where two goroutines store different entries in one slot, the only cost is that one plan is made
// again.
type planCache [256]atomic.Pointer[cachedPlan]

type cachedPlan struct {
	request request
	plan    *plan
}

// planCaches has one cache for each device ordinal. Calls on a device with a higher ordinal make a plan each
// time.
var planCaches [64]planCache

func (r *request) hash() uint64 {
	h := uint64(r.m)*0x9e3779b97f4a7c15 ^ uint64(r.n)*0xc2b2ae3d27d4eb4f ^ uint64(r.op)<<8 ^ uint64(r.x)
	if r.dw || r.total {
		h ^= 1 << 17
	}
	if r.onePass {
		h ^= 1 << 18
	}
	if r.BatchInvariant {
		h ^= 1 << 19
	}
	if r.wideWeights || r.weights {
		h ^= 1 << 27
	}
	h ^= uint64(r.Algorithm)<<20 ^ uint64(r.layout)<<24
	h ^= r.norm.hash()
	h ^= h >> 32
	return h * 0x9e3779b97f4a7c15 >> 32 // a slot is the low bits, so all bits have to reach them
}

func planFor(ordinal int32, f *driver.Facts, r request) (*plan, error) {
	if tuningFile != "" {
		return tuningPlan(f, r)
	}
	if int(ordinal) >= len(planCaches) {
		return makePlan(f, r)
	}
	slot := &planCaches[ordinal][r.hash()%uint64(len(planCache{}))]
	if e := slot.Load(); e != nil && e.request == r {
		return e.plan, nil
	}
	p, err := makePlan(f, r)
	if err != nil {
		return nil, err
	}
	slot.Store(&cachedPlan{r, p})
	return p, nil
}

// cudaCall is what one call needs to launch its kernels. It copies the stream and does not point to the Call:
// the struct's device escapes to the heap, and escape analysis would then move the Call there too.
type cudaCall struct {
	device          *driver.Device
	plan            *plan
	stream          uintptr
	scratch         uintptr
	ignoreAlignment int32 // 1 for batch-invariant results
	fromPool        bool  // scratch is from the driver's memory pool, and finish frees it
}

// start opens the device, makes the plan and allocates scratch memory. The caller must call finish.
func (c *Call) start(ordinal int32, r request) (cudaCall, error) {
	d, err := driver.Open(ordinal)
	if err != nil {
		return cudaCall{}, cudaError(err)
	}
	facts, err := d.Facts(kernels.FamilyOf(r.op, r.x))
	if err != nil {
		return cudaCall{}, cudaError(err)
	}
	p, err := planFor(ordinal, facts, r)
	if err != nil {
		return cudaCall{}, err
	}
	k := cudaCall{device: d, plan: p, stream: c.Stream}
	if r.BatchInvariant {
		k.ignoreAlignment = 1
	}
	switch {
	case p.scratch.size == 0:
	case c.Allocate != nil:
		memory, err := c.Allocate(p.scratch.size)
		if err != nil {
			return cudaCall{}, err
		}
		k.scratch = uintptr(memory)
	default:
		if k.scratch, err = d.Allocate(p.scratch.size, c.Stream); err != nil {
			return cudaCall{}, cudaError(err)
		}
		k.fromPool = true
	}
	return k, nil
}

// finish frees scratch memory that came from the driver's pool, in the stream's order.
func (k *cudaCall) finish() {
	if k.fromPool {
		k.device.Free(k.scratch, k.stream)
	}
}

// launch enqueues the plan's kernels, all with the same arguments. A kernel of another family than the others
// takes the first part of them.
func (k *cudaCall) launch(args unsafe.Pointer) error {
	for i := range k.plan.launches {
		l := &k.plan.launches[i]
		if err := k.device.Launch(l.variant, l.geometry, args, l.variant.Family.ArgBytes(), k.stream); err != nil {
			return cudaError(err)
		}
	}
	return nil
}

// at returns the address of an offset in the scratch memory.
func (k *cudaCall) at(offset uint64) kernels.Output {
	return kernels.Output(k.scratch + uintptr(offset))
}

// rows fills in the arguments that all kernels take. b is empty if the op has one input, and y if it writes
// no rows.
func (k *cudaCall) rows(a, b, y kernels.Matrix) kernels.Rows {
	return kernels.Rows{
		A: input(a.Data), B: input(b.Data), Y: output(y.Data), Partial: k.at(k.plan.scratch.partial),
		AStride: a.Stride, BStride: b.Stride, YStride: y.Stride, M: a.Rows, N: a.Cols,
		Chunk: k.plan.chunk, Splits: k.plan.splits, BType: int32(b.DType), YType: int32(y.DType),
		IgnoreAlignment: k.ignoreAlignment, Stages: k.plan.stages, Depth: k.plan.depth,
		PrefetchDistance: k.plan.prefetch, PrefetchFrom: k.plan.prefetchFrom,
	}
}

func input(p unsafe.Pointer) kernels.Input   { return kernels.Input(uintptr(p)) }
func output(p unsafe.Pointer) kernels.Output { return kernels.Output(uintptr(p)) }

// vectorRows reports whether every row of m consists of whole, aligned 16-byte vectors.
func vectorRows(m kernels.Matrix) bool {
	size := m.DType.Size()
	return uintptr(m.Data)%16 == 0 && m.Cols*size%16 == 0 && (m.Rows <= 1 || m.Stride*size%16 == 0)
}

// sameOffset reports whether all matrices have one type and equal offsets: row i begins equally far from a
// 16-byte boundary in each of them.
func sameOffset(first kernels.Matrix, others ...kernels.Matrix) bool {
	for _, m := range others {
		apart := uintptr(m.Data) - uintptr(first.Data)
		if m.DType != first.DType || apart%16 != 0 ||
			m.Rows > 1 && (m.Stride-first.Stride)*m.DType.Size()%16 != 0 {
			return false
		}
	}
	return true
}

func aligned(v kernels.Vector) bool { return uintptr(v.Data)%16 == 0 }

// cudaWarmup loads all kernels for a device.
func cudaWarmup(ordinal int32) error {
	d, err := driver.Open(ordinal)
	if err == nil {
		err = d.Warmup()
	}
	if err != nil {
		return cudaError(err)
	}
	return nil
}

// cudaExplain describes the kernels that would serve a request.
func cudaExplain(ordinal int32, r request) (string, error) {
	d, err := driver.Open(ordinal)
	if err != nil {
		return "", cudaError(err)
	}
	facts, err := d.Facts(kernels.FamilyOf(r.op, r.x))
	if err != nil {
		return "", cudaError(err)
	}
	return explainPlan(facts, r)
}

// explainPlan describes the kernels of a request's plan.
func explainPlan(f *driver.Facts, r request) (string, error) {
	planned := makePlan
	if tuningFile != "" {
		planned = tuningPlan
	}
	p, err := planned(f, r)
	if err != nil {
		return "", err
	}
	if r.m == 0 {
		p.why = "there are no rows"
		if len(p.launches) == 0 {
			return p.why + ": nothing is launched", nil
		}
	}
	return p.String(), nil
}

// String says what a plan launches and why.
func (p *plan) String() string {
	text := p.why
	if p.row != nil {
		text += "\npolicy: " + p.row.String()
	}
	for _, l := range p.launches {
		g := l.geometry
		text += fmt.Sprintf("\n%s: %d CTAs of %d threads", l.variant.Symbol, g.Grid, g.Threads)
		if g.Cluster > 1 {
			text += fmt.Sprintf(" in clusters of %d", g.Cluster)
		}
		if g.Shared > 0 {
			text += fmt.Sprintf(", %d KiB of shared memory", g.Shared>>10)
		}
	}
	if p.scratch.size > 0 {
		text += fmt.Sprintf("\n%d bytes of scratch memory", p.scratch.size)
	}
	return text
}

func errorf(s Status, format string, args ...any) error {
	return &Error{Status: s, Message: fmt.Sprintf(format, args...)}
}

// cudaError converts an error of internal/driver to an Error.
func cudaError(err error) error {
	var result *driver.Error
	switch {
	case errors.As(err, &result) && result.Code == driver.CodeOutOfMemory:
		return errorf(StatusMemory, "%v", err)
	case errors.As(err, &result) && result.Code == driver.CodeInvalidDevice:
		return errorf(StatusDevice, "%v", err)
	case errors.As(err, &result):
		return errorf(StatusCUDA, "%v", err)
	}
	return errorf(StatusUnsupported, "%v", err)
}
