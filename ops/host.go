package ops

// hostError converts the error of a CPU operator to an Error. A CPU operator fails only if it cannot allocate
// memory.
func hostError(op string, err error) error {
	if err == nil {
		return nil
	}
	return errorf(StatusMemory, "%s: %v; free memory, raise the process's limit (ulimit -v), or give a call "+
		"fewer rows or threads", op, err)
}
