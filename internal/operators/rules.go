package operators

import (
	"math"

	"github.com/gander-go/gander/internal/sizes"
)

// Shape is a rule for the shape of an operand. Shapes describes the rules.
type Shape int

// The rules for shapes.
const (
	Rows Shape = iota
	Columns
	HeadColumns
	PerRow
	Strided
	Upstream
	Reduced
	Statistics
	One
	Broadcast
	Slices
	SliceStatistics
	HalfRows
	Heads
	OtherHeads
	Positions
	Sequences
	Boundaries
	RowStates
	ColumnStates
)

// ShapeRule describes a rule for shapes. An operator's checks in package ops, the operands that kernels.c
// prepares, the outputs that are allocated and PyTorch's fake tensors follow from it.
type ShapeRule struct {
	Name   string // in Python
	Doc    string // for gander.h and Go
	Layout Layout
	Forms  []Form // the shapes that an operand may have
	Rank   int    // the least rank of a first operand, if that is not 1
	Packed string // the form of the result of an operator of PyTorch with Packed; else it is the first
}

// Form is a shape that follows from the shape of the operator's first operand, of M rows and N columns.
type Form struct {
	Sizes string // Letters
	// L or S may be other sizes with the same product. Without them, there may be any sizes of 1.
	Count bool
	When  When
	Text  string // follows the sizes in a refusal; {x} is the first operand
}

// Letters are what forms are written in. A letter stands for sizes of the first operand, or for a number.
var Letters = map[byte]sizes.Letter{
	'L': {From: math.MaxInt32, To: 1},                    // the leading dimensions: all but the last
	'H': {From: 2, To: 1},                                // the second last
	'N': {From: 1, To: 0},                                // the last
	'F': {From: 1, To: 0, Times: 1, Over: 2},             // half of the last
	'2': {Times: 2},                                      // 2
	'S': {From: math.MaxInt32, To: 1, Times: 2, Plus: 1}, // 2 M + 1
	'R': {From: math.MaxInt32, To: 2},                    // all but the last two
	'3': {Times: 3},
	'4': {Times: 4},
	'8': {Times: 8},
	'B': {From: math.MaxInt32, To: 3}, // all but the last three
	'*': {Any: true},                  // any size, of inputs
}

// When tells in which calls a form is allowed.
type When int

// The conditions.
const (
	Always When = iota
	Unreduced
	Summed
	Headed
	Unread
	Undivided
	Weighted
	Unweighted
	Narrow
	Full
)

// Condition describes a When.
type Condition struct {
	Name string
	Doc  string
	// If it is that a flag of the operator is set, or is not, the flag's name. The other conditions have code
	// of their own, in ops/shapes.go and in forms of python/gander/_table.
	Flag string
	Set  bool
}

// Conditions describes the conditions.
var Conditions = [...]Condition{
	Unreduced: {Name: "unreduced", Doc: "reduction is none"},
	Summed:    {Name: "summed", Doc: "reduction is another than none"},
	Headed:    {Name: "headed", Doc: "the first operand has rank 2 or more"},
	// A gradient that forward has computed is for one number.
	Unread: {Name: "unread", Doc: "the flag with which an output is read is not set"},
	// No operator of PyTorch has the operand Denominator as an argument. What writes it does not need it.
	Undivided:  {Name: "undivided", Doc: "reduction is not mean, or the denominator is given"},
	Weighted:   {Name: "weighted", Doc: "weighted is set", Flag: "weighted", Set: true},
	Unweighted: {Name: "unweighted", Doc: "weighted is not set", Flag: "weighted"},
	Narrow:     {Name: "narrow", Doc: "narrow is set", Flag: "narrow", Set: true},
	Full:       {Name: "full", Doc: "narrow is not set", Flag: "narrow"},
}

// Denominator is the operand from which backward takes the denominator of a mean.
const Denominator = "denominator"

// Layout says how an operand's elements lie in memory.
type Layout int

// The layouts.
const (
	InRows     Layout = iota // the last dimension has stride 1, the others collapse into one
	Contiguous               // the elements are adjacent
	Regular                  // the elements have a fixed stride; inputs only
	Parts                    // contiguous, or in two contiguous parts
	Broadcasts               // a form that broadcasts; the leading strides collapse into three; inputs only
	InHeads                  // the last dimension has stride 1, all but the last three collapse into one
	Tables                   // the same for all but the last two: the first operand's, or 1s; inputs only
)

