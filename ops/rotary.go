package ops

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

func (a *rotaryForward) call() kernels.Rotary {
	return kernels.Rotary{
		Q: a.Q, K: a.K, QOut: a.QOut, KOut: a.KOut, Cos: a.Cos, Sin: a.Sin, Offset: a.Offset, Offsets: a.Offsets,
		CuSeqlens: a.CuSeqlens, Interleaved: a.Interleaved, PerElement: a.PerElement, Round: a.RoundProducts,
	}
}

func (a *rotaryBackward) call() kernels.Rotary {
	r := (&rotaryForward{a.DQOut, a.DKOut, a.Cos, a.Sin, a.Offsets, a.CuSeqlens, a.DQ, a.DK, a.Offset,
		a.Interleaved, a.PerElement, a.RoundProducts, a.Choice}).call()
	r.Backward = true
	return r
}

func (a *rotaryForward) refuse(k *check)  { k.rotary(a.call()) }
func (a *rotaryBackward) refuse(k *check) { k.rotary(a.call()) }

// rotary refuses what does not fit together.
func (k *check) rotary(r kernels.Rotary) {
	if k.err != nil {
		return
	}
	rotated, sequences := r.Rotated(), r.Q.Sequences
	if r.CuSeqlens.Len > 0 {
		sequences = r.CuSeqlens.Len - 1
	}
	// What wraps around when a position, the offset and the sequence's own are added is in no table then.
	const most = 1 << 62
	switch {
	case r.Offset > most || r.Offset < -most:
		k.fail(StatusOption, "offset is %d, expected %d to %d", r.Offset, -most, most)
	case rotated%2 != 0:
		k.fail(StatusShape, "cos has width %d with per_element, expected an even number: two for each pair",
			rotated)
	case rotated > r.Q.Cols:
		per := "two columns for each of its numbers"
		if r.PerElement {
			per = "a column for each of its numbers"
		}
		k.fail(StatusShape, "cos has width %d, expected at most the %d columns of %s, with %s", r.Cos.Cols,
			r.Q.Cols, k.first, per)
	case k.given("cu_seqlens") && r.Q.Sequences != 1:
		k.fail(StatusShape, "cu_seqlens is given for %d sequences of tokens in %s, expected one, which it "+
			"divides; reshape %s to (tokens, heads, columns)", r.Q.Sequences, k.first, k.first)
	case k.given("cu_seqlens") && r.CuSeqlens.Len == 0:
		k.fail(StatusShape, "cu_seqlens has no elements, expected the first token of each sequence and the end")
	case k.given("cu_seqlens") && r.Cos.SequenceStride != 0:
		k.fail(StatusShape, "cos has a table for each sequence, expected one for all with cu_seqlens")
	case k.given("offsets") && r.Offsets.Len != sequences:
		k.fail(StatusShape, "offsets has %d elements, expected %d: one for each sequence", r.Offsets.Len, sequences)
	case !k.given("cu_seqlens") && !k.given("offsets") && r.Tokens() > 0 &&
		(r.Offset < 0 || r.Offset > r.Cos.Rows-r.Q.Tokens):
		with := ""
		if r.Offset != 0 {
			with = fmt.Sprintf(" with offset %d", r.Offset)
		}
		k.fail(StatusShape, "cos has %d positions, expected those of the tokens, %d to %d%s", r.Cos.Rows, r.Offset,
			r.Offset+r.Q.Tokens-1, with)
	}
}

// given tells whether an optional operand was passed, also without elements.
func (k *check) given(name string) bool {
	for i := range k.spans[:k.count] {
		if k.spans[i].name == name {
			return true
		}
	}
	return false
}

func (a *rotaryForward) host() error  { return rotaryOnHost(a.call()) }
func (a *rotaryBackward) host() error { return rotaryOnHost(a.call()) }

func rotaryOnHost(r kernels.Rotary) error {
	if r.Tokens() == 0 {
		return nil
	}
	return cpu.Rotary(&r, workers())
}

func (a *rotaryForward) cuda(c *Call, ordinal int32) error  { return c.rotary(ordinal, a.call()) }
func (a *rotaryBackward) cuda(c *Call, ordinal int32) error { return c.rotary(ordinal, a.call()) }

// rotary launches forward or backward.
func (c *Call) rotary(ordinal int32, r kernels.Rotary) error {
	if r.Tokens() == 0 {
		return nil
	}
	args, layout, err := rotaryArgs(&r, r.KOut.Present(), wholeVectors(&r))
	if err != nil {
		return err
	}
	if args.Rotated > 0 && inPlace(&r.Q, &r.QOut) && inPlace(&r.K, &r.KOut) { // what is copied is there
		args.Items = int32(itemsOf(r.Rotated(), r.Rotated(), vectorOf(r.Q.DType, layout)))
	}
	k, err := c.start(ordinal, rotateRequest(request{op: kernels.Rotate, x: r.Q.DType, layout: layout},
		r.Tokens(), int64(args.Heads), int64(args.Items)))
	if err != nil {
		return err
	}
	defer k.finish()
	args.Groups = k.plan.groups
	return k.launch(unsafe.Pointer(&args))
}

