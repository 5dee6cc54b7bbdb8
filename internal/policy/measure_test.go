package policy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const smallPolicy = `# A policy.

[h100 other; softmax_forward; bfloat16; aligned]
auto - 128 - registers 32x4
auto - 512 - registers 128x4
auto - - - two-passes - per-sm=16
`

const policyRow = "auto - 512 - registers 128x4" // what smallPolicy takes for 129 to 512 vectors

// measured makes measurements of one shape on an H100, of 2048 elements (256 vectors) unless n is given.
func measured(m, n int64, policyUS float64, others map[string]float64) (all []Measurement) {
	one := Measurement{
		Device: "h100", Operator: "softmax_forward", Type: "bfloat16", Layout: "aligned", M: m, N: n,
		Policy: policyRow, US: policyUS, LimitUS: 90,
	}
	all = append(all, one)
	for row, us := range others {
		one.Row, one.Policy, one.US = "auto 64 4096 - "+row, "", us
		all = append(all, one)
	}
	return all
}

func apply(t *testing.T, text string, measurements ...[]Measurement) (string, []string) {
	f, err := Parse([]byte(text))
	require.NoError(t, err)
	var all []Measurement
	for _, m := range measurements {
		all = append(all, m...)
	}
	report, err := f.Apply(all, "results/a.jsonl")
	require.NoError(t, err)
	return string(f.Format()), report
}

func formatted(t *testing.T, text string) string {
	f, err := Parse([]byte(text))
	require.NoError(t, err)
	return string(f.Format())
}

// list is a section's rows, without alignment.
func list(text, section string) (rows []string) {
	_, rest, _ := strings.Cut(text, "["+section+"]\n")
	body, _, _ := strings.Cut(rest, "\n\n")
	for line := range strings.Lines(body) {
		rows = append(rows, strings.Join(strings.Fields(line), " "))
	}
	return rows
}

func TestNoiseMovesNoRow(t *testing.T) {
	for us, moves := range map[float64]bool{99: false, 98.1: false, 97: true} {
		others := map[string]float64{"registers 256x4": us}
		text, report := apply(t, smallPolicy, measured(32768, 2048, 100, others))
		assert.Equal(t, moves, len(report) > 0, "%v", us)
		first := list(text, "h100; softmax_forward; bfloat16; aligned")[1]
		assert.Equal(t, moves, strings.Contains(first, " registers 256x4 "), "%v\n%s", us, text)
	}
}

func TestAFasterRowIsTakenWhereItWasMeasured(t *testing.T) {
	text, report := apply(t, smallPolicy,
		measured(1024, 2048, 100, map[string]float64{"registers 256x4": 95}),
		measured(4096, 2048, 100, map[string]float64{"registers 256x4": 100}),
		measured(4096, 4096, 100, map[string]float64{"registers 256x4": 80}))
	assert.Len(t, report, 2)
	assert.Equal(t, []string{
		"# Measured: results/a.jsonl.",
		"auto 255 256 1024..4095 registers 256x4 ratio=0.947 next=registers:128x4:0.9",
		"# Measured: results/a.jsonl.",
		"auto 256 512 4096.. registers 256x4 ratio=1.12 next=registers:128x4:0.9",
		"auto - 128 - registers 32x4",
		"auto - 512 - registers 128x4 ratio=0.9 next=registers:256x4:0.9", // 4096 x 2048 stays
		"auto - - - two-passes - per-sm=16",
	}, list(text, "h100; softmax_forward; bfloat16; aligned"))
}

// A device that was not measured keeps its rows, though it shared them.
func TestOtherDevicesKeepTheirRows(t *testing.T) {
	text, _ := apply(t, smallPolicy, measured(4096, 2048, 100, map[string]float64{"registers 256x4": 80}))
	want, _ := Parse([]byte(smallPolicy))
	have, err := Parse([]byte(text))
	require.NoError(t, err)
	for _, k := range want.Keys() {
		assert.Equal(t, k.Device != H100, fmt.Sprint(want.Lists[k]) == fmt.Sprint(have.Lists[k]), "%v", k)
	}
}

