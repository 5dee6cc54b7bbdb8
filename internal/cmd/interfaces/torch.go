package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// torchOperators generates python/gander/_torch/c/operators_gen.h. For each operator of PyTorch it has a
// table for kernels.c and a function that calls the C ABI.
func torchOperators() string {
	var t text
	t.add("/* %s */", generated)
	var list []string
	for _, o := range all() {
		for i := range o.Torch {
			op := &o.Torch[i]
			torchCall(&t, o, op)
			list = append(list, op.Name)
		}
	}
	t.add("\nstatic const Letter letters[] = {")
	for _, name := range letterNames() {
		l := operators.Letters[name]
		t.add("    [%q] = {%d, %d, %d, %d, %d},", name, l.From, l.To, l.Times, max(l.Over, 1), l.Plus)
	}
	t.add("};\n\nenum {")
	for _, name := range list {
		t.add("  OP_%s,", strings.ToUpper(name))
	}
	t.add("  OPERATOR_COUNT\n};")
	t.add("\nstatic const Operator operators[] = {")
	for _, o := range all() {
		for i := range o.Torch {
			torchDescription(&t, o, &o.Torch[i])
		}
	}
	t.add("};\n")
	for _, name := range list {
		t.add("KERNEL(%s, OP_%s)", name, strings.ToUpper(name))
	}
	t.add("\nstatic const Kernel kernels[] = {")
	for _, name := range list {
		t.add("    kernel_%s,", name)
	}
	t.add("};")
	return t.String()
}

// position is the index of an argument, or -1.
func position(list []argument, name string) int {
	return slices.IndexFunc(list, func(a argument) bool { return a.Name == name && a.kind != "extra" })
}

// operandAt is the index of an operand, or -1.
func (o operator) operandAt(name string) int {
	return slices.IndexFunc(o.Operands, func(p operators.Operand) bool { return p.Name == name })
}

// torchCall writes the function that fills in the options and calls the C ABI.
func torchCall(t *text, o operator, op *operators.Torch) {
	list := arguments(o, op)
	t.add("\nstatic int32_t call_%s(Call* call, const Operand* o, const Value* a) {", op.Name)
	t.add("  (void)a;")
	t.add("  %s options = {", borrowing(o).structName())
	t.add("      .size = sizeof options,")
	t.add("      .magic = GANDER_OPTIONS_MAGIC,")
	t.add("      .allocator = allocator(call),")
	for i, p := range o.Operands {
		if p.Optional {
			t.add("      .%s = optional(&o[%d]),", p.Name, i)
		}
	}
	for _, option := range o.options() {
		at := position(list, option.Name)
		value := fmt.Sprintf("(int64_t)a[%d]", at)
		switch {
		case at < 0:
			left, _ := fixed(op, option)
			value = number(left)
		case option.Type == operators.Real:
			value = fmt.Sprintf("as_double(a[%d])", at)
		case option.Type == operators.Flag:
			value = fmt.Sprintf("(a[%d] & 1) != 0", at)
		}
		t.add("      .%s = %s,", option.Name, value)
	}
	t.add("  };")
	var operands []string
	for i, p := range o.Operands {
		if !p.Optional {
			operands = append(operands, fmt.Sprintf("optional(&o[%d])", i))
		}
	}
	operands = append(operands, "&options", "call->stream")
	t.add("%s;\n}", cCall("  return lib.gander_"+o.full(), operands))
}

// torchDescription writes one row of the table for kernels.c.
func torchDescription(t *text, o operator, op *operators.Torch) {
	list := arguments(o, op)
	kinds := ""
	for _, a := range list {
		switch {
		case a.kind == "tensor" && a.optional:
			kinds += "O"
		case a.kind == "tensor":
			kinds += "T"
		case a.kind == "dtype":
			kinds += "d"
		case a.kind == "extra" && a.value() < 0:
			kinds += "E"
		case a.kind == "extra":
			kinds += "e"
		case a.Type == operators.Real:
			kinds += "f"
		case a.Type == operators.Flag:
			kinds += "b"
		default:
			kinds += "i"
		}
	}
	t.add("    {")
	t.add("        .name = %q,", op.Name)
	t.add("        .operator = %q,", o.full())
	t.add("        .call = call_%s,", op.Name)
	t.add("        .arguments = %q,", kinds)
	t.add("        .reduction = %d,", position(list, "reduction"))
	t.add("        .operand_count = %d,", len(o.Operands))
	t.add("        .operands = {")
	for _, p := range o.Operands {
		at, over, choice := position(list, p.Name), -1, position(list, p.Choice)
		if into := op.Into(p.Name); into != "" && into != p.Name {
			over = o.operandAt(into)
		}
		written := op.Modifies(p.Name)
		made := p.Output && slices.Contains(op.Results, p.Name)
		saved, with := savedResult(o, op, p.Name)
		each, all := madeSizes(o, op, p)
		t.add("            {%q, %s, {%q, %q}, .statistic = %t%s, .argument = %d, .over = %d, .choice = %d, "+
			".like = %d, .fits = %d, .written = %t, .made = %t, .index = %t, .demand = %d, .saved = %t, "+
			".saved_with = %d},",
			p.Name, cLayouts[operators.Shapes[p.Shape].Layout], each, all, operators.DTypes[p.DType].Statistic,
			cMade(p), at, over, choice, o.operandAt(p.Like), o.operandAt(p.Fits), written, made,
			p.DType == operators.Index, position(list, demand(p.Name)), saved, position(list, with))
	}
	t.add("        },")
	t.add("        .result_count = %d,", len(op.Results))
	var results []string
	for _, name := range op.Results {
		results = append(results, fmt.Sprint(o.operandAt(name)))
	}
	if len(results) > 0 {
		t.add("        .results = {%s},", strings.Join(results, ", "))
	}
	t.add("        .fast = %t,", len(op.Writes) == 0 || len(op.Results) == 0)
	t.add("        .has_gradient = %t,", op.Backward != "")
	if op.Backward != "" {
		torchSaved(t, o, op, list)
	}
	t.add("    },")
}

