package ops

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

// plans remembers plans by request, direct-mapped: a training loop asks for the same few again and again.
// An entry is immutable, so that a lost race costs one more plan and nothing else.
type plans [256]atomic.Pointer[remembered]

type remembered struct {
	request request
	plan    *plan
}

// devicePlans holds each device's plans by its number; a device beyond the table plans anew on each call.
var devicePlans [64]plans

func (r *request) hash() uint64 {
	h := uint64(r.m)*0x9e3779b97f4a7c15 ^ uint64(r.n)*0xc2b2ae3d27d4eb4f ^ uint64(r.op)<<8 ^ uint64(r.x)
	if r.general {
		h ^= 1 << 16
	}
	if r.dw || r.total {
		h ^= 1 << 17
	}
	if r.alike {
		h ^= 1 << 24
	}
	if r.onePass {
		h ^= 1 << 18
	}
	if r.BatchInvariant {
		h ^= 1 << 19
	}
	h ^= uint64(r.Algorithm) << 20
	return h ^ h>>32
}

func planFor(ordinal int32, f *driver.Facts, r request) (*plan, error) {
	if int(ordinal) >= len(devicePlans) {
		return makePlan(f, r)
	}
	slot := &devicePlans[ordinal][r.hash()%uint64(len(plans{}))]
	if e := slot.Load(); e != nil && e.request == r {
		return e.plan, nil
	}
	p, err := makePlan(f, r)
	if err != nil {
		return nil, err
	}
	slot.Store(&remembered{r, p})
	return p, nil
}

// cudaCall is one call on its way to the device. It does not hold the Call: what is in one struct with a device that lives on
// the heap would have to live there too.
type cudaCall struct {
	device  *driver.Device
	plan    *plan
	stream  uintptr
	scratch uintptr
	fixed   int32
	ours    bool // the scratch memory is the driver's, to be given back
}

// start opens the device, plans and takes the scratch memory. finish gives it back.
func (c *Call) start(ordinal int32, r request) (cudaCall, error) {
	d, err := driver.Open(ordinal)
	if err != nil {
		return cudaCall{}, cudaError(err)
	}
	r.Choice = c.Choice
	p, err := planFor(ordinal, d.Facts(), r)
	if err != nil {
		return cudaCall{}, err
	}
	k := cudaCall{device: d, plan: p, stream: c.Stream}
	if c.BatchInvariant {
		k.fixed = 1
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
		k.ours = true
	}
	return k, nil
}

func (k *cudaCall) finish() {
	if k.ours {
		k.device.Free(k.scratch, k.stream)
	}
}

// launch enqueues the plan's kernels, all with the same arguments.
func (k *cudaCall) launch(args unsafe.Pointer, bytes uintptr) error {
	for i := range k.plan.launches {
		l := &k.plan.launches[i]
		if err := k.device.Launch(l.variant, l.geometry, args, bytes, k.stream); err != nil {
			return cudaError(err)
		}
	}
	return nil
}

func (k *cudaCall) at(offset uint64) kernels.Output {
	return kernels.Output(k.scratch + uintptr(offset))
}

// rows fills in what all kernels need. b is empty where the op has one input, y where it writes no rows.
func (k *cudaCall) rows(a, b, y kernels.Matrix) kernels.Rows {
	return kernels.Rows{
		A: input(a.Data), B: input(b.Data), Y: output(y.Data), Partial: k.at(k.plan.scratch.partial),
		AStride: a.Stride, BStride: b.Stride, YStride: y.Stride, M: a.Rows, N: a.Cols,
		Chunk: k.plan.chunk, Splits: k.plan.splits, BType: int32(b.DType), YType: int32(y.DType),
		Fixed: k.fixed, Stages: k.plan.stages, Lag: k.plan.lag, Ahead: k.plan.ahead, AheadFrom: k.plan.aheadFrom,
	}
}

func input(p unsafe.Pointer) kernels.Input   { return kernels.Input(uintptr(p)) }
func output(p unsafe.Pointer) kernels.Output { return kernels.Output(uintptr(p)) }

