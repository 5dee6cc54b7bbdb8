package ops

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// logSumExp is the log-sum-exp of each row, Max + LogSum. If LogSum is absent, Max holds the sum. Denominator
// is the divisor of a mean, if the same tensor holds that too.
type logSumExp struct{ Max, LogSum, Denominator kernels.Vector }

func (a *crossEntropyForward) refuse(k *check) {
	k.lossOptions(a.LabelSmoothing, a.ZLoss, a.Scale, a.Softcap, a.Temperature)
	k.weightedMean(a.ZLoss, a.Weight, a.Reduction)
	k.onePass(a.OnePass, a.Reduction)
	if a.LSE.Denominator.Present() && a.Denominator.Present() {
		k.fail(StatusOption, "denominator is given, and lse has room for it too, expected one of them; "+
			"drop denominator")
	}
	k.divisor(a.Divisor, a.Reduction)
}

// lossOptions checks the options of a row's loss.
func (k *check) lossOptions(labelSmoothing, zLoss, scale, softcap, temperature float64) {
	if !(0 <= labelSmoothing && labelSmoothing <= 1) {
		k.fail(StatusOption, "label_smoothing is %v, expected 0 to 1", labelSmoothing)
	}
	if !(0 <= zLoss && zLoss <= math.MaxFloat32) {
		k.fail(StatusOption, "z_loss is %v, expected a finite number of at least 0", zLoss)
	}
	k.logitMap(scale, softcap, temperature)
}

func (k *check) weightedMean(zLoss float64, weight kernels.Vector, reduction kernels.Reduction) {
	if zLoss != 0 && weight.Present() && reduction == kernels.ReduceMean {
		k.fail(StatusUnsupported, "z_loss is %v with weight and reduction mean, expected 0: the mean of losses is "+
			"over weights, that of z-losses over rows; use reduction sum, or leave one of them out", zLoss)
	}
}

// logitMap checks the options that map logits.
func (k *check) logitMap(scale, softcap, temperature float64) {
	if !isFactor(scale) {
		k.fail(StatusOption, "scale is %v, expected %v to %v", scale, leastFactor, mostFactor)
	}
	if softcap != 0 && !isFactor(softcap) {
		k.fail(StatusOption, "softcap is %v, expected %v to %v, or 0 for none", softcap, leastFactor, mostFactor)
	}
	if !isFactor(temperature) {
		k.fail(StatusOption, "temperature is %v, expected %v to %v", temperature, leastFactor, mostFactor)
	}
}

// The factors of logits, so that also quotients of them are normal numbers of float32.
const leastFactor, mostFactor = 1e-18, 1e18

func isFactor(v float64) bool { return leastFactor <= v && v <= mostFactor }

func (k *check) divisor(divisor kernels.Vector, reduction kernels.Reduction) {
	if divisor.Present() && reduction == kernels.ReduceMean {
		k.fail(StatusOption, "divisor is given with reduction mean, expected sum or none; a mean has a divisor "+
			"already: drop one of them")
	}
}

func (k *check) onePass(onePass bool, reduction kernels.Reduction) {
	if onePass && reduction == kernels.ReduceNone {
		k.fail(StatusOption, "one_pass is set with reduction none, expected mean or sum; leave it 0")
	}
}

// spec describes the call to the kernels: what they read and write, and the options.
func (a *crossEntropyForward) spec() kernels.CrossEntropy {
	s := kernels.CrossEntropy{
		X: a.X, Target: a.Target, Weight: a.Weight, Divisor: a.Divisor, Upstream: a.Upstream,
		IgnoreIndex: a.IgnoreIndex, Reduction: a.Reduction, OnePass: a.OnePass, LabelSmoothing: a.LabelSmoothing,
		ZLoss: a.ZLoss, Map: kernels.MapLogits(a.Scale, a.Softcap, a.Temperature),
		Loss: a.Loss, Max: a.LSE.Max, LogSum: a.LSE.LogSum, DX: a.DX, Denominator: a.Denominator,
	}
	if a.LSE.Denominator.Present() {
		s.Denominator = a.LSE.Denominator
	}
	return s
}

func (a *crossEntropyForward) host() error {
	if s := a.spec(); s.X.Rows > 0 || s.HasTotal() {
		return cpu.CrossEntropyForward(&s, workers())
	}
	return nil
}

