package ops

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/sizes"
	"github.com/gander-go/gander/kernels"
)

// shapeRule is a rule for an operand's shape, from internal/operators.
type shapeRule struct {
	layout layout
	forms  []form
}

// form is a shape that an operand may have, in the letters of internal/operators. If count is true, L or S
// may be other sizes with the same product, and without them there may be any sizes of 1.
type form struct {
	letters string
	count   bool
	when    conditions
	text    string
}

// layout says how an operand's elements lie in memory.
type layout uint8

const (
	inRows layout = iota
	contiguous
	regular
	parts
	broadcasts
	inHeads
	tables
)

// conditions are facts about a call, of which a form needs some. operators_gen.go lists them.
type conditions uint32

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
	before, after, count := f.letters, "", int64(1)
	if f.count {
		before, after = "", f.letters
		if i := strings.IndexAny(f.letters, "LS"); i >= 0 {
			before, after = f.letters[:i], f.letters[i+1:]
			count = sizes.Product(sizes.Of(f.letters[i], k.dims, &room))
		}
	}
	for i := range len(before) {
		part := sizes.Of(before[i], k.dims, &room)
		if len(dims) < len(part) || !sizes.Fit(dims[:len(part)], part) {
			return false
		}
		dims = dims[len(part):]
	}
	for i := range len(after) {
		part := sizes.Of(after[len(after)-1-i], k.dims, &room)
		rest := len(dims) - len(part)
		if rest < 0 || !sizes.Fit(dims[rest:], part) {
			return false
		}
		dims = dims[:rest]
	}
	return f.count && sizes.Product(dims) == count || len(dims) == 0 && !f.count
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

// leading checks the shape of a first operand that has a rule of its own.
func (k *check) leading(name string, t *dlpack.Tensor, r *shapeRule) {
	if k.err == nil {
		k.form(name, t, r.forms)
	}
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
		dims := sizes.Shape(f.letters, k.dims)
		s := list(len(dims), func(i int) int64 { return dims[i] })
		s = strings.ReplaceAll(s, strconv.Itoa(sizes.AnySize), "any")
		if f.count && strings.Trim(f.letters, "LS") == "" {
			s = strconv.FormatInt(sizes.Product(dims), 10)
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

// holds notes whether a flag is set, for a form that is allowed only then, or only if it is not.
func (k *check) holds(flag bool, set, unset conditions) {
	if flag {
		set = unset
	}
	k.unmet |= set
}

// divides notes whether a denominator is needed that is not given.
func (k *check) divides(without bool) {
	if without {
		k.unmet |= undivided
	}
}
