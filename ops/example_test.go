package ops_test

import (
	"errors"
	"fmt"
	"math"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

// rowsOf is a tensor of rows of n elements, which shares their memory.
func rowsOf(n int, values ...float32) *dlpack.Tensor {
	return must(dlpack.FromSlice(values, int64(len(values)/n), int64(n)))
}

func must(t *dlpack.Tensor, err error) *dlpack.Tensor {
	if err != nil {
		panic(err)
	}
	return t
}

// show prints the elements of tensors, or the error.
func show(err error, tensors ...*dlpack.Tensor) {
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, t := range tensors {
		values, err := t.Float32s()
		if err != nil {
			fmt.Println(err)
		}
		fmt.Printf("%.3f\n", values)
	}
}

func Example() {
	x, err := dlpack.FromSlice([]float32{0, 0, 0, 0, 10000, 10000, -1, -1}, 2, 4)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := (ops.SoftmaxForward{X: x, Y: x}).Run(nil); err != nil { // in place
		fmt.Println(err)
		return
	}
	y, err := x.Float32s()
	fmt.Println(y, err)
	// Output: [0.25 0.25 0.25 0.25 0.5 0.5 0 0] <nil>
}

func ExampleSoftmax() {
	y, err := ops.Softmax(rowsOf(2, 0, 0, 1, -1))
	show(err, y)
	// Output: [0.500 0.500 0.881 0.119]
}

func ExampleSoftmaxForward() {
	x := rowsOf(2, 0, 0, 1, -1)
	y := must(dlpack.New(dlpack.BFloat16, 2, 2))
	fmt.Println(ops.SoftmaxForward{X: x, Y: y}.Run(nil))
	// Output: softmax_forward: y has dtype bfloat16, expected float32; convert it
}

func ExampleSoftmaxBackward() {
	y, dy := rowsOf(2, 0.5, 0.5), rowsOf(2, 1, 0)
	show(ops.SoftmaxBackward{DY: dy, Y: y, DX: dy}.Run(nil), dy)
	// Output: [0.250 -0.250]
}

// Row i of a causal softmax has no columns after i.
func ExampleMaskedSoftmaxForward() {
	x := rowsOf(3, 0, 9, 9, 0, 0, 9, 0, 0, 0)
	show(ops.MaskedSoftmaxForward{X: x, Y: x, Causal: true, Scale: ops.Some(0.5)}.Run(nil), x)
	// Output: [1.000 0.000 0.000 0.500 0.500 0.000 0.333 0.333 0.333]
}

func ExampleMaskedSoftmaxBackward() {
	x := rowsOf(3, 1, 2, 3)
	mask := must(dlpack.FromSlice([]bool{true, true, false}, 1, 3))
	y, dx := rowsOf(3, 0, 0, 0), rowsOf(3, 1, 0, 5)
	err := ops.MaskedSoftmaxForward{X: x, Mask: mask, Y: y}.Run(nil)
	if err == nil {
		err = ops.MaskedSoftmaxBackward{DY: dx, Y: y, Mask: mask, DX: dx}.Run(nil)
	}
	show(err, y, dx)
	// Output:
	// [0.269 0.731 0.000]
	// [0.197 -0.197 0.000]
}

// A norm with a residual also writes the sum, here over the residual.
func ExampleRMSNormForward() {
	x, residual := rowsOf(2, 1, 2), rowsOf(2, 2, 2)
	weight := must(dlpack.FromSlice([]float32{1, 10}))
	y, rstd := rowsOf(2, 0, 0), must(dlpack.New(dlpack.Float32, 1))
	show(ops.RMSNormForward{X: x, Weight: weight, Residual: residual, ResidualOut: residual, Y: y, Rstd: rstd,
		Eps: ops.Some(0.0)}.Run(nil), y, residual, rstd)
	// Output:
	// [0.849 11.314]
	// [3.000 4.000]
	// [0.283]
}

func ExampleRMSNormBackward() {
	x, dy := rowsOf(2, 1, -1), rowsOf(2, 1, 0)
	weight, dw := must(dlpack.FromSlice([]float32{1, 1})), must(dlpack.New(dlpack.Float32, 2))
	rstd := must(dlpack.FromSlice([]float32{1}))
	show(ops.RMSNormBackward{X: x, Weight: weight, DOut: dy, Rstd: rstd, DX: dy, DW: dw}.Run(nil), dy, dw)
	// Output:
	// [0.500 0.500]
	// [1.000 0.000]
}

func ExampleL2NormForward() {
	x := rowsOf(2, 3, 4)
	rnorm := must(dlpack.New(dlpack.Float32, 1))
	show(ops.L2NormForward{X: x, Y: x, Rnorm: rnorm}.Run(nil), x, rnorm)
	// Output:
	// [0.600 0.800]
	// [0.200]
}

func ExampleL2NormBackward() {
	x, dy := rowsOf(2, 3, 4), rowsOf(2, 1, 0)
	rnorm := must(dlpack.FromSlice([]float32{0.2}))
	show(ops.L2NormBackward{X: x, DY: dy, Rnorm: rnorm, DX: dy}.Run(nil), dy)
	// Output: [0.128 -0.096]
}

func ExampleLayerNormForward() {
	x := rowsOf(2, 1, 3)
	bias := must(dlpack.FromSlice([]float32{0, 0.5}))
	mean, rstd := must(dlpack.New(dlpack.Float32, 1)), must(dlpack.New(dlpack.Float32, 1))
	show(ops.LayerNormForward{X: x, Bias: bias, Y: x, Mean: mean, Rstd: rstd}.Run(nil), x, mean, rstd)
	// Output:
	// [-1.000 1.500]
	// [2.000]
	// [1.000]
}

func ExampleLayerNormBackward() {
	x, dy := rowsOf(3, -1, 0, 1), rowsOf(3, 1, 0, 0)
	mean, rstd := must(dlpack.FromSlice([]float32{0})), must(dlpack.FromSlice([]float32{1.2247449}))
	db := must(dlpack.New(dlpack.Float32, 3))
	show(ops.LayerNormBackward{X: x, DOut: dy, Mean: mean, Rstd: rstd, DX: dy, DB: db}.Run(nil), dy, db)
	// Output:
	// [0.204 -0.408 0.204]
	// [1.000 0.000 0.000]
}

func ExampleGLUForward() {
	gate, up := rowsOf(2, 0, 1), rowsOf(2, 3, 3)
	show(ops.GLUForward{Gate: gate, Up: up, Y: up}.Run(nil), up)
	// Output: [0.000 2.193]
}

// Backward may write over what it reads.
func ExampleGLUBackward() {
	gate, up, dy := rowsOf(2, 0, 1), rowsOf(2, 3, 3), rowsOf(2, 1, 1)
	show(ops.GLUBackward{Gate: gate, Up: up, DY: dy, DGate: gate, DUp: up}.Run(nil), gate, up)
	// Output:
	// [1.500 2.783]
	// [0.000 0.731]
}

// The first half of each row is the gate.
func ExamplePackedGLUForward() {
	x, y := rowsOf(4, 0, 1, 3, 3), rowsOf(2, 0, 0)
	show(ops.PackedGLUForward{X: x, Y: y, Gelu: true}.Run(nil), y)
	// Output: [0.000 2.524]
}

func ExamplePackedGLUBackward() {
	x, dy := rowsOf(4, 0, 1, 3, 3), rowsOf(2, 1, 1)
	show(ops.PackedGLUBackward{X: x, DY: dy, DX: x}.Run(nil), x)
	// Output: [1.500 2.783 0.000 0.731]
}

// The tokens of a sequence have one head of two columns, which is turned by 0 and by 90 degrees.
func ExampleRotary() {
	q := must(dlpack.FromSlice([]float32{1, 2, 1, 2}, 2, 1, 2)) // tokens, heads, columns
	cos, sin := rowsOf(1, 1, 0), rowsOf(1, 0, 1)
	turned, _, err := ops.Rotary(q, nil, cos, sin)
	show(err, turned)
	// Output: [1.000 2.000 -2.000 1.000]
}

// The token at position 1, in place: with Offset, or with one of each sequence in Offsets.
func ExampleRotaryForward() {
	q := must(dlpack.FromSlice([]float32{1, 2}, 1, 1, 2))
	k := must(dlpack.FromSlice([]float32{1, 0, 0, 1}, 1, 2, 2)) // two heads
	cos, sin := rowsOf(1, 1, 0), rowsOf(1, 0, 1)
	show(ops.RotaryForward{Q: q, K: k, Cos: cos, Sin: sin, QOut: q, KOut: k, Offset: 1}.Run(nil), q, k)
	// Output:
	// [-2.000 1.000]
	// [0.000 1.000 -1.000 0.000]
}

// Backward rotates by the negative angles. It needs neither q nor k.
func ExampleRotaryBackward() {
	dq := must(dlpack.FromSlice([]float32{-2, 1}, 1, 1, 2))
	cos, sin := rowsOf(1, 1, 0), rowsOf(1, 0, 1)
	show(ops.RotaryBackward{DQOut: dq, Cos: cos, Sin: sin, DQ: dq, Offset: 1}.Run(nil), dq)
	// Output: [1.000 2.000]
}

// A head of two columns gets the length of (1, 1), and the token at position 1 is turned by 90 degrees.
func ExampleQKNormRotaryForward() {
	q := must(dlpack.FromSlice([]float32{3, 4}, 1, 1, 2)) // tokens, heads, columns
	cos, sin := rowsOf(1, 1, 0), rowsOf(1, 0, 1)
	show(ops.QKNormRotaryForward{Q: q, Cos: cos, Sin: sin, QOut: q, Offset: 1, Eps: ops.Some(0.0)}.Run(nil), q)
	// Output: [-1.131 0.849]
}

func ExampleQKNormRotaryBackward() {
	q, dq := must(dlpack.FromSlice([]float32{1, 1}, 1, 1, 2)), must(dlpack.FromSlice([]float32{2, 1}, 1, 1, 2))
	weight, dw := must(dlpack.FromSlice([]float32{1, 1})), must(dlpack.New(dlpack.Float32, 2))
	cos, sin := rowsOf(1, 1), rowsOf(1, 0)
	show(ops.QKNormRotaryBackward{Q: q, QWeight: weight, Cos: cos, Sin: sin, DQOut: dq, DQ: dq, DQWeight: dw,
		Eps: ops.Some(0.0)}.Run(nil), dq, dw)
	// Output:
	// [0.500 -0.500]
	// [2.000 1.000]
}

// One pass computes the mean loss and its gradient. The second row is ignored.
func ExampleCrossEntropyForward() {
	x := rowsOf(2, 0, 0, 5, 5, 0, 0)
	target := must(dlpack.FromSlice([]int64{1, -100, 0}))
	loss := must(dlpack.New(dlpack.Float32))
	show(ops.CrossEntropyForward{X: x, Target: target, Loss: loss, DX: x, Reduction: ops.ReduceMean,
		OnePass: true}.Run(nil), loss, x)
	// Output:
	// [0.693]
	// [0.250 -0.250 0.000 0.000 -0.250 0.250]
}

func ExampleCrossEntropyBackward() {
	x, target := rowsOf(2, 0, 0), must(dlpack.FromSlice([]int64{1}))
	loss, lse := must(dlpack.New(dlpack.Float32, 1)), must(dlpack.New(dlpack.Float32, 2, 1))
	smoothing := 0.1
	err := ops.CrossEntropyForward{X: x, Target: target, Loss: loss, LSE: lse,
		LabelSmoothing: smoothing}.Run(nil)
	if err == nil {
		err = ops.CrossEntropyBackward{X: x, Target: target, DLoss: must(dlpack.FromSlice([]float32{1})),
			LSE: lse, DX: x, LabelSmoothing: smoothing}.Run(nil)
	}
	show(err, loss, x)
	// Output:
	// [0.693]
	// [0.450 -0.450]
}

// A target between two classes.
func ExampleSoftCrossEntropyForward() {
	x, target := rowsOf(2, 0, 0, 3, 1), rowsOf(2, 0.5, 0.5, 0.75, 0.25)
	loss := must(dlpack.New(dlpack.Float32, 1))
	show(ops.SoftCrossEntropyForward{X: x, Target: target, Loss: loss, Reduction: ops.ReduceMean}.Run(nil), loss)
	// Output: [0.660]
}

// Backward reads the state that forward has written. The gradient is the probabilities of x less those of the
// target.
func ExampleSoftCrossEntropyBackward() {
	x, target := rowsOf(2, 3, 1), rowsOf(2, 0.75, 0.25)
	loss, state := must(dlpack.New(dlpack.Float32, 1)), must(dlpack.New(dlpack.Float32, 1, 3))
	err := ops.SoftCrossEntropyForward{X: x, Target: target, Loss: loss, State: state}.Run(nil)
	if err == nil {
		err = ops.SoftCrossEntropyBackward{X: x, Target: target, State: state,
			DLoss: must(dlpack.FromSlice([]float32{1})), DX: x}.Run(nil)
	}
	show(err, x)
	// Output: [0.131 -0.131]
}

// The log-probability of a token, and the entropy of its row, in one pass.
func ExampleTokenStatisticsForward() {
	x, index := rowsOf(2, 0, 0, 3, 1), must(dlpack.FromSlice([]int64{1, 0}))
	logProb, entropy := must(dlpack.New(dlpack.Float32, 2)), must(dlpack.New(dlpack.Float32, 2))
	isTop1 := must(dlpack.New(dlpack.Bool, 2))
	show(ops.TokenStatisticsForward{Logits: x, Index: index, LogProb: logProb, Entropy: entropy,
		IsTop1: isTop1}.Run(nil), logProb, entropy, isTop1)
	// Output:
	// [-0.693 -0.127]
	// [0.693 0.365]
	// [0.000 1.000]
}

// Backward reads the state that forward has written.
func ExampleTokenStatisticsBackward() {
	x, index := rowsOf(2, 3, 1), must(dlpack.FromSlice([]int64{0}))
	state := must(dlpack.New(dlpack.Float32, 1, 3))
	err := ops.TokenStatisticsForward{Logits: x, Index: index, State: state}.Run(nil)
	if err == nil {
		err = ops.TokenStatisticsBackward{Logits: x, Index: index, State: state,
			DLogProb: must(dlpack.FromSlice([]float32{1})), DLogits: x}.Run(nil)
	}
	show(err, x)
	// Output: [0.119 -0.119]
}

func ExampleLogSumExpForward() {
	lse := must(dlpack.New(dlpack.Float32, 1))
	show(ops.LogSumExpForward{X: rowsOf(2, 1000, 1000), LSE: lse}.Run(nil), lse)
	// Output: [1000.693]
}

func ExampleLogSumExpBackward() {
	x := rowsOf(2, 0, 0)
	lse, dlse := must(dlpack.FromSlice([]float32{math.Ln2})), must(dlpack.FromSlice([]float32{2}))
	show(ops.LogSumExpBackward{X: x, DLSE: dlse, LSE: lse, DX: x}.Run(nil), x)
	// Output: [1.000 1.000]
}

// A gradient that forward has made for an upstream gradient of 1 is corrected to the one that came.
func ExampleRescaleGradient() {
	x, dloss := rowsOf(2, 1, 2), must(dlpack.FromSlice([]float32{0.5}))
	show(ops.RescaleGradient{X: x, DLoss: dloss, Y: x}.Run(nil), x)
	// Output: [0.500 1.000]
}

// Two slices of one class each, with equal logits: the loss is log 2.
func ExampleShardedCrossEntropyCombine() {
	nan := float32(math.NaN())
	parts := must(dlpack.FromSlice([]float32{
		0, 0, nan, // the first slice: maximum, logarithm of the sum, loss; the target is not in it
		0, 0, 0, // the second slice
	}, 2, 3, 1))
	one := func() *dlpack.Tensor { return must(dlpack.New(dlpack.Float32, 1)) }
	highest, logSum, loss := one(), one(), must(dlpack.New(dlpack.Float32))
	show(ops.ShardedCrossEntropyCombine{Parts: parts, Target: must(dlpack.FromSlice([]int64{1})),
		Max: highest, LogSum: logSum, Loss: loss}.Run(nil), highest, logSum, loss)
	// Output:
	// [0.000]
	// [0.693]
	// [0.693]
}

// Two slices of one token each, with equal logits: the entropy is log 2.
func ExampleShardedTokenStatisticsCombine() {
	sent, index, all := make([]float32, 2*4), must(dlpack.FromSlice([]int64{1})), ops.Some[int64](2)
	for slice := range int64(2) { // of its row the state and the log-probability
		part := sent[4*slice:][:4]
		err := ops.TokenStatisticsForward{Logits: rowsOf(1, 0), Index: index, First: slice, Classes: all,
			State: must(dlpack.FromSlice(part[:3], 1, 3)), LogProb: must(dlpack.FromSlice(part[3:]))}.Run(nil)
		show(err, must(dlpack.FromSlice(part)))
	}
	logProb, entropy := must(dlpack.New(dlpack.Float32, 1)), must(dlpack.New(dlpack.Float32, 1))
	show(ops.ShardedTokenStatisticsCombine{Parts: must(dlpack.FromSlice(sent, 2, 4, 1)), Index: index,
		Narrow: true, Classes: all, LogProb: logProb, Entropy: entropy}.Run(nil), logProb, entropy)
	// Output:
	// [0.000 0.000 0.000 NaN]
	// [0.000 0.000 0.000 0.000]
	// [-0.693]
	// [0.693]
}

// An option that is not set has its default: ignore_index is -100. Some sets it, here to class 0.
func ExampleSome() {
	x := rowsOf(2, 0, 0, 0, 0)
	target, loss := must(dlpack.FromSlice([]int64{0, 1})), must(dlpack.New(dlpack.Float32, 2))
	for _, ignored := range []ops.Optional[int64]{{}, ops.Some[int64](0)} {
		show(ops.CrossEntropyForward{X: x, Target: target, Loss: loss, IgnoreIndex: ignored}.Run(nil), loss)
	}
	// Output:
	// [0.693 0.693]
	// [0.000 0.693]
}

func ExampleStatus() {
	_, err := ops.Softmax(must(dlpack.FromSlice([]int32{1, 2})))
	fmt.Println(err)
	fmt.Println(errors.Is(err, ops.StatusDType), errors.Is(err, ops.StatusShape))
	// Output:
	// softmax: x has dtype int32, expected float16, bfloat16, float32 or float64; convert it
	// true false
}

func ExampleCheckTargets() {
	target := must(dlpack.FromSlice([]int64{0, 3, -100}))
	fmt.Println(ops.CheckTargets(target, 3, -100))
	// Output: check_targets: target[1] is 3, expected 0 to 2, or -100, which is ignored
}

// Softmax regression: the points of each class lie around a center of their own, and w learns to tell them
// apart. gander computes the loss and its gradient in one pass; the two products are the caller's.
func Example_training() {
	const points, features, classes, rate = 60, 2, 3, 0.5
	centers := [classes][features]float32{{0, 2}, {-2, -1}, {2, -1}}
	var inputs [points][features]float32
	labels := make([]int64, points)
	for i := range inputs {
		labels[i] = int64(i % classes)
		angle := float64(i)
		inputs[i][0] = centers[labels[i]][0] + float32(math.Cos(angle))
		inputs[i][1] = centers[labels[i]][1] + float32(math.Sin(angle))
	}
	var w [features][classes]float32
	logits := make([]float32, points*classes)
	x := must(dlpack.FromSlice(logits, points, classes)) // which shares their memory
	target := must(dlpack.FromSlice(labels))
	loss := must(dlpack.New(dlpack.Float32))
	step := ops.CrossEntropyForward{X: x, Target: target, Loss: loss, DX: x, Reduction: ops.ReduceMean,
		OnePass: true}
	for epoch := range 101 {
		for i, in := range inputs { // logits = inputs w
			for c := range classes {
				logits[i*classes+c] = in[0]*w[0][c] + in[1]*w[1][c]
			}
		}
		if err := step.Run(nil); err != nil { // logits become their gradient
			fmt.Println(err)
			return
		}
		if epoch%50 == 0 {
			value, _ := loss.Float32s()
			fmt.Printf("epoch %d: loss %.2f\n", epoch, value[0])
		}
		for i, in := range inputs { // w -= rate * inputs' dlogits
			for f := range features {
				for c := range classes {
					w[f][c] -= rate * in[f] * logits[i*classes+c]
				}
			}
		}
	}
	// Output:
	// epoch 0: loss 1.10
	// epoch 50: loss 0.03
	// epoch 100: loss 0.02
}