func (a *crossEntropyForward) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.X.Rows == 0 && !s.HasTotal() {
		return nil
	}
	r := a.request(&s)
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.generalCrossEntropy(&s, &r)
	args.TargetLogits = k.at(k.plan.scratch.logits)
	args.Denominator = output(s.Denominator.Data)
	if r.onePass {
		args.OnePass = 1
		if args.Denominator == 0 {
			args.Denominator = k.at(k.plan.scratch.denominator)
		}
		args.Divisor = kernels.Input(args.Denominator)
	}
	if r.total && !k.plan.singleCTATotal {
		args.RowLosses = k.at(k.plan.scratch.rowLosses)
	}
	if s.Reduction == kernels.ReduceNone {
		args.Loss, args.LossStride = output(s.Loss.Data), s.Loss.Stride
	} else {
		args.Total = output(s.Loss.Data)
	}
	if k.plan.singleCTATotal {
		args.SingleCTATotal = 1
	}
	if args.Loss != 0 && !r.total && args.Max == 0 && args.LogSum == 0 && args.Divisor == 0 {
		args.OnlyLosses = 1
	}
	return k.launch(unsafe.Pointer(&args))
}

func (a *crossEntropyForward) request(s *kernels.CrossEntropy) request {
	r := request{
		op: kernels.CrossEntropyForward, Choice: a.Choice, x: a.X.DType, layout: layoutOf(true, a.X),
		total: s.HasTotal(), m: a.X.Rows, n: a.X.Cols,
	}
	if a.DX.Data != nil {
		r.op = kernels.CrossEntropyForwardDX
		r.layout = layoutOf(true, a.X, a.DX)
		r.onePass = a.OnePass && a.Reduction == kernels.ReduceMean
	}
	return r.general(s)
}

func (a *crossEntropyBackward) refuse(k *check) {
	k.lossOptions(a.LabelSmoothing, a.ZLoss, a.Scale, a.Softcap, a.Temperature)
	k.weightedMean(a.ZLoss, a.Weight, a.Reduction)
	if a.Slice && a.LabelSmoothing != 0 {
		k.fail(StatusUnsupported, "label_smoothing is %v with slice, expected 0: the classes of other slices are "+
			"not known; leave one of them out", a.LabelSmoothing)
	}
	k.onePass(a.OnePass, a.Reduction)
	if a.OnePass && a.Slice {
		k.fail(StatusOption, "slice is set with one_pass, whose dx forward has computed without it, expected "+
			"one of them; leave one_pass 0")
	}
	k.divisor(a.Divisor, a.Reduction)
	if a.Reduction != kernels.ReduceMean && a.Denominator.Present() {
		k.fail(StatusOption, "denominator is given with another reduction than mean, expected NULL; "+
			"drop it or set reduction to mean")
	}
}

func (a *crossEntropyBackward) request(s *kernels.CrossEntropy) request {
	r := request{
		op: kernels.CrossEntropyBackward, Choice: a.Choice, x: a.X.DType, onePass: a.OnePass,
		layout: layoutOf(true, a.X, a.DX), m: a.X.Rows, n: a.X.Cols,
	}
	return r.general(s)
}

func (a *crossEntropyBackward) spec() kernels.CrossEntropy {
	s := kernels.CrossEntropy{
		X: a.X, Target: a.Target, Weight: a.Weight, Divisor: a.Divisor, Upstream: a.Upstream,
		IgnoreIndex: a.IgnoreIndex, Reduction: a.Reduction, OnePass: a.OnePass, Slice: a.Slice,
		LabelSmoothing: a.LabelSmoothing, ZLoss: a.ZLoss,
		Map:   kernels.MapLogits(a.Scale, a.Softcap, a.Temperature),
		DLoss: a.DLoss, Max: a.LSE.Max, LogSum: a.LSE.LogSum, DX: a.DX,
	}
	if a.Reduction == kernels.ReduceMean {
		if s.Divisor = a.Denominator; !s.Divisor.Present() {
			s.Divisor = a.LSE.Denominator
		}
	}
	return s
}

func (a *crossEntropyBackward) host() error {
	if a.X.Rows == 0 {
		return nil
	}
	s := a.spec()
	return cpu.CrossEntropyBackward(&s, workers())
}

func (a *crossEntropyBackward) cuda(c *Call, ordinal int32) error {
	s := a.spec()
	if s.X.Rows == 0 {
		return nil
	}
	r := a.request(&s)
	k, err := c.start(ordinal, r)
	if err != nil {
		return err
	}
	defer k.finish()
	args := k.generalCrossEntropy(&s, &r)
	args.Dloss, args.DlossStride = input(s.DLoss.Data), s.DLoss.Stride
	if s.OnePass {
		args.OnePass = 1
	}
	if s.Slice {
		args.Slice = 1
	}
	return k.launch(unsafe.Pointer(&args))
}

// generalLosses has the ops that stand for cross-entropy's where it has options.
var generalLosses = map[kernels.Op]kernels.Op{
	kernels.CrossEntropyForward:   kernels.GeneralCrossEntropyForward,
	kernels.CrossEntropyForwardDX: kernels.GeneralCrossEntropyForwardDX,
	kernels.CrossEntropyBackward:  kernels.GeneralCrossEntropyBackward,
}

