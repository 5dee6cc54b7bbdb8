package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// fill replaces the parts of gander.h between "/* generated: NAME */" and "/* end of what is generated */".
func fill(header string) (string, error) {
	parts := map[string]func() string{
		"statuses": cStatuses, "choices": cChoices, "borrowed": cBorrowed, "owned": cOwned,
	}
	region := regexp.MustCompile(`(?s)(/\* generated: (\w+)[^\n]*\*/\n).*?(/\* end of what is generated \*/)`)
	found := 0
	filled := region.ReplaceAllStringFunc(header, func(match string) string {
		groups := region.FindStringSubmatch(match)
		part := parts[groups[2]]
		if part == nil {
			return match
		}
		found++
		return groups[1] + part() + groups[3]
	})
	if found != len(parts) {
		return "", fmt.Errorf("capi/gander.h has %d of the %d generated regions", found, len(parts))
	}
	return filled, nil
}

func cStatuses() string {
	var t text
	t.add("typedef enum {")
	for i, c := range operators.Statuses {
		comma := ","
		if i == len(operators.Statuses)-1 {
			comma = ""
		}
		t.add("  %-31s /* %s */", fmt.Sprintf("%s = %d%s", cStatus(c), i, comma), c.Doc)
	}
	t.add("} gander_status;")
	return t.String()
}

func cStatus(c operators.Constant) string {
	if c.Name == "OK" {
		return "GANDER_OK"
	}
	return "GANDER_ERROR_" + strings.ToUpper(c.Name)
}

func cChoices() string {
	var t text
	list := func(prefix, name string, constants []operators.Constant) {
		t.add("typedef enum {")
		for i, c := range constants {
			s := fmt.Sprintf("  %s%s = %d", prefix, strings.ToUpper(c.Name), i)
			if i < len(constants)-1 {
				s += ","
			}
			if c.Doc != "" {
				s += " /* " + c.Doc + " */"
			}
			t.add("%s", s)
		}
		t.add("} %s;", name)
	}
	list("GANDER_ALGORITHM_", "gander_algorithm", operators.Algorithms)
	t.add("#define GANDER_ALGORITHM_IF_SERVED %#x\n", operators.IfServed)
	list("GANDER_REDUCTION_", "gander_reduction", operators.Reductions)
	return t.String()
}

// comment formats words as a C comment.
func comment(words, indent string) string {
	s := wrap(words, indent+" * ", 107)
	return indent + "/* " + strings.TrimPrefix(s, indent+" * ") + " */"
}

// declaration is the declaration of a C function, without a semicolon.
func declaration(name string, parameters []string) string {
	head := "int32_t " + name + "("
	lines := filled(head, strings.Repeat(" ", len(head)), parameters)
	if slices.ContainsFunc(lines, func(line string) bool { return len(line) > 110 }) {
		lines = append([]string{head}, filled("    ", "    ", parameters)...)
	}
	return strings.Join(lines, "\n")
}

// filled are lines of up to 110 columns with the parameters, after head.
func filled(head, indent string, parameters []string) (lines []string) {
	line := head
	for i, p := range parameters {
		if i < len(parameters)-1 {
			p += ","
		} else {
			p += ")"
		}
		if len(line)+1+len(p) > 110 {
			lines = append(lines, line)
			line = indent + p
			continue
		}
		if line != head {
			line += " "
		}
		line += p
	}
	return append(lines, line)
}

func cBorrowed() string {
	var t text
	for i, o := range all() {
		if i > 0 {
			t.add("")
		}
		f := borrowing(o)
		cStruct(&t, f)
		words := []string{wrap(o.Doc, " * ", 107)}
		for _, p := range o.Operands {
			if !p.Optional {
				words = append(words, wrap(p.Name+": "+describe(p, o.Operands[0].Name, "NULL")+".", " *   ", 107))
			}
		}
		t.add("/*%s */", strings.TrimPrefix(strings.Join(words, "\n"), " *"))
		t.add("%s;", declaration(f.name(), f.parameters()))
	}
	return t.String()
}