// vectorRows tells whether every row of m is made of whole, aligned 16-byte vectors.
func vectorRows(m kernels.Matrix) bool {
	size := m.DType.Size()
	return uintptr(m.Data)%16 == 0 && m.Cols*size%16 == 0 && (m.Rows <= 1 || m.Stride*size%16 == 0)
}

// alike tells whether the rows of all of them begin at the same place in a 16-byte vector, row by row.
func alike(first kernels.Matrix, others ...kernels.Matrix) bool {
	for _, m := range others {
		apart := uintptr(m.Data) - uintptr(first.Data)
		if m.DType != first.DType || apart%16 != 0 || (m.Rows > 1 && (m.Stride-first.Stride)*m.DType.Size()%16 != 0) {
			return false
		}
	}
	return true
}

func aligned(v kernels.Vector) bool { return uintptr(v.Data)%16 == 0 }

func (c *Call) cudaSoftmaxForward(ordinal int32, x, y kernels.Matrix) error {
	general := !vectorRows(x) || !vectorRows(y)
	return c.softmax(ordinal, kernels.SoftmaxForward, x, kernels.Matrix{}, y, general, general && alike(x, y))
}

func (c *Call) cudaSoftmaxBackward(ordinal int32, dy, y, dx kernels.Matrix) error {
	general := !vectorRows(dy) || !vectorRows(y) || !vectorRows(dx)
	return c.softmax(ordinal, kernels.SoftmaxBackward, dy, y, dx, general, general && alike(dy, y, dx))
}

func (c *Call) softmax(ordinal int32, op kernels.Op, a, b, y kernels.Matrix, general, alike bool) error {
	if a.Rows == 0 {
		return nil
	}
	k, err := c.start(ordinal, request{op: op, x: a.DType, general: general, alike: alike, m: a.Rows, n: a.Cols})
	if err != nil {
		return err
	}
	defer k.finish()
	args := kernels.SoftmaxArgs{Rows: k.rows(a, b, y)}
	return k.launch(unsafe.Pointer(&args), unsafe.Sizeof(args))
}

func (c *Call) cudaRMSNormForward(
	ordinal int32, x kernels.Matrix, weight kernels.Vector, y kernels.Matrix, rstd kernels.Vector, eps float64,
) error {
	if x.Rows == 0 {
		return nil
	}
	general := !vectorRows(x) || !vectorRows(y) || y.DType != x.DType || !aligned(weight)
	k, err := c.start(ordinal, request{
		op: kernels.RMSNormForward, x: x.DType, general: general, alike: general && alike(x, y), m: x.Rows, n: x.Cols,
	})
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.rmsnorm(x, kernels.Matrix{}, y, weight)
	args.Rstd, args.Eps = output(rstd.Data), float32(eps)
	return k.launch(unsafe.Pointer(&args), unsafe.Sizeof(args))
}

func (c *Call) cudaRMSNormBackward(
	ordinal int32, x kernels.Matrix, weight kernels.Vector, dout kernels.Matrix, rstd kernels.Vector, dx kernels.Matrix,
	dw kernels.Vector,
) error {
	if x.Rows == 0 && !dw.Present() {
		return nil
	}
	mixed := dout.DType != x.DType
	general := mixed || !vectorRows(x) || !vectorRows(dout) || !vectorRows(dx) || !aligned(weight)
	k, err := c.start(ordinal, request{
		op: kernels.RMSNormBackward, x: x.DType, general: general, mixed: mixed, alike: general && alike(x, dout, dx),
		dw: dw.Present(), m: x.Rows, n: x.Cols,
	})
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.rmsnorm(x, dout, dx, weight)
	args.Rstd, args.Dw, args.DwType = output(rstd.Data), output(dw.Data), int32(dw.DType)
	args.DwPartial, args.Partials = k.at(k.plan.scratch.dwPartial), k.plan.partials
	return k.launch(unsafe.Pointer(&args), unsafe.Sizeof(args))
}

func (k *cudaCall) rmsnorm(a, b, y kernels.Matrix, weight kernels.Vector) kernels.RMSNormArgs {
	return kernels.RMSNormArgs{
		Rows: k.rows(a, b, y), Weight: input(weight.Data), WeightType: int32(weight.DType), InvN: 1 / float32(a.Cols),
	}
}

