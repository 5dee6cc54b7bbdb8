package ops_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/operators"
	"github.com/gander-go/gander/ops"
)

// The functions that allocate give what the operators' structs do.
func TestFunctionsThatAllocate(t *testing.T) {
	for _, d := range floats {
		x := tensor(t, d, []float64{1, 2, 3, 4, -1, 0.5, 0, 8}, 2, 1, 4)
		weight, bias := tensor(t, d, []float64{1, 2, 0.5, -1}, 4), tensor(t, d, []float64{0, 1, 2, 3}, 4)
		rows := func() *dlpack.Tensor { return empty(t, d, 2, 1, 4) }
		y := map[string]*dlpack.Tensor{}
		for _, name := range []string{"softmax", "log", "rmsnorm", "layernorm", "l2norm", "swiglu", "geglu", "dx"} {
			y[name] = rows()
		}
		lse, target := empty(t, statistic(d), 2, 1), tensor(t, dlpack.Int64, []float64{3, 0}, 2, 1)
		loss := empty(t, statistic(d))
		for _, err := range []error{
			ops.SoftmaxForward{X: x, Y: y["softmax"]}.Run(nil),
			ops.MaskedSoftmaxForward{X: x, Y: y["log"], Log: true}.Run(nil),
			ops.RMSNormForward{X: x, Weight: weight, Y: y["rmsnorm"]}.Run(nil),
			ops.LayerNormForward{X: x, Weight: weight, Bias: bias, Y: y["layernorm"]}.Run(nil),
			ops.L2NormForward{X: x, Y: y["l2norm"]}.Run(nil),
			ops.GLUForward{Gate: x, Up: x, Y: y["swiglu"]}.Run(nil),
			ops.GLUForward{Gate: x, Up: x, Y: y["geglu"], Gelu: true}.Run(nil),
			ops.LogSumExpForward{X: x, LSE: lse}.Run(nil),
			ops.CrossEntropyForward{X: x, Target: target, Loss: loss, DX: y["dx"], Reduction: ops.ReduceMean,
				OnePass: true}.Run(nil),
		} {
			require.NoError(t, err)
		}
		gotLoss, gotDX, err := ops.CrossEntropy(x, target)
		require.NoError(t, err)
		q, k := view(t, x, 0, []int64{1, 2, 4}, nil), view(t, x, 0, []int64{1, 1, 4}, nil)
		cos, sin := tensor(t, d, []float64{0.5, -1}, 1, 2), tensor(t, d, []float64{2, 0.25}, 1, 2)
		turned, kTurned := empty(t, d, 1, 2, 4), empty(t, d, 1, 1, 4)
		require.NoError(t, ops.RotaryForward{Q: q, K: k, Cos: cos, Sin: sin, QOut: turned, KOut: kTurned}.Run(nil))
		gotTurned, gotKTurned, err := ops.Rotary(q, k, cos, sin)
		require.NoError(t, err)
		alone, none, err := ops.Rotary(q, nil, cos, sin)
		require.NoError(t, err)
		assert.Nil(t, none)
		for _, c := range []struct {
			want *dlpack.Tensor
			make func() (*dlpack.Tensor, error)
		}{
			{y["softmax"], func() (*dlpack.Tensor, error) { return ops.Softmax(x) }},
			{y["log"], func() (*dlpack.Tensor, error) { return ops.LogSoftmax(x) }},
			{y["rmsnorm"], func() (*dlpack.Tensor, error) { return ops.RMSNorm(x, weight) }},
			{y["layernorm"], func() (*dlpack.Tensor, error) { return ops.LayerNorm(x, weight, bias) }},
			{y["l2norm"], func() (*dlpack.Tensor, error) { return ops.L2Norm(x) }},
			{y["swiglu"], func() (*dlpack.Tensor, error) { return ops.SwiGLU(x, x) }},
			{y["geglu"], func() (*dlpack.Tensor, error) { return ops.GeGLU(x, x) }},
			{lse, func() (*dlpack.Tensor, error) { return ops.LogSumExp(x) }},
			{loss, func() (*dlpack.Tensor, error) { return gotLoss, nil }},
			{y["dx"], func() (*dlpack.Tensor, error) { return gotDX, nil }},
			{turned, func() (*dlpack.Tensor, error) { return gotTurned, nil }},
			{kTurned, func() (*dlpack.Tensor, error) { return gotKTurned, nil }},
			{turned, func() (*dlpack.Tensor, error) { return alone, nil }},
		} {
			got, err := c.make()
			require.NoError(t, err)
			assert.Equal(t, c.want.DType, got.DType)
			assert.Equal(t, c.want.Dims(), got.Dims())
			assert.Equal(t, values(t, c.want), values(t, got))
		}
	}
}

