package ops

import "github.com/gander-go/gander/dlpack"

// The functions below allocate their results, on the Go heap. So they take host tensors alone. They use
// defaults for all options; an operator's struct has the others. A nil weight or bias is absent.

// Softmax returns exp(x - max x) / sum exp(x - max x) for each row, of x's shape and dtype.
func Softmax(x *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("softmax", "x", x)
	if err != nil {
		return nil, err
	}
	return y, SoftmaxForward{X: x, Y: y}.Run(nil)
}

// LogSoftmax returns the logarithm of Softmax, of x's shape and dtype.
func LogSoftmax(x *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("log_softmax", "x", x)
	if err != nil {
		return nil, err
	}
	return y, MaskedSoftmaxForward{X: x, Y: y, Log: true}.Run(nil)
}

// LogSumExp returns log(sum exp(x)) for each row: x's shape without the last dimension, float32 (float64 for
// float64).
func LogSumExp(x *dlpack.Tensor) (*dlpack.Tensor, error) {
	lse, err := newPerRow("logsumexp", "x", x)
	if err != nil {
		return nil, err
	}
	return lse, LogSumExpForward{X: x, LSE: lse}.Run(nil)
}

// RMSNorm returns x / sqrt(mean(x^2) + 1e-6) * weight for each row, of x's shape and dtype. weight has N
// elements.
func RMSNorm(x, weight *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("rmsnorm", "x", x)
	if err != nil {
		return nil, err
	}
	return y, RMSNormForward{X: x, Weight: weight, Y: y}.Run(nil)
}

// LayerNorm returns (x - mean) / sqrt(var(x) + 1e-6) * weight + bias for each row, of x's shape and dtype.
// weight and bias have N elements.
func LayerNorm(x, weight, bias *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("layernorm", "x", x)
	if err != nil {
		return nil, err
	}
	return y, LayerNormForward{X: x, Weight: weight, Bias: bias, Y: y}.Run(nil)
}

// L2Norm returns x / sqrt(sum(x^2) + 1e-6) for each row, of x's shape and dtype.
func L2Norm(x *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("l2norm", "x", x)
	if err != nil {
		return nil, err
	}
	return y, L2NormForward{X: x, Y: y}.Run(nil)
}

// SwiGLU returns gate * sigmoid(gate) * up for each element, of gate's shape and dtype, which up has too.
func SwiGLU(gate, up *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("swiglu", "gate", gate)
	if err != nil {
		return nil, err
	}
	return y, GLUForward{Gate: gate, Up: up, Y: y}.Run(nil)
}

// GeGLU returns gate * P(gate) * up for each element, with P the normal distribution, of gate's shape and
// dtype, which up has too.
func GeGLU(gate, up *dlpack.Tensor) (*dlpack.Tensor, error) {
	y, err := newRows("geglu", "gate", gate)
	if err != nil {
		return nil, err
	}
	return y, GLUForward{Gate: gate, Up: up, Y: y, Gelu: true}.Run(nil)
}

// Rotary returns q and k, (..., S, H, N), of their shapes and dtype, with each pair (a, b) of a head's
// elements rotated to (a cos - b sin, b cos + a sin). k may have another number of heads, or be nil, as is
// then its result. cos and sin are (T, R / 2): token s has row s. Pair i is elements i and i + R / 2. The
// columns after the first R are copied.
func Rotary(q, k, cos, sin *dlpack.Tensor) (qOut, kOut *dlpack.Tensor, err error) {
	if qOut, err = newRows("rotary", "q", q); err != nil {
		return nil, nil, err
	}
	if k != nil {
		if kOut, err = newRows("rotary", "k", k); err != nil {
			return nil, nil, err
		}
	}
	return qOut, kOut, RotaryForward{Q: q, K: k, Cos: cos, Sin: sin, QOut: qOut, KOut: kOut}.Run(nil)
}

// CrossEntropy returns the mean loss of rows of logits x, of one element, float32 (float64 for float64), and
// its gradient, of x's shape and dtype. target has the class of each row, int32 or int64. Rows of class -100
// are ignored. Any other that is not in [0, N) makes the loss and the whole gradient NaN: see CheckTargets.
func CrossEntropy(x, target *dlpack.Tensor) (loss, dx *dlpack.Tensor, err error) {
	if dx, err = newRows("cross_entropy", "x", x); err != nil {
		return nil, nil, err
	}
	if loss, err = dlpack.New(statisticOf(x)); err != nil {
		return nil, nil, err
	}
	return loss, dx, CrossEntropyForward{X: x, Target: target, Loss: loss, DX: dx, Reduction: ReduceMean,
		OnePass: true}.Run(nil)
}

// CheckTargets returns an error that names the first class in target, a host tensor of int32 or int64,
// that is neither ignored nor in [0, classes). The operators do not look: on a device they could not say
// so without waiting for it, and the loss of such a row is NaN.
func CheckTargets(target *dlpack.Tensor, classes, ignored int64) error {
	k := check{op: "check_targets"}
	d, ok := k.operand("target", target, typeIndex.narrow)
	switch {
	case !ok:
		return k.err
	case !target.Device.Host():
		k.fail(StatusDevice, "target is on %v, expected host memory; copy it to the host first", target.Device)
		return k.err
	}
	values, err := target.Float64s() // exact up to 2^53, which no number of classes reaches
	if err != nil {
		k.fail(StatusDType, "target has dtype %v: %v", d, err)
		return k.err
	}
	for i, class := range values {
		if class != float64(ignored) && !(class >= 0 && class < float64(classes)) {
			k.fail(StatusOption, "target[%d] is %.0f, expected 0 to %d, or %d, which is ignored", i, class, classes-1,
				ignored)
			return k.err
		}
	}
	return nil
}

// newRows makes a host tensor of x's shape and dtype.
func newRows(op, name string, x *dlpack.Tensor) (*dlpack.Tensor, error) {
	if err := checkHost(op, name, x); err != nil {
		return nil, err
	}
	return dlpack.New(x.DType, x.Dims()...)
}

// newPerRow makes a host tensor with a number for each row of x.
func newPerRow(op, name string, x *dlpack.Tensor) (*dlpack.Tensor, error) {
	if err := checkHost(op, name, x); err != nil {
		return nil, err
	}
	return dlpack.New(statisticOf(x), x.Dims()[:x.Rank()-1]...)
}

// statisticOf is the dtype of what is computed of x's rows.
func statisticOf(x *dlpack.Tensor) dlpack.DType {
	if x.DType == dlpack.Float64 {
		return dlpack.Float64
	}
	return dlpack.Float32
}

// checkHost checks that results of x's shape can be allocated.
func checkHost(op, name string, x *dlpack.Tensor) error {
	if err := CheckRows(op, name, x); err != nil {
		return err
	}
	if !x.Device.Host() {
		k := check{op: op}
		k.fail(StatusDevice, "%s is on %v, expected host memory, where results are allocated; allocate them on "+
			"the device and run the operator's struct, such as ops.SoftmaxForward", name, x.Device)
		return k.err
	}
	return nil
}