func (c *Call) cudaCrossEntropyForward(ordinal int32, a *kernels.CrossEntropy) error {
	op, general := kernels.CrossEntropyForward, !vectorRows(a.X)
	if a.DX.Data != nil {
		op, general = kernels.CrossEntropyForwardDX, general || !vectorRows(a.DX)
	}
	total := a.Reduction != kernels.ReduceNone || a.Denominator.Present()
	if a.X.Rows == 0 && !total {
		return nil
	}
	rowsAlike := general && (a.DX.Data == nil || alike(a.X, a.DX))
	onePass := a.OnePass && a.Reduction == kernels.ReduceMean && a.DX.Data != nil
	k, err := c.start(ordinal, request{
		op: op, x: a.X.DType, general: general, alike: rowsAlike, total: total, onePass: onePass, m: a.X.Rows, n: a.X.Cols,
	})
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.crossEntropy(a)
	args.Logits = k.at(k.plan.scratch.logits)
	args.Denominator = output(a.Denominator.Data)
	if onePass {
		args.OnePass = 1
		if args.Denominator == 0 {
			args.Denominator = k.at(k.plan.scratch.denominator)
		}
	}
	if total && !k.plan.totalHere {
		args.RowLosses = k.at(k.plan.scratch.rowLosses)
	}
	if a.Reduction == kernels.ReduceNone {
		args.Loss, args.LossStride = output(a.Loss.Data), a.Loss.Stride
	} else {
		args.Total = output(a.Loss.Data)
	}
	if k.plan.totalHere {
		args.TotalHere = 1
	}
	return k.launch(unsafe.Pointer(&args), unsafe.Sizeof(args))
}

func (c *Call) cudaCrossEntropyBackward(ordinal int32, a *kernels.CrossEntropy) error {
	if a.X.Rows == 0 {
		return nil
	}
	general := !vectorRows(a.X) || !vectorRows(a.DX)
	k, err := c.start(ordinal, request{
		op: kernels.CrossEntropyBackward, x: a.X.DType, general: general, onePass: a.OnePass, m: a.X.Rows, n: a.X.Cols,
	})
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.crossEntropy(a)
	args.Dloss, args.DlossStride = input(a.DLoss.Data), a.DLoss.Stride
	args.Denominator = output(a.Denominator.Data)
	if a.OnePass {
		args.OnePass = 1
	}
	return k.launch(unsafe.Pointer(&args), unsafe.Sizeof(args))
}

// crossEntropy fills in what forward and backward share.
func (k *cudaCall) crossEntropy(a *kernels.CrossEntropy) kernels.CrossEntropyArgs {
	args := kernels.CrossEntropyArgs{
		Rows:   k.rows(a.X, kernels.Matrix{}, a.DX),
		Target: input(a.Target.Data), TargetStride: a.Target.Stride, TargetType: int32(a.Target.DType),
		Weight: input(a.Weight.Data), WeightType: int32(a.Weight.DType), IgnoreIndex: a.IgnoreIndex,
		Max: output(a.Max.Data), MaxStride: a.Max.Stride, LogSum: output(a.LogSum.Data), LogSumStride: a.LogSum.Stride,
	}
	if a.Reduction == kernels.ReduceMean {
		args.Mean = 1
	}
	return args
}

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

// cudaExplain describes the kernels that aligned compact rows would get.
func cudaExplain(ordinal int32, r request) (string, error) {
	d, err := driver.Open(ordinal)
	if err != nil {
		return "", cudaError(err)
	}
	r.general = r.n*r.x.Size()%16 != 0
	r.alike = r.general
	p, err := makePlan(d.Facts(), r)
	if err != nil {
		return "", err
	}
	return p.String(), nil
}

// String says what a plan launches and why.
func (p *plan) String() string {
	text := p.why
	for _, l := range p.launches {
		text += fmt.Sprintf("\n%s: %d CTAs of %d threads", l.variant.Symbol, l.geometry.Grid, l.variant.Threads)
		if l.geometry.Cluster > 1 {
			text += fmt.Sprintf(" in clusters of %d", l.geometry.Cluster)
		}
		if l.geometry.Shared > 0 {
			text += fmt.Sprintf(", %d KiB of shared memory", l.geometry.Shared>>10)
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

// cudaError gives the driver's errors a status.
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
