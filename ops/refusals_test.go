package ops_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// operands are valid operands of all ops for x (3, 4). A case then makes one of them invalid.
type operands struct {
	x, weight, y, rstd, dw, dout              *dlpack.Tensor
	target, loss, lse, dx, dloss, denominator *dlpack.Tensor
	eps                                       float64
	o                                         crossEntropyOptions
}

const mark = 5 // the value of every output's elements before a call

func newOperands(t testing.TB) *operands {
	f := func(dims ...int64) *dlpack.Tensor {
		v := empty(t, dlpack.Float32, dims...)
		filled := make([]float64, v.Len())
		for i := range filled {
			filled[i] = mark
		}
		require.NoError(t, v.SetFloat64s(filled))
		return v
	}
	return &operands{x: f(3, 4), weight: f(4), y: f(3, 4), rstd: f(3), dw: f(4), dout: f(3, 4),
		target: empty(t, dlpack.Int64, 3), loss: f(3), lse: f(2, 3), dx: f(3, 4), dloss: f(),
		denominator: f(), eps: eps}
}

var calls = map[string]func(a *operands) error{
	"softmax_forward":  func(a *operands) error { return softmaxForward(a.x, a.y) },
	"softmax_backward": func(a *operands) error { return softmaxBackward(a.dout, a.y, a.dx) },
	"rmsnorm_forward":  func(a *operands) error { return rmsNormForward(a.x, a.weight, a.y, a.rstd, a.eps) },
	"rmsnorm_backward": func(a *operands) error {
		return rmsNormBackward(a.x, a.weight, a.dout, a.rstd, a.dx, a.dw)
	},
	"cross_entropy_forward": func(a *operands) error {
		return crossEntropyForward(a.x, a.target, a.weight, a.loss, a.lse, a.dx, a.denominator, a.o)
	},
	"cross_entropy_backward": func(a *operands) error {
		return crossEntropyBackward(a.x, a.target, a.weight, a.dloss, a.lse, a.denominator, a.dx, a.o)
	},
}

func (a *operands) on(d dlpack.Device) {
	for _, v := range a.all() {
		v.Device = d
	}
}

func (a *operands) all() []*dlpack.Tensor {
	return []*dlpack.Tensor{a.x, a.weight, a.y, a.rstd, a.dw, a.dout, a.target, a.loss, a.lse, a.dx, a.dloss,
		a.denominator}
}

