package ops

// hostError is what a CPU operator returns as an Error: nothing but memory can fail it.
func hostError(op string, err error) error {
	if err == nil {
		return nil
	}
	return errorf(StatusMemory, "%s: %v; free memory, raise the process's limit (ulimit -v), or give a call "+
		"fewer rows or threads", op, err)
}
