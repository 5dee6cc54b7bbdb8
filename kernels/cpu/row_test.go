package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

// format describes a 16-bit float, for reference conversions that share no code with the package.
type format struct {
	dtype    kernels.DType
	mantissa int
	bias     int
	widen    func(uint16) float32
	narrow   func(float32) uint16
}

var formats = []format{
	{kernels.Float16, 10, 15, widenFloat16, narrowFloat16},
	{kernels.BFloat16, 7, 127, widenBFloat16, narrowBFloat16},
}

func (f format) value(h uint16) float64 {
	mantissa := int(h) & (1<<f.mantissa - 1)
	exponent := int(h&0x7fff) >> f.mantissa
	largest := 1<<(15-f.mantissa) - 1
	var v float64
	switch {
	case exponent == largest && mantissa != 0:
		return math.NaN()
	case exponent == largest:
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(float64(mantissa), 1-f.bias-f.mantissa)
	default:
		v = math.Ldexp(float64(mantissa+1<<f.mantissa), exponent-f.bias-f.mantissa)
	}
	if h&0x8000 != 0 {
		v = -v
	}
	return v
}

func all16() []uint16 {
	a := make([]uint16, 1<<16)
	for i := range a {
		a[i] = uint16(i)
	}
	return a
}

// store converts with the table under test.
func store(k *rowFuncs[float32], t kernels.DType, src []float32) []uint16 {
	dst := make([]uint16, len(src))
	k.store[t](unsafe.Pointer(&dst[0]), src, 1)
	return dst
}

func TestConversionsOfAllValues(t *testing.T) {
	for _, f := range formats {
		for _, k := range supportedRowFuncs {
			in := all16()
			out := make([]float32, len(in))
			k.load[f.dtype](out, unsafe.Pointer(&in[0]))
			back := store(k, f.dtype, out)
			for i, h := range in {
				want := f.value(h)
				same := math.Float64bits(want) == math.Float64bits(float64(out[i])) && back[i] == h
				if math.IsNaN(want) {
					same = out[i] != out[i] && math.IsNaN(f.value(back[i]))
				}
				if !same {
					require.Failf(t, "conversion", "%v %s: %#x is %v, became %v and %#x",
						f.dtype, k.name, h, want, out[i], back[i])
				}
			}
		}
	}
}

func TestRoundsToNearestEven(t *testing.T) {
	for _, f := range formats {
		infinity := uint16(1<<15 - 1<<f.mantissa)
		var in []float32
		var want []uint16
		expect := func(v float64, h uint16) {
			in = append(in, float32(v), -float32(v))
			want = append(want, h, h|0x8000)
		}
		for h := uint16(0); h < infinity; h++ {
			low, high := f.value(h), f.value(h+1)
			if h+1 == infinity { // numbers round to infinity as if it were the next finite one
				high = 2*low - f.value(h-1)
			}
			middle := float32((low + high) / 2)
			require.Equal(t, (low+high)/2, float64(middle), "exact")
			expect(float64(middle), h+h&1)
			expect(float64(math.Nextafter32(middle, 0)), h)
			expect(float64(math.Nextafter32(middle, math.MaxFloat32)), h+1)
		}
		expect(math.MaxFloat32, infinity)
		expect(math.Inf(1), infinity)
		expect(0x1p-149, 0)
		for _, k := range supportedRowFuncs {
			require.Equal(t, want, store(k, f.dtype, in), "%v %s", f.dtype, k.name)
		}
		for _, bits := range []uint32{0x7fc00000, 0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff} {
			nan := make([]float32, 40)
			for i := range nan {
				nan[i] = math.Float32frombits(bits)
			}
			for _, k := range supportedRowFuncs {
				for _, h := range store(k, f.dtype, nan) {
					require.True(t, math.IsNaN(f.value(h)), "%v %s %#x became %#x", f.dtype, k.name, bits, h)
				}
			}
		}
	}
}

