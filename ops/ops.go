package ops

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// Status classifies an Error. The numbers are gander_status of gander.h.
type Status int32

// String returns the status as a word, such as "shape".
func (s Status) String() string {
	if s < 0 || int(s) >= len(statusNames) {
		return fmt.Sprintf("status %d", int32(s))
	}
	return statusNames[s]
}

// Error makes a Status a target of errors.Is: errors.Is(err, ops.StatusShape).
func (s Status) Error() string { return "gander: " + s.String() }

// Error is the error of every function of this package. Message names the argument, what came, what was
// expected, and what to do.
type Error struct {
	Status  Status
	Message string
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Is tells whether target is the error's status.
func (e *Error) Is(target error) bool { return target == e.Status }

// Call holds the stream and the memory allocator of a call. It matters on CUDA devices only. A nil Call means
// the legacy default stream and the driver's memory pool.
type Call struct {
	Stream uintptr // a CUstream
	// Allocate returns device memory that may be used in Stream's order, or an error. A call uses it at most
	// once. The memory must stay valid until the work that the call enqueues on Stream is done.
	Allocate func(bytes uint64) (unsafe.Pointer, error)
}

var defaultCall Call

// orDefault returns the defaults for a nil Call.
func (c *Call) orDefault() *Call {
	if c == nil {
		return &defaultCall
	}
	return c
}

var threads atomic.Int64

// SetNumThreads limits the threads of one call on host tensors. 0, which is the default, and negative numbers
// mean GOMAXPROCS.
func SetNumThreads(n int) { threads.Store(int64(n)) }

// NumThreads is what SetNumThreads has set.
func NumThreads() int { return int(threads.Load()) }

// workers returns how many threads a call may use.
func workers() int {
	all := runtime.GOMAXPROCS(0)
	if n := int(threads.Load()); n > 0 && n < all {
		return n
	}
	return all
}

// Warmup loads everything that ops on d will need, so that no later call has to.
func Warmup(d dlpack.Device) error {
	k := check{op: "warmup"}
	k.onDevice(d)
	if k.err != nil {
		return k.err
	}
	if d.Host() {
		return nil
	}
	return cudaWarmup(d.ID)
}

// OpenImages reads the compiled kernels from a folder, in place of those that the program embeds. A program
// embeds none if it was built from a module without compiled kernels, as go get fetches it. The folder is
// kernels/images after ./build.sh build in a checkout of the same version of gander, or a copy of it. All
// images are read and stay in memory.
//
// OpenImages may succeed once, and before the first call with CUDA tensors. After an error the program is as
// before. Without the tag cuda it returns an error.
func OpenImages(folder string) error {
	switch err := driver.OpenImages(folder); {
	case err == nil:
		return nil
	case errors.Is(err, driver.ErrBuiltWithout):
		return cudaError(err)
	default:
		return errorf(StatusOption, "open_images: %v", err)
	}
}

// explained maps the names that Explain takes to the requests that it plans.
var explained = map[string]request{
	"softmax_forward":             {op: kernels.SoftmaxForward},
	"softmax_backward":            {op: kernels.SoftmaxBackward},
	"rmsnorm_forward":             {op: kernels.RMSNormForward},
	"rmsnorm_backward":            {op: kernels.RMSNormBackward, dw: true},
	"cross_entropy_forward":       {op: kernels.CrossEntropyForward},
	"cross_entropy_forward_dx":    {op: kernels.CrossEntropyForwardDX},
	"cross_entropy_backward":      {op: kernels.CrossEntropyBackward},
	"token_statistics_forward":    {op: kernels.TokenStatisticsForward},
	"logsumexp_forward":           {op: kernels.CrossEntropyForward},
	"logsumexp_backward":          {op: kernels.CrossEntropyBackward},
	"token_statistics_backward":   {op: kernels.TokenStatisticsBackward},
	"soft_cross_entropy_forward":  {op: kernels.SoftCrossEntropyForward},
	"soft_cross_entropy_backward": {op: kernels.SoftCrossEntropyBackward},
	"l2norm_forward":              {op: kernels.RMSNormForward},
	"l2norm_backward":             {op: kernels.RMSNormBackward},
	"layernorm_forward":           {op: kernels.LayerNormForward},
	"layernorm_backward":          {op: kernels.LayerNormBackward, norm: normOperands{second: 1, sums: 2}},
	"glu_forward":                 {op: kernels.GLUForward},
	"glu_backward":                {op: kernels.GLUBackward},

	// With a residual, and its gradient. All operands have x's type.
	"rmsnorm_residual_forward":    {op: kernels.RMSNormResidualForward, norm: residual(0)},
	"rmsnorm_residual_backward":   {op: kernels.RMSNormResidualBackward, norm: residual(1)},
	"layernorm_residual_forward":  {op: kernels.NormForward, norm: residual(0)},
	"layernorm_residual_backward": {op: kernels.NormBackward, norm: residual(2)},
}

// residual is the operands of a norm with a residual. sums is how many of dw and db backward computes.
func residual(sums int8) normOperands { return normOperands{second: 1, third: sums > 0, sums: sums} }

// explainedOps lists those names, of forward and backward that of forward alone.
var explainedOps = func() string {
	isBackward := func(name string) bool { return strings.HasSuffix(name, "_backward") }
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(explained)), isBackward)
	return alternatives(append(names, "such a name with _backward"))
}()

