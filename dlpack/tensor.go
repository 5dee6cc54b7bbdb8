package dlpack

import (
	"fmt"
	"math"
	"math/bits"
	"unsafe"
)

// Rank returns the number of dimensions.
func (t *Tensor) Rank() int { return int(t.NDim) }

// Dims returns the tensor's own shape, which must not be modified.
func (t *Tensor) Dims() []int64 { return unsafe.Slice(t.Shape, t.NDim) }

// Dim returns the size of dimension i.
func (t *Tensor) Dim(i int) int64 { return t.Dims()[i] }

// Stride returns the distance, in elements, between neighbours in dimension i. It has no meaning if the
// dimension's size is less than 2.
func (t *Tensor) Stride(i int) int64 {
	if t.Strides != nil {
		return unsafe.Slice(t.Strides, t.NDim)[i]
	}
	s := int64(1)
	for _, d := range t.Dims()[i+1:] {
		s *= d
	}
	return s
}

// Len returns the number of elements.
func (t *Tensor) Len() int64 {
	n := int64(1)
	for _, d := range t.Dims() {
		n *= d
	}
	return n
}

// Pointer returns the address of the first element, or nil if Data is nil.
func (t *Tensor) Pointer() unsafe.Pointer {
	if t.Data == nil {
		return nil
	}
	return unsafe.Add(t.Data, t.ByteOffset)
}

// Validate returns an error unless the other methods are safe to call: every field must be in its range, and
// the number, sizes and addresses of the elements must not overflow. It does not read the elements.
func (t *Tensor) Validate() error {
	if t == nil {
		return fmt.Errorf("%w: the tensor is NULL, expected a DLTensor", ErrNull)
	}
	total, err := t.bytes()
	if err != nil || total == 0 {
		return err
	}
	if t.Data == nil {
		return fmt.Errorf("%w: data is NULL, expected the address of %d bytes", ErrNull, total)
	}
	size := uint64(t.DType.Size())
	below, above := uint64(0), total-size
	if t.Strides != nil {
		var ok bool
		if below, above, ok = t.reach(size); !ok {
			return fmt.Errorf("%w: the strides reach beyond 64 bits, expected smaller ones", ErrLayout)
		}
	}
	first, carry := bits.Add64(uint64(uintptr(t.Data)), t.ByteOffset, 0)
	last, carry2 := bits.Add64(first, above+size-1, 0)
	if carry|carry2 != 0 || below > first || last > math.MaxInt64 {
		return fmt.Errorf("%w: byte_offset %d and the strides lead outside of the address space",
			ErrLayout, t.ByteOffset)
	}
	return nil
}

// bytes returns the size of the elements of a compact tensor.
func (t *Tensor) bytes() (uint64, error) {
	switch {
	case t.NDim < 0 || t.NDim > MaxRank:
		return 0, fmt.Errorf("%w: ndim is %d, expected 0 to %d", ErrShape, t.NDim, MaxRank)
	case t.NDim > 0 && t.Shape == nil:
		return 0, fmt.Errorf("%w: shape is NULL with ndim %d, expected an array of that many sizes",
			ErrNull, t.NDim)
	case t.DType.Bits == 0 || t.DType.Lanes == 0:
		return 0, fmt.Errorf("%w: %d bits in %d lanes, expected at least one of each", ErrDType, t.DType.Bits,
			t.DType.Lanes)
	}
	empty := false
	for i, d := range t.Dims() {
		if d < 0 {
			return 0, fmt.Errorf("%w: dimension %d is %d, expected 0 or more", ErrShape, i, d)
		}
		empty = empty || d == 0
	}
	if empty {
		return 0, nil
	}
	total := uint64(t.DType.Size())
	for _, d := range t.Dims() {
		high, low := bits.Mul64(total, uint64(d))
		if high != 0 || low > math.MaxInt64 {
			return 0, fmt.Errorf("%w: the elements take more than 2^63 bytes, expected fewer", ErrShape)
		}
		total = low
	}
	return total, nil
}

// reach returns how far the other elements start before and after the first one, in bytes.
func (t *Tensor) reach(size uint64) (below, above uint64, ok bool) {
	for i, d := range t.Dims() {
		s := t.Stride(i)
		if d < 2 {
			continue
		}
		side, step := &above, uint64(s)
		if s < 0 {
			side, step = &below, -step
		}
		high, elements := bits.Mul64(uint64(d-1), step)
		high2, far := bits.Mul64(elements, size)
		sum, carry := bits.Add64(*side, far, 0)
		if high|high2|carry != 0 || sum > math.MaxInt64-size {
			return 0, 0, false
		}
		*side = sum
	}
	return below, above, true
}
