//go:build !cuda

package kernels

// Architectures lists what the embedded images were built for: nothing without the tag cuda.
func Architectures() []string { return nil }

// Image returns a family's embedded image for an architecture; there is none without the tag cuda.
func Image(family Family, arch string) []byte { return nil }