func TestFunctionsRefuse(t *testing.T) {
	shape := []int64{2, 3}
	device, err := dlpack.Borrow(tensor(t, dlpack.Float32, make([]float64, 6), 2, 3).Data,
		dlpack.Device{Type: dlpack.CUDA}, dlpack.Float32, shape, nil)
	require.NoError(t, err)
	for name, run := range map[string]func(x *dlpack.Tensor) error{
		"softmax: x":     func(x *dlpack.Tensor) error { _, err := ops.Softmax(x); return err },
		"log_softmax: x": func(x *dlpack.Tensor) error { _, err := ops.LogSoftmax(x); return err },
		"logsumexp: x":   func(x *dlpack.Tensor) error { _, err := ops.LogSumExp(x); return err },
		"rmsnorm: x":     func(x *dlpack.Tensor) error { _, err := ops.RMSNorm(x, nil); return err },
		"layernorm: x":   func(x *dlpack.Tensor) error { _, err := ops.LayerNorm(x, nil, nil); return err },
		"l2norm: x":      func(x *dlpack.Tensor) error { _, err := ops.L2Norm(x); return err },
		"swiglu: gate":   func(x *dlpack.Tensor) error { _, err := ops.SwiGLU(x, x); return err },
		"geglu: gate":    func(x *dlpack.Tensor) error { _, err := ops.GeGLU(x, x); return err },
		"rotary: q":      func(x *dlpack.Tensor) error { _, _, err := ops.Rotary(x, nil, x, x); return err },
		"cross_entropy: x": func(x *dlpack.Tensor) error {
			_, _, err := ops.CrossEntropy(x, tensor(t, dlpack.Int64, []float64{0, 0}, 2))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(device)
			assert.ErrorIs(t, err, ops.StatusDevice)
			assert.ErrorContains(t, err, name+" is on cuda:0, expected host memory")
			assert.ErrorIs(t, run(nil), ops.StatusNull)
			assert.ErrorIs(t, run(tensor(t, dlpack.Int32, make([]float64, 6), 2, 3)), ops.StatusDType)
		})
	}
}

func TestCheckTargets(t *testing.T) {
	for _, d := range []dlpack.DType{dlpack.Int32, dlpack.Int64} {
		assert.NoError(t, ops.CheckTargets(tensor(t, d, []float64{0, 4, -100, 9}, 2, 2), 10, -100))
		assert.NoError(t, ops.CheckTargets(tensor(t, d, nil, 0), 10, -100))
		for _, wrong := range []float64{10, -1, -100, 1e6} {
			err := ops.CheckTargets(tensor(t, d, []float64{0, wrong}, 2), 10, 7)
			assert.ErrorIs(t, err, ops.StatusOption)
			assert.ErrorContains(t, err, "check_targets: target[1] is ")
			assert.ErrorContains(t, err, ", expected 0 to 9, or 7, which is ignored")
		}
	}
	assert.ErrorIs(t, ops.CheckTargets(nil, 10, -100), ops.StatusNull)
	assert.ErrorIs(t, ops.CheckTargets(tensor(t, dlpack.Float32, []float64{1}, 1), 10, -100), ops.StatusDType)
}

func TestStatusIsASentinelAndAWord(t *testing.T) {
	err := ops.SoftmaxForward{}.Run(nil)
	assert.ErrorIs(t, err, ops.StatusNull)
	assert.NotErrorIs(t, err, ops.StatusShape)
	assert.NotErrorIs(t, err, errors.New("another"))
	assert.Equal(t, "null", ops.StatusNull.String())
	assert.Equal(t, "gander: dtype", ops.StatusDType.Error())
	assert.Equal(t, "status 99", ops.Status(99).String())
}

func TestEveryOperatorHasAnExample(t *testing.T) {
	examples, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	for _, group := range operators.Table {
		for _, o := range group.Operators {
			name := group.Type + strings.ToUpper(o.Name[:1]) + o.Name[1:]
			assert.Contains(t, string(examples), "func Example"+name+"() {")
		}
	}
}