func TestStoreScales(t *testing.T) {
	for _, k := range supportedRowFuncs {
		for n := 1; n < 70; n++ {
			src, dst := make([]float32, n), make([]float32, n)
			for i := range src {
				src[i] = float32(i)
			}
			k.store[kernels.Float32](unsafe.Pointer(&dst[0]), src, 0.25)
			for i, v := range dst {
				require.Equal(t, float32(i)/4, v)
			}
			for _, f := range formats {
				half := make([]uint16, n)
				k.store[f.dtype](unsafe.Pointer(&half[0]), src, 0.25)
				for i, h := range half {
					require.Equal(t, float64(i)/4, f.value(h), "%v %s %d", f.dtype, k.name, n)
				}
			}
		}
	}
}

// checkExp compares the exponentials of x with float64.
func checkExp(t testing.TB, k *rowFuncs[float32], x []float32) {
	e, scaled := make([]float32, len(x)+16), make([]float32, len(x)+16)
	sum, want := k.exp(e[:len(x)], x, 0), 0.0
	k.expScale(scaled[:len(x)], x, 0, 2)
	for _, beyond := range [][]float32{e[len(x):], scaled[len(x):]} {
		require.Equal(t, make([]float32, 16), beyond, k.name)
	}
	e = e[:len(x)]
	if k.expSum != nil && sum == sum {
		require.Equal(t, sum, k.expSum(x, 0), k.name)
	}
	for i, v := range e {
		if v == v && scaled[i] != 2*v {
			require.Failf(t, "scaled exp", "%s: %v, not twice %v", k.name, scaled[i], v)
		}
	}
	for i, v := range x {
		exact := math.Exp(float64(v))
		want += exact
		switch {
		case v != v:
			require.True(t, e[i] != e[i], "%s: exp of NaN %#x is %v", k.name, math.Float32bits(v), e[i])
		case v < expLow:
			require.Zero(t, e[i], "%s: exp(%v)", k.name, v)
		case exact > math.MaxFloat32:
			require.True(t, math.IsInf(float64(e[i]), 1), "%s: exp(%v) is %v", k.name, v, e[i])
		case !(math.Abs(float64(e[i])-exact) <= ulp(kernels.Float32, exact)):
			require.Failf(t, "exp is off by more than an ulp", "%s: exp(%v) is %v, not %v",
				k.name, v, e[i], exact)
		}
	}
	if !math.IsNaN(want) && !math.IsInf(want, 0) {
		require.InEpsilon(t, want+1, sum+1, 4e-7, k.name)
	}
}

func TestExp(t *testing.T) {
	for _, k := range supportedRowFuncs {
		var x []float32
		// 272 thousand numbers of each sign.
		for bits := uint32(0); bits < math.Float32bits(106); bits += 4099 {
			x = append(x, -math.Float32frombits(bits))
			if math.Float32frombits(bits) <= expMost {
				x = append(x, math.Float32frombits(bits))
			}
			if len(x) > 1000 {
				checkExp(t, k, x)
				x = x[:0]
			}
		}
		edge, subnormal := float32(expLow), float32(-126*math.Ln2)
		checkExp(t, k, []float32{subnormal, math.Nextafter32(subnormal, 0), math.Nextafter32(subnormal, -100)})
		checkExp(t, k, []float32{edge, math.Nextafter32(edge, 0), math.Nextafter32(edge, -200), -1e4, -1e30,
			-math.MaxFloat32, float32(math.Inf(-1)), 0, float32(math.NaN()), math.Float32frombits(0xffffffff),
			89, 1000})
	}
}

// TestFloat64Functions: exp and log(1 + x) have all digits but the last, wherever a number lies.
func TestFloat64Functions(t *testing.T) {
	inf, r := math.Inf(1), rand.New(rand.NewPCG(4, 0))
	below := []float64{0, math.Copysign(0, -1), -inf, math.NaN(), -1e-300, -700, -700.1, -745, -1e300, 1, inf}
	above := []float64{0, math.Copysign(0, -1), -1, math.NaN(), 5e-324, 1e-17, 1, math.Sqrt2 - 1, 1 << 53, inf}
	for range 20000 {
		below = append(below, -math.Exp(r.Float64()*40-33))
		above = append(above, math.Exp(r.Float64()*80-60))
	}
	forEachInstructionSet(t, func(t *testing.T) {
		for _, f := range []struct {
			name string
			all  func([]float64)
			one  func(float64) float64
			x    []float64
		}{
			{"exp", engine32.funcs.expAll, math.Exp, below}, {"log1p", engine32.funcs.log1pAll, math.Log1p, above},
		} {
			together := slices.Clone(f.x)
			f.all(together)
			for i, v := range f.x {
				alone := []float64{v, 7}[:1]
				f.all(alone)
				require.Equal(t, 7.0, alone[:2][1])
				require.Equal(t, math.Float64bits(alone[0]), math.Float64bits(together[i]), "%s(%v)", f.name, v)
				want := f.one(v)
				if same := math.IsNaN(want) && math.IsNaN(alone[0]) || want == alone[0]; !same {
					require.InDelta(t, want, alone[0], math.Abs(want)*0x1p-51+5e-324, "%s(%v)", f.name, v)
				}
			}
		}
	})
}

