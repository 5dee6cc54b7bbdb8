package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// testFunctions generates tests/c/functions_gen.h: a function for every operator, all with the same
// signature.
func testFunctions() string {
	var t text
	t.add("/* %s */\n", generated)
	for _, g := range operators.Table {
		for _, option := range g.Options {
			if option.Type == operators.Algorithm || option.Type == operators.Reduction {
				t.add("static const gander_%[1]s_options bad_%[1]s = {\n    .size = sizeof bad_%[1]s, .%[2]s = 99};",
					g.Name, option.Name)
				break
			}
		}
	}
	for _, g := range operators.Table {
		fields := fmt.Sprintf(".size = sizeof set_%s%s};", g.Name, setOptions(g))
		t.add("static const gander_%[1]s_options set_%[1]s = {\n%[2]s", g.Name, wrap(fields, "    ", 110))
	}
	var rows []string
	operands, outputs := 0, 0
	for _, o := range all() {
		wrong := "NULL"
		for _, option := range o.group.Options {
			if option.Type == operators.Algorithm || option.Type == operators.Reduction {
				wrong = "&bad_" + o.group.Name
			}
		}
		call := func(name, function string, arguments []string) {
			t.add("\nstatic inline int32_t %s(const arguments* a) {\n%s;\n}", name,
				cCall("  return "+function, arguments))
		}
		var borrowed, owned []string
		for i := range o.Operands {
			borrowed = append(borrowed, fmt.Sprintf("borrowed(a, %d)", i))
		}
		call("call_"+o.full(), "gander_"+o.full(), append(borrowed, "a->options", "a->stream"))
		for i := range o.inputs() {
			owned = append(owned, fmt.Sprintf("a->operands[%d]", i))
		}
		for _, p := range o.outputs() {
			if p.Choice != "" {
				owned = append(owned, "(DLDataType){0, 0, 0}")
			}
		}
		owned = append(owned, "a->options", "a->stream")
		for i := range o.outputs() {
			owned = append(owned, fmt.Sprintf("a->outputs[%d]", i))
		}
		call("call_"+strings.TrimPrefix(o.Owned, "gander_")+"_owned", o.Owned, owned)
		rows = append(rows,
			testRow("gander_"+o.full(), "call_"+o.full(), o.Operands, 0, wrong, o.group.Name),
			testRow(o.Owned, "call_"+strings.TrimPrefix(o.Owned, "gander_")+"_owned", o.inputs(), len(o.outputs()),
				wrong, o.group.Name))
		operands, outputs = max(operands, len(o.Operands)), max(outputs, len(o.outputs()))
	}
	t.add("\nstatic const function functions[] = {\n%s\n};", strings.Join(rows, "\n"))
	head := fmt.Sprintf("*/\nenum { MOST_OPERANDS = %d, MOST_OUTPUTS = %d };\nTYPES_OF_FUNCTIONS\n",
		operands, outputs)
	return strings.Replace(t.String(), "*/\n", head, 1)
}

// setOptions sets every option that is a flag, and the first reduction that is not the default.
func setOptions(g operators.Group) string {
	var b strings.Builder
	for _, option := range g.Options {
		switch {
		case option.Type == operators.Flag, option.Type == operators.Reduction:
			fmt.Fprintf(&b, ", .%s = 1", option.Name)
		case option.Default != 0:
			fmt.Fprintf(&b, ", .%s = %s", option.Name, number(option.Default))
		}
	}
	return b.String()
}

// testRow is a row of the table of functions.
func testRow(name, call string, list []operators.Operand, outputs int, wrong, group string) string {
	var s []string
	for _, p := range list {
		s = append(s, strconv.Quote(p.Name))
	}
	more := fmt.Sprintf("&set_%s, {%s}},", group, strings.Join(s, ", "))
	return fmt.Sprintf("    {%q, %s, %q, %d, %s,\n%s", name, call, letters(list), outputs, wrong,
		wrap(more, "     ", 110))
}

// letters encodes the operands of a valid call with the default options.
func letters(list []operators.Operand) string {
	var b strings.Builder
	for _, p := range list {
		rule, letter := operators.Shapes[p.Shape], byte('r') // a number for each row
		sizes, indices := rule.Forms[0].Sizes, p.DType == operators.Index
		switch {
		case rule.Layout == operators.Broadcasts:
			letter = 'b'
		case sizes == "LN":
			letter = 'm'
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
