package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/operators"
)

// change lets a test change the table.
func change(t *testing.T) {
	before := operators.Table
	t.Cleanup(func() { operators.Table = before })
	operators.Table = slices.Clone(before)
	for i := range operators.Table {
		g := &operators.Table[i]
		g.Options, g.Operators = slices.Clone(g.Options), slices.Clone(g.Operators)
		for j := range g.Operators {
			o := &g.Operators[j]
			o.Operands, o.Torch, o.Plain = slices.Clone(o.Operands), slices.Clone(o.Torch), slices.Clone(o.Plain)
		}
	}
}

// Each entry that is forgotten, or too many, is found.
func TestProblems(t *testing.T) {
	without := func(name string, left ...string) func() {
		return func() { findTorch(name).Without = append(slices.Clone(findTorch(name).Without), left...) }
	}
	for name, c := range map[string]struct {
		change func()
		want   string
	}{
		"a gradient without an option": {without("rmsnorm_bwd", "weight_offset"),
			"rmsnorm_bwd takes weight_offset for 0, which is another value in rmsnorm"},
		"a gradient without an operand": {without("masked_softmax_bwd", "mask"),
			"masked_softmax_bwd leaves out mask, which masked_softmax has to know"},
		"a gradient without a dtype": {without("layernorm_bwd", "bias_dtype"),
			"layernorm_bwd leaves out bias_dtype, which layernorm has to know"},
		"an operator without an operand of its gradient": {without("cross_entropy", "divisor"),
			"cross_entropy_bwd takes divisor, which cross_entropy leaves out"},
		"a gradient with another value": {func() {
			findTorch("cross_entropy_bwd").Without = nil
			findTorch("cross_entropy_bwd").Fixed = map[string]float64{"one_pass": 1}
		}, "cross_entropy_bwd takes one_pass for 1, which is another value in cross_entropy"},
		"an operator in place without an option": {without("cross_entropy_bwd_", "slice"),
			"cross_entropy_bwd_ takes slice for 0, which is another value in cross_entropy_bwd"},
		"an operator in place without an operand": {without("cross_entropy_bwd_", "weight"),
			"cross_entropy_bwd_ leaves out weight, which cross_entropy_bwd has to know"},
		"a name of nothing": {without("cross_entropy", "smoothing"),
			"cross_entropy leaves out smoothing, which cross_entropy_forward does not have, or requires"},
		"a required operand": {without("cross_entropy", "target"),
			"cross_entropy leaves out target, which cross_entropy_forward does not have, or requires"},
		"the default as a fixed value": {func() {
			findTorch("rescale_").Without = nil
			findTorch("rescale_").Fixed = map[string]float64{"batch_invariant": 0}
		}, "rescale_: Fixed has batch_invariant, which is not an option with another value than its default"},
		"a plain operand of another operator": {func() { operatorOf("rmsnorm").Plain[0] = "dw" },
			"rmsnorm_forward: dw is Plain, and neither an optional operand nor an option"},
		"a need of nothing": {func() { operatorOf("rmsnorm_bwd").Find("dw").Needs = "eps" },
			"rmsnorm_backward: dw needs eps, which is neither an optional operand nor a flag"},
	} {
		t.Run(name, func(t *testing.T) {
			change(t)
			c.change()
			assert.Contains(t, problems(), c.want)
		})
	}
}

// What is added to the table reaches every operator of PyTorch that does not leave it out, and makes a call
// of RMSNorm one for the general kernels.
func TestAnAddition(t *testing.T) {
	change(t)
	for i := range operators.Table {
		if g := &operators.Table[i]; g.Name == "rmsnorm" {
			softcap := operators.Option{Name: "softcap", Type: operators.Real, Default: 2, Since: 1}
			g.Options = append(g.Options, softcap)
			o := &g.Operators[0]
			gate := operators.Operand{Name: "gate", Shape: operators.Rows, DType: operators.Companion,
				Optional: true, Since: 1}
			o.Operands = slices.Insert(o.Operands, 1, gate)
		}
	}
	require.Empty(t, problems())
	for _, name := range []string{"rmsnorm", "rmsnorm_out", "fused_add_rmsnorm_", "rmsnorm_bwd"} {
		assert.Contains(t, schema(operatorOf(name), findTorch(name)), ", float softcap=2", name)
	}
	assert.Contains(t, goOperators(), "case a.Gate.Present():\nreturn \"gate\"\n")
	assert.Contains(t, goOperators(), "case a.Softcap != 2:\nreturn \"softcap\"\n")
	assert.Contains(t, goOperators(), "Softcap: o.Softcap.or(2),")
}
