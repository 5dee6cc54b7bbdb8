package ops

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
)

// shapeRule is a rule for an operand's shape, from internal/operators.
type shapeRule struct {
	layout layout
	forms  []form
}

// form is a shape that an operand may have. The letters of sizes stand for sizes of the first operand: its
// leading dimensions (L), second last (H) and last dimension (N), 2, and twice the product of the leading
// dimensions and one more (S). If count is true, L or S may be other sizes with the same product, and without
// them there may be any sizes of 1.
type form struct {
	sizes string
	count bool
	when  conditions
	text  string
}

// layout says how an operand's elements lie in memory.
type layout uint8

const (
	inRows layout = iota
	contiguous
	regular
	parts
	broadcasts
)

// conditions are facts about a call, of which a form needs some.
type conditions uint8

const (
	unreduced conditions = 1 << iota // a result for each row
	summed                           // one for all
	headed                           // the first operand has rank 2 or more
	unread                           // no output is read
	undivided                        // no denominator is needed that is not given
	always    conditions = 0
)

// size returns the sizes that a letter of a form stands for. room holds them if the first operand does not.
func (k *check) size(letter byte, room *[1]int64) []int64 {
	last := len(k.dims) - 1
	switch letter {
	case 'L':
		return k.dims[:last]
	case 'H':
		return k.dims[max(last-1, 0):last]
	case 'N':
		return k.dims[last:]
	case '2':
		room[0] = 2
	case 'S':
		room[0] = 2*product(k.dims[:last]) + 1
	}
	return room[:]
}

// secondLast is the first operand's second last dimension, 0 if it has rank 1.
func (k *check) secondLast() int64 {
	if len(k.dims) < 2 {
		return 0
	}
	return k.dims[len(k.dims)-2]
}

// fits reports whether dims are a form.
func (k *check) fits(dims []int64, f *form) bool {
	var room [1]int64
	before, after, count := f.sizes, "", int64(1)
	if f.count {
		before, after = "", f.sizes
		if i := strings.IndexAny(f.sizes, "LS"); i >= 0 {
			before, after, count = f.sizes[:i], f.sizes[i+1:], product(k.size(f.sizes[i], &room))
		}
	}
	for i := range len(before) {
		sizes := k.size(before[i], &room)
		if len(dims) < len(sizes) || !slices.Equal(dims[:len(sizes)], sizes) {
			return false
		}
		dims = dims[len(sizes):]
	}
	for i := range len(after) {
		sizes := k.size(after[len(after)-1-i], &room)
		rest := len(dims) - len(sizes)
		if rest < 0 || !slices.Equal(dims[rest:], sizes) {
			return false
		}
		dims = dims[:rest]
	}
	return f.count && product(dims) == count || len(dims) == 0 && !f.count
}

func product(dims []int64) int64 {
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	return n
}

// form returns the form that an operand has, or nil after a failure.
func (k *check) form(name string, t *dlpack.Tensor, forms []form) *form {
	for i := range forms {
		if f := &forms[i]; f.when&k.unmet == 0 && k.fits(t.Dims(), f) {
			return f
		}
	}
	k.unfit(name, t, forms, "")
	return nil
}

// like reports whether an operand has the shape of another. It may be that or, without the other, the first
// form of its rule.
func (k *check) like(name string, t *dlpack.Tensor, r *shapeRule, other string, o *dlpack.Tensor) bool {
	switch {
	case o == nil && !k.fits(t.Dims(), &r.forms[0]):
		k.unfit(name, t, r.forms[:1], " without a "+other)
	case o != nil && !slices.Equal(t.Dims(), o.Dims()):
		k.fail(StatusShape, "%s has shape %s, expected %s as %s", name, shape(t), shape(o), other)
	}
	return k.err == nil
}

// unfit refuses a shape that is none of the forms. Without is appended to the message.
func (k *check) unfit(name string, t *dlpack.Tensor, forms []form, without string) {
	var expected []string
	counted := ""
	for _, f := range forms {
		if f.when&k.unmet != 0 {
			continue
		}
		var room [1]int64
		var sizes []int64
		for i := range len(f.sizes) {
			sizes = append(sizes, k.size(f.sizes[i], &room)...)
		}
		s := list(len(sizes), func(i int) int64 { return sizes[i] })
		if f.count && strings.Trim(f.sizes, "LS") == "" {
			s = strconv.FormatInt(product(sizes), 10)
			counted = fmt.Sprintf(", which is %d elements", t.Len())
		}
		expected = append(expected, s+strings.Replace(f.text, "{x}", k.first, 1))
	}
	if expected == nil {
		expected = []string{k.first + " of rank 2 or more"}
	}
	k.fail(StatusShape, "%s has shape %s%s, expected %s%s", name, shape(t), counted,
		strings.Join(expected, ", or "), without)
}

// rank refuses a flag that is set for a first operand of a lower rank than it needs.
func (k *check) rank(flag string, set bool, rank int) {
	if set && k.err == nil && len(k.dims) < rank {
		k.fail(StatusShape, "%s is set for %s of rank %d, expected rank %d or more; reshape it, or leave %s out",
			flag, k.first, len(k.dims), rank, flag)
	}
}

// reduction checks the option of that name.
func (k *check) reduction(r kernels.Reduction) {
	switch {
	case r < kernels.ReduceNone || r > kernels.ReduceSum:
		k.fail(StatusOption, "reduction is %d, expected none (0), mean (1) or sum (2)", r)
	case r == kernels.ReduceNone:
		k.unmet |= summed
	default:
		k.unmet |= unreduced
	}
}

// reads notes whether an output is read.
func (k *check) reads(read bool) {
	if read {
		k.unmet |= unread
	}
}

// divides notes whether a denominator is needed that is not given.
func (k *check) divides(without bool) {
	if without {
		k.unmet |= undivided
	}
}
