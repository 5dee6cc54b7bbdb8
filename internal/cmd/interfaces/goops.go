package main

import (
	"fmt"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// deviceOptions generates kernels/operators_gen.go.
func deviceOptions() string {
	var t text
	t.add("%s\n", goGenerated)
	t.add("package kernels\n")
	t.add("// Reduction is how the rows' losses are reduced.\ntype Reduction int32\n")
	t.add("// The reductions.\nconst (")
	for i, c := range operators.Reductions {
		t.add("Reduce%s Reduction = %d // %s", c.Name, i, c.Doc)
	}
	t.add(")")
	for _, g := range operators.Table {
		if !onDevice(g) {
			continue
		}
		t.add("\n// %sOptions are the options that are passed to the kernels of %s.", g.Type, g.Name)
		t.add("type %sOptions struct {", g.Type)
		for _, o := range g.Options {
			if o.Device {
				t.add("%s float32 // %s", camel(o.Name), o.Doc)
			}
		}
		t.add("}")
	}
	return t.String()
}

func onDevice(g operators.Group) bool {
	for _, o := range g.Options {
		if o.Device {
			return true
		}
	}
	return false
}

var shapeDocs = map[operators.Shape]string{
	operators.Rows: "(M, N)", operators.Columns: "(N), contiguous", operators.PerRow: "M elements, contiguous",
	operators.HeadColumns: "(N), or (H, N) for rows of shape (..., H, N), contiguous",
	operators.Strided:     "M elements, any stride",
	operators.Broadcast: "broadcasts to the first operand's shape; the leading dimensions' strides collapse " +
		"into three or fewer, the last stride is 1 or 0",
	operators.Upstream: "M elements of any stride, or one for all rows",
	operators.Reduced:  "M elements with reduction none, else one", operators.One: "one element",
	operators.Statistics: "M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: " +
		"those and the denominator",
}

// describe documents an operand's shape, dtype and rules. first is the operator's first operand.
func describe(p operators.Operand, first, absent string) string {
	s := shapeDocs[p.Shape]
	switch p.DType {
	case operators.Float:
		s += "; float16, bfloat16 or float32, on the host also float64"
	case operators.Wide:
		s += "; float32, on the host also float64"
	case operators.Same:
		s += "; " + p.Like + "'s dtype"
	case operators.Companion, operators.Parameter:
		s += "; float64 if " + first + " is, else float16, bfloat16 or float32"
	case operators.Statistic:
		s += "; float64 if " + first + " is, else float32"
	case operators.Index:
		s += "; int32 or int64"
	case operators.Mask:
		s += "; bool or uint8; or float64 if " + first + " is, else float16, bfloat16 or float32"
	}
	if len(p.Over) > 0 {
		s += "; may be " + strings.Join(p.Over, " or ") + " if the dtypes agree"
	}
	if p.Read != "" {
		s += "; with " + p.Read + " it is also read, and must not overlap an input"
	}
	if p.Optional {
		s += "; or " + absent
	}
	if p.Needs != "" {
		s += "; must be " + absent + " without " + p.Needs
	}
	return s
}

var goOptionTypes = map[operators.OptionType]string{
	operators.Real: "float64", operators.Integer: "int64", operators.Flag: "bool",
	operators.Reduction: "kernels.Reduction", operators.Algorithm: "Algorithm",
}

// goOperators generates ops/operators_gen.go.
func goOperators() string {
	var t text
	t.add("%s\n", goGenerated)
	t.add("package ops\n")
	t.add("import (")
	t.add("%q", "github.com/gander-go/gander/dlpack")
	t.add("%q", "github.com/gander-go/gander/kernels")
	t.add(")\n")
	t.add("// The statuses.\nconst (")
	for i, c := range operators.Statuses {
		t.add("Status%s Status = %d // %s", c.Name, i, c.Doc)
	}
	t.add(")\n")
	t.add("// The algorithms. Algorithms describes them, and the rows that they serve.\nconst (")
	for i, c := range operators.Algorithms {
		t.add("%s Algorithm = %d", c.Name, i)
	}
	t.add("// IfServed, added to an algorithm, lets Auto take its place for rows that it cannot serve.")
	t.add("IfServed Algorithm = %#x", operators.IfServed)
	t.add(")\n")
	t.add("var algorithmNames = [...]string{%s}\n", quoted(lower(operators.Algorithms)...))
	for _, o := range all() {
		goOperator(&t, o)
	}
	return t.String()
}

// field is the name of an operand or option in Go.
func field(name string) string { return camel(name) }

func goOperator(t *text, o operator) {
	name, checked, first := o.goName(), unexported(o.goName()), o.Operands[0].Name
	t.add("%s\n//", wrap(name+" is the operator "+o.full()+": "+o.Doc, "// ", 110))
	rows := "M and N are the rows and columns of " + first + ". A refused call writes nothing."
	t.add("%s", wrap(rows, "// ", 110))
	t.add("type %s struct {", name)
	for _, p := range o.Operands {
		goField(t, field(p.Name)+" *dlpack.Tensor", describe(p, first, "nil"))
	}
	t.add("")
	for _, option := range o.group.Options {
		goField(t, camel(option.Name)+" "+goOptionTypes[option.Type], option.Doc)
	}
	t.add("}\n")

	t.add("// %s is a %s whose operands have been checked.", checked, name)
	t.add("type %s struct {", checked)
	for _, p := range o.Operands {
		kind := "kernels.Vector"
		switch p.Shape {
		case operators.Rows:
			kind = "kernels.Matrix"
		case operators.Statistics:
			kind = "logSumExp"
		case operators.Broadcast:
			kind = "kernels.Mask"
		}
		t.add("%s %s", field(p.Name), kind)
	}
	algorithm := "Auto"
	for _, option := range o.group.Options {
		switch {
		case option.Type == operators.Algorithm:
			algorithm = "o.Algorithm"
		case option.Name == "batch_invariant":
		default:
			t.add("%s %s", camel(option.Name), goOptionTypes[option.Type])
		}
	}
	t.add("Choice")
	t.add("}\n")

	t.add("// Run checks the operands and runs the operator.")
	t.add("func (o %s) Run(c *Call) error {", name)
	t.add("k := check{op: %q}", o.full())
	t.add("a := %s{", checked)
	for _, option := range o.group.Options {
		if option.Type != operators.Algorithm && option.Name != "batch_invariant" {
			t.add("%[1]s: o.%[1]s,", camel(option.Name))
		}
	}
	t.add("Choice: Choose(%s, o.BatchInvariant),", algorithm)
	t.add("}")
	for _, option := range o.group.Options {
		if option.Type == operators.Reduction {
			t.add("k.reduction(o.%s)", camel(option.Name))
		}
	}
	for i, p := range o.Operands {
		goCheck(t, o, p, i == 0)
	}
	for _, option := range o.group.Options {
		if option.Type == operators.Algorithm {
			t.add("k.chosen(a.Choice, kernels.%s)", name)
		}
	}
	if o.Refuses {
		t.add("a.refuse(&k)")
	}
	t.add("if k.err != nil {\nreturn k.err\n}")
	t.add("if k.device.Host() {\nreturn hostError(k.op, a.host())\n}")
	t.add("return a.cuda(c.orDefault(), k.device.ID)")
	t.add("}\n")
	if onDevice(*o.group) {
		t.add("func (a *%s) options() kernels.%sOptions {", checked, o.group.Type)
		t.add("return kernels.%sOptions{", o.group.Type)
		for _, option := range o.group.Options {
			if option.Device {
				t.add("%[1]s: float32(a.%[1]s),", camel(option.Name))
			}
		}
		t.add("}\n}\n")
	}
}

// goField writes a field of a struct. A long comment is above it, a short one on the same line.
func goField(t *text, declaration, doc string) {
	if len(doc) > 80 {
		t.add("%s\n%s", wrap(doc, "// ", 105), declaration)
		return
	}
	t.add("%s // %s", declaration, doc)
}

// goCheck checks one operand.
func goCheck(t *text, o operator, p operators.Operand, leading bool) {
	first := o.Operands[0]
	types := "anyFloat"
	switch p.DType {
	case operators.Wide:
		types = "wideFloat"
	case operators.Index:
		types = "anyIndex"
	case operators.Mask:
		types = fmt.Sprintf("anyMask|companion(a.%s.DType)", field(first.Name))
	case operators.Companion, operators.Parameter:
		types = fmt.Sprintf("companion(a.%s.DType)", field(first.Name))
	case operators.Statistic:
		types = fmt.Sprintf("statistic(a.%s.DType)", field(first.Name))
	case operators.Same:
		types = fmt.Sprintf("only(a.%s.DType)", field(p.Like))
	}
	rows, cols := "a."+field(first.Name)+".Rows", "a."+field(first.Name)+".Cols"
	f := field(p.Name)
	if p.Needs != "" {
		t.add("if o.%s != nil && o.%s == nil {", f, field(p.Needs))
		t.add("k.fail(StatusOption, %q)", fmt.Sprintf(
			"%[1]s is given without a %[2]s, expected NULL; pass the %[2]s or drop %[1]s", p.Name, p.Needs))
		t.add("}")
	}
	if p.Optional {
		t.add("if o.%s != nil {", f)
	}
	switch {
	case leading:
		t.add("a.%s = k.rows(%q, o.%s, %s)", f, p.Name, f, types)
	case p.Shape == operators.Rows:
		t.add("a.%s = k.rowsLike(%q, o.%s, %s, %q, a.%s)", f, p.Name, f, types, first.Name, field(first.Name))
	case p.Shape == operators.Broadcast:
		t.add("a.%s = k.broadcast(%q, o.%s, %s, %q, o.%s)", f, p.Name, f, types, first.Name, field(first.Name))
	case p.Shape == operators.Columns:
		t.add("a.%s = k.weights(%q, o.%s, %s, %s)", f, p.Name, f, types, cols)
	case p.Shape == operators.HeadColumns:
		t.add("a.%s = k.headWeights(%q, o.%s, %s, o.%s)", f, p.Name, f, types, field(first.Name))
	case p.Shape == operators.PerRow:
		t.add("a.%s = k.compact(%q, o.%s, %s, %s, perRow)", f, p.Name, f, types, rows)
	case p.Shape == operators.Strided:
		t.add("a.%s = k.vector(%q, o.%s, %s, %s, perRow)", f, p.Name, f, types, rows)
	case p.Shape == operators.Upstream:
		t.add("a.%s = k.upstream(%q, o.%s, %s, %s)", f, p.Name, f, types, rows)
	case p.Shape == operators.Reduced:
		t.add("a.%s = k.reduced(%q, o.%s, %s, %s, o.Reduction)", f, p.Name, f, types, rows)
	case p.Shape == operators.Statistics:
		t.add("a.%s = k.statistics(%q, o.%s, %s, %s)", f, p.Name, f, types, rows)
	case p.Shape == operators.One:
		t.add("a.%s = k.compact(%q, o.%s, %s, 1, %q)", f, p.Name, f, types, "one for all rows")
	}
	if p.Output {
		over := quoted(p.Over...)
		if p.Read != "" {
			t.add("if o.%s {\nk.output()\n} else {\nk.output(%s)\n}", camel(p.Read), over)
		} else {
			t.add("k.output(%s)", over)
		}
	}
	if p.Optional {
		t.add("}")
	}
}
