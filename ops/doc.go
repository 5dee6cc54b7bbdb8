/*
Package ops implements the operators: softmax, RMSNorm, LayerNorm, L2 normalization, gated linear units,
cross-entropy and log-sum-exp, forward and backward. It checks the arguments, chooses the kernels, and runs
them on the CPU or on a CUDA device.

# A first call

A tensor is a [dlpack.Tensor], which may share the memory of a slice. The functions that return their results
take host tensors and have defaults for all options:

	x, err := dlpack.FromSlice([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	y, err := ops.Softmax(x)
	values, err := y.Float32s()

# Operators

Each operator is a struct of its operands and options, with the method Run. The caller brings the results'
memory. Many results may lie over an operand; the fields say which. So a loop allocates nothing:

	err := ops.SoftmaxForward{X: x, Y: x}.Run(nil) // in place

An operand or an option that is not set is absent, or has its default. [Some] sets an option whose default is
not 0, to 0 as well:

	ops.RMSNormForward{X: x, Weight: w, Y: y, Rstd: rstd, Eps: ops.Some(1e-5)}

Backward takes what forward has saved: RMSNormBackward{X: x, Weight: w, DOut: dy, Rstd: rstd, DX: dx, DW: dw}.
Cross-entropy's forward also computes the gradient in the same pass, if it gets a DX. The examples have each
operator, and a whole training step.

# Rows

All operators work on the last dimension of their operands, which are M rows of N elements. An operand has
rank 1 or more. The elements of a row are adjacent. The leading dimensions collapse into M rows with one fixed
stride. M may be 0, N may not. float16, bfloat16 and float32 are computed in float32 or wider, float64 in
float64. A result has the same bits on every run, and for every number of threads.

# Errors

An error is an [Error], whose message names the argument, what came, what was expected and what to do. A
refused call writes nothing. errors.Is tells what kind it is:

	if errors.Is(err, ops.StatusShape) { ... }

What only the elements show, such as a target that is no class, is no error: the loss of that row is NaN.
[CheckTargets] looks for it in host memory.

# CUDA

Tensors on CUDA devices need a build with the tag cuda. A [Call] has the stream. A call enqueues its work and
returns; nothing waits for the device.

	call := &ops.Call{Stream: stream}
	err := ops.SoftmaxForward{X: x, Y: y}.Run(call)

[Explain] says which kernel would run, and why; [ExplainHeads] which one rotates heads. [Warmup] loads all of
them before the first call.

The tag needs Linux on x86-64, gcc and CUDA's headers. The command cmd/cudaenv downloads the headers with pip
into the user's cache, and prints what the shell needs. From an empty folder, with a main.go that imports ops:

	go mod init example.org/program
	go mod edit -replace github.com/gander-go/gander=/path/to/checkout # until it is published
	go mod tidy
	eval "$(go run github.com/gander-go/gander/cmd/cudaenv)"
	go build -tags cuda .

A published version needs no line with -replace. The build needs no kernels. A program embeds them if
./build.sh build has compiled them in that checkout. Any other program opens the folder that ./build.sh build
has made, or a copy of it, before its first call with CUDA tensors:

	err := ops.OpenImages("/path/to/checkout/kernels/images")
*/
package ops