var cLayouts = map[operators.Layout]string{
	operators.InRows: "IN_ROWS", operators.Contiguous: "CONTIGUOUS", operators.Regular: "REGULAR",
	operators.Parts: "CONTIGUOUS", operators.Broadcasts: "BROADCASTS",
	operators.InHeads: "IN_HEADS", operators.Tables: "TABLES",
}

// madeSizes returns the forms of a new tensor, without and with a reduction. They agree if that is fixed.
func madeSizes(o operator, op *operators.Torch, p operators.Operand) (each, all string) {
	rule := operators.Shapes[p.Shape]
	switch {
	case !p.Output:
		return "", ""
	case op.Packed && rule.Packed != "":
		return rule.Packed, rule.Packed
	}
	if reduction := o.option("reduction"); reduction != nil {
		if value, fixed := fixed(op, *reduction); fixed {
			made := rule.Made(value != 0)
			return made, made
		}
	}
	return rule.Made(false), rule.Made(true)
}

// torchSaved writes what autograd needs: the differentiable arguments, and the tensors that backward reads.
func torchSaved(t *text, o operator, op *operators.Torch, list []argument) {
	inputs := make([]string, len(list))
	for i := range list {
		inputs[i] = "false"
	}
	backward, in := findTorch(op.Backward), operatorOf(op.Backward)
	for _, result := range backward.Results {
		if at := position(list, in.Find(result).Gradient); at >= 0 {
			inputs[at] = "true"
		}
	}
	t.add("        .differentiable = {%s},", strings.Join(inputs, ", "))
	if slices.ContainsFunc(arguments(in, backward), func(a argument) bool { return a.kind == "dtype" }) {
		t.add("        .typed = true,")
	}
	var saved []string
	for _, s := range savedBy(op) {
		from := slices.Index(op.Results, s.result)
		saved = append(saved, fmt.Sprintf("{%d, %d}", from, position(list, s.argument)))
	}
	t.add("        .saved_count = %d,", len(saved))
	t.add("        .saved = {%s},", strings.Join(saved, ", "))
}

// saved is a tensor that autograd saves for backward: a result, or an argument of the operator. If it is
// both, the result is saved if it was computed, else the argument.
type saved struct{ result, argument string }

// savedBy lists what autograd saves for backward.
func savedBy(op *operators.Torch) (list []saved) {
	in := operatorOf(op.Backward)
	for _, a := range arguments(in, findTorch(op.Backward)) {
		p := in.Find(a.Name)
		if a.kind != "tensor" || p == nil || p.Gradient != "" {
			continue
		}
		s := saved{argument: a.Name}
		if slices.Contains(op.Results, p.Stored) {
			s.result = p.Stored
		} else if slices.Contains(op.Results, a.Name) {
			s = saved{result: a.Name}
		}
		list = append(list, s)
	}
	return list
}

// savedResult tells whether autograd demands a result for backward: always, or with an argument. A result
// that can take an argument's place is needed if the operand that it is like is given.
func savedResult(o operator, op *operators.Torch, result string) (saved bool, with string) {
	if op.Backward == "" {
		return false, ""
	}
	for _, s := range savedBy(op) {
		if s.result == result && s.argument != "" {
			return true, o.Find(result).Like
		}
		if s.result == result {
			return true, ""
		}
	}
	return false, ""
}

func findTorch(name string) *operators.Torch {
	o := operatorOf(name)
	return &o.Torch[slices.IndexFunc(o.Torch, func(op operators.Torch) bool { return op.Name == name })]
}

func operatorOf(torch string) operator {
	for _, o := range all() {
		if slices.ContainsFunc(o.Torch, func(op operators.Torch) bool { return op.Name == torch }) {
			return o
		}
	}
	panic("no operator of PyTorch has the name " + torch)
}

// cMade is the dtype of an output that follows from its rule alone.
func cMade(p operators.Operand) string {
	switch made := operators.DTypes[p.DType].Made; made {
	case "":
		return ""
	case "Bool":
		return ", .dtype = {kDLBool, 8, 1}"
	case "Int64":
		return ", .dtype = {kDLInt, 64, 1}"
	default:
		panic(made + " has no name in DLPack here")
	}
}
