package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

var (
	layoutNames = map[operators.Layout]string{
		operators.InRows: "rows", operators.Contiguous: "contiguous", operators.Regular: "regular",
		operators.Parts: "parts", operators.Broadcasts: "broadcast",
		operators.InHeads: "heads", operators.Tables: "tables",
	}
	optionNames = map[operators.OptionType]string{
		operators.Real: "real", operators.Integer: "integer", operators.Flag: "flag",
		operators.Reduction: "reduction", operators.Algorithm: "algorithm",
	}
)

// pythonNumbers are macros of gander.h that Python needs too, by their names there.
var pythonNumbers = []string{"GANDER_ABI_VERSION", "GANDER_OPTIONS_MAGIC"}

// pythonTable generates python/gander/_table/operators_gen.py.
func pythonTable(header string) (string, error) {
	var t text
	t.add("# %s", generated)
	t.add("# ruff: noqa: E501")
	t.add("# fmt: off")
	t.add(`"""The tables that the shim reads; types.py has their types."""`)
	t.add("")
	t.add("from typing import Literal")
	t.add("")
	t.add("from .types import (")
	for _, name := range []string{"Argument", "DTypeRule", "Form", "Letter", "Operand", "Operator", "Option",
		"Saved", "ShapeRule", "TorchOperator"} {
		t.add("    %s,", name)
	}
	t.add(")")
	t.add("")
	for _, name := range pythonNumbers {
		value := regexp.MustCompile(`(?m)^#define ` + name + ` (\w+?)u?\b`).FindStringSubmatch(header)
		if value == nil {
			return "", fmt.Errorf("capi/gander.h does not define %s as a number", name)
		}
		t.add("%s = %s", strings.TrimPrefix(name, "GANDER_"), value[1])
	}
	t.add("STATUSES = (%s)", quoted(lower(operators.Statuses)...))
	t.add("Algorithm = Literal[%s]", quoted(lower(operators.Algorithms)...))
	t.add("ALGORITHMS: tuple[Algorithm, ...] = (%s)", quoted(lower(operators.Algorithms)...))
	t.add("IF_SERVED = %d", operators.IfServed)
	t.add("Reduction = Literal[%s]", quoted(lower(operators.Reductions)...))
	t.add("REDUCTIONS: tuple[Reduction, ...] = (%s)", quoted(lower(operators.Reductions)...))
	t.add("%s = range(len(REDUCTIONS))", strings.ToUpper(strings.Join(lower(operators.Reductions), ", ")))
	t.add("")
	pythonRules(&t)
	t.add("OPERATORS = {")
	for _, o := range all() {
		t.add("    %q: Operator(", o.full())
		t.add("        owned=%q,", o.Owned)
		t.add("        operands=(")
		for _, p := range o.Operands {
			t.add("            %s,", pythonOperand(o, p))
		}
		t.add("        ),")
		t.add("        options=(")
		for _, option := range o.options() {
			rank := ""
			if option.Rank > 0 {
				rank = fmt.Sprintf(", rank=%d", option.Rank)
			}
			t.add("            Option(%q, %q, %s%s),", option.Name, optionNames[option.Type], number(option.Default),
				rank)
		}
		t.add("        ),")
		var names []string
		for _, f := range owning(o).fields() {
			names = append(names, f.name)
		}
		t.add("        fields=(%s),", quoted(names...))
		t.add("    ),")
	}
	t.add("}")
	t.add("")
	t.add("TORCH = {")
	for _, o := range all() {
		for i := range o.Torch {
			pythonTorch(&t, o, &o.Torch[i])
		}
	}
	t.add("}")
	return t.String(), nil
}

// pythonRules writes the rules for shapes and element types.
func pythonRules(t *text) {
	t.add("LETTERS = {")
	for _, name := range letterNames() {
		l := operators.Letters[name]
		free := ""
		if l.Any {
			free = ", any=True"
		}
		t.add("    %q: Letter(%d, %d, %d, %d, %d%s),", string(name), l.From, l.To, l.Times, max(l.Over, 1), l.Plus,
			free)
	}
	t.add("}\n\nFLAGS: dict[str, tuple[str, bool]] = {")
	for _, c := range operators.Conditions {
		if c.Flag != "" {
			t.add("    %q: (%q, %s),", c.Name, c.Flag, pythonBool(c.Set))
		}
	}
	t.add("}\n\nSHAPES = {")
	for _, r := range operators.Shapes {
		var forms []string
		for _, f := range r.Forms {
			forms = append(forms,
				fmt.Sprintf("Form(%q, %s, %q, %q)", f.Sizes, pythonBool(f.Count),
					operators.Conditions[f.When].Name, f.Text))
		}
		t.add("    %q: ShapeRule(", r.Name)
		t.add("        %q,", layoutNames[r.Layout])
		t.add("        (%s,),", strings.Join(forms, ", "))
		if r.Packed != "" {
			t.add("        packed=%q,", r.Packed)
		}
		if r.Rank > 0 {
			t.add("        rank=%d,", r.Rank)
		}
		t.add("    ),")
	}
	t.add("}\n\nDTYPES = {")
	for _, r := range operators.DTypes {
		statistic := ""
		if r.Statistic {
			statistic = ", statistic=True"
		}
		if r.Made != "" {
			statistic = fmt.Sprintf(", made=%q", strings.ToLower(r.Made))
		}
		names := func(list []string) string { return strings.ToLower(quoted(list...)) }
		t.add("    %q: DTypeRule((%s), (%s)%s),", r.Name, names(r.Narrow), names(r.Wide), statistic)
	}
	t.add("}\n")
}

