// Package kernels is the immutable description of everything gander can launch: element types, operand
// shapes, and the table of CUDA kernel variants. It knows nothing of DLPack, of a device that is present,
// or of what an op means; package ops decides what to launch and package driver launches it.
package kernels

//go:generate go run ../internal/cmd/instantiate

import "unsafe"

// DType is an element type. The device code has the same numbers (cuda/args_gen.cuh).
type DType int32

const (
	Float16 DType = iota
	BFloat16
	Float32
	Float64
	Int32
	Int64
)

// Size returns the size of one element in bytes.
func (d DType) Size() int64 {
	switch d {
	case Float16, BFloat16:
		return 2
	case Float32, Int32:
		return 4
	default:
		return 8
	}
}

// String returns the name that torch and NumPy use.
func (d DType) String() string {
	return [...]string{"float16", "bfloat16", "float32", "float64", "int32", "int64"}[d]
}

// Matrix is Rows rows of Cols adjacent elements; rows begin Stride elements apart. Data may be aligned
// to the element only, and is nil where the operand is absent or has no elements.
type Matrix struct {
	Data   unsafe.Pointer
	DType  DType
	Rows   int64
	Cols   int64
	Stride int64
}

// Present tells whether an optional operand was given. It is false for one that has no elements.
func (m Matrix) Present() bool { return m.Data != nil }

// Vector is Len elements that lie Stride elements apart (0 repeats one element). A nil Data with a
// Len of 0 means that the operand is absent.
type Vector struct {
	Data   unsafe.Pointer
	DType  DType
	Len    int64
	Stride int64
}

// Present tells whether an optional operand was given.
func (v Vector) Present() bool { return v.Data != nil }

// CrossEntropy is what one cross-entropy call reads and writes, forward or backward.
// Statistics (Loss, Max, LogSum, Denominator, Divisor, Upstream, DLoss) are float32, or float64 where X is
// float64.
type CrossEntropy struct {
	X           Matrix // logits (M, N)
	Target      Vector // class of each row (M), int32 or int64
	Weight      Vector // weight of each class (N), optional
	IgnoreIndex int64  // rows with this target are left out: loss and gradient 0, weight 0 in a mean
	Reduction   Reduction

	// Divisor divides each row's gradient, and in forward its loss: one element, optional. Backward gets a
	// mean's denominator here.
	Divisor Vector

	// Upstream is the upstream gradient that forward's DX is made for: one element, 1 if absent.
	Upstream Vector

	// OnePass: forward's DX is the gradient of the reduced loss; with ReduceMean it is divided by the
	// denominator. Backward finds that gradient in DX, and computes it again only if DLoss is not Upstream.
	OnePass bool

	// Slice: X is a slice of each row's classes. Backward subtracts nothing in a row whose target is not in
	// the slice, and takes 1 as its weight.
	Slice bool

	// Forward writes:
	Loss Vector // (M) where Reduction is ReduceNone, else one element
	// Max and LogSum hold the two parts of each row's log-sum-exp; Max alone receives the whole where
	// LogSum is absent. Both are optional in the forward call. With OnePass LogSum holds sum exp(x - max)
	// itself, by which both divide, so that they compute the same bits.
	Max, LogSum Vector
	DX          Matrix // weighted gradient for an upstream gradient of Upstream; optional in forward
	Denominator Vector // one element: the mean's denominator; optional

	// Backward reads Max and LogSum as well, and writes DX:
	DLoss Vector // upstream gradient, (M) or a single element with Stride 0
}

// Norm is what one call of RMSNorm or LayerNorm reads and writes, forward or backward. Forward normalizes
// h = X + Residual, which it does not round. Backward's X is h as forward stored it: forward's ResidualOut
// if it wrote one, else its X. Each matrix and vector has a type of its own, but all are float64 where X is,
// and Mean and Rstd are float32 elsewhere.
type Norm struct {
	X            Matrix // (M, N)
	Weight, Bias Vector // (N), optional: ones and zeros; backward needs no Bias
	Mean, Rstd   Vector // (M), optional in forward, which writes them; Mean only with Center

	// Forward:
	Residual    Matrix // optional
	Y           Matrix
	ResidualOut Matrix // receives h; optional

	// Backward:
	DOut         Matrix // gradient of Y
	DResidualOut Matrix // gradient of ResidualOut; optional
	DX           Matrix // gradient of h
	DResidual    Matrix // receives the same numbers as DX; optional
	DW, DB       Vector // (N), optional

	Eps          float64 // forward only
	WeightOffset float64 // added to each weight; no effect without a Weight
	Center       bool    // LayerNorm: the mean is subtracted
}
