package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gander-go/gander/internal/operators"
)

// function is a C function of an operator, with borrowed or with owned tensors.
type function struct {
	operator
	owns bool
}

func borrowing(o operator) function { return function{o, false} }
func owning(o operator) function    { return function{o, true} }

// functions lists the C functions, in the order of gander.h.
func functions() (list []function) {
	for _, o := range all() {
		list = append(list, borrowing(o))
	}
	for _, o := range all() {
		list = append(list, owning(o))
	}
	return list
}

func (f function) name() string {
	if f.owns {
		return f.Owned
	}
	return "gander_" + f.full()
}

// structName and initializer name the function's option struct. It has one of its own, so that a first
// optional operand, whose type differs where tensors are owned, changes no signature.
func (f function) structName() string  { return f.name() + "_options" }
func (f function) initializer() string { return strings.ToUpper(f.structName()) + "_DEFAULTS" }

// cField is a field of an option struct, apart from its size and magic.
type cField struct{ kind, name, doc, value string }

// The bytes of a field, and of the fields size and magic together. Each field has as many, so there is no
// padding, whose bytes in old callers' structs would be garbage in the place of a new field.
const fieldSize = 8

// fields lists the fields of the option struct: the allocator, the optional operands, the dtypes of outputs
// that an owning function allocates, and the options. Later releases add theirs at the end.
func (f function) fields() []cField {
	type added struct {
		cField
		since int
	}
	list := []added{{cField{"const gander_allocator*", "allocator",
		"NULL: the driver's stream-ordered memory pool", "NULL"}, 0}}
	for _, p := range f.Operands {
		kind := "const DLTensor*"
		switch {
		case f.owns && p.Output:
			kind = "DLManagedTensorVersioned**"
		case f.owns:
			kind = "DLManagedTensorVersioned*"
		}
		doc := strings.Replace(describe(p, f.Operands[0].Name, "NULL"), "; or NULL", "", 1)
		if p.Optional {
			list = append(list, added{cField{kind, p.Name, doc, "NULL"}, p.Since})
		}
	}
	for _, p := range f.outputs() {
		if f.owns && p.Choice != "" {
			doc := "the dtype of " + p.Name + "; NULL: " + defaultDType(p, f.Operands[0].Name)
			list = append(list, added{cField{"const DLDataType*", p.Choice, doc, "NULL"}, p.Since})
		}
	}
	for _, o := range f.options() {
		kind, doc := "int64_t", optionDoc(o)
		switch o.Type {
		case operators.Real:
			kind = "double"
		case operators.Reduction:
			doc += ": a gander_reduction"
		case operators.Algorithm:
			doc += ": a gander_algorithm"
		}
		list = append(list, added{cField{kind, o.Name, doc, number(o.Default)}, o.Since})
	}
	slices.SortStableFunc(list, func(a, b added) int { return a.since - b.since })
	var fields []cField
	for _, a := range list {
		fields = append(fields, a.cField)
	}
	return fields
}

// size is the size of the struct in bytes.
func (f function) size() int { return fieldSize * (1 + len(f.fields())) }

// cStruct writes the option struct and its initializer. The fields of an owning function are documented where
// the borrowing one has them, apart from dtypes.
func cStruct(t *text, f function) {
	t.add("typedef struct {")
	t.add("  uint32_t size, magic;")
	values := []string{"sizeof(" + f.structName() + ")", "GANDER_OPTIONS_MAGIC"}
	for _, field := range f.fields() {
		values = append(values, field.value)
		line := fmt.Sprintf("  %s %s;", field.kind, field.name)
		switch comment := comment(field.doc, "  "); {
		case f.owns && field.kind != "const DLDataType*":
		case len(line)+1+len(field.doc)+6 <= 110:
			line += " /* " + field.doc + " */"
		default:
			t.add("%s", comment)
		}
		t.add("%s", line)
	}
	t.add("} %s;", f.structName())
	t.add("#define %s \\", f.initializer())
	lines := wrap("{"+strings.Join(values, ", ")+"}", "  ", 108)
	t.add("%s\n", strings.ReplaceAll(lines, "\n", " \\\n"))
}

// parameters lists the parameters of the C function.
func (f function) parameters() (list []string) {
	inputs, outputs := "const DLTensor* ", "const DLTensor* "
	if f.owns {
		inputs, outputs = "DLManagedTensorVersioned* ", "DLManagedTensorVersioned** "
	}
	var after []string
	for _, p := range f.Operands {
		switch {
		case p.Optional:
		case f.owns && p.Output:
			after = append(after, outputs+p.Name)
		case p.Output:
			list = append(list, outputs+p.Name)
		default:
			list = append(list, inputs+p.Name)
		}
	}
	list = append(list, "const "+f.structName()+"* options", "void* stream")
	return append(list, after...)
}
