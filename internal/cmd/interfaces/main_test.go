package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/operators"
)

// What the generators take for granted of the table.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range all() {
		require.NotEmpty(t, o.Operands, o.full())
		first := o.Operands[0]
		layouts := []operators.Layout{operators.InRows, operators.InHeads}
		assert.Contains(t, layouts, operators.Shapes[first.Shape].Layout, o.full())
		assert.False(t, first.Optional || first.Output, o.full())
		for _, p := range o.Operands {
			assert.False(t, seen[o.full()+"."+p.Name], "%s has two operands %s", o.full(), p.Name)
			seen[o.full()+"."+p.Name] = true
			if p.DType == operators.Same {
				assert.NotNil(t, o.Find(p.Like), "%s: %s is like no operand", o.full(), p.Name)
			}
			for _, name := range p.Over {
				require.NotNil(t, o.Find(name))
				assert.False(t, o.Find(name).Output, "%s: %s over an output", o.full(), p.Name)
			}
			if p.Needs != "" || p.Since != 0 {
				assert.True(t, p.Optional, "%s: %s", o.full(), p.Name)
			}
			if p.Twin != "" {
				assert.True(t, p.Output && o.Find(p.Twin).Output, "%s: %s", o.full(), p.Name)
			}
			if p.Read != "" {
				assert.NotNil(t, o.option(p.Read), "%s: no option %s", o.full(), p.Read)
			}
		}
		for i := range o.Torch {
			op := &o.Torch[i]
			assert.False(t, seen[op.Name], "two operators of PyTorch are called %s", op.Name)
			seen[op.Name] = true
			assert.LessOrEqual(t, len(arguments(o, op)), 24, "MAX_ARGUMENTS of torch.h")
			for _, name := range op.Results {
				require.NotNil(t, o.Find(name))
				assert.True(t, o.Find(name).Output)
			}
			// PyTorch wants arguments without a default before those that have one.
			defaults := false
			for _, a := range arguments(o, op) {
				assert.False(t, defaults && !a.hasDefault, "%s: %s", op.Name, a.Name)
				defaults = defaults || a.hasDefault
			}
			for _, name := range op.OnDemand {
				assert.Contains(t, op.Results, name, op.Name)
			}
			if op.Backward != "" {
				backward(t, op)
			}
		}
		assert.LessOrEqual(t, len(o.Operands), 16, "spans in ops/check.go; MAX_OPERANDS of torch.h")
		fields := map[string]bool{"size": true, "magic": true}
		for _, f := range owning(o).fields() {
			assert.False(t, fields[f.name], "%s has two fields %s", owning(o).structName(), f.name)
			fields[f.name] = true
		}
	}
	for _, g := range operators.Table {
		for _, option := range g.Options {
			only := slices.ContainsFunc(g.Operators, func(o operators.Operator) bool { return o.Name == option.Only })
			assert.True(t, only || option.Only == "", "%s: %s", g.Name, option.Name)
		}
	}
	assert.Empty(t, problems())
}

// backward checks that an operator's gradient reads only what autograd can save.
func backward(t *testing.T, op *operators.Torch) {
	o := operatorOf(op.Name)
	for _, s := range savedBy(op) {
		if s.result == "" {
			assert.NotNil(t, o.Find(s.argument), "%s reads %s", op.Backward, s.argument)
		}
		if s.result != "" && s.argument != "" {
			assert.NotEmpty(t, o.Find(s.result).Like, "%s: with which argument?", s.result)
		}
	}
	var names []string // the results that have a gradient, of which each has a gradient operator's argument
	for _, name := range findTorch(op.Backward).Results {
		names = append(names, operatorOf(op.Backward).Find(name).Gradient)
	}
	assert.NotContains(t, names, "", op.Backward)
}

func TestSchema(t *testing.T) {
	op := findTorch("rmsnorm")
	assert.Equal(t, "rmsnorm(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, "+
		"ScalarType? out_dtype=None, ScalarType? residual_dtype=None, float eps=1e-06",
		strings.Split(schema(operatorOf("rmsnorm"), op), ", int algorithm")[0])
	assert.True(t, strings.HasPrefix(schema(operatorOf("cross_entropy_bwd_"), findTorch("cross_entropy_bwd_")),
		"cross_entropy_bwd_(Tensor(a!) x, Tensor target, Tensor? weight, Tensor dloss, Tensor lse, "))
}

func TestNames(t *testing.T) {
	for name, want := range map[string]string{"one_pass": "OnePass", "dx": "DX", "dloss": "DLoss",
		"weight": "Weight"} {
		assert.Equal(t, want, camel(name))
	}
	for name, want := range map[string]string{"RMSNormForward": "rmsNormForward", "Softmax": "softmax",
		"DX": "dx"} {
		assert.Equal(t, want, unexported(name))
	}
	assert.Equal(t, "// one two\n// three", wrap("one two three", "// ", 11))
}

func TestHeaderWithoutARegion(t *testing.T) {
	_, err := fill("/* generated: statuses */\n/* end of what is generated */")
	require.ErrorContains(t, err, "1 of the 4 generated regions")
}

func TestNumbersForPython(t *testing.T) {
	table, err := pythonTable("#define GANDER_ABI_VERSION 7\n#define GANDER_OPTIONS_MAGIC 0x1fu /* why */\n")
	require.NoError(t, err)
	assert.Contains(t, table, "\nABI_VERSION = 7\nOPTIONS_MAGIC = 0x1f\n")
	_, err = pythonTable("#define GANDER_ABI_VERSION 7\n")
	assert.EqualError(t, err, "capi/gander.h does not define GANDER_OPTIONS_MAGIC as a number")
}
