package main

import (
	"fmt"
	"slices"

	"github.com/gander-go/gander/internal/operators"
)

// problems lists contradictions in the table, each of which would be a wrong result on one of several paths:
// an option that a gradient or an operator in place does not know, or a name that stands for nothing.
func problems() (list []string) {
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	for _, o := range all() {
		for _, name := range o.Plain {
			if p := o.Find(name); !(p != nil && p.Optional) && o.option(name) == nil {
				add("%s: %s is Plain, and neither an optional operand nor an option", o.full(), name)
			}
		}
		for _, p := range o.Operands {
			if other := o.Find(p.Needs); p.Needs != "" && !(other != nil && other.Optional) && !isFlag(o, p.Needs) {
				add("%s: %s needs %s, which is neither an optional operand nor a flag", o.full(), p.Name, p.Needs)
			}
		}
		for i := range o.Torch {
			op := &o.Torch[i]
			for _, name := range leftOut(op) {
				if !canBeLeftOut(o, name) {
					add("%s leaves out %s, which %s does not have, or requires", op.Name, name, o.full())
				}
			}
			for name, value := range op.Fixed {
				option := o.option(name)
				if option == nil || value == option.Default || slices.Contains(op.Without, name) {
					add("%s: Fixed has %s, which is not an option with another value than its default", op.Name, name)
				}
			}
			if op.Backward != "" {
				list = append(list, forgotten(o, op, operatorOf(op.Backward), findTorch(op.Backward))...)
			}
			for j := range o.Torch { // rmsnorm_ would be rmsnorm in place
				if other := &o.Torch[j]; op.Name == other.Name+"_" {
					list = append(list, forgotten(o, other, o, op)...)
				}
			}
		}
	}
	return list
}

// leftOut lists what an operator of PyTorch leaves out because the table says so.
func leftOut(op *operators.Torch) []string {
	names := slices.Clone(op.Without)
	for name := range op.Fixed {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func canBeLeftOut(o operator, name string) bool {
	for _, p := range o.Operands {
		if p.Name == name && p.Optional && !p.Output || p.Choice == name && name != "" {
			return true
		}
	}
	return o.option(name) != nil
}

func isFlag(o operator, name string) bool {
	option := o.option(name)
	return option != nil && option.Type == operators.Flag && option.Default == 0
}

// forgotten compares an operator of PyTorch with another that has to do the same: its gradient, or itself in
// place. What the other leaves out, this one leaves out too, with the same value; and the other has an
// argument for no optional input that this one leaves out.
func forgotten(o operator, op *operators.Torch, other operator, its *operators.Torch) (list []string) {
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	for _, name := range leftOut(its) {
		switch option := other.option(name); {
		case option == nil && position(arguments(o, op), name) >= 0, option == nil && o.Find(name) == nil:
			add("%s leaves out %s, which %s has to know", its.Name, name, op.Name)
		case option != nil:
			value, _ := fixed(its, *option)
			here, fixedHere := fixed(op, *option)
			if o.option(name) != nil && !fixedHere || here != value {
				add("%s takes %s for %s, which is another value in %s", its.Name, name, number(value), op.Name)
			}
		}
	}
	for _, p := range other.inputs() {
		if o.Find(p.Name) != nil && p.Optional && position(arguments(other, its), p.Name) >= 0 &&
			position(arguments(o, op), p.Name) < 0 && !o.Find(p.Name).Output {
			add("%s takes %s, which %s leaves out", its.Name, p.Name, op.Name)
		}
	}
	return list
}
