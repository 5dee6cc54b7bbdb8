package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// testFunctions generates tests/c/functions_gen.h: a function for every operator, all with the same
// signature.
func testFunctions() string {
	var t text
	var rows []string
	operands, outputs := 0, 0
	for _, o := range all() {
		for _, f := range []function{borrowing(o), owning(o)} {
			rows = append(rows, testFunction(&t, f))
		}
		operands, outputs = max(operands, len(o.Operands)), max(outputs, len(o.outputs()))
	}
	t.add("\nstatic const function functions[] = {\n%s\n};", strings.Join(rows, "\n"))
	head := fmt.Sprintf("/* %s */\nenum { MOST_OPERANDS = %d, MOST_OUTPUTS = %d };\nTYPES_OF_FUNCTIONS\n",
		generated, operands, outputs)
	return head + t.String()
}

// testFunction writes option structs with values for tests, and a function that calls a C function. It
// returns the row of the table for it.
func testFunction(t *text, f function) string {
	kind, name, wrong := f.structName(), strings.TrimPrefix(f.name(), "gander_"), "NULL"
	for _, option := range f.options() {
		if wrong == "NULL" && (option.Type == operators.Algorithm || option.Type == operators.Reduction) {
			wrong = "&bad_" + name
			testOptions(t, kind, "bad_"+name, f.options(), func(o operators.Option) float64 {
				if o.Name == option.Name {
					return 99
				}
				return o.Default
			})
		}
	}
	// Every flag, and the first reduction that is not the default.
	testOptions(t, kind, "set_"+name, f.options(), func(o operators.Option) float64 {
		if o.Type == operators.Flag || o.Type == operators.Reduction {
			return 1
		}
		return o.Default
	})
	t.add("\nstatic inline int32_t call_%s(const arguments* a) {", name)
	list, slots := f.Operands, []operators.Operand(nil)
	if f.owns {
		list, slots = f.inputs(), f.outputs()
	}
	var arguments, after []string
	options, where := "a->options", ""
	place := func(p operators.Operand, value string) {
		switch {
		case p.Optional && options != "&o":
			options = "&o"
			t.add("  %s o = %s;", kind, f.initializer())
			t.add("  if (a->options) o = *(const %s*)a->options;", kind)
			fallthrough
		case p.Optional:
			t.add("  o.%s = %s;", p.Name, value)
			where += "o"
		case p.Output && f.owns:
			after = append(after, value)
			where += "p"
		default:
			arguments = append(arguments, value)
			where += "p"
		}
	}
	for i, p := range list {
		value := fmt.Sprintf("borrowed(a, %d)", i)
		if f.owns {
			value = fmt.Sprintf("a->operands[%d]", i)
		}
		place(p, value)
	}
	for i, p := range slots {
		place(p, fmt.Sprintf("a->outputs[%d]", i))
	}
	arguments = append(append(arguments, options, "a->stream"), after...)
	t.add("%s;\n}", cCall("  return "+f.name(), arguments))
	var names []string
	for _, p := range list {
		names = append(names, strconv.Quote(p.Name))
	}
	more := fmt.Sprintf("%s, &set_%s, {%s}},", wrong, name, strings.Join(names, ", "))
	operands := letters(list, f.Operands)
	row := fmt.Sprintf("    {%q, call_%s, %q, %q, %d,\n", f.name(), name, operands, where, len(slots))
	return row + wrap(more, "     ", 110)
}

// testOptions writes an option struct with these values.
func testOptions(t *text, kind, name string, list []operators.Option, value func(operators.Option) float64) {
	fields := fmt.Sprintf(".size = sizeof %s, .magic = GANDER_OPTIONS_MAGIC", name)
	for _, option := range list {
		if v := value(option); v != 0 {
			fields += fmt.Sprintf(", .%s = %s", option.Name, number(v))
		}
	}
	t.add("\nstatic const %s %s = {\n%s", kind, name, wrap(fields+"};", "    ", 110))
}

// testLayouts generates tests/c/layout_gen.h: where C and C++ must place the fields of the option structs.
func testLayouts() string {
	var structs, fields []string
	for _, f := range functions() {
		structs = append(structs, fmt.Sprintf("  S(%s, %d, %s)", f.structName(), f.size(), f.initializer()))
		fields = append(fields, fmt.Sprintf("  F(%[1]s, size, 0) F(%[1]s, magic, 4)", f.structName()))
		for i, field := range f.fields() {
			fields = append(fields, fmt.Sprintf("  F(%s, %s, %d)", f.structName(), field.name, fieldSize*(i+1)))
		}
	}
	var t text
	t.add("/* %s */\n", generated)
	t.add("#define OPTION_STRUCTS(S) \\\n%s\n", strings.Join(structs, " \\\n"))
	t.add("#define OPTION_FIELDS(F) \\\n%s", strings.Join(fields, " \\\n"))
	return t.String()
}

// indexTypes are the rules that int32 follows.
var indexTypes = []operators.DType{operators.Index, operators.RowMask}

// letters encodes the operands of a valid call with the default options. all has those of the operator.
func letters(list, all []operators.Operand) string {
	var b strings.Builder
	halved := slices.ContainsFunc(all, func(p operators.Operand) bool { return p.Shape == operators.HalfRows })
	for _, p := range list {
		rule, letter := operators.Shapes[p.Shape], byte('r') // a number for each row
		sizes, indices := rule.Forms[0].Sizes, slices.Contains(indexTypes, p.DType)
		switch {
		case rule.Layout == operators.Broadcasts:
			letter = 'b'
		case rule.Layout == operators.InHeads:
			letter = 'q'
		case rule.Layout == operators.Tables:
			letter = 'w'
		case p.Shape == operators.Sequences:
			letter = 'i'
		case p.Shape == operators.Boundaries:
			letter = 'c'
		case p.Shape == operators.HalfRows:
			letter = 'h'
		case p.Shape == operators.SliceStatistics:
			letter = 'P'
		case p.Shape == operators.ColumnStates:
			letter = 'G'
		case sizes == "N" && p.DType == operators.Truth:
			letter = 'O'
		case sizes == "N" && p.DType == operators.Class:
			letter = 'L'
		case rule.Layout == operators.InRows && halved:
			letter = 'e' // an even number of columns
		case rule.Layout == operators.InRows:
			letter = 'm'
		case p.Shape == operators.RowStates:
			letter = 'g'
		case p.DType == operators.Truth:
			letter = 'o'
		case p.DType == operators.Class:
			letter = 'l'
		case sizes == "N" && indices:
			letter = 'u'
		case sizes == "N":
			letter = 'n'
		case indices:
			letter = 't'
		case len(rule.Forms) > 1 && rule.Layout == operators.Regular:
			letter = 's'
		case sizes == "" && p.Optional && !p.Output: // only used with another reduction
			letter = '-'
		case sizes == "":
			letter = '1'
		}
		b.WriteByte(letter)
	}
	return b.String()
}
