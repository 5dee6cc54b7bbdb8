//go:build race

package cpu

const raceEnabled = true

// The race detector checks Go's heap only, so workspaces are allocated there.
func init() {
	allocate = func(n int) ([]byte, error) { return make([]byte, n), nil }
	release = func([]byte) {}
}
