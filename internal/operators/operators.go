// Package operators defines the operators of gander in a table: the operands and options of each, their
// documentation, and the PyTorch operators that call it. From the table, internal/cmd/interfaces generates
// the C ABI, the Go code that passes its calls on to package ops, and the tables for PyTorch and Python. The
// computations are in package ops, and so are checks of arguments that the table cannot express.
package operators

// Operand is a tensor that an operator reads or writes.
type Operand struct {
	Name     string
	Shape    Shape
	DType    DType
	Like     string   // the operand whose dtype it has (Same), or has by default if that is given
	Output   bool     // whether the operator writes it; other operands are inputs
	Optional bool     // may be absent
	Needs    string   // the optional operand, or the flag, without which this one must be absent
	Fits     string   // the operand whose shape it has; without that, it has the first form of its rule
	Over     []string // inputs that the output may be, for a call in place
	Read     string   // the flag with which the output is read first; it must not overlap an input then
	Choice   string   // the argument that sets an output's dtype; by default it is Like's, or else x's
	Gradient string   // the operand that this is the gradient of
	Twin     string   // the output with the same values: it can take this one's place if the dtypes agree
	Stored   string   // the output of forward that is this input of backward, if forward wrote it
	Since    int      // of an optional one: see Option
}

// OptionType is the type of an option's value.
type OptionType int

// The types. In C they are double, and int64_t for the others.
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
	Default float64 // what a caller who does not set it gets, in C, Go and Python
	Torch   float64 // PyTorch's default, or 0 if it is Default
	Doc     string  // the field's comment in C and in Go
	Device  bool    // also passed to kernels, as float32
	Rank    int     // of a Flag: the least rank of the first operand with which it can be set
	Only    string  // the operator of the group that has it; "": all
	Varies  bool    // of an Integer: from call to call, so that PyTorch's graphs take any value
	// The option structs of C grow at their end: fields are in the order of Since, which is 0 for those of the
	// first release and larger for those of each later one.
	Since int
}

// Group is a set of operators that share options.
type Group struct {
	Name      string // "rmsnorm"
	Type      string // "RMSNorm": the prefix of its names in Go
	Options   []Option
	Operators []Operator
}

// OptionsOf lists the options of one of the operators.
func (g *Group) OptionsOf(operator string) (list []Option) {
	for _, option := range g.Options {
		if option.Only == "" || option.Only == operator {
			list = append(list, option)
		}
	}
	return list
}

// Operator is one function.
type Operator struct {
	Name     string // "forward", for gander_rmsnorm_forward in C and ops.RMSNormForward in Go
	Owned    string // "gander_rmsnorm": the C function that consumes its inputs and allocates its outputs
	Doc      string // the formula, and what the table cannot express about the operands
	Operands []Operand
	Refuses  bool // package ops has a method named refuse that checks more than the table
	// If an operator has kernels for plain calls: the optional operands and the options that they serve, apart
	// from algorithm and batch_invariant. A call with any other takes the operator's general kernels.
	Plain []string
	Torch []Torch
}

// Torch is a PyTorch operator that calls an operator of gander and returns some of its outputs. Its arguments
// are the inputs, then the outputs in Writes, the dtypes named by Choice of its results, the options, and a
// flag needs_<result> for each of OnDemand.
type Torch struct {
	Name     string
	Results  []string           // the outputs that it returns
	OnDemand []string           // those of Results that it computes only on demand; else they have no elements
	Writes   []Written          // the arguments that it modifies in place
	Without  []string           // optional inputs, choices and options that it has no argument for
	Fixed    map[string]float64 // values of such options, where they are not the defaults
	Must     []string           // optional inputs that are required arguments
	Packed   bool               // its Statistics have 2 M + 1 elements, with the denominator for backward
	Extra    []Option           // options for autograd only; a Flag whose Torch is -1 defaults to None
	// Backward is the operator that computes its gradients, "" if it is not differentiable. For a gradient,
	// autograd also demands the results that Backward reads.
	Backward string
}

// Written is an argument of an operator of PyTorch that it modifies in place.
type Written struct {
	Argument string // an input, or the output itself, which the caller allocates
	Output   string // the output that is stored in it
}

// Into returns the argument that an output is stored in, or "" if it is none.
func (t *Torch) Into(output string) string {
	for _, w := range t.Writes {
		if w.Output == output {
			return w.Argument
		}
	}
	return ""
}

// Modifies tells whether the operator modifies an argument in place.
func (t *Torch) Modifies(argument string) bool {
	for _, w := range t.Writes {
		if w.Argument == argument {
			return true
		}
	}
	return false
}

// Find returns the operand with the given name, or nil.
func (o *Operator) Find(name string) *Operand {
	for i := range o.Operands {
		if o.Operands[i].Name == name {
			return &o.Operands[i]
		}
	}
	return nil
}