const perRow = ": one for each row of {x}"

// Shapes are the rules for shapes. M is the number of elements in the leading dimensions.
var Shapes = [...]ShapeRule{
	Rows: {
		Name: "rows", Doc: "(M, N)", Layout: InRows,
		Forms: []Form{{Sizes: "LN", Count: true, Text: " as {x}"}},
	},
	Columns: {
		Name: "columns", Doc: "(N), contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "N", Text: ": one for each column of {x}"}},
	},
	HeadColumns: {
		Name: "head_columns", Doc: "(N), or (H, N) for rows of shape (..., H, N), contiguous", Layout: Contiguous,
		Forms: []Form{
			{Sizes: "N", Text: ": one for each column of {x}"},
			{Sizes: "HN", When: Headed, Text: ": one for each column of each head"},
		},
	},
	PerRow: {
		Name: "per_row", Doc: "M elements, contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "L", Count: true, Text: perRow}},
	},
	Strided: {
		Name: "strided", Doc: "the leading dimensions of the first operand, any stride", Layout: Regular,
		Forms: []Form{{Sizes: "L", Text: ", the leading dimensions of {x}"}},
	},
	Upstream: { // the gradient of a Reduced operand
		Name: "upstream", Doc: "M elements of any stride, or one for all rows", Layout: Regular,
		Forms: []Form{
			{Sizes: "L", Count: true, When: Unread, Text: perRow},
			{Sizes: "", Count: true, Text: ": one for all rows"},
		},
	},
	Reduced: {
		Name: "reduced", Doc: "M elements with reduction none, else one", Layout: Contiguous,
		Forms: []Form{
			{Sizes: "L", Count: true, When: Unreduced, Text: perRow + " with reduction none"},
			{Sizes: "", Count: true, When: Summed, Text: ": one sum or mean for all rows"},
		},
	},
	Statistics: { // the log-sum-exp of rows
		Name: "statistics", Layout: Parts, Packed: "S",
		Doc: "M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: those and the denominator",
		Forms: []Form{
			{Sizes: "L", Count: true, When: Undivided, Text: perRow},
			{Sizes: "2L", Count: true, When: Undivided, Text: ": its two parts"},
			{Sizes: "S", Count: true, Text: ": the two parts and the denominator"},
		},
	},
	One: {
		Name: "one", Doc: "one element", Layout: Contiguous,
		Forms: []Form{{Sizes: "", Count: true, Text: ": one for all rows"}},
	},
	Broadcast: {
		Name: "broadcast", Layout: Broadcasts,
		Doc: "broadcasts to the first operand's shape; the leading dimensions' strides collapse into three or " +
			"fewer, the last stride is 1 or 0",
		Forms: []Form{{Sizes: "LN", Text: ", the shape of {x}"}},
	},
	Slices: {
		Name: "slices", Doc: "(R, 3, N), or (R, 4, N) with weighted", Layout: InRows,
		Forms: []Form{
			{Sizes: "R3N", When: Unweighted, Text: ": three numbers of each of N rows for each of R slices"},
			{Sizes: "R4N", When: Weighted, Text: ": four numbers of each of N rows for each of R slices"},
		},
	},
	SliceStatistics: {
		Name: "slice_statistics", Doc: "(R, 8, N), or (R, 4, N) with narrow", Layout: InRows,
		Forms: []Form{
			{Sizes: "R8N", When: Full, Text: ": eight numbers of each of N rows for each of R slices"},
			{Sizes: "R4N", When: Narrow, Text: ": four numbers of each of N rows for each of R slices"},
		},
	},
	HalfRows: {
		Name: "half_rows", Doc: "(M, N / 2)", Layout: InRows,
		Forms: []Form{{Sizes: "LF", Text: ": half of the columns of {x}"}},
	},
	Heads: {
		Name: "heads", Layout: InHeads, Rank: 3,
		Doc:   "(B, S, H, N), where B is any dimensions",
		Forms: []Form{{Sizes: "RHN", Text: " as {x}"}},
	},
	OtherHeads: {
		Name: "other_heads", Doc: "(B, S, any number, N)", Layout: InHeads,
		Forms: []Form{{Sizes: "R*N", Text: ", with any number of heads, as {x}"}},
	},
	Positions: {
		Name: "positions", Layout: Tables,
		Doc:   "(T, W): a row for each position; or (B, T, W), a table for each sequence",
		Forms: []Form{{Sizes: "B**", Text: ": a table for each sequence"}},
	},
	Sequences: {
		Name: "sequences", Doc: "one for each sequence, contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "*", Text: ": one dimension"}},
	},
	Boundaries: {
		Name: "boundaries", Doc: "one for each sequence and one more, contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "*", Text: ": one dimension"}},
	},
	RowStates: {
		Name: "row_states", Doc: "(M, 3), contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "L3", Text: ": three numbers for each row of {x}"}},
	},
	ColumnStates: {
		Name: "column_states", Doc: "(N, 3), contiguous", Layout: Contiguous,
		Forms: []Form{{Sizes: "N3", Text: ": three numbers for each column of {x}"}},
	},
}

