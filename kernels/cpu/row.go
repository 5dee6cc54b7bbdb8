package cpu

import (
	"os"
	"unsafe"
)

// rowFuncs is the table of row functions of one instruction set. A function works on one block of a row: its
// slices have equal lengths and any alignment, and dst may be an input. Sums are accumulated in several lanes
// of float64. Vector code first adds up to four float32 results: converting fewer values costs less, and the
// rounding error stays small.
type rowFuncs[T float] struct {
	name string

	exponential int // bytes of memory that are as much work as an exponential

	// Indexed by the kernels.DType in memory. There is no load for T itself, which is read in place.
	load  [4]func(dst []T, src unsafe.Pointer)
	store [4]func(dst unsafe.Pointer, src []T, c T) // dst = src * c, rounded to nearest even

	max         func(x []T) T                               // may or may not ignore a NaN in x
	without     func(dst, x []T, k int) T                   // dst = x, but dst[k] = -inf; returns max(dst)
	exp         func(dst, src []T, m T) float64             // dst = exp(src - m); returns the sum
	expScale    func(dst, src []T, m, c T)                  // dst = exp(src - m) * c
	dot         func(x, y []T) float64                      // sum of x * y
	dot3        func(x, y, z []T) float64                   // sum of x * y * z
	add         func(acc, x []float64)                      // acc += x
	addProduct  func(acc []float64, x, y []T, c, e float64) // acc += (x * c + e) * y
	multiply    func(dst, x, w []T, c T)                    // dst = x * c * w
	softmaxGrad func(dst, dy, y []T, hi, lo T)              // dst = ((dy - hi) - lo) * y
	sum         func(dst, x, y []T)                         // dst = x + y
	subtract    func(dst, x []T, m T)                       // dst = x - m
	accumulate  func(acc []float64, x []T)                  // acc += x

	sumsAndDot3 func(x, y, z []T) (sum, dot, dot3 float64)             // sums of x, of y * z, and of x * y * z
	addBoth     func(products, sums []float64, x, y []T, c, e float64) // addProduct and accumulate of y
	moments     func(x []T, pivot T) (sum, squares float64)            // of x - pivot, all in float64
	normalize   func(dst, x, w, b []T, hi, lo, c T)                    // dst = ((x - hi) - lo) * c * w + b
	normGrad    func(dst, x, w, dout []T, k, m, r float64)             // dst = (dout * w - x * k - m) * r

	// With v = (a + b * x^2) * x: value = x * sigmoid(v), slope = its derivative. slope may be nil.
	gate func(value, slope, x []T, a, b T)
	gelu func(value, slope, x []T) // the same of x * P(x), where P is the normal distribution

	expAll   func(x []float64) // x = exp(x)
	log1pAll func(x []float64) // x = log(1 + x)

	// Fast paths, nil where there is none. Those named raw take memory of the DType that they are indexed by,
	// without a conversion to T. With stream, dst is aligned to 64 bytes and written past the cache.
	expSum func(src []T, m T) float64 // sum of exp(src - m), with the same bits as exp's
	// What expBlocks does to rows of n float32, a multiple of 64, with strides in bytes: in out each row's
	// maximum and sum of exponentials, with the bits of max and exp, in dst the exponentials unless that is
	// nil. Each row leaves out a column, unless that is negative.
	expRows        func(dst, src unsafe.Pointer, n, rows, dstStride, srcStride int, without *int, out *partial)
	dotRaw         [4]func(x, y unsafe.Pointer, n int) float64
	softmaxGradRaw [4]func(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)
	// Softmax backward of rows of n float32, a multiple of 64, with strides in bytes and the bits of the two
	// above.
	softmaxGradRows func(dst, dy, y unsafe.Pointer, n, rows, dstStride, dyStride, yStride int)
	scaleRaw        [4]func(dst, x unsafe.Pointer, w []T, c T, stream bool) // dst = x * c * w
	dot3Raw         [4]func(x, dy unsafe.Pointer, w []T) float64            // sum of x * dy * w
	// dx = (dy * w - x * k) * r, and sums += x * r * dy unless sums is nil
	rmsNormGradRaw [4]func(dx, x, dy unsafe.Pointer, w, sums []T, k, r T)
	// RMSNorm of a few rows of float32, whose length, that of w, is a multiple of 64: y = x * rstd * w, rstd =
	// 1 / sqrt(sum(x^2) / over + eps), with the bits of dot and multiply.
	rmsNormRows func(y, x strided, w []T, over, eps float64, rows int, rstd *[maxTogether]float64)
	// Its gradient, with the bits of dot3, normGrad and addProduct. dw is nil if it is not wanted.
	rmsNormGradRows func(
		dx, x, dy strided, w []T, over float64, dw []float64, rows int, rstd *[maxTogether]float64,
	)
}

// strided is rows of float32 in memory. The stride is in bytes.
type strided struct {
	first  unsafe.Pointer
	stride int
}

// row is a row's address. Addresses behind the last row must not be formed: Go's runtime takes one that lies
// in its heap for a pointer to what is there.
func (s *strided) row(i int) unsafe.Pointer { return unsafe.Add(s.first, i*s.stride) }

// The exponential function in float32: with n = round(x / ln 2) and r = x - n ln 2, exp(x) is 2^n (1 + r +
// r^2 q(r)). q is the polynomial of degree 4 with the smallest relative error, 2^-28. ln 2 is split into
// ln2High + ln2Low, where ln2High has so few bits that n * ln2High is exact. For x below expLow the result is
// 0. Above it may be subnormal. 2^n has no exponent then, but 2^(n + expShift) has.
const (
	log2E    = 1.44269504088896341
	ln2High  = 0.693359375
	ln2Low   = -2.12194440054690583e-4
	expLow   = -104
	expShift = 24
	expMost  = 71 // AVX2 may return infinity for a larger x, which no operator has unless its operands are wrong

	exp2 = 0.499999934478
	exp3 = 0.166665206317
	exp4 = 0.0416683880453
	exp5 = 0.00836871687973
	exp6 = 0.00138145986467

	// v + roundBias, for |v| < 2^21, rounds v to an integer. The low bits of the sum are that integer plus
	// float32's exponent bias of 127.
	roundBias = 0x1.8p23 + 127
)

// supportedRowFuncs are the tables that this machine can run, fastest first.
var supportedRowFuncs = append(simdRowFuncs(), &portable32)

// SIMD returns the instruction set in use: "avx512", "avx2" or "portable".
func SIMD() string { return engine32.funcs.name }

// chooseRowFuncs returns the table that GANDER_SIMD names, or else the fastest.
func chooseRowFuncs() *rowFuncs[float32] {
	for _, k := range supportedRowFuncs {
		if k.name == os.Getenv("GANDER_SIMD") {
			return k
		}
	}
	return supportedRowFuncs[0]
}