func alignedTo64(n int) []float32 {
	s := make([]float32, n+15)
	return s[-uintptr(unsafe.Pointer(&s[0]))/4%16:][:n]
}

// TestRowFuncLengths compares all tables with plain loops, for lengths that end at every position in a
// vector.
func TestRowFuncLengths(t *testing.T) {
	for _, k := range supportedRowFuncs {
		for n := 1; n < 140; n++ {
			x, y, z, dst := make([]float32, n), make([]float32, n), make([]float32, n), alignedTo64(n+1)
			acc, more := make([]float64, n), make([]float64, n)
			largest, dot, dot3 := math.Inf(-1), 0.0, 0.0
			yz, shifted, shiftedSquares := 0.0, 0.0, 0.0
			for i := range n {
				x[i], y[i], z[i] = float32(i*37%50)-60, float32(i*11%13), float32(i%5)-2
				acc[i], more[i] = float64(i), 0.5
				largest = math.Max(largest, float64(x[i]))
				dot += float64(x[i] * y[i])
				dot3 += float64(x[i] * y[i] * z[i])
				yz += float64(y[i] * z[i])
				shifted += float64(x[i] - 3)
				shiftedSquares += float64((x[i] - 3) * (x[i] - 3))
			}
			require.Equal(t, largest, float64(k.max(x)), "%s %d", k.name, n)
			// Sums of small integers are exact in any order.
			require.Equal(t, dot, k.dot(x, y), "%s %d", k.name, n)
			require.Equal(t, dot3, k.dot3(x, y, z), "%s %d", k.name, n)
			pair := func(a, b float64) [2]float64 { return [2]float64{a, b} }
			require.Equal(t, pair(shifted, shiftedSquares), pair(k.moments(x, 3)), "%s %d", k.name, n)
			sum, sumYZ, sumXYZ := k.sumsAndDot3(x, y, z)
			require.Equal(t, [3]float64{shifted + 3*float64(n), yz, dot3}, [3]float64{sum, sumYZ, sumXYZ}, "%s %d",
				k.name, n)
			k.add(acc, more)
			products, sums := slices.Clone(acc), slices.Clone(more)
			k.addProduct(acc, x, y, 2, 3)
			k.accumulate(more, y)
			for i := range n {
				require.Equal(t, float64(i)+0.5+float64((2*x[i]+3)*y[i]), acc[i])
				require.Equal(t, 0.5+float64(y[i]), more[i])
			}
			k.addBoth(products, sums, x, y, 2, 3)
			require.Equal(t, acc, products, "%s %d", k.name, n)
			require.Equal(t, more, sums, "%s %d", k.name, n)
			each := func(name string, want func(i int) float32) {
				for i := range n {
					require.Equal(t, want(i), dst[i], "%s %s %d", k.name, name, n)
				}
				require.Zero(t, dst[n], "beyond the end")
			}
			k.multiply(dst[:n], x, y, 2)
			each("multiply", func(i int) float32 { return x[i] * 2 * y[i] })
			grad := func(i int) float32 { return (x[i] - 2.5) * y[i] }
			if k.softmaxGrad != nil {
				k.softmaxGrad(dst[:n], x, y, 2, 0.5)
				each("softmaxGrad", grad)
			}
			if raw := k.softmaxGradRaw[kernels.Float32]; raw != nil {
				for _, stream := range []bool{false, true} {
					clear(dst)
					raw(unsafe.Pointer(&dst[0]), unsafe.Pointer(&x[0]), unsafe.Pointer(&y[0]), n, 2, 0.5,
						stream)
					each("softmaxGrad", grad)
				}
			}
			k.sum(dst[:n], x, y)
			each("sum", func(i int) float32 { return x[i] + y[i] })
			k.subtract(dst[:n], x, 7)
			each("subtract", func(i int) float32 { return x[i] - 7 })
			k.normalize(dst[:n], x, y, z, 2, 0.5, 3)
			each("normalize", func(i int) float32 { return (x[i]-2.5)*3*y[i] + z[i] })
			k.normGrad(dst[:n], x, y, z, 2, 1, 3)
			each("normGrad", func(i int) float32 { return (z[i]*y[i] - x[i]*2 - 1) * 3 })
			checkExp(t, k, x)
		}
	}
}

