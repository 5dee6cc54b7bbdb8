package ops

// Optional is the value of an option whose default is not 0. Its zero value means the default.
type Optional[T int64 | float64] struct {
	value T
	given bool
}

// Some returns the value of an option, which may be 0: Eps: Some(0.0), IgnoreIndex: Some[int64](0).
func Some[T int64 | float64](value T) Optional[T] { return Optional[T]{value, true} }

// or returns the value, or the default if none was given.
func (o Optional[T]) or(otherwise T) T {
	if o.given {
		return o.value
	}
	return otherwise
}