func cOwned() string {
	var t text
	for i, o := range all() {
		if i > 0 {
			t.add("")
		}
		f := owning(o)
		cStruct(&t, f)
		words := "gander_" + o.full() + " with owned tensors."
		for _, p := range o.outputs() {
			if p.Read != "" {
				words += fmt.Sprintf(" %s is refused: it would read %s.", p.Read, p.Name)
			}
			if operators.Shapes[p.Shape].Packed != "" {
				words += fmt.Sprintf(" %s has M elements.", p.Name)
			}
		}
		t.add("%s", comment(words, ""))
		t.add("%s;", declaration(f.name(), f.parameters()))
	}
	return t.String()
}

// defaultDType says which dtype an output has if the caller does not choose one.
func defaultDType(p operators.Operand, first string) string {
	switch {
	case operators.DTypes[p.DType].Statistic && p.Like != "":
		return p.Like + "'s, without it float32 (float64 if " + first + " is)"
	case p.Like != "":
		return p.Like + "'s, without it " + first + "'s"
	}
	return first + "'s"
}

// versionScript exports the functions that gander.h declares.
func versionScript(header string) string {
	var names []string
	function := regexp.MustCompile(`(?m)^[a-z].*[ *](gander_[a-z0-9_]+)\(`)
	for _, m := range function.FindAllStringSubmatch(header, -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	var t text
	t.add("/* The exports of libgander: the functions of gander.h. */\n/* %s */", generated)
	t.add("{\n  global:")
	for _, name := range names {
		t.add("    %s;", name)
	}
	t.add("  local:\n    *;\n};")
	return t.String()
}

// libraryFunctions generates python/gander/_native/c/functions_gen.h: the operators' functions, for libraries
// that look them up in libgander.
func libraryFunctions() string {
	var functions []string
	for _, o := range all() {
		functions = append(functions, "  F(gander_"+o.full()+")")
	}
	var t text
	t.add("/* %s */", generated)
	t.add("#define OPERATOR_FUNCTIONS(F) \\\n%s", strings.Join(functions, " \\\n"))
	return t.String()
}

// cExports generates capi/exports_gen.c: the C functions, which refuse forked children and call Go.
func cExports() string {
	var t text
	t.add("//go:build cgo\n\n/* %s */", generated)
	t.add("#include \"internal.h\"\n#include \"_cgo_export.h\"")
	for _, o := range all() {
		cExport(&t, borrowing(o))
		cExport(&t, owning(o))
	}
	return t.String()
}

// cExport writes a C function. Go gets an option struct that has all fields.
func cExport(t *text, f function) {
	t.add("\n%s {", declaration(f.name(), f.parameters()))
	if !f.owns {
		t.add("  GANDER_ENTER();")
	}
	t.add("  GANDER_OPTIONS(%s, %s);", f.structName(), f.initializer())
	var arguments, after, inputs, outputs []string
	for _, p := range f.Operands {
		value := p.Name
		if p.Optional {
			value = "o->" + p.Name
		}
		switch {
		case f.owns && p.Output:
			outputs = append(outputs, value)
			if !p.Optional {
				after = append(after, value)
			}
			continue
		case f.owns:
			inputs = append(inputs, fmt.Sprintf("{%q, %s}", p.Name, value))
		}
		if !p.Optional {
			arguments = append(arguments, "(void*)"+value)
		}
	}
	arguments = append(append(arguments, "(void*)o", "(uintptr_t)stream"), after...)
	if !f.owns {
		t.add("  if (status) return status;")
		t.add("%s;\n}", cCall("  return "+goExport(f.operator), arguments))
		return
	}
	line := fmt.Sprintf("  const gander_input inputs[] = {%s};", strings.Join(inputs, ", "))
	if len(line) > 110 {
		line = fmt.Sprintf("  const gander_input inputs[] = {\n      %s};", strings.Join(inputs, ",\n      "))
	}
	t.add("%s", line)
	t.add("  DLManagedTensorVersioned** const outputs[] = {%s};", strings.Join(outputs, ", "))
	t.add("  status = gander_begin(__func__, status, (const void*)o, inputs, %d, outputs, %d);", len(inputs),
		len(outputs))
	t.add("  if (status == GANDER_OK) {")
	t.add("%s;\n  }", cCall("    status = "+goExport(f.operator)+"Owned", arguments))
	t.add("  return gander_end(inputs, %d, status);\n}", len(inputs))
}

func goExport(o operator) string { return "gander" + o.goName() }

// cCall is a function call, on several lines if it is long.
func cCall(head string, arguments []string) string {
	indent := strings.Repeat(" ", len(head)-len(strings.TrimLeft(head, " "))+4)
	s := wrap(strings.Join(arguments, ", "), indent, 110)
	one := head + "(" + strings.Join(arguments, ", ") + ")"
	if len(one) <= 108 {
		return one
	}
	return head + "(\n" + s + ")"
}

// goExports generates capi/exports_gen.go, which converts arguments and calls package ops.
func goExports() string {
	var t text
	t.add("%s\n", goGenerated)
	t.add("package main\n\n// #include \"internal.h\"\nimport \"C\"\n")
	t.add("import (\n\"unsafe\"\n\n%q\n%q\n%q\n)\n", "github.com/gander-go/gander/dlpack",
		"github.com/gander-go/gander/kernels", "github.com/gander-go/gander/ops")
	t.add("var _ kernels.Reduction // the import may otherwise be unused")
	for _, o := range all() {
		goBorrowed(&t, o)
		goOwned(&t, o)
	}
	return t.String()
}

// opsCall writes the struct of package ops and its Run. operand returns the expression for an operand.
func opsCall(t *text, o operator, operand func(p operators.Operand) string) {
	t.add("ops.%s{", o.goName())
	for _, p := range o.Operands {
		t.add("%s: %s,", field(p.Name), operand(p))
	}
	for _, option := range o.options() {
		value := fmt.Sprintf("%s(o.%s)", goOptionTypes[option.Type], option.Name)
		switch option.Type {
		case operators.Flag:
			value = fmt.Sprintf("o.%s != 0", option.Name)
		case operators.Reduction:
			value = fmt.Sprintf("kernels.Reduction(saturated(o.%s))", option.Name)
		case operators.Algorithm:
			value = fmt.Sprintf("ops.Algorithm(saturated(o.%s))", option.Name)
		}
		if option.Default != 0 {
			value = "ops.Some(" + value + ")"
		}
		t.add("%s: %s,", camel(option.Name), value)
	}
	t.add("}.Run(&c)")
}

// required lists the parameters for those operands that are no fields of the option struct.
func required(list []operators.Operand) string {
	var s []string
	for _, p := range list {
		if !p.Optional {
			s = append(s, goParameter(p.Name)+", ")
		}
	}
	return strings.Join(s, "")
}

// given is a pointer that the caller passed: a parameter, or a field of the option struct.
func given(p operators.Operand) string {
	if p.Optional {
		return "unsafe.Pointer(o." + p.Name + ")"
	}
	return goParameter(p.Name)
}

// goParameter is the name of an operand or argument in Go: dloss, outDtype.
func goParameter(name string) string {
	if !strings.Contains(name, "_") {
		return name
	}
	return unexported(camel(name))
}

// goHead is the head of a Go function, on several lines if it is long. Only a comma can end a line.
func goHead(name, parameters, result string) string {
	head, width := "func "+name+"(", len("func "+name+"(")
	list := strings.SplitAfter(parameters, ", ")
	for i, p := range list {
		if i == len(list)-1 {
			p += ") " + result + " {"
		}
		if width+len(p) > 107 {
			head, width = strings.TrimSuffix(head, " ")+"\n", 0
		}
		head, width = head+p, width+len(p)
	}
	return head
}

func goBorrowed(t *text, o operator) {
	t.add("\n//export %s", goExport(o))
	parameters := required(o.Operands) + "options unsafe.Pointer, stream uintptr"
	t.add("%s", goHead(goExport(o), parameters, "(status int32)"))
	t.add("defer recovered(&status)")
	t.add("o := (*C.%s)(options)", borrowing(o).structName())
	t.add("c := call(stream, o.allocator)")
	t.WriteString("err := ")
	opsCall(t, o, func(p operators.Operand) string { return "tensor(" + given(p) + ")" })
	t.add("return report(err)\n}")
}

func goOwned(t *text, o operator) {
	first, name := o.Operands[0], strings.TrimPrefix(o.Owned, "gander_")
	parameters := required(o.inputs()) + "options unsafe.Pointer, stream uintptr"
	if outputs := required(o.outputs()); outputs != "" {
		parameters += ", " + strings.TrimSuffix(outputs, ", ") + " unsafe.Pointer"
	}
	t.add("\n//export %sOwned", goExport(o))
	t.add("%s", goHead(goExport(o)+"Owned", parameters, "int32"))
	t.add("return run(func() error {")
	t.add("o := (*C.%s)(options)", owning(o).structName())
	check := "CheckRows"
	if operators.Shapes[first.Shape].Layout == operators.InHeads {
		check = "CheckHeads"
	}
	t.add("made, err := outputsFor(ops.%s, %q, %q, owned(%s), stream)", check, name, first.Name, given(first))
	t.add("if err != nil {\nreturn err\n}")
	t.add("defer made.discard()")
	for _, p := range o.outputs() {
		slot := given(p)
		if p.Read != "" {
			t.add("if o.%s != 0 {", p.Read)
			t.add("return refuse(ops.StatusOption, %q+\n%q)\n}",
				fmt.Sprintf("%s: %s is set, expected 0: ", name, p.Read),
				fmt.Sprintf("it reads %s, which an owning call allocates; use gander_%s", p.Name, o.full()))
		}
		if p.Needs != "" {
			t.add("if %s != nil && %s == nil {", slot, given(*o.Find(p.Needs)))
			t.add("return refuse(ops.StatusOption, %q+\n%q)\n}",
				fmt.Sprintf("%s: %s is requested without a %s, expected NULL; ", name, p.Name, p.Needs),
				fmt.Sprintf("pass the %s or leave %s NULL", p.Needs, p.Name))
		}
		method := "required"
		if p.Optional {
			method = "optional"
		}
		rule := operators.Shapes[p.Shape]
		shape := fmt.Sprintf("made.shape(%q)", rule.Made(false))
		switch {
		case p.Fits != "":
			forms := []string{"owned(" + given(*o.Find(p.Fits)) + ")"}
			for _, f := range rule.Forms {
				forms = append(forms, strconv.Quote(f.Sizes))
			}
			shape = fmt.Sprintf("made.shapeOf(%s)", strings.Join(forms, ", "))
		case rule.Made(false) != rule.Made(true):
			shape = fmt.Sprintf("made.shape(reduced(saturated(o.reduction), %q, %q))", rule.Made(false),
				rule.Made(true))
		}
		dtype := "made.dtype()"
		switch made := operators.DTypes[p.DType].Made; {
		case made != "":
			dtype = "dlpack." + made
		case operators.DTypes[p.DType].Statistic:
			dtype = "made.statistic()"
		}
		if p.Like != "" && p.Like != first.Name {
			dtype = fmt.Sprintf("made.dtypeOf(owned(%s), %s)", given(*o.Find(p.Like)), dtype)
		}
		if p.Choice != "" {
			dtype = fmt.Sprintf("requestedDType(unsafe.Pointer(o.%s), %s)", p.Choice, dtype)
		}
		t.add("t%s := made.%s(%q, %s, %s, %s)", goParameter(p.Name), method, p.Name, slot, dtype, shape)
	}
	t.add("if made.err != nil {\nreturn made.err\n}")
	t.add("c := call(stream, o.allocator)")
	t.WriteString("err = ")
	opsCall(t, o, func(p operators.Operand) string {
		if p.Output {
			return "t" + goParameter(p.Name)
		}
		return "owned(" + given(p) + ")"
	})
	t.add("if err != nil {\nreturn err\n}\nreturn made.deliver()\n})\n}")
}