// TestSoftmaxGradOfAllBits: every 16-bit number as dy, and as y, also beside a sum that is NaN.
func TestSoftmaxGradOfAllBits(t *testing.T) {
	all, one, got := make([]uint16, 1<<16+5), make([]uint16, 1<<16+5), make([]uint16, 1<<16+5)
	for i := range all {
		all[i] = uint16(i)
	}
	for _, f := range formats {
		for i := range one {
			one[i] = f.narrow(1)
		}
		for _, k := range supportedRowFuncs {
			raw := k.softmaxGradRaw[f.dtype]
			if raw == nil {
				continue
			}
			for _, hi := range []float32{0.5, float32(math.NaN()), float32(math.Inf(-1))} {
				for _, o := range [][2][]uint16{{all, one}, {one, all}, {all, all}} {
					raw(unsafe.Pointer(&got[0]), unsafe.Pointer(&o[0][0]), unsafe.Pointer(&o[1][0]), len(got), hi, 0, false)
					for i, h := range got {
						want := (f.widen(o[0][i]) - hi) * f.widen(o[1][i])
						if want != want {
							require.True(t, math.IsNaN(f.value(h)), "%v %s %#x: %#x", f.dtype, k.name, i, h)
						} else {
							require.Equal(t, f.narrow(want), h, "%v %s %#x", f.dtype, k.name, i)
						}
					}
				}
			}
		}
	}
}

func FuzzExp(f *testing.F) {
	f.Add(uint32(0), uint32(0x80000000), 1)
	f.Add(math.Float32bits(expLow), uint32(0xff800000), 17)
	f.Fuzz(func(t *testing.T, a, b uint32, n int) {
		x := make([]float32, 1+(n&127))
		for i := range x {
			x[i] = -float32(math.Abs(float64(math.Float32frombits(a + uint32(i)*b))))
		}
		for _, k := range supportedRowFuncs {
			checkExp(t, k, x)
		}
	})
}

func FuzzConversions(f *testing.F) {
	f.Add(uint32(0x38800000), uint32(1))
	f.Add(uint32(0x477fefff), uint32(0x1000))
	f.Fuzz(func(t *testing.T, a, b uint32) {
		x := make([]float32, 50)
		for i := range x {
			x[i] = math.Float32frombits(a + uint32(i)*b)
		}
		for _, format := range formats {
			for _, k := range supportedRowFuncs {
				for i, h := range store(k, format.dtype, x) {
					if x[i] != x[i] {
						require.True(t, math.IsNaN(format.value(h)), "%v %s", format.dtype, k.name)
						continue
					}
					require.Equal(t, format.narrow(x[i]), h, "%v %s %v", format.dtype, k.name, x[i])
				}
			}
		}
	})
}