// Of rows that are as fast, the one that serves more shapes is taken, or one whose kernel is in use.
func TestFewerKernels(t *testing.T) {
	text, _ := apply(t, smallPolicy,
		measured(4096, 2048, 100, map[string]float64{"registers 256x4": 80, "registers 64x8": 79}),
		measured(4096, 4096, 100, map[string]float64{"registers 256x4": 81, "registers 512x4": 80}))
	rows := list(text, "h100; softmax_forward; bfloat16; aligned")
	assert.Equal(t, "auto 255 512 4096.. registers 256x4 ratio=1.11 next=registers:128x4:0.9", rows[1])
	assert.NotContains(t, text, "64x8")
	assert.NotContains(t, text, "512x4")

	text, _ = apply(t, smallPolicy, measured(4096, 1024, 100, map[string]float64{
		"registers 64x2": 80, "registers 128x4": 81, "registers 32x4": 82}))
	rows = list(text, "h100; softmax_forward; bfloat16; aligned")
	assert.Contains(t, rows[1], " registers 128x4 ") // 64x2 would be a kernel more, and 32x4 is slower
}

func TestMeasuringAgainChangesNothing(t *testing.T) {
	first := measured(4096, 2048, 100, map[string]float64{"registers 256x4": 80})
	once, _ := apply(t, smallPolicy, first)
	again := measured(4096, 2048, 80.5, map[string]float64{"registers 256x4": 80, "registers 128x4": 100})
	again[0].Policy = list(once, "h100; softmax_forward; bfloat16; aligned")[1]
	twice, report := apply(t, once, again)
	assert.Empty(t, report)
	assert.Equal(t, once, twice)
	// and what is measured better later takes the place of what was measured before
	again = measured(4096, 2048, 80, map[string]float64{"registers 512x4": 60})
	thrice, _ := apply(t, once, again)
	assert.Contains(t, thrice, "512x4")
	assert.NotContains(t, thrice, "256x4")
}

func TestWithoutMeasurementsNothingChanges(t *testing.T) {
	text, report := apply(t, smallPolicy)
	assert.Empty(t, report)
	assert.Equal(t, formatted(t, smallPolicy), text)
	only := measured(4096, 2048, 100, nil) // no other row was measured
	only[0].LimitUS = 0
	text, report = apply(t, smallPolicy, only)
	assert.Empty(t, report)
	assert.Equal(t, formatted(t, smallPolicy), text)
}

func TestRedundantKernels(t *testing.T) {
	one := measured(4096, 2048, 100, map[string]float64{"registers 256x4": 101})
	two := measured(4096, 8192, 100, map[string]float64{"registers 128x4": 150})
	two[0].Policy = "auto - 1024 - registers 256x4"
	redundant, err := Redundant(append(one, two...))
	require.NoError(t, err)
	assert.Equal(t, []string{"h100; softmax_forward; bfloat16; aligned: " +
		"registers 128x4 is chosen for 1 shapes; for each, another chosen kernel is as fast"}, redundant)
	one[1].US = 103
	redundant, err = Redundant(append(one, two...))
	require.NoError(t, err)
	assert.Empty(t, redundant)
}

func TestMeasurementsWithOtherWeights(t *testing.T) {
	lines := `{"m":1,"n":8,"us":2}` + "\n" + `{"m":1,"n":8,"us":1,"weight":"float32"}`
	all, err := ReadMeasurements([]byte(lines))
	require.NoError(t, err)
	require.Len(t, all, 1)
	assert.Equal(t, 2.0, all[0].US)
}

func TestMeasurementsThatCannotBe(t *testing.T) {
	_, err := ReadMeasurements([]byte(`{"device":"h100","m":1,"n":1,"us":0}`))
	assert.ErrorContains(t, err, "line 1: us, m and n are 0, 1, 1, expected numbers above 0")
	_, err = ReadMeasurements([]byte("{"))
	assert.ErrorContains(t, err, "line 1: ")
	f, err := Parse([]byte(smallPolicy))
	require.NoError(t, err)
	bad := measured(1, 8, 1, nil)
	bad[0].Operator = "relu"
	_, err = f.Apply(bad, "")
	assert.ErrorContains(t, err, `"relu", expected one of softmax_forward`)
	bad[0].Operator = "rmsnorm_forward"
	_, err = f.Apply(bad, "")
	assert.ErrorContains(t, err, "h100; rmsnorm_forward; bfloat16; aligned was measured, but the policy "+
		"has no rows for it; add a section to policy.txt")
}
