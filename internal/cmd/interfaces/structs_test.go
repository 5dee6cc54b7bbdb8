package main

import (
	"errors"
	"flag"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/operators"
)

var update = flag.Bool("update", false, "add new fields of option structs to testdata/options.txt")

const stored = "testdata/options.txt"

// layouts lists the fields of each option struct.
func layouts() map[string][]string {
	list := map[string][]string{}
	for _, f := range functions() {
		for _, field := range f.fields() {
			list[f.structName()] = append(list[f.structName()], field.kind+" "+field.name)
		}
	}
	return list
}

// broken lists the structs whose fields do not begin with those that they had.
func broken(before, now map[string][]string) (names []string) {
	for name, fields := range before {
		if len(now[name]) < len(fields) || !slices.Equal(now[name][:len(fields)], fields) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Callers that were compiled before have structs with the fields that were there then.
func TestOptionStructsOnlyGrow(t *testing.T) {
	before, now := map[string][]string{}, layouts()
	text, err := os.ReadFile(stored)
	if !*update || !errors.Is(err, fs.ErrNotExist) {
		require.NoError(t, err)
	}
	for line := range strings.Lines(string(text)) {
		name, fields, _ := strings.Cut(strings.TrimSpace(line), ": ")
		before[name] = strings.Split(fields, ", ")
	}
	require.Empty(t, broken(before, now), "what is new needs a Since that is larger than all others")
	if *update {
		var b strings.Builder
		for _, f := range functions() {
			b.WriteString(f.structName() + ": " + strings.Join(now[f.structName()], ", ") + "\n")
		}
		require.NoError(t, os.WriteFile(stored, []byte(b.String()), 0o644))
		return
	}
	assert.Equal(t, before, now, "go test ./internal/cmd/interfaces -update stores what was added")
}

func TestABrokenStructIsFound(t *testing.T) {
	before := layouts()
	change(t)
	o := operatorOf("rmsnorm")
	gate := operators.Operand{Name: "gate", Shape: operators.Rows, DType: operators.Companion, Optional: true}
	o.Operands = slices.Insert(o.Operands, 1, gate)
	both := []string{"gander_rmsnorm_forward_options", "gander_rmsnorm_options"}
	assert.Equal(t, both, broken(before, layouts()))
	o.Operands[1].Since = 1
	assert.Empty(t, broken(before, layouts()))
	o.group.Options = append(o.group.Options, operators.Option{Name: "softcap", Since: 2})
	grown := layouts()
	assert.Empty(t, broken(before, grown))
	assert.Equal(t, []string{"const DLTensor* gate", "double softcap"},
		grown["gander_rmsnorm_forward_options"][len(before["gander_rmsnorm_forward_options"]):])
	assert.Contains(t, broken(before, map[string][]string{}), "gander_softmax_options")
}
