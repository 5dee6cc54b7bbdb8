// Package operators is the table that defines every operator of gander: its operands, its options, their
// documentation, and its operators in PyTorch. internal/cmd/interfaces generates from it the C ABI, the
// conversion from that to package ops, and the tables for PyTorch and Python. What an operator computes, and
// which calls it refuses beyond what the table says, is in package ops.
package operators

// Shape is the shape of an operand. M and N are the rows and columns of the operator's first operand.
type Shape int

// The shapes.
const (
	Rows       Shape = iota // (M, N): any rank of 1 or more, N adjacent elements in the last dimension
	Columns                 // (N), contiguous
	PerRow                  // M elements, contiguous
	Strided                 // M elements with any stride; inputs only
	Upstream                // M elements with any stride, or a single one for all rows; inputs only
	Reduced                 // M elements with reduction none, otherwise one
	Statistics              // a log-sum-exp: M elements; (2, M) in two parts; or 2 M + 1 with a denominator
	One                     // one element
)

// DType is a rule for an operand's element type.
type DType int

// The rules. float64 is supported in host memory only.
const (
	Float     DType = iota // float16, bfloat16, float32 or float64
	Same                   // the type of the operand that Like names
	Companion              // float64 if the first operand is float64, else any of float16, bfloat16 and float32
	Statistic              // float64 if the first operand is float64, else float32
	Index                  // int32 or int64
)

// Operand is a tensor that an operator reads or writes.
type Operand struct {
	Name     string
	Shape    Shape
	DType    DType
	Like     string   // with Same, the operand that has the same dtype
	Output   bool     // written; other operands are inputs
	Optional bool     // may be absent
	Needs    string   // an optional operand that must be present if this one is
	Over     []string // inputs that the output may overwrite in place
	Read     string   // the flag with which the output is also read; it must not be an input then
	Choice   string   // the argument that sets the dtype of a Companion output; x's dtype by default
	Gradient string   // the operand that this is the gradient of
}

// OptionType is the type of an option's value.
type OptionType int

// The types. In C they are double, int64_t, and int32_t for the others.
const (
	Real OptionType = iota
	Integer
	Flag      // 0 or 1
	Reduction // gander_reduction
	Algorithm // gander_algorithm
)

// Option is a scalar argument of an operator.
type Option struct {
	Name    string
	Type    OptionType
	Default float64 // with a NULL option struct, or one that is too short to have the field
	Torch   float64 // PyTorch's default, if it differs from Default
	Doc     string  // comment of the field in C and in Go
	Device  bool    // also passed to kernels, as float32
}

// Group is a set of operators with the same options.
type Group struct {
	Name      string // "rmsnorm"
	Type      string // "RMSNorm": prefix of names in Go
	Options   []Option
	Operators []Operator
}

// Operator is one function.
type Operator struct {
	Name     string // "forward", for gander_rmsnorm_forward in C and ops.RMSNormForward in Go
	Owned    string // "gander_rmsnorm": the C function that owns its inputs and returns new outputs
	Doc      string // the formula, and facts about the operands that the table does not have
	Operands []Operand
	Refuses  bool // package ops has a method refuse with more checks
	Torch    []Torch
}

// Torch is an operator of PyTorch that returns some of the outputs of an operator of gander. Its arguments
// are the inputs, the arguments of Choice, and the options, in this order.
type Torch struct {
	Name    string
	Results []string           // outputs that it returns
	Writes  string             // the argument that it modifies
	Into    string             // the output that is written to Writes; the same if Writes is an output
	Without []string           // options and optional inputs that are not arguments
	Fixed   map[string]float64 // values of options that are not arguments
	Must    []string           // optional inputs that it requires
	Packed  bool               // its Statistics have 2 M + 1 elements, so that one tensor is enough for backward
	Extra   []Option           // arguments for its gradient only; a Flag with a Torch of -1 is optional
	Saving  string             // the operator that autograd runs instead, which also returns what backward reads
	// Backward lists operators that compute its gradients. Autograd runs the last one that computes all that
	// are needed. Without any, the operator is not differentiable.
	Backward []string
}

// Find returns the operand with a name, or nil.
func (o *Operator) Find(name string) *Operand {
	for i := range o.Operands {
		if o.Operands[i].Name == name {
			return &o.Operands[i]
		}
	}
	return nil
}