func pythonOperand(o operator, p operators.Operand) string {
	needs := p.Needs
	if o.option(needs) != nil {
		needs = "" // libgander refuses it
	}
	s := fmt.Sprintf("Operand(%q, %q, %q", p.Name, operators.Shapes[p.Shape].Name,
		operators.DTypes[p.DType].Name)
	for _, f := range []struct{ name, value string }{
		{"like", p.Like}, {"needs", needs}, {"fits", p.Fits},
		{"choice", p.Choice}, {"gradient", p.Gradient}, {"twin", p.Twin},
		{"stored", p.Stored}, {"read", p.Read},
	} {
		if f.value != "" {
			s += fmt.Sprintf(", %s=%q", f.name, f.value)
		}
	}
	if p.Output {
		s += ", output=True"
	}
	if p.Optional {
		s += ", optional=True"
	}
	return s + ")"
}

func pythonTorch(t *text, o operator, op *operators.Torch) {
	t.add("    %q: TorchOperator(", op.Name)
	t.add("        operator=%q,", o.full())
	t.add("        schema=%q,", schema(o, op))
	t.add("        arguments=(")
	for _, a := range arguments(o, op) {
		s := fmt.Sprintf("Argument(%q, %q", a.Name, a.kind)
		if a.kind != "tensor" && a.kind != "dtype" {
			s += fmt.Sprintf(", type=%q", optionNames[a.Type])
		}
		if a.optional {
			s += ", optional=True"
		}
		t.add("            %s),", s)
	}
	t.add("        ),")
	t.add("        results=(%s),", quoted(op.Results...))
	var left []string // of all options of the group: a gradient may have one that this operator does not have
	for _, option := range o.group.Options {
		if value, ok := fixed(op, option); ok || o.option(option.Name) == nil {
			left = append(left, fmt.Sprintf("%q: %s", option.Name, number(value)))
		}
	}
	if len(left) > 0 {
		t.add("        fixed={%s},", strings.Join(left, ", "))
	}
	if len(op.Writes) > 0 {
		var writes []string
		for _, w := range op.Writes {
			writes = append(writes, fmt.Sprintf("%q: %q", w.Argument, w.Output))
		}
		t.add("        writes={%s},", strings.Join(writes, ", "))
	}
	if op.Packed {
		t.add("        packed=True,")
	}
	if len(op.OnDemand) > 0 {
		t.add("        on_demand=(%s),", quoted(op.OnDemand...))
	}
	if op.Backward != "" {
		t.add("        backward=%q,", op.Backward)
		var list []string
		for _, s := range savedBy(op) {
			list = append(list, fmt.Sprintf("Saved(%q, %q)", s.result, s.argument))
		}
		t.add("        saved=(%s,),", strings.Join(list, ", "))
	}
	t.add("    ),")
}

// pythonProtocol generates python/gander/_table/protocol_gen.py.
func pythonProtocol() string {
	var t text
	t.add("# %s", generated)
	t.add("# ruff: noqa: E501")
	t.add("# fmt: off")
	t.add(`"""The operators as functions, which every backend has."""`)
	t.add("")
	t.add("from typing import Any, Protocol")
	t.add("")
	t.add("")
	t.add("class Operators(Protocol):")
	first := true
	for _, o := range all() {
		for i := range o.Torch {
			if !first {
				t.add("")
			}
			first = false
			op := &o.Torch[i]
			t.add("    def %s(self, %s) -> Any:", op.Name, pythonParameters(arguments(o, op), "Any", "Any"))
			t.add("        %s", pythonDoc(o, op))
			t.add("        ...")
		}
	}
	return t.String()
}

