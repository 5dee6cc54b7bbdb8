package cpu

import (
	"os"
	"unsafe"
)

// kit is the row primitives of one instruction set. A call works on one block of a row: slices of equal length, of any
// alignment. Results may be written over an input. Sums have a few lanes of float64; vector code adds up to four
// float32 results before it widens them, and so keeps nearly all the digits at little cost.
type rowFuncs[T float] struct {
	name string

	// By kernels.DType of the memory; load of T's own type is not there, since nothing needs it.
	load  [4]func(dst []T, src unsafe.Pointer)
	store [4]func(dst unsafe.Pointer, src []T, c T) // dst = src * c, rounded to nearest even

	max         func(x []T) T                            // a NaN in x may be passed over
	exp         func(dst, src []T, m T) float64          // dst = exp(src - m); returns the sum
	expScale    func(dst, src []T, m, c T)               // dst = exp(src - m) * c
	dot         func(x, y []T) float64                   // sum of x * y
	dot3        func(x, y, z []T) float64                // sum of x * y * z
	add         func(acc, x []float64)                   // acc += x
	addProduct  func(acc []float64, x, y []T, c float64) // acc += x * c * y
	multiply    func(dst, x, w []T, c T)                 // dst = x * c * w
	softmaxGrad func(dst, dy, y []T, hi, lo T)           // dst = ((dy - hi) - lo) * y
	rmsNormGrad func(dst, x, w, dout []T, k, r float64)  // dst = (dout * w - x * k) * r

	// Shortcuts, nil where there is none: a sum without the exponentials themselves, and softmax's backward pass on memory
	// as it lies, by its DType; with stream dst is aligned to 64 bytes, and written past the cache.
	expSum         func(src []T, m T) float64 // sum of exp(src - m), to the same bits as exp's
	dotRaw         [4]func(x, y unsafe.Pointer, n int) float64
	softmaxGradRaw [4]func(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
}

// exp is polynomial: with n = round(x / ln 2) and r = x - n ln 2, exp(x) = 2^n (1 + r + r^2 q(r)), where q has the
// least relative error (2^-28) that a polynomial of degree 4 can have. ln2High has few enough bits for n * ln2High to
// be exact. Below expLow, where the result would be subnormal, it is 0.
const (
	log2E   = 1.44269504088896341
	ln2High = 0.693359375
	ln2Low  = -2.12194440054690583e-4
	expLow  = -87.3365447505

	exp2 = 0.499999934478
	exp3 = 0.166665206317
	exp4 = 0.0416683880453
	exp5 = 0.00836871687973
	exp6 = 0.00138145986467

	// Adding roundBias to |v| < 2^21 rounds v to an integer, which the low bits then hold plus the exponent's bias.
	roundBias = 0x1.8p23 + 127
)

// supportedRowFuncs are what this machine can run, fastest first.
var supportedRowFuncs = append(simdRowFuncs(), &portable32)

// SIMD names the instruction set that rows are computed with: "avx512", "avx2" or "portable".
func SIMD() string { return engine32.funcs.name }

// chooseRowFuncs is the fastest kit, or the one that the environment names.
func chooseRowFuncs() *rowFuncs[float32] {
	for _, k := range supportedRowFuncs {
		if k.name == os.Getenv("GANDER_SIMD") {
			return k
		}
	}
	return supportedRowFuncs[0]
}
