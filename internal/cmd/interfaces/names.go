package main

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/gander-go/gander/internal/operators"
)

// operator is an operator with its group.
type operator struct {
	*operators.Operator
	group *operators.Group
}

// all lists the operators.
func all() (list []operator) {
	for i := range operators.Table {
		g := &operators.Table[i]
		for j := range g.Operators {
			list = append(list, operator{&g.Operators[j], g})
		}
	}
	return list
}

// full is the operator's full name: "rmsnorm_forward".
func (o operator) full() string { return o.group.Name + "_" + o.Name }

// goName is the name of its struct in Go: "RMSNormForward".
func (o operator) goName() string { return o.group.Type + camel(o.Name) }

// options lists its options.
func (o operator) options() []operators.Option { return o.group.OptionsOf(o.Name) }

// option finds one of its options, or returns nil.
func (o operator) option(name string) *operators.Option {
	for _, option := range o.options() {
		if option.Name == name {
			return &option
		}
	}
	return nil
}

// inputs and outputs are its operands by direction, in order.
func (o operator) inputs() []operators.Operand  { return o.filter(false) }
func (o operator) outputs() []operators.Operand { return o.filter(true) }

func (o operator) filter(output bool) (list []operators.Operand) {
	for _, p := range o.Operands {
		if p.Output == output {
			list = append(list, p)
		}
	}
	return list
}

// goWords are names whose Go spelling differs from what camel would return.
var goWords = map[string]string{
	"x": "X", "y": "Y", "dx": "DX", "dy": "DY", "dw": "DW", "lse": "LSE", "dloss": "DLoss",
	"dout": "DOut", "dgate": "DGate", "dup": "DUp", "dlse": "DLSE", "db": "DB", "dresidual": "DResidual",
	"dresidual_out": "DResidualOut", "dq": "DQ", "dk": "DK", "dq_out": "DQOut", "dk_out": "DKOut",
	"dq_weight": "DQWeight", "dk_weight": "DKWeight", "dlog_prob": "DLogProb",
	"dentropy": "DEntropy", "dlogits": "DLogits",
}

// camel turns one_pass into OnePass, and dx into DX.
func camel(name string) string {
	if word, ok := goWords[name]; ok {
		return word
	}
	var b strings.Builder
	for _, word := range strings.Split(name, "_") {
		r := []rune(word)
		b.WriteRune(unicode.ToUpper(r[0]))
		b.WriteString(string(r[1:]))
	}
	return b.String()
}

// unexported turns RMSNormForward into rmsNormForward.
func unexported(name string) string {
	r := []rune(name)
	for i := range r {
		if i > 0 && i+1 < len(r) && unicode.IsLower(r[i+1]) {
			break
		}
		r[i] = unicode.ToLower(r[i])
	}
	return string(r)
}

// number formats a default value in a syntax that all languages share.
func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// argument is an argument of an operator of PyTorch.
type argument struct {
	operators.Option        // Name and, of a scalar, Type and default
	kind             string // "tensor", "dtype", "option"; "extra": for the gradient only; "demand"
	optional         bool   // of a tensor
	hasDefault       bool
}

// arguments lists the arguments of an operator of PyTorch, in order.
func arguments(o operator, t *operators.Torch) (list []argument) {
	required := 0 // arguments up to the last required tensor
	for _, p := range o.inputs() {
		if leavesOut(o, t, p) {
			continue
		}
		optional := p.Optional && !slices.Contains(t.Must, p.Name)
		list = append(list, argument{Option: operators.Option{Name: p.Name}, kind: "tensor", optional: optional})
		if !optional {
			required = len(list)
		}
	}
	for _, p := range o.outputs() { // that the caller allocates
		if !t.Modifies(p.Name) {
			continue
		}
		optional := p.Optional && !slices.Contains(t.Must, p.Name)
		list = append(list, argument{Option: operators.Option{Name: p.Name}, kind: "tensor", optional: optional})
		if !optional {
			required = len(list)
		}
	}
	for i := range list {
		list[i].hasDefault = i >= required
	}
	for _, p := range o.outputs() {
		if p.Choice != "" && !slices.Contains(t.Without, p.Choice) && slices.Contains(t.Results, p.Name) {
			list = append(list, argument{Option: operators.Option{Name: p.Choice}, kind: "dtype", hasDefault: true})
		}
	}
	for _, option := range o.options() {
		if _, fixed := fixed(t, option); !fixed {
			list = append(list, argument{Option: option, kind: "option", hasDefault: true})
		}
	}
	for _, option := range t.Extra {
		list = append(list, argument{Option: option, kind: "extra", hasDefault: true})
	}
	for _, name := range t.OnDemand {
		option := operators.Option{Name: demand(name), Type: operators.Flag}
		list = append(list, argument{Option: option, kind: "demand", hasDefault: true})
	}
	return list
}

// leavesOut tells whether an operator of PyTorch has no argument for an input. Statistics of its own bring it
// the denominator. What needs a flag that is fixed at 0 would be refused.
func leavesOut(o operator, t *operators.Torch, p operators.Operand) bool {
	if flag := o.option(p.Needs); flag != nil {
		if value, fixed := fixed(t, *flag); fixed && value == 0 {
			return true
		}
	}
	return p.Name == operators.Denominator || slices.Contains(t.Without, p.Name)
}

// fixed returns the value of an option that an operator of PyTorch has no argument for.
func fixed(t *operators.Torch, option operators.Option) (value float64, ok bool) {
	if value, ok = t.Fixed[option.Name]; ok {
		return value, true
	}
	return option.Default, slices.Contains(t.Without, option.Name)
}

// demand names the argument that asks for a result.
func demand(result string) string { return "needs_" + result }

// value is PyTorch's default.
func (a argument) value() float64 {
	if a.Torch != 0 {
		return a.Torch
	}
	return a.Default
}

// lower lists the names of constants in lower case, as in Python.
func lower(list []operators.Constant) (names []string) {
	for _, c := range list {
		names = append(names, strings.ToLower(c.Name))
	}
	return names
}

// letterNames lists the letters of forms.
func letterNames() []byte { return slices.Sorted(maps.Keys(operators.Letters)) }

// conditionsOf returns the conditions that a flag is set, and that it is not, "" for none.
func conditionsOf(flag string) (set, unset string) {
	for _, c := range operators.Conditions {
		switch {
		case c.Flag != flag:
		case c.Set:
			set = c.Name
		default:
			unset = c.Name
		}
	}
	return set, unset
}

func pythonBool(b bool) string {
	if b {
		return "True"
	}
	return "False"
}