// general is the request for a call with options, or the same one without. Label smoothing has kernels read
// the weight of each class along with the logits.
func (r request) general(s *kernels.CrossEntropy) request {
	if !s.HasOptions() {
		return r
	}
	r.op = generalLosses[r.op]
	if s.LabelSmoothing != 0 && s.Weight.Present() {
		r.weights = r.op != kernels.GeneralCrossEntropyForward
		if !aligned(s.Weight) && r.layout == policy.Aligned {
			r.layout = policy.MixedOffsets
		}
	}
	return r
}

// generalCrossEntropy fills in the arguments that forward and backward share. The kernels without options
// take the first part of them.
func (k *cudaCall) generalCrossEntropy(
	s *kernels.CrossEntropy, r *request,
) kernels.GeneralCrossEntropyArgs {
	args := kernels.GeneralCrossEntropyArgs{
		CrossEntropyArgs: k.crossEntropy(s), LabelSmoothing: float32(s.LabelSmoothing), ZLoss: float32(s.ZLoss),
		Inner: float32(s.Map.Inner), Outer: 1,
	}
	if s.Map.Outer != 0 {
		args.Outer = float32(s.Map.Outer)
	}
	if r.weights {
		args.ClassWeights = k.at(k.plan.scratch.weights)
	}
	return args
}

// crossEntropy fills in the arguments that forward and backward share.
func (k *cudaCall) crossEntropy(s *kernels.CrossEntropy) kernels.CrossEntropyArgs {
	args := kernels.CrossEntropyArgs{
		Rows:   k.rows(s.X, kernels.Matrix{}, s.DX),
		Target: input(s.Target.Data), TargetStride: s.Target.Stride, TargetType: int32(s.Target.DType),
		Weight: input(s.Weight.Data), WeightType: int32(s.Weight.DType), IgnoreIndex: s.IgnoreIndex,
		Divisor: input(s.Divisor.Data), Upstream: input(s.Upstream.Data),
		Max: output(s.Max.Data), MaxStride: s.Max.Stride,
		LogSum: output(s.LogSum.Data), LogSumStride: s.LogSum.Stride,
	}
	if s.Reduction == kernels.ReduceMean {
		args.Mean = 1
	}
	if s.OnePass && s.LogSum.Present() {
		args.Sums = 1
	}
	if threads := k.plan.rowThreads; threads > 0 {
		args.RowThreads, args.InverseRowThreads = threads, (1<<16+threads-1)/threads
		args.RowsPerCTA, args.Parts = k.plan.rowsPerCTA, k.plan.parts
	}
	return args
}

// statistics checks the log-sum-exp of the rows. It has M elements; or shape (2, M), with the maxima and the
// logarithms of the sums (with one_pass see kernels.CrossEntropy); or 2 M + 1 elements, the same two parts
// and then the denominator.
func (k *check) statistics(name string, t *dlpack.Tensor, allowed types) (s logSumExp) {
	d, ok := k.operand(name, t, allowed)
	if !ok {
		return s
	}
	f := k.form(name, t, shapeStatistics.forms)
	switch {
	case f == nil:
	case f.letters == "L":
		s.Max = k.elements(name, t, d, &shapeStatistics)
	case f.letters == "S":
		all := k.elements(name, t, d, &shapeStatistics)
		if k.err != nil {
			return s
		}
		m := all.Len / 2
		part := func(from, n int64) kernels.Vector {
			return kernels.Vector{Data: unsafe.Add(all.Data, from*d.Size()), DType: d, Len: n, Stride: 1}
		}
		s.Denominator = part(2*m, 1)
		if m > 0 {
			s.Max, s.LogSum = part(0, m), part(m, m)
		}
	default:
		s.Max, s.LogSum = k.halves(name, t, d)
	}
	return s
}

// halves checks the strides of an operand of two parts.
func (k *check) halves(name string, t *dlpack.Tensor, d kernels.DType) (first, second kernels.Vector) {
	m := t.Len() / 2
	part := *t
	part.NDim--
	part.Shape = unsafe.SliceData(t.Dims()[1:])
	if t.Strides != nil {
		part.Strides = unsafe.SliceData(unsafe.Slice(t.Strides, t.NDim)[1:])
	}
	if stride, ok := collapse(&part, part.Rank()); m > 1 && (!ok || stride != 1) {
		k.fail(StatusLayout, "%s has strides %s, expected adjacent elements in each of its two parts; "+
			"make it contiguous", name, strides(t))
	}
	first = kernels.Vector{Data: t.Pointer(), DType: d, Len: m, Stride: 1}
	second = first
	second.Data = unsafe.Add(first.Data, t.Stride(0)*d.Size())
	k.add(span{name: name, dtype: d, data: int64(uintptr(t.Pointer())), rows: 2, cols: m, stride: t.Stride(0)})
	return first, second
}
