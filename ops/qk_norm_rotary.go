package ops

import (
	"math/bits"
	"unsafe"

	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// mostNormalized is how many columns a normalized head may have: it lies in the registers of a warp.
const mostNormalized = 512

func (a *qkNormRotaryForward) call() kernels.QKNormRotary {
	rotation := rotaryForward{a.Q, a.K, a.Cos, a.Sin, a.Offsets, a.CuSeqlens, a.QOut, a.KOut, a.Offset,
		a.Interleaved, a.PerElement, a.RoundProducts, a.Choice}
	return kernels.QKNormRotary{
		Rotary: rotation.call(), QWeight: a.QWeight, KWeight: a.KWeight, Eps: a.Eps, WeightOffset: a.WeightOffset,
		RoundNormalized: a.RoundNormalized,
	}
}

func (a *qkNormRotaryBackward) call() kernels.QKNormRotary {
	r := (&qkNormRotaryForward{a.Q, a.K, a.QWeight, a.KWeight, a.Cos, a.Sin, a.Offsets, a.CuSeqlens, a.DQ, a.DK,
		a.Offset, a.Interleaved, a.PerElement, a.Eps, a.WeightOffset, a.RoundNormalized, a.RoundProducts,
		a.Choice}).call()
	r.Backward = true
	r.DQOut, r.DKOut, r.DQWeight, r.DKWeight = a.DQOut, a.DKOut, a.DQWeight, a.DKWeight
	return r
}

func (a *qkNormRotaryForward) refuse(k *check)  { k.qkNormRotary(a.call()) }
func (a *qkNormRotaryBackward) refuse(k *check) { k.qkNormRotary(a.call()) }

// qkNormRotary refuses what does not fit together.
func (k *check) qkNormRotary(r kernels.QKNormRotary) {
	k.rotary(r.Rotary)
	k.finite("eps", r.Eps)
	k.finite("weight_offset", r.WeightOffset)
	switch {
	case k.err != nil:
	case r.Eps < 0:
		k.fail(StatusOption, "eps is %v, expected 0 or more", r.Eps)
	case r.Q.Cols > mostNormalized:
		k.fail(StatusShape, "%s has %d columns, expected at most %d; normalize the heads with rmsnorm, and rotate "+
			"them with rotary", k.first, r.Q.Cols, mostNormalized)
	case r.WeightOffset != 0 && !(k.given("q_weight") && (k.given("k_weight") || !k.given("k"))):
		k.fail(StatusOption, "weight_offset is %v without a weight, expected 0; pass the weights", r.WeightOffset)
	case k.given("k_weight") && !k.given("k"):
		k.fail(StatusOption, "k_weight is given without a k, expected NULL; pass the k or drop k_weight")
	}
}

func (a *qkNormRotaryForward) host() error  { r := a.call(); return cpu.QKNormRotary(&r, workers()) }
func (a *qkNormRotaryBackward) host() error { r := a.call(); return cpu.QKNormRotary(&r, workers()) }

func (a *qkNormRotaryForward) cuda(c *Call, ordinal int32) error {
	return c.qkNormRotary(ordinal, a.call())
}
func (a *qkNormRotaryBackward) cuda(c *Call, ordinal int32) error {
	return c.qkNormRotary(ordinal, a.call())
}

// qkNormRotary launches forward or backward.
func (c *Call) qkNormRotary(ordinal int32, r kernels.QKNormRotary) error {
	sums := r.DQWeight.Present() || r.DKWeight.Present()
	if r.Tokens() == 0 && !sums {
		return nil
	}
	ofK := r.KOut
	if r.Backward {
		ofK = r.DKOut
	}
	aligned := wholeVectors(&r.Rotary) && wholeHeads(&r.DQOut) && wholeHeads(&r.DKOut)
	for _, w := range [...]kernels.Vector{r.QWeight, r.KWeight} {
		aligned = aligned && int64(uintptr(w.Data))%min(16, 16/r.Q.DType.Size()*w.DType.Size()) == 0
	}
	rotation, layout, err := rotaryArgs(&r.Rotary, ofK.Present(), aligned)
	if err != nil {
		return err
	}
	rotation.Total = r.Tokens()
	op := kernels.QKNormRotate
	if r.Backward {
		op = kernels.QKNormRotateBackward
	}
	lanes := lanesFor(int64(rotation.Items))
	k, err := c.start(ordinal, normalizeRequest(request{op: op, x: r.Q.DType, layout: layout, dw: sums},
		r.Tokens(), r.Q.Heads, int64(rotation.Heads)-r.Q.Heads, int64(rotation.Items), r.Q.Cols))
	if err != nil {
		return err
	}
	defer k.finish()
	rotation.Groups = k.plan.groups
	args := kernels.QKNormRotaryArgs{
		RotaryArgs: rotation, DQOut: input(r.DQOut.Data), DKOut: input(r.DKOut.Data),
		DQOutStrides: headStrides(&r.DQOut), DKOutStrides: headStrides(&r.DKOut), QWeight: input(r.QWeight.Data),
		KWeight: input(r.KWeight.Data), DQWeight: output(r.DQWeight.Data), DKWeight: output(r.DKWeight.Data),
		QWeightType: int32(r.QWeight.DType), KWeightType: int32(r.KWeight.DType),
		DQWeightType: int32(r.DQWeight.DType), DKWeightType: int32(r.DKWeight.DType),
		PartialRows: k.plan.partials, Lanes: int32(lanes), QParts: k.plan.qParts,
		HeadsPerThread: k.plan.headsPerThread, RoundNormalized: bit(r.RoundNormalized), Eps: float32(r.Eps),
		WeightOffset: float32(r.WeightOffset), InvN: float32(1 / float64(r.Q.Cols)),
	}
	if sums {
		args.Partials = k.at(k.plan.scratch.dwPartial)
	}
	return k.launch(unsafe.Pointer(&args))
}

// lanesFor is how many lanes of a warp share a head of some items: a power of two.
func lanesFor(items int64) int64 {
	return min(int64(1)<<bits.Len64(uint64(max(items, 1)-1)), lanesPerWarp)
}

// normalizeRequest completes the request of a call of some tokens.
func normalizeRequest(r request, tokens, qHeads, kHeads, items, columns int64) request {
	r.m, r.n, r.qHeads, r.kHeads = tokens*lanesFor(items), columns, qHeads, kHeads
	return r
}

// byLanes appends what normalizes and rotates heads. The request has as M the threads of a head of all
// tokens, and as N the columns. A thread has heads of q or of k alone, so that it needs one weight.
// Backward's grid is persistent, so that few CTAs have sums of the weights' gradients.
func (q *query) byLanes(p *plan) {
	p.why = "the lanes of a warp hold a head"
	if q.m == 0 {
		return
	}
	v, backward := q.chunkKernel(kernels.Elementwise), q.op == kernels.QKNormRotateBackward
	parts := func(perThread int64) int64 { return ceil(q.qHeads, perThread) + ceil(q.kHeads, perThread) }
	perThread := q.headsPerThread(v, parts)
	all := q.resident(v, 1) * int64(v.Threads)
	for backward && parts(perThread)*lanesPerWarp > all { // a thread keeps its part: the grid has all of a token
		perThread *= 2
	}
	grid := ceil(q.m*parts(perThread), int64(v.Threads))
	if backward {
		grid = min(grid, q.resident(v, 1))
	}
	p.partials, p.groups = int32(grid), int32(parts(perThread))
	p.qParts, p.headsPerThread = int32(ceil(q.qHeads, perThread)), int32(perThread)
	q.add(p, v, grid, 1, 0)
}

// sumHeads appends what sums the weights' gradients of CTAs.
func (q *query) sumHeads(p *plan) {
	p.scratch.dwPartial = p.scratch.take(int64(p.partials) * 2 * q.n * 4)
	v := kernelsOf[kernelKey{op: kernels.QKNormWeights, shape: kernels.Finish, x: q.x, unaligned: true}][0]
	q.add(p, v, ceil(2*q.n, lanesPerWarp), 1, 0)
}