func TestRefusals(t *testing.T) {
	float64s := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float64, dims...) }
	f32 := func(dims ...int64) *dlpack.Tensor { return empty(t, dlpack.Float32, dims...) }
	shift := func(v *dlpack.Tensor, bytes uint64) *dlpack.Tensor {
		w := *v
		w.ByteOffset += bytes
		return &w
	}
	strided := func(dims, strides []int64) *dlpack.Tensor { return view(t, f32(64), 0, dims, strides) }
	cuda := func(id int32) dlpack.Device { return dlpack.Device{Type: dlpack.CUDA, ID: id} }

	cases := []struct {
		op      string
		spoil   func(a *operands)
		status  ops.Status
		message string
	}{
		// A required operand is missing.
		{"softmax_forward", func(a *operands) { a.x = nil }, ops.StatusNull, "x is NULL, expected a tensor"},
		{"softmax_forward", func(a *operands) { a.y = nil }, ops.StatusNull, "y is NULL, expected a tensor"},
		{"softmax_backward", func(a *operands) { a.dout = nil }, ops.StatusNull,
			"dy is NULL, expected a tensor"},
		{"softmax_backward", func(a *operands) { a.y = nil }, ops.StatusNull, "y is NULL, expected a tensor"},
		{"softmax_backward", func(a *operands) { a.dx = nil }, ops.StatusNull,
			"dx is NULL, expected a tensor"},
		{"rmsnorm_forward", func(a *operands) { a.x = nil }, ops.StatusNull, "x is NULL, expected a tensor"},
		{"rmsnorm_forward", func(a *operands) { a.y = nil }, ops.StatusNull, "y is NULL, expected a tensor"},
		{"rmsnorm_backward", func(a *operands) { a.x = nil }, ops.StatusNull, "x is NULL, expected a tensor"},
		{"rmsnorm_backward", func(a *operands) { a.dout = nil }, ops.StatusNull,
			"dout is NULL, expected a tensor"},
		{"rmsnorm_backward", func(a *operands) { a.rstd = nil }, ops.StatusNull,
			"rstd is NULL, expected a tensor"},
		{"rmsnorm_backward", func(a *operands) { a.dx = nil }, ops.StatusNull,
			"dx is NULL, expected a tensor"},
		{"cross_entropy_forward", func(a *operands) { a.x = nil }, ops.StatusNull,
			"x is NULL, expected a tensor"},
		{"cross_entropy_forward", func(a *operands) { a.target = nil }, ops.StatusNull,
			"target is NULL, expected a tensor"},
		{"cross_entropy_forward", func(a *operands) { a.loss = nil }, ops.StatusNull,
			"loss is NULL, expected a tensor"},
		{"cross_entropy_backward", func(a *operands) { a.dloss = nil }, ops.StatusNull,
			"dloss is NULL, expected a tensor"},
		{"cross_entropy_backward", func(a *operands) { a.lse = nil }, ops.StatusNull,
			"lse is NULL, expected a tensor"},
		{"cross_entropy_backward", func(a *operands) { a.dx, a.denominator = nil, nil }, ops.StatusNull,
			"dx is NULL"},
		{"cross_entropy_backward", func(a *operands) {
			a.o.Reduction, a.denominator = kernels.ReduceMean, nil
		}, ops.StatusShape, "lse has shape (2, 3), which is 6 elements, expected 7: the two parts and the " +
			"denominator"},

		// Invalid DLPack tensors.
		{"softmax_forward", func(a *operands) { a.x.NDim = -1 }, ops.StatusShape,
			"x is not a valid DLPack tensor, it has a bad shape: ndim is -1, expected 0 to 64"},
		{"softmax_forward", func(a *operands) { a.x.Shape = nil }, ops.StatusNull,
			"x is not a valid DLPack tensor, it has a NULL pointer: shape is NULL with ndim 2"},
		{"softmax_forward", func(a *operands) { a.x.Data = nil }, ops.StatusNull,
			"x is not a valid DLPack tensor, it has a NULL pointer: data is NULL, expected the address of " +
				"48 bytes"},
		{"rmsnorm_forward", func(a *operands) { a.weight.NDim, a.weight.Shape = 2, nil }, ops.StatusNull,
			"weight is not a valid DLPack tensor, it has a NULL pointer: shape is NULL with ndim 2"},
		{"rmsnorm_backward", func(a *operands) { a.dw.NDim, a.dw.Shape = 2, nil }, ops.StatusNull,
			"dw is not a valid DLPack tensor, it has a NULL pointer: shape is NULL with ndim 2"},
		{"cross_entropy_forward", func(a *operands) { a.lse.Shape = nil }, ops.StatusNull,
			"lse is not a valid DLPack tensor, it has a NULL pointer: shape is NULL with ndim 2"},
		{"softmax_forward", func(a *operands) { a.x.DType.Lanes = 0 }, ops.StatusDType,
			"x is not a valid DLPack tensor, it has a bad dtype: 32 bits in 0 lanes"},
		{"softmax_forward", func(a *operands) { a.x.ByteOffset = math.MaxUint64 }, ops.StatusLayout,
			"x is not a valid DLPack tensor, it has a bad layout"},

		// Ranks and shapes.
		{"softmax_forward", func(a *operands) { a.x = f32() }, ops.StatusShape,
			"x has rank 0, expected rows (M, N) of rank 1 or more; reshape it to (1, 1)"},
		{"softmax_forward", func(a *operands) { a.x = f32(3, 0) }, ops.StatusShape,
			"x has shape (3, 0), expected a last dimension of 1 or more; skip the call"},
		{"softmax_forward", func(a *operands) { a.y = f32(3, 5) }, ops.StatusShape,
			"y has shape (3, 5), expected (3, 4) as x"},
		{"softmax_backward", func(a *operands) { a.y = f32(12) }, ops.StatusShape,
			"y has shape (12,), expected (3, 4) as dy"},
		{"rmsnorm_forward", func(a *operands) { a.weight = f32(3) }, ops.StatusShape,
			"weight has shape (3,), expected (4,): one for each column of x, or (3, 4): one for each column of " +
				"each head"},
		{"rmsnorm_forward", func(a *operands) { a.weight = f32(1, 4) }, ops.StatusShape,
			"weight has shape (1, 4), expected (4,): one for each column of x, or (3, 4): one for each column of " +
				"each head"},
		{"rmsnorm_forward", func(a *operands) { a.rstd = f32(4) }, ops.StatusShape,
			"rstd has shape (4,), which is 4 elements, expected 3: one for each row of x"},
		{"rmsnorm_backward", func(a *operands) { a.dw = f32(3) }, ops.StatusShape, "dw has shape (3,)"},
		{"rmsnorm_backward", func(a *operands) { a.dout = f32(4, 3) }, ops.StatusShape,
			"dout has shape (4, 3)"},
		{"rmsnorm_backward", func(a *operands) { a.dx = f32(2, 4) }, ops.StatusShape, "dx has shape (2, 4)"},
		{"cross_entropy_forward", func(a *operands) { a.target = empty(t, dlpack.Int64, 4) }, ops.StatusShape,
			"target has shape (4,), expected (3,), the leading dimensions of x"},
		{"cross_entropy_forward", func(a *operands) { a.loss = f32(1) }, ops.StatusShape,
			"loss has shape (1,), which is 1 elements, expected 3: one for each row of x with reduction " +
				"none"},
		{"cross_entropy_forward", func(a *operands) { a.o.Reduction = kernels.ReduceSum }, ops.StatusShape,
			"loss has shape (3,), which is 3 elements, expected 1: one sum or mean for all rows"},
		{"cross_entropy_forward", func(a *operands) { a.lse = f32(3, 2) }, ops.StatusShape,
			"lse has shape (3, 2), which is 6 elements, expected 3: one for each row of x, or (2, 3): its " +
				"two parts, or 7: the two parts and the denominator"},
		{"cross_entropy_forward", func(a *operands) { a.denominator = f32(3) }, ops.StatusShape,
			"denominator has shape (3,), which is 3 elements, expected 1: one for all rows"},
		{"cross_entropy_backward", func(a *operands) { a.dloss = f32(2) }, ops.StatusShape,
			"dloss has shape (2,), which is 2 elements, expected 3: one for each row of x, or 1: one " +
				"for all rows"},

		// Element types.
		{"softmax_forward", func(a *operands) { a.x = empty(t, dlpack.Int32, 3, 4) }, ops.StatusDType,
			"x has dtype int32, expected float16, bfloat16, float32 or float64; convert it"},
		{"softmax_forward", func(a *operands) { a.x.DType = dlpack.DType{Code: 1, Bits: 8, Lanes: 1} },
			ops.StatusDType,
			"x has dtype uint8, expected float16, bfloat16, float32 or float64; convert it"},
		{"softmax_forward", func(a *operands) { a.x.DType.Lanes = 4 }, ops.StatusDType,
			"x has dtype float32 x 4 lanes"},
		{"softmax_forward", func(a *operands) { a.y = empty(t, dlpack.Float16, 3, 4) }, ops.StatusDType,
			"y has dtype float16, expected float32; convert it"},
		{"rmsnorm_forward", func(a *operands) { a.weight = float64s(4) }, ops.StatusDType,
			"weight has dtype float64, expected float16, bfloat16 or float32; convert it"},
		{"rmsnorm_forward", func(a *operands) { a.x = float64s(3, 4) }, ops.StatusDType,
			"weight has dtype float32, expected float64; convert it"},
		{"rmsnorm_forward", func(a *operands) { a.rstd = empty(t, dlpack.Float16, 3) }, ops.StatusDType,
			"rstd has dtype float16, expected float32; convert it"},
		{"rmsnorm_backward", func(a *operands) { a.dx = float64s(3, 4) }, ops.StatusDType,
			"dx has dtype float64, expected float16, bfloat16 or float32; convert it"},
		{"rmsnorm_backward", func(a *operands) { a.dw = empty(t, dlpack.Float16, 4) }, ops.StatusDType,
			"dw has dtype float16, expected float32; convert it"},
		{"cross_entropy_forward", func(a *operands) { a.target = f32(3) }, ops.StatusDType,
			"target has dtype float32, expected int32 or int64; convert it"},
		{"cross_entropy_forward", func(a *operands) { a.loss = float64s(3) }, ops.StatusDType,
			"loss has dtype float64, expected float32; convert it"},
		{"cross_entropy_backward", func(a *operands) { a.dloss = float64s() }, ops.StatusDType,
			"dloss has dtype float64, expected float32; convert it"},

		// Devices.
		{"softmax_forward", func(a *operands) { a.on(dlpack.Device{Type: 8}) }, ops.StatusDevice,
			"x is on device type 8:0, expected cpu (1), cuda (2), cuda_host (3) or cuda_managed (13); " +
				"copy it there"},
		{"softmax_forward", func(a *operands) { a.y.Device = cuda(0) }, ops.StatusDevice,
			"y is on cuda:0, expected cpu as x; move one of them"},
		{"softmax_forward", func(a *operands) { a.x.Device, a.y.Device = cuda(0), cuda(1) }, ops.StatusDevice,
			"y is on cuda:1, expected cuda:0 as x; move one of them"},
		{"rmsnorm_forward", func(a *operands) {
			a.on(cuda(1))
			a.x.Device.Type = dlpack.CUDAManaged
			a.rstd.Device.ID = 0
		}, ops.StatusDevice, "rstd is on cuda:0, expected cuda:1 as x; move one of them"},
		{"softmax_forward", func(a *operands) { a.x, a.y = float64s(3, 4), float64s(3, 4); a.on(cuda(2)) },
			ops.StatusUnsupported,
			"x has dtype float64 on cuda:2, expected float16, bfloat16 or float32 there; convert it, or " +
				"move the operands to host memory, where float64 is served"},

		// Strides.
		{"softmax_forward", func(a *operands) { a.x = strided([]int64{3, 4}, []int64{1, 3}) },
			ops.StatusLayout,
			"x has stride 3 in its last dimension, expected adjacent elements (stride 1); make it " +
				"contiguous"},
		{"softmax_forward", func(a *operands) { a.x = strided([]int64{3, 4}, []int64{1, 0}) },
			ops.StatusLayout,
			"x has stride 0 in its last dimension"},
		{"softmax_forward", func(a *operands) { a.x = strided([]int64{3, 2, 4}, []int64{4, 12, 1}) },
			ops.StatusLayout,
			"x has shape (3, 2, 4) and strides (4, 12, 1), expected leading dimensions that collapse into " +
				"rows one fixed stride apart; make it contiguous"},
		{"softmax_forward", func(a *operands) { a.y = strided([]int64{3, 4}, []int64{2, 1}) },
			ops.StatusLayout,
			"y has rows of 4 elements 2 apart, expected an output whose rows do not overlap; make it " +
				"contiguous"},
		{"rmsnorm_forward", func(a *operands) { a.weight = strided([]int64{4}, []int64{2}) },
			ops.StatusLayout,
			"weight has stride 2, expected adjacent elements (stride 1); make it contiguous"},
		{"rmsnorm_forward", func(a *operands) { a.rstd = strided([]int64{3}, []int64{0}) }, ops.StatusLayout,
			"rstd has stride 0, expected adjacent elements (stride 1); make it contiguous"},
		{"cross_entropy_forward", func(a *operands) {
			a.x, a.target = f32(2, 3, 4), view(t, empty(t, dlpack.Int64, 9), 0, []int64{2, 3}, []int64{1, 2})
		}, ops.StatusLayout, "target has shape (2, 3) and strides (1, 2), expected elements one fixed " +
			"stride apart; make it contiguous"},
		{"cross_entropy_forward", func(a *operands) { a.lse = strided([]int64{2, 3}, []int64{1, 2}) },
			ops.StatusLayout,
			"lse has strides (1, 2), expected adjacent elements in each of its two parts; make it " +
				"contiguous"},
		{"cross_entropy_forward", func(a *operands) { a.lse = strided([]int64{2, 3}, []int64{0, 1}) },
			ops.StatusLayout,
			"lse has rows of 3 elements 0 apart, expected an output whose rows do not overlap"},

		// Alignment.
		{"softmax_forward", func(a *operands) { a.x = shift(f32(3, 4), 2) }, ops.StatusAlignment,
			"x begins 2 bytes after a multiple of 4, expected an address aligned to the size of a " +
				"float32; copy it"},
		{"cross_entropy_forward", func(a *operands) { a.target = shift(empty(t, dlpack.Int64, 3), 4) },
			ops.StatusAlignment,
			"target begins 4 bytes after a multiple of 8"},

		// Overlap.
		{"softmax_forward", func(a *operands) {
			a.y = view(t, a.x, 1, []int64{2, 4}, nil)
			a.x = view(t, a.x, 0, []int64{2, 4}, nil)
		}, ops.StatusOverlap, "y overlaps x, expected exactly the same rows and dtype, or separate memory; " +
			"allocate y separately"},
		{"rmsnorm_backward", func(a *operands) { a.dx = a.x }, ops.StatusOverlap,
			"dx overlaps x, expected separate memory; allocate dx separately"},
		{"rmsnorm_backward", func(a *operands) { a.dw = a.weight }, ops.StatusOverlap, "dw overlaps weight"},
		{"rmsnorm_forward", func(a *operands) { a.weight = view(t, a.y, 4, []int64{4}, nil) },
			ops.StatusOverlap,
			"y overlaps weight, expected separate memory; allocate y separately"},
		{"rmsnorm_forward", func(a *operands) { a.rstd = view(t, a.y, 0, []int64{3}, nil) },
			ops.StatusOverlap,
			"rstd overlaps y, expected separate memory; allocate rstd separately"},
		{"softmax_forward", func(a *operands) {
			b := f32(40) // columns 0 to 3 and 3 to 6 of the same rows
			a.x = view(t, b, 0, []int64{3, 4}, []int64{8, 1})
			a.y = view(t, b, 3, []int64{3, 4}, []int64{8, 1})
		}, ops.StatusOverlap, "y overlaps x, expected exactly the same rows"},
		{"softmax_forward", func(a *operands) {
			b := f32(40) // the last element of each row of x is the first of the same row of y
			a.x = view(t, b, 5, []int64{3, 4}, []int64{8, 1})
			a.y = view(t, b, 8, []int64{3, 4}, []int64{8, 1})
		}, ops.StatusOverlap, "y overlaps x, expected exactly the same rows"},
		{"cross_entropy_forward", func(a *operands) { a.denominator = view(t, a.loss, 2, nil, nil) },
			ops.StatusOverlap,
			"denominator overlaps loss"},

		// Options.
		{"rmsnorm_forward", func(a *operands) { a.eps = -1 }, ops.StatusOption,
			"eps is -1, expected a finite number of 0 or more"},
		{"rmsnorm_forward", func(a *operands) { a.eps = math.NaN() }, ops.StatusOption, "eps is NaN"},
		{"rmsnorm_forward", func(a *operands) { a.eps = math.Inf(1) }, ops.StatusOption, "eps is +Inf"},
		{"rmsnorm_forward", func(a *operands) { a.eps = 1e39 }, ops.StatusOption,
			"eps is 1e+39, expected a number that float32 holds, at most 3.4028235e+38"},
		{"rmsnorm_backward", func(a *operands) { a.weight = nil }, ops.StatusOption,
			"dw is given without a weight, expected NULL; pass the weight or drop dw"},
		{"cross_entropy_forward", func(a *operands) { a.o.Reduction = 3 }, ops.StatusOption,
			"reduction is 3, expected none (0), mean (1) or sum (2)"},
		{"cross_entropy_backward", func(a *operands) { a.o.Reduction = -1 }, ops.StatusOption,
			"reduction is -1"},
		{"cross_entropy_backward", func(a *operands) {
			a.o.Slice, a.o.OnePass, a.o.Reduction, a.dloss = true, true, kernels.ReduceSum, f32()
			a.denominator = nil
		}, ops.StatusOption, "slice is set with one_pass, whose dx forward has computed without it"},
		{"cross_entropy_forward", func(a *operands) {
			a.o.Reduction, a.o.Divisor, a.loss = kernels.ReduceMean, f32(), f32()
		}, ops.StatusOption, "divisor is given with reduction mean, expected sum or none; a mean has a divisor " +
			"already: drop one of them"},
		{"cross_entropy_backward", func(a *operands) { a.o.Reduction, a.o.Divisor = kernels.ReduceMean, f32() },
			ops.StatusOption, "divisor is given with reduction mean"},
		{"cross_entropy_forward", func(a *operands) { a.o.Divisor = f32(2) }, ops.StatusShape,
			"divisor has shape (2,), which is 2 elements, expected 1: one for all rows"},
		{"cross_entropy_forward", func(a *operands) { a.o.Upstream = f32(3) }, ops.StatusShape,
			"upstream has shape (3,)"},
		{"cross_entropy_backward", func(a *operands) { a.o.Upstream = f32() }, ops.StatusOption,
			"upstream is given without one_pass, expected NULL; set one_pass or drop upstream"},
		{"cross_entropy_backward", func(a *operands) {}, ops.StatusOption,
			"denominator is given with another reduction than mean, expected NULL; drop it or set " +
				"reduction to mean"},
	}
	for _, c := range cases {
		t.Run(c.op+"/"+c.message, func(t *testing.T) {
			a := newOperands(t)
			c.spoil(a)
			err := calls[c.op](a)
			var e *ops.Error
			require.ErrorAs(t, err, &e)
			assert.Equal(t, c.status, e.Status)
			assert.Contains(t, e.Message, c.op+": "+c.message)
			for _, v := range []*dlpack.Tensor{a.y, a.rstd, a.dw, a.loss, a.lse, a.dx} {
				if v == nil || v.DType != dlpack.Float32 || !v.Device.Host() || v.Validate() != nil ||
					v.NDim == 0 {
					continue
				}
				for _, got := range values(t, v) {
					assert.Contains(t, []float64{0, mark}, got, "a refused call wrote")
				}
			}
		})
	}
}

