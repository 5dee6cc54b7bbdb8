package main

import (
	"cmp"
	"fmt"
	"slices"
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

// sizesOf says what the letters in the documentation of shapes stand for.
func sizesOf(first operators.Operand) string {
	if operators.Shapes[first.Shape].Layout == operators.InHeads {
		return "B, S, H and N are the sequences, tokens, heads and columns of " + first.Name + "."
	}
	return "M and N are the rows and columns of " + first.Name + "."
}

// describe documents an operand's shape, dtype and rules. first is the operator's first operand.
func describe(p operators.Operand, first, absent string) string {
	s := operators.Shapes[p.Shape].Doc + "; "
	s += strings.NewReplacer("{x}", first, "{like}", p.Like).Replace(operators.DTypes[p.DType].Doc)
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
	if p.Fits != "" {
		s += "; has the shape of " + p.Fits
	}
	return s
}

var goOptionTypes = map[operators.OptionType]string{
	operators.Real: "float64", operators.Integer: "int64", operators.Flag: "bool",
	operators.Reduction: "Reduction", operators.Algorithm: "Algorithm",
}

// optional is the type of an option in Go whose default is not 0.
func optional(option operators.Option) string { return "Optional[" + goOptionTypes[option.Type] + "]" }

// optionDoc is an option's documentation.
func optionDoc(option operators.Option) string {
	if option.Default != 0 {
		return option.Doc + "; " + number(option.Default) + " by default"
	}
	return option.Doc
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
	t.add("var statusNames = [...]string{%s}\n", quoted(lower(operators.Statuses)...))
	t.add("// Reduction is how the rows' losses are reduced.\ntype Reduction = kernels.Reduction\n")
	t.add("// The reductions.\nconst (")
	for _, c := range operators.Reductions {
		t.add("Reduce%s = kernels.Reduce%s // %s", c.Name, c.Name, c.Doc)
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
	goRules(&t)
	for _, o := range all() {
		goOperator(&t, o)
	}
	return t.String()
}

// goLetters generates internal/sizes/letters_gen.go.
func goLetters() string {
	var t text
	t.add("%s\n\npackage sizes\n\nvar letters = [...]Letter{", goGenerated)
	for _, name := range letterNames() {
		l := operators.Letters[name]
		t.add("%q: {%d, %d, %d, %d, %d, %t},", name, l.From, l.To, l.Times, l.Over, l.Plus, l.Any)
	}
	t.add("}")
	return t.String()
}

// goRules writes the rules for shapes and element types as variables.
func goRules(t *text) {
	t.add("const always conditions = 0\n\n// The other conditions for forms.\nconst (")
	for i, c := range operators.Conditions {
		if c.Name != "" {
			t.add("%s conditions = 1 << %d // %s", c.Name, i-1, c.Doc)
		}
	}
	t.add(")\n\n// The rules for shapes.\nvar (")
	for _, r := range operators.Shapes {
		t.add("%s = shapeRule{%s, []form{", goShape(r), goLayouts[r.Layout])
		for _, f := range r.Forms {
			t.add("{%q, %t, %s, %q},", f.Sizes, f.Count, goCondition(f.When), f.Text)
		}
		t.add("}}")
	}
	t.add(")\n\n// The rules for element types.\nvar (")
	for _, r := range operators.DTypes {
		if r.Narrow != nil {
			t.add("%s = typeRule{%s, %s}", goType(r), goTypes(r.Narrow), goTypes(r.Wide))
		}
	}
	t.add(")\n")
}

var (
	goLayouts = map[operators.Layout]string{
		operators.InRows: "inRows", operators.Contiguous: "contiguous", operators.Regular: "regular",
		operators.Parts: "parts", operators.Broadcasts: "broadcasts",
		operators.InHeads: "inHeads", operators.Tables: "tables",
	}
)

func goCondition(w operators.When) string {
	if w == operators.Always {
		return "always"
	}
	return operators.Conditions[w].Name
}

func goShape(r operators.ShapeRule) string { return "shape" + camel(r.Name) }
func goType(r operators.DTypeRule) string  { return "type" + camel(r.Name) }

// goTypes is a set of element types.
func goTypes(names []string) string {
	var list []string
	for _, name := range names {
		list = append(list, "1<<kernels."+name)
	}
	return strings.Join(list, "|")
}

// field is the name of an operand or option in Go.
func field(name string) string { return camel(name) }

func goOperator(t *text, o operator) {
	name, checked, first := o.goName(), unexported(o.goName()), o.Operands[0].Name
	t.add("%s\n//", wrap(name+" is the operator "+o.full()+": "+o.Doc, "// ", 110))
	t.add("%s", wrap(sizesOf(o.Operands[0])+" A refused call writes nothing.", "// ", 110))
	t.add("type %s struct {", name)
	for _, p := range o.Operands {
		goField(t, field(p.Name)+" *dlpack.Tensor", describe(p, first, "nil"))
	}
	t.add("")
	for _, option := range o.options() {
		kind := goOptionTypes[option.Type]
		if option.Default != 0 {
			kind = optional(option)
		}
		goField(t, camel(option.Name)+" "+kind, optionDoc(option))
	}
	t.add("}\n")

	t.add("// %s is a %s whose operands have been checked.", checked, name)
	t.add("type %s struct {", checked)
	for _, p := range o.Operands {
		t.add("%s %s", field(p.Name), goKinds[operators.Shapes[p.Shape].Layout])
	}
	algorithm, invariant := "Auto", "false"
	for _, option := range o.options() {
		switch {
		case option.Type == operators.Algorithm:
			algorithm = "o.Algorithm"
		case option.Name == "batch_invariant":
			invariant = "o.BatchInvariant"
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
	for _, option := range o.options() {
		switch {
		case option.Type == operators.Algorithm || option.Name == "batch_invariant":
		case option.Default != 0:
			t.add("%[1]s: o.%[1]s.or(%[2]s),", camel(option.Name), number(option.Default))
		default:
			t.add("%[1]s: o.%[1]s,", camel(option.Name))
		}
	}
	t.add("Choice: Choose(%s, %s),", algorithm, invariant)
	t.add("}")
	for _, option := range o.options() {
		if option.Type == operators.Reduction {
			t.add("k.reduction(o.%s)", camel(option.Name))
		}
	}
	for _, p := range o.Operands {
		if p.Read != "" {
			t.add("k.reads(o.%s)", camel(p.Read))
		}
		if p.Name == operators.Denominator && !p.Output {
			t.add("k.divides(o.Reduction == kernels.ReduceMean && o.%s == nil)", field(p.Name))
		}
	}
	for _, option := range o.options() {
		if set, unset := conditionsOf(option.Name); set+unset != "" {
			t.add("k.holds(o.%s, %s, %s)", camel(option.Name), cmp.Or(set, "always"), cmp.Or(unset, "always"))
		}
	}
	for i, p := range o.Operands {
		goCheck(t, o, p, i == 0)
	}
	for _, option := range o.options() {
		if option.Rank > 0 {
			t.add("k.rank(%q, o.%s, %d)", option.Name, camel(option.Name), option.Rank)
		}
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
	if o.Plain != nil {
		goExtra(t, o)
	}
	if onDevice(*o.group) {
		t.add("func (a *%s) options() kernels.%sOptions {", checked, o.group.Type)
		t.add("return kernels.%sOptions{", o.group.Type)
		for _, option := range o.options() {
			if option.Device {
				t.add("%[1]s: float32(a.%[1]s),", camel(option.Name))
			}
		}
		t.add("}\n}\n")
	}
}

// goExtra writes the method that says whether a call is a plain one. What the table does not list as Plain
// makes it none, so that a forgotten entry costs speed and not the result.
func goExtra(t *text, o operator) {
	t.add("// extra names an operand or an option that the kernels of plain calls do not have, or returns \"\".")
	t.add("func (a *%s) extra() string {\nswitch {", unexported(o.goName()))
	for _, p := range o.Operands {
		if p.Optional && !slices.Contains(o.Plain, p.Name) {
			t.add("case a.%s.Present():\nreturn %q", field(p.Name), p.Name)
		}
	}
	for _, option := range o.options() {
		switch {
		case option.Type == operators.Algorithm || option.Name == "batch_invariant":
		case slices.Contains(o.Plain, option.Name):
		case option.Type == operators.Flag:
			t.add("case a.%s:\nreturn %q", camel(option.Name), option.Name)
		default:
			t.add("case a.%s != %s:\nreturn %q", camel(option.Name), number(option.Default), option.Name)
		}
	}
	t.add("}\nreturn \"\"\n}\n")
}

// goField writes a field of a struct. A long comment is above it, a short one on the same line.
func goField(t *text, declaration, doc string) {
	if len(doc) > 80 {
		t.add("%s\n%s", wrap(doc, "// ", 105), declaration)
		return
	}
	t.add("%s // %s", declaration, doc)
}

// goKinds are the types of checked operands.
var goKinds = map[operators.Layout]string{
	operators.InRows: "kernels.Matrix", operators.Contiguous: "kernels.Vector",
	operators.Regular: "kernels.Vector", operators.Parts: "logSumExp", operators.Broadcasts: "kernels.Mask",
	operators.InHeads: "kernels.Heads", operators.Tables: "kernels.Table",
}

// needed lists what has to be given if an operand is: what the table says, and for an output of another
// operand's type that operand.
func needed(o operator, p operators.Operand) (names []string) {
	if p.Needs != "" {
		names = append(names, p.Needs)
	}
	if like := o.Find(p.Like); p.Output && p.DType == operators.Same && like.Optional && p.Like != p.Needs {
		names = append(names, p.Like)
	}
	return names
}

// goCheck checks one operand.
func goCheck(t *text, o operator, p operators.Operand, leading bool) {
	rule, f := operators.Shapes[p.Shape], field(p.Name)
	types := fmt.Sprintf("%s.with(a.%s.DType)", goType(operators.DTypes[p.DType]), field(o.Operands[0].Name))
	switch {
	case leading:
		types = goType(operators.DTypes[p.DType]) + ".narrow"
	case p.DType == operators.Same:
		types = fmt.Sprintf("only(a.%s.DType)", field(p.Like))
	}
	for _, name := range needed(o, p) {
		absent, without, set := "o."+field(name)+" == nil", "a "+name, "pass the "+name
		if o.option(name) != nil {
			absent, without, set = "!o."+camel(name), name, "set "+name
		}
		t.add("if o.%s != nil && %s {", f, absent)
		t.add("k.fail(StatusOption, %q)", fmt.Sprintf("%[1]s is given without %s, expected NULL; %s or drop %[1]s",
			p.Name, without, set))
		t.add("}")
	}
	if p.Optional {
		t.add("if o.%s != nil {", f)
	}
	switch {
	case leading && rule.Layout == operators.InHeads:
		t.add("a.%s = k.heads(%q, o.%s, %s)", f, p.Name, f, types)
	case leading:
		t.add("a.%s = k.rows(%q, o.%s, %s)", f, p.Name, f, types)
		if p.Shape != operators.Rows {
			t.add("k.leading(%q, o.%s, &%s)", p.Name, f, goShape(rule))
		}
	case rule.Layout == operators.InRows && p.Fits != "":
		t.add("a.%s = k.rowsFitting(%q, o.%s, %s, %q, o.%s)", f, p.Name, f, types, p.Fits, field(p.Fits))
	case rule.Layout == operators.InRows && p.Shape != operators.Rows:
		t.add("a.%s = k.rowsOf(%q, o.%s, %s, &%s)", f, p.Name, f, types, goShape(rule))
	case rule.Layout == operators.InRows:
		t.add("a.%s = k.rowsLike(%q, o.%s, %s)", f, p.Name, f, types)
	case rule.Layout == operators.InHeads && p.Fits != "":
		t.add("a.%s = k.headsFitting(%q, o.%s, %s, %q, o.%s)", f, p.Name, f, types, p.Fits, field(p.Fits))
	case rule.Layout == operators.InHeads:
		t.add("a.%s = k.headsOf(%q, o.%s, %s, &%s)", f, p.Name, f, types, goShape(rule))
	case rule.Layout == operators.Tables && p.Fits != "":
		t.add("a.%s = k.tableFitting(%q, o.%s, %s, %q, o.%s)", f, p.Name, f, types, p.Fits, field(p.Fits))
	case rule.Layout == operators.Tables:
		t.add("a.%s = k.table(%q, o.%s, %s)", f, p.Name, f, types)
	case rule.Layout == operators.Broadcasts:
		t.add("a.%s = k.broadcast(%q, o.%s, %s)", f, p.Name, f, types)
	case rule.Layout == operators.Parts:
		t.add("a.%s = k.statistics(%q, o.%s, %s)", f, p.Name, f, types)
	case p.Fits != "":
		t.add("a.%s = k.fitting(%q, o.%s, %s, &%s, %q, o.%s)", f, p.Name, f, types, goShape(rule), p.Fits,
			field(p.Fits))
	default:
		t.add("a.%s = k.vector(%q, o.%s, %s, &%s)", f, p.Name, f, types, goShape(rule))
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
