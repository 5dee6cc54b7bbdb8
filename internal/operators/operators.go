// Package operators is the table that defines every operator of gander once: its operands, its options, what each
// means, and how PyTorch names it. internal/cmd/interfaces generates from it the C ABI, its conversion to package ops,
// and what PyTorch and Python need; what an operator computes, and what it refuses beyond the table, is in package ops.
package operators

// Shape is how many elements an operand has. M and N are the rows and columns of the operator's first operand.
type Shape int

// The shapes.
const (
	Rows       Shape = iota // (M, N): any rank of 1 or more, N adjacent elements in the last dimension
	Columns                 // (N), contiguous
	PerRow                  // M elements, contiguous
	Strided                 // M elements, any stride: an input
	Upstream                // M elements, any stride, or a single one for all rows: an input
	Reduced                 // M elements with reduction none, else one
	Statistics              // a log-sum-exp: M elements, (2, M) for its two parts, or 2 M + 1 with the denominator behind
	One                     // one element
)

// DType is which element types an operand may have.
type DType int

// The rules. Float64 is for host memory only.
const (
	Float     DType = iota // float16, bfloat16, float32 or float64
	Same                   // that of the operand Like
	Companion              // float16, bfloat16 or float32 whatever the first operand is; float64 exactly where that is
	Statistic              // float32; float64 where the first operand is
	Index                  // int32 or int64
)

// Operand is a tensor that an operator reads or writes.
type Operand struct {
	Name     string
	Shape    Shape
	DType    DType
	Like     string   // the operand whose dtype a Same one has
	Output   bool     // written; what is read is an input
	Optional bool     // may be absent
	Needs    string   // an optional operand that must be there where this one is
	Over     []string // inputs whose very rows an output may be
	Read     string   // the flag with which an output is read too, and then lies apart from all inputs
	Choice   string   // the argument by which callers choose the dtype of a Companion output; x's where they do not
	Gradient string   // the operand whose gradient this is
}

// OptionType is the type of an option's value.
type OptionType int

// The types, as C has them: double, int64_t, and int32_t for the others.
const (
	Real OptionType = iota
	Integer
	Flag      // 0 or 1
	Reduction // gander_reduction
	Algorithm // gander_algorithm
)

// Option is a number that an operator takes beside its operands.
type Option struct {
	Name    string
	Type    OptionType
	Default float64 // what a NULL or shorter option struct means
	Torch   float64 // PyTorch's default, where it is not Default
	Doc     string  // for the field in C and in Go
	Device  bool    // a kernel's parameter too, as float32
}

// Group is the operators that share their options.
type Group struct {
	Name      string // "rmsnorm"
	Type      string // "RMSNorm", as Go's names begin
	Options   []Option
	Operators []Operator
}

// Operator is one function.
type Operator struct {
	Name     string // "forward": gander_rmsnorm_forward borrows its operands, ops.RMSNormForward is its struct in Go
	Owned    string // "gander_rmsnorm": the same with tensors that change hands
	Doc      string // the formula, and what the table does not say of the operands
	Operands []Operand
	Refuses  bool // package ops refuses more than the table says, in a method of that name
	Torch    []Torch
}

// Torch is an operator of PyTorch: a set of results of an operator of gander. Its arguments are the inputs, the dtypes
// that can be chosen, and the options, in this order, with their defaults.
type Torch struct {
	Name    string
	Results []string           // the outputs that it returns
	Writes  string             // the operand that it writes, an input of PyTorch's
	Into    string             // the output that is written there, Writes itself where that is an output
	Without []string           // options that it does not take, and optional inputs
	Fixed   map[string]float64 // options that it does not take, and their values
	Must    []string           // optional inputs that it cannot do without
	Packed  bool               // its Statistics are of 2 M + 1 elements: all that backward needs in one tensor
	Extra   []Option           // arguments that concern its gradient only; Flags are optional where Torch is -1
	Saving  string             // the operator that its gradient runs in its place, which returns what backward reads too
	// Backward lists the operators that make its gradients; the last one that makes all that are wanted runs. None: it
	// cannot be differentiated.
	Backward []string
}

// Find returns the operand of a name.
func (o *Operator) Find(name string) *Operand {
	for i := range o.Operands {
		if o.Operands[i].Name == name {
			return &o.Operands[i]
		}
	}
	return nil
}