// Made returns the form of a new tensor, of a call that reduces the rows' results or does not.
func (r *ShapeRule) Made(reduces bool) string {
	other := map[bool]When{true: Unreduced, false: Summed}[reduces]
	for _, f := range r.Forms {
		if f.When != other {
			return f.Sizes
		}
	}
	panic(r.Name + " has no form for a result")
}

// DType is a rule for an operand's element type. DTypes describes the rules.
type DType int

// The rules for element types.
const (
	Float DType = iota
	Wide
	Same // the type of the operand that Like names
	Companion
	Parameter
	Statistic
	Index
	Mask
	RowMask
	Truth
	Class
)

// DTypeRule describes a rule for element types.
type DTypeRule struct {
	Name string // in Python
	// The types beside a first operand of float64 (Wide) and of another type (Narrow), as in kernels.DType.
	Narrow, Wide []string
	// An output whose type neither Like nor Choice sets has that of statistics: float32, or float64 beside
	// float64. Else it has the first operand's.
	Statistic bool
	Made      string // the type of all outputs that follow the rule, as in kernels.DType, or ""
	Doc       string // for gander.h and Go; {x} is the first operand, {like} is Like
}

var (
	narrow   = []string{"Float16", "BFloat16", "Float32"}
	wide     = []string{"Float64"}
	indices  = []string{"Int32", "Int64"}
	booleans = []string{"Bool", "Uint8"}
)

const companionDoc = "float64 if {x} is, else float16, bfloat16 or float32"

// DTypes are the rules for element types. float64 is supported in host memory only.
var DTypes = [...]DTypeRule{
	Float: {Name: "float", Narrow: join(narrow, wide), Wide: join(narrow, wide),
		Doc: "float16, bfloat16 or float32, on the host also float64"},
	Wide: {Name: "wide", Narrow: []string{"Float32", "Float64"}, Wide: []string{"Float32", "Float64"},
		Doc: "float32, on the host also float64"},
	Same:      {Name: "same", Doc: "{like}'s dtype"},
	Companion: {Name: "companion", Narrow: narrow, Wide: wide, Doc: companionDoc},
	Parameter: {Name: "parameter", Narrow: narrow, Wide: wide, Statistic: true, Doc: companionDoc},
	Statistic: {Name: "statistic", Narrow: []string{"Float32"}, Wide: wide, Statistic: true,
		Doc: "float64 if {x} is, else float32"},
	Index: {Name: "index", Narrow: indices, Wide: indices, Doc: "int32 or int64"},
	Mask: {Name: "mask", Narrow: join(narrow, booleans), Wide: join(wide, booleans),
		Doc: "bool or uint8; or " + companionDoc},
	RowMask: {Name: "row_mask", Narrow: join(indices, booleans), Wide: join(indices, booleans),
		Doc: "int32, int64, bool or uint8"},
	Truth: {Name: "truth", Narrow: []string{"Bool"}, Wide: []string{"Bool"}, Made: "Bool", Doc: "bool"},
	Class: {Name: "class", Narrow: []string{"Int64"}, Wide: []string{"Int64"}, Made: "Int64", Doc: "int64"},
}

func join(a, b []string) []string { return append(append([]string{}, a...), b...) }