// inPlace tells whether results are written over their operands.
func inPlace(from, to *kernels.Heads) bool {
	return from.Data == to.Data && headStrides(from) == headStrides(to)
}

// rotateRequest completes the request of a call of some tokens.
func rotateRequest(r request, tokens, heads, items int64) request {
	r.m, r.n = tokens*items, heads
	return r
}

// itemsOf is how many items a head has: two vectors of each pair of them, then two of what is copied. size is
// how many elements a vector has.
func itemsOf(columns, rotated, size int64) int64 {
	return rotated/2/size + ceil(ceil(columns-rotated, size), 2)
}

// vectorOf is how many elements a thread loads at once.
func vectorOf(t kernels.DType, layout policy.Layout) int64 {
	if layout == policy.Aligned {
		return 16 / t.Size()
	}
	return 1
}

// rotaryArgs are what kernels take but for what the plan decides.
func rotaryArgs(r *kernels.Rotary, ofK, aligned bool) (kernels.RotaryArgs, policy.Layout, error) {
	heads := r.Q.Heads
	if ofK {
		heads += r.K.Heads
	}
	rotated, layout := r.Rotated(), policy.MixedOffsets
	if aligned {
		layout = policy.Aligned
	}
	items := itemsOf(r.Q.Cols, rotated, vectorOf(r.Q.DType, layout))
	if items*heads > math.MaxInt32 || r.Q.Cols > math.MaxInt32 {
		return kernels.RotaryArgs{}, layout, errorf(StatusUnsupported,
			"%d heads of %d columns are more than %d elements; pass fewer at a time", heads, r.Q.Cols, math.MaxInt32)
	}
	return kernels.RotaryArgs{
		Q: input(r.Q.Data), K: input(r.K.Data), QOut: output(r.QOut.Data), KOut: output(r.KOut.Data),
		Cos: input(r.Cos.Data), Sin: input(r.Sin.Data), Offsets: input(r.Offsets.Data),
		CuSeqlens: input(r.CuSeqlens.Data), QStrides: headStrides(&r.Q), KStrides: headStrides(&r.K),
		QOutStrides: headStrides(&r.QOut), KOutStrides: headStrides(&r.KOut), CosSequence: r.Cos.SequenceStride,
		CosRow: r.Cos.Stride, SinSequence: r.Sin.SequenceStride, SinRow: r.Sin.Stride, Total: r.Tokens(),
		Tokens: r.Q.Tokens, Sequences: r.CuSeqlens.Len - 1, Positions: r.Cos.Rows, Offset: r.Offset,
		QHeads: int32(r.Q.Heads), Heads: int32(heads), Items: int32(items), Cols: int32(r.Q.Cols),
		Rotated: int32(rotated), CosType: int32(r.Cos.DType), OffsetsType: int32(r.Offsets.DType),
		CuSeqlensType: int32(r.CuSeqlens.DType), Interleaved: bit(r.Interleaved), PerElement: bit(r.PerElement),
		Round: bit(r.Round), Backward: bit(r.Backward),
	}, layout, nil
}

func headStrides(h *kernels.Heads) kernels.HeadStrides {
	return kernels.HeadStrides{Sequence: h.SequenceStride, Token: h.TokenStride, Head: h.HeadStride}
}

// bit is a bool as kernels have it.
func bit(set bool) int32 {
	if set {
		return 1
	}
	return 0
}

// wholeVectors tells whether all heads, and the two vectors that a thread has of each, consist of whole,
// aligned 16-byte vectors, and their rows of the tables likewise.
func wholeVectors(r *kernels.Rotary) bool {
	size := r.Q.DType.Size()
	elements := 16 / size
	if r.Rotated()/2%elements != 0 || r.Q.Cols%elements != 0 {
		return false
	}
	if !wholeHeads(&r.Q) || !wholeHeads(&r.K) || !wholeHeads(&r.QOut) || !wholeHeads(&r.KOut) {
		return false
	}
	// A thread loads as many numbers as it has elements, in vectors of up to 16 bytes.
	number := r.Cos.DType.Size()
	vector := min(16, elements*number)
	for _, t := range [...]*kernels.Table{&r.Cos, &r.Sin} {
		if int64(uintptr(t.Data))%vector != 0 || t.Rows > 1 && t.Stride*number%vector != 0 ||
			t.SequenceStride*number%vector != 0 {
			return false
		}
	}
	return true
}

// wholeHeads tells whether all heads begin at 16-byte boundaries.
func wholeHeads(h *kernels.Heads) bool {
	size := h.DType.Size()
	return !h.Present() || uintptr(h.Data)%16 == 0 &&
		(h.Sequences == 1 || h.SequenceStride*size%16 == 0) && (h.Tokens == 1 || h.TokenStride*size%16 == 0) &&
		(h.Heads == 1 || h.HeadStride*size%16 == 0)
}
