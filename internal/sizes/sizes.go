// Package sizes computes the shapes that follow from an operator's first operand. The letters of a shape are
// defined in internal/operators.
package sizes

import "slices"

// Letter stands for the sizes of some dimensions of the first operand. From and To count them from the end: 0
// is behind the last, and what is before the first is the first. If Times is not 0, it stands for one size
// instead: Times times their product, divided by Over unless that is 0, and Plus. With Any it stands for one
// size that can be any.
type Letter struct {
	From, To          int
	Times, Over, Plus int64
	Any               bool
}

// AnySize is what a letter with Any stands for.
const AnySize = -1

// Of returns what a letter stands for beside a first operand of these dimensions, in room if they do not have
// it.
func Of(letter byte, first []int64, room *[1]int64) []int64 {
	l, n := &letters[letter], len(first)
	part := first[max(n-l.From, 0):max(n-l.To, 0)]
	if l.Any {
		room[0] = AnySize
		return room[:]
	}
	if l.Times == 0 {
		return part
	}
	room[0] = l.Times*Product(part)/max(l.Over, 1) + l.Plus
	return room[:]
}

// Shape returns the shape that letters stand for.
func Shape(letters string, first []int64) (dims []int64) {
	var room [1]int64
	for i := range len(letters) {
		dims = append(dims, Of(letters[i], first, &room)...)
	}
	return dims
}

// Fit tells whether sizes are those that a letter stands for.
func Fit(dims, of []int64) bool {
	return slices.EqualFunc(dims, of, func(m, n int64) bool { return m == n || n == AnySize })
}

// Product returns the number of elements of a shape.
func Product(dims []int64) int64 {
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	return n
}