// The operands that TestRefusals starts from are valid.
func TestOperandsAreValid(t *testing.T) {
	for op, call := range calls {
		a := newOperands(t)
		if op == "cross_entropy_backward" {
			a.denominator = nil
		}
		assert.NoError(t, call(a), op)
	}
}

// Pinned memory is host memory. A call may use it together with pageable memory.
func TestPinnedMemory(t *testing.T) {
	a := newOperands(t)
	a.y.Device.Type = dlpack.CUDAHost
	require.NoError(t, softmaxForward(a.x, a.y))
	assert.Equal(t, []float64{0.25, 0.25}, values(t, a.y)[:2])
}

func TestCUDAWithoutDevice(t *testing.T) {
	for op, call := range calls {
		a := newOperands(t)
		// The operands are host memory, so the ordinal must be one that no machine has.
		a.on(dlpack.Device{Type: dlpack.CUDA, ID: 1 << 20})
		if op == "cross_entropy_backward" {
			a.denominator = nil
		}
		var e *ops.Error
		require.ErrorAs(t, call(a), &e, op)
		expected := []ops.Status{ops.StatusUnsupported, ops.StatusDevice, ops.StatusCUDA}
		assert.Contains(t, expected, e.Status, op)
		assert.NotEmpty(t, e.Message)
	}
}