// pythonArrays generates python/gander/_arrays/operators_gen.py.
func pythonArrays() string {
	var t text
	t.add("# %s", generated)
	t.add("# ruff: noqa: E501")
	t.add("# fmt: off")
	t.add(`"""A function for each operator of torch.ops.gander, on arrays: see calls.py."""`)
	t.add("")
	t.add("from typing import Any")
	t.add("")
	t.add("from .calls import call")
	t.add("")
	t.add("__all__ = (%s)", quoted(torchNames()...))
	for _, o := range all() {
		for i := range o.Torch {
			op := &o.Torch[i]
			t.add("")
			t.add("")
			t.add("def %s(%s) -> Any:", op.Name, pythonParameters(arguments(o, op), "Any", "Any"))
			t.add("    %s", pythonDoc(o, op))
			t.add("    return call(%q, locals())", op.Name)
		}
	}
	return t.String()
}

// pythonFunctions generates python/gander/_torch/operators_gen.py.
func pythonFunctions() string {
	var t text
	t.add("# %s", generated)
	t.add("# ruff: noqa: E501")
	t.add("# fmt: off")
	t.add(`"""A function for each operator of torch.ops.gander, which torch.compile can trace."""`)
	t.add("")
	t.add("from typing import Any")
	t.add("")
	t.add("from torch import Tensor, dtype")
	t.add("")
	t.add("from .registry import overloads")
	for _, o := range all() {
		for i := range o.Torch {
			op := &o.Torch[i]
			list := arguments(o, op)
			var names []string
			for _, a := range list {
				names = append(names, a.Name)
			}
			t.add("")
			t.add("")
			t.add("def %s(%s) -> Any:", op.Name, pythonParameters(list, "Tensor", "dtype"))
			t.add("    %s", pythonDoc(o, op))
			t.add("    return overloads[%q](%s)", op.Name, strings.Join(names, ", "))
		}
	}
	return t.String()
}

// torchNames lists the names of PyTorch's operators, in ruff's order.
func torchNames() (names []string) {
	for _, o := range all() {
		for i := range o.Torch {
			names = append(names, o.Torch[i].Name)
		}
	}
	slices.Sort(names)
	return names
}

// pythonDoc is the docstring of an operator's function.
func pythonDoc(o operator, op *operators.Torch) string {
	results := "nothing"
	if len(op.Results) > 0 {
		results = strings.Join(op.Results, ", ")
	}
	return fmt.Sprintf(`"""gander_%s: returns %s."""`, o.full(), results)
}

// pythonParameters lists the parameters of an operator's function.
func pythonParameters(list []argument, tensor, dtype string) string {
	var parameters []string
	for _, a := range list {
		kind, value := "int", number(a.value())
		switch {
		case a.kind == "tensor":
			kind, value = tensor, "None"
		case a.kind == "dtype":
			kind, value = dtype, "None"
		case a.kind == "extra" && a.value() < 0:
			kind, value = "bool", "None"
		case a.Type == operators.Real:
			kind = "float"
		case a.Type == operators.Flag:
			kind, value = "bool", "False"
		}
		if kind != "Any" && (a.optional || value == "None" && a.kind != "tensor") {
			kind += " | None"
		}
		s := a.Name + ": " + kind
		if a.hasDefault {
			s += " = " + value
		}
		parameters = append(parameters, s)
	}
	return strings.Join(parameters, ", ")
}

// schema is an operator's schema in PyTorch's syntax.
func schema(o operator, op *operators.Torch) string {
	var list []string
	written := 'a'
	for _, a := range arguments(o, op) {
		kind, value := "Tensor", "None"
		switch {
		case a.kind == "tensor":
			if op.Modifies(a.Name) {
				kind += fmt.Sprintf("(%c!)", written)
				written++
			}
			if a.optional {
				kind += "?"
			}
		case a.kind == "dtype":
			kind = "ScalarType?"
		case a.kind == "extra" && a.value() < 0:
			kind = "bool?"
		case a.Type == operators.Real:
			kind, value = "float", number(a.value())
		case a.Type == operators.Flag:
			kind, value = "bool", "False"
			if a.value() != 0 {
				value = "True"
			}
		default:
			kind, value = "int", number(a.value())
			if a.Varies {
				kind = "SymInt"
			}
		}
		s := kind + " " + a.Name
		if a.hasDefault {
			s += "=" + value
		}
		list = append(list, s)
	}
	results := "()"
	switch len(op.Results) {
	case 0:
	case 1:
		results = "Tensor"
	default:
		results = "(Tensor " + strings.Join(op.Results, ", Tensor ") + ")"
	}
	return fmt.Sprintf("%s(%s) -> %s", op.Name, strings.Join(list, ", "), results)
}

// quoted lists strings in the syntax of a Python tuple, without parentheses.
func quoted(names ...string) string {
	var b strings.Builder
	for i, name := range names {
		if i > 0 {
			b.WriteString(" ")
		}
		fmt.Fprintf(&b, "%q,", name)
	}
	if len(names) > 1 {
		return strings.TrimSuffix(b.String(), ",")
	}
	return b.String()
}