// alternatives lists names in a sentence.
func alternatives(names []string) string {
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// onDevice checks the device that Warmup or Explain is given.
func (k *check) onDevice(d dlpack.Device) {
	k.device = d
	if !served(d) {
		k.fail(StatusDevice, "device has type %d, expected %s", d.Type, servedDevices)
	}
}

// noFloat64 refuses float64 for Explain. where is a device, or a GPU's name.
func (k *check) noFloat64(where any) {
	k.fail(StatusUnsupported, "dtype is float64, expected %v on %v; float64 is served in host memory, on "+
		`device "cpu"`, typeCompanion.narrow, where)
}

// elementType is the type of the rows that Explain is asked about.
func (k *check) elementType(d dlpack.DType) kernels.DType {
	t, ok := DType(d)
	if !ok {
		k.fail(StatusDType, "dtype is %v, expected %v", d, typeFloat.narrow)
	}
	return t
}

// rowType checks the element type that Explain is asked about, on a device.
func (k *check) rowType(t kernels.DType, d dlpack.Device) {
	switch {
	case typeFloat.narrow&only(t) == 0:
		k.fail(StatusDType, "dtype is %v, expected %v", t, typeFloat.narrow)
	case t == kernels.Float64 && !d.Host():
		k.noFloat64(d)
	}
}

// explainable checks a name that Explain is given.
func (k *check) explainable(op string) {
	if _, ok := explained[op]; !ok {
		k.fail(StatusOption, "op is %.40q, expected %s", op, explainedOps)
	}
}

// Explain describes in words what would run an op, and why, for aligned compact rows (m, n) of t on d. op is
// an operator's name, "cross_entropy_forward_dx", or the name of a norm with "_residual" before "_forward" or
// "_backward". Backward of a norm has a weight, and that of LayerNorm a bias.
func Explain(op string, m, n int64, dtype dlpack.DType, d dlpack.Device, c Choice) (string, error) {
	k := check{op: "explain"}
	t := k.elementType(dtype)
	r := k.explain(op, m, n, t, d, c)
	if k.err != nil {
		return "", k.err
	}
	if !d.Host() {
		return cudaExplain(d.ID, r)
	}
	return onHost(fmt.Sprintf("%s of %d rows of %d %v", op, m, n, t), t, d), nil
}

// onHost describes what runs a call in host memory.
func onHost(call string, t kernels.DType, d dlpack.Device) string {
	accumulator := kernels.Float32
	if t == kernels.Float64 {
		accumulator = kernels.Float64
	}
	whose := ""
	if cpu.HasParallelFor() {
		whose = " of the caller's framework"
	}
	return fmt.Sprintf("%s on %v: Go with %s instructions, accumulated in %v, on the calling thread if the "+
		"operands are small, otherwise on up to %d threads%s", call, d, cpu.SIMD(), accumulator, workers(), whose)
}

// explainedHeads maps the names that ExplainHeads takes.
var explainedHeads = map[string]request{
	"rotary_forward":          {op: kernels.Rotate},
	"rotary_backward":         {op: kernels.Rotate},
	"qk_norm_rotary_forward":  {op: kernels.QKNormRotate},
	"qk_norm_rotary_backward": {op: kernels.QKNormRotateBackward, dw: true},
}

// ExplainHeads is Explain for what rotates the heads of tokens. heads is how many a token has, of q and of k
// together; all n columns of each are rotated, but for the last of an odd number. Backward of qk_norm_rotary
// computes the weights' gradients. A name that is not empty is that of a GPU as in ExplainDevice; then d does
// not matter.
func ExplainHeads(op string, tokens, heads, n int64, dtype dlpack.DType, d dlpack.Device, name string) (
	string, error,
) {
	k := check{op: "explain"}
	t := k.elementType(dtype)
	var facts *driver.Facts
	if name != "" {
		facts, d = k.named(name), dlpack.Device{Type: dlpack.CUDA}
		if t == kernels.Float64 {
			k.noFloat64(name)
		}
	}
	k.onDevice(d)
	k.rowType(t, d)
	r, known := explainedHeads[op]
	normalized := r.op != kernels.Rotate
	switch {
	case !known:
		k.fail(StatusOption, "op is %.40q, expected %s", op,
			alternatives(slices.Sorted(maps.Keys(explainedHeads))))
	case tokens < 0 || heads < 1 || n < 1:
		k.fail(StatusShape, "shape is (%d, %d, %d), expected M >= 0 tokens of H >= 1 heads of N >= 1", tokens,
			heads, n)
	case n > math.MaxInt32 || heads > math.MaxInt32/n || tokens > math.MaxInt64/64/(heads*n):
		k.fail(StatusShape, "shape is (%d, %d, %d), expected fewer than 2^31 elements of a token, and fewer "+
			"than 2^57 in all", tokens, heads, n)
	case normalized && n > mostNormalized:
		k.fail(StatusShape, "shape is (%d, %d, %d), expected at most %d columns of heads that are normalized",
			tokens, heads, n, mostNormalized)
	}
	if k.err != nil {
		return "", k.err
	}
	if d.Host() {
		call := fmt.Sprintf("%s of %d tokens of %d heads of %d %v", op, tokens, heads, n, t)
		return onHost(call, t, d), nil
	}
	rotated, size := n-n%2, vectorOf(t, policy.Aligned)
	r.x = t
	if r.layout = policy.Aligned; rotated/2%size != 0 || n%size != 0 {
		r.layout = policy.MixedOffsets
	}
	items := itemsOf(n, rotated, vectorOf(t, r.layout))
	if r = rotateRequest(r, tokens, heads, items); normalized {
		r = normalizeRequest(r, tokens, heads, 0, items, n)
	}
	if name != "" {
		return explainPlan(facts, r)
	}
	return cudaExplain(d.ID, r)
}

// explain checks the arguments of Explain and returns the request.
func (k *check) explain(op string, m, n int64, t kernels.DType, d dlpack.Device, c Choice) request {
	r := explained[op]
	r.x, r.m, r.n, r.Choice = t, m, n, c
	if r.norm.second > 0 {
		r.norm.second = int8(t.Size())
		r.norm.compact, r.norm.bulk = true, n*t.Size()%16 == 0
	}
	if r.layout = policy.Aligned; n*t.Size()%16 != 0 {
		r.layout = policy.SameOffset
	}
	k.explainable(op)
	k.onDevice(d)
	k.rowType(t, d)
	switch {
	case m < 0 || n < 1:
		k.fail(StatusShape, "shape is (%d, %d), expected M >= 0 rows of N >= 1", m, n)
	case m > math.MaxInt64/8/n:
		k.fail(StatusShape, "shape is (%d, %d), expected fewer than 2^60 elements", m, n)
	}
	k.chosen(c, r.op)
	return r
}