func TestWarmup(t *testing.T) {
	require.NoError(t, ops.Warmup(dlpack.Device{Type: dlpack.CPU}))
	var e *ops.Error
	require.True(t, errors.As(ops.Warmup(dlpack.Device{Type: 8}), &e))
	assert.Equal(t, ops.StatusDevice, e.Status)
	assert.Equal(t, "warmup: device has type 8, expected cpu (1), cuda (2), cuda_host (3) or cuda_managed (13)",
		e.Message)
	require.Error(t, ops.Warmup(dlpack.Device{Type: dlpack.CUDA, ID: 1 << 20}))
}

func TestOpenImages(t *testing.T) {
	folder := t.TempDir()
	err := ops.OpenImages(folder)
	var e *ops.Error
	require.ErrorAs(t, err, &e)
	if e.Status == ops.StatusUnsupported { // without the tag cuda
		assert.EqualError(t, err, "built without CUDA: build with -tags cuda (./build.sh build)")
		return
	}
	assert.Equal(t, ops.StatusOption, e.Status)
	assert.EqualError(t, err, `open_images: folder is "`+folder+`", which has no SHA256SUMS, expected a folder `+
		"of device images: ./build.sh build in a checkout of gander makes it, as kernels/images")
}

func TestExplain(t *testing.T) {
	host := dlpack.Device{Type: dlpack.CPU}
	for _, op := range []string{"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward"} {
		text, err := ops.Explain(op, 3, 4, dlpack.BFloat16, host, ops.Choice{})
		require.NoError(t, err)
		assert.Contains(t, text, op+" of 3 rows of 4 bfloat16 on cpu")
		assert.Contains(t, text, "accumulated in float32")
	}
	for _, c := range []struct {
		op      string
		m, n    int64
		t       dlpack.DType
		d       dlpack.Device
		status  ops.Status
		message string
	}{
		{"softmax", 1, 1, dlpack.Float32, host, ops.StatusOption,
			`explain: op is "softmax", expected cross_entropy_forward`},
		{"softmax_forward", -1, 1, dlpack.Float32, host, ops.StatusShape,
			"shape is (-1, 1), expected M >= 0 rows of N >= 1"},
		{"softmax_forward", 1, 0, dlpack.Float32, host, ops.StatusShape, "shape is (1, 0)"},
		{"softmax_forward", 1, 1, dlpack.Int32, host, ops.StatusDType,
			"explain: dtype is int32, expected float16, bfloat16, float32 or float64"},
		{"softmax_forward", 1, 1, dlpack.Float64, dlpack.Device{Type: dlpack.CUDA}, ops.StatusUnsupported,
			"dtype is float64, expected float16, bfloat16 or float32 on cuda:0; float64 is served in host memory"},
		{"softmax_forward", 1, 1, dlpack.Float32, dlpack.Device{Type: 9}, ops.StatusDevice,
			"device has type 9, expected cpu (1)"},
		{"softmax_forward", 1, 1, dlpack.Float32, dlpack.Device{Type: dlpack.CUDA, ID: 1 << 20}, 0, ""},
	} {
		_, err := ops.Explain(c.op, c.m, c.n, c.t, c.d, ops.Choice{})
		var e *ops.Error
		require.ErrorAs(t, err, &e)
		assert.Contains(t, e.Message, c.message)
		if c.status != 0 {
			assert.Equal(t, c.status, e.Status)
		}
	}
}