// TestRawNorms checks the functions of norms that work on rows in memory, with numbers that all types hold.
func TestRawNorms(t *testing.T) {
	small := func(n, step int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(i*step%7 - 3)
		}
		return v
	}
	for _, k := range supportedRowFuncs {
		for dtype, scale := range k.scaleRaw {
			if scale == nil {
				continue
			}
			// in memory aligned to 64 bytes, with room for one more element, which must stay 1
			stored := func(v []float32) unsafe.Pointer {
				v = append(slices.Clone(v), 1)
				p := unsafe.Pointer(&make([]float32, len(v)+16)[0])
				p = unsafe.Add(p, -uintptr(p)&63)
				if kernels.DType(dtype) == kernels.Float32 {
					copy(unsafe.Slice((*float32)(p), len(v)), v)
				} else {
					k.store[dtype](p, v, 1)
				}
				return p
			}
			loaded := func(p unsafe.Pointer, n int) []float32 {
				if kernels.DType(dtype) == kernels.Float32 {
					return unsafe.Slice((*float32)(p), n+1)
				}
				v := make([]float32, n+1)
				k.load[dtype](v, p)
				return v
			}
			for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 1000} {
				x, dy, w := small(n, 1), small(n, 2), small(n, 3)
				product := 0.0
				dst, dx := make([]float32, n), make([]float32, n)
				sums, want := make([]float32, n), make([]float32, n)
				for i := range n {
					sums[i] = float32(i)
					dst[i], dx[i] = x[i]*2*w[i], (dy[i]*w[i]-x[i]*2)*3
					want[i] = float32(i) + x[i]*3*dy[i]
					product += float64(x[i] * dy[i] * w[i])
				}
				for _, stream := range []bool{false, true} {
					p := stored(make([]float32, n))
					scale(p, stored(x), w, 2, stream)
					require.Equal(t, append(dst[:n:n], 1), loaded(p, n), "%s scale %d %d", k.name, dtype, n)
				}
				if k.rmsNormGradRaw[dtype] == nil {
					continue
				}
				require.Equal(t, product, k.dot3Raw[dtype](stored(x), stored(dy), w), "%s %d %d", k.name, dtype, n)
				p := stored(dy) // in place
				k.rmsNormGradRaw[dtype](p, stored(x), p, w, sums, 2, 3)
				require.Equal(t, append(dx, 1), loaded(p, n), "%s gradient %d %d", k.name, dtype, n)
				require.Equal(t, want, sums, "%s sums %d %d", k.name, dtype, n)
				p = stored(dy)
				k.rmsNormGradRaw[dtype](p, stored(x), p, w, nil, 2, 3)
				require.Equal(t, append(dx[:n:n], 1), loaded(p, n), "%s without sums %d %d", k.name, dtype, n)
			}
		}
	}
}

// TestStreamedRows: calls that write past the cache have the bits of those that do not, with rows that begin
// anywhere. A vector that is written so must be aligned, or the process ends.
func TestStreamedRows(t *testing.T) {
	bytes, funcs := streamBytes, engine32.funcs
	defer func() { streamBytes, engine32.funcs = bytes, funcs }()
	for _, k := range supportedRowFuncs {
		engine32.funcs = k
		for _, dtype := range []kernels.DType{kernels.Float16, kernels.BFloat16, kernels.Float32} {
			for _, n := range []int{1, 33, 64, 1000, 2100} {
				for _, gap := range []int{0, 1, 32} {
					x := newMatrix(dtype, 9, n, gap, gap)
					x.fill(func(i, j int) float64 { return float64((i*n+j)%17) / 8 })
					w := newVector(dtype, n, func(j int) float64 { return float64(j%5) - 2 })
					var results [2][2][]byte
					for i, least := range []int{math.MaxInt, 0} {
						streamBytes = least
						y, dx := newMatrix(dtype, 9, n, gap, gap), newMatrix(dtype, 9, n, gap, gap)
						rstd := newVector(kernels.Float32, 9, func(int) float64 { return 0 })
						require.NoError(t, RMSNormForward(x.Matrix, w, y.Matrix, rstd, 1e-6, 1))
						require.NoError(t, SoftmaxBackward(x.Matrix, x.Matrix, dx.Matrix, 1))
						results[i] = [2][]byte{y.bytes, dx.bytes}
					}
					require.Equal(t, results[0], results[1], "%s %v %d %d", k.name, dtype, n, gap)
				}
			}
		}
	}
}

// TestFloat64Exponentials: beside a large element, additions of small ones all round the same way.
func TestFloat64Exponentials(t *testing.T) {
	x := make([]float64, 2048)
	x[0] = 20
	sum := exp64Row(make([]float64, len(x)), x, 20)
	require.InEpsilon(t, 1+2047*math.Exp(-20), sum, 1e-14)
}
