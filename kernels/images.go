//go:build !cuda

package kernels

// Architectures lists what images were built for: nothing without the tag cuda.
func Architectures() []string { return nil }

// Image returns a family's device image for an architecture; there is none without the tag cuda.
func Image(family Family, arch string) []byte { return nil }
