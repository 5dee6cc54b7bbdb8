package main

import (
	"fmt"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// jaxOperators generates python/gander/jax/c/operators_gen.h: for each operator a row of handlers.c's table,
// and the function that calls the C ABI.
func jaxOperators() string {
	var t text
	t.add("/* %s */", generated)
	for _, o := range all() {
		jaxCall(&t, o)
	}
	t.add("\nstatic const Operator operators[] = {")
	for _, o := range all() {
		var operands, options []string
		for _, p := range o.Operands {
			operands = append(operands, p.Name)
		}
		for _, option := range o.options() {
			value := ".integer = " + number(option.Default)
			if option.Type == operators.Real {
				value = ".real = " + number(option.Default)
			}
			options = append(options, fmt.Sprintf("{%q, %t, {%s}}", option.Name, option.Type == operators.Real, value))
		}
		t.add("    {")
		t.add("        .name = %q,", o.full())
		t.add("        .call = call_%s,", o.full())
		t.add("        .operand_count = %d,", len(operands))
		t.add("        .operands = {%s},", strings.TrimSuffix(quoted(operands...), ","))
		t.add("        .option_count = %d,", len(options))
		t.add("        .options = {%s},", strings.Join(options, ", "))
		t.add("    },")
	}
	t.add("};\n")
	for i, o := range all() {
		t.add("HANDLERS(%s, %d)", o.full(), i)
	}
	t.add("\nstatic Handler* const handlers[][2] = {")
	for _, o := range all() {
		t.add("    {%s_cpu, %s_cuda},", o.full(), o.full())
	}
	t.add("};")
	return t.String()
}

// jaxCall writes the function that fills in the options and calls the C ABI.
func jaxCall(t *text, o operator) {
	t.add("\nstatic int32_t call_%s(", o.full())
	t.add("    const DLTensor* const* o, const Value* v, const gander_allocator* allocator, void* stream) {")
	t.add("  %s options = {", borrowing(o).structName())
	t.add("      .size = sizeof options,")
	t.add("      .magic = GANDER_OPTIONS_MAGIC,")
	t.add("      .allocator = allocator,")
	var operands []string
	for i, p := range o.Operands {
		if p.Optional {
			t.add("      .%s = o[%d],", p.Name, i)
		} else {
			operands = append(operands, fmt.Sprintf("o[%d]", i))
		}
	}
	for i, option := range o.options() {
		field := "integer"
		if option.Type == operators.Real {
			field = "real"
		}
		t.add("      .%s = v[%d].%s,", option.Name, i, field)
	}
	t.add("  };")
	if len(o.options()) == 0 {
		t.add("  (void)v;")
	}
	operands = append(operands, "&options", "stream")
	t.add("%s;\n}", cCall("  return lib.gander_"+o.full(), operands))
}
