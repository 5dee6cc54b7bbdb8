package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const text = `[h100; softmax_forward; bfloat16; aligned]
auto - 512 - registers 128x4
auto - - - two-passes -
`

const (
	shape = `{"device": "h100", "operator": "softmax_forward", "dtype": "bfloat16", "layout": "aligned", ` +
		`"m": 4096, "n": 2048, "limit_us": 90, `
	measurements = shape + `"row": "", "policy": "auto - 512 - registers 128x4", "us": 100}
` + shape + `"row": "auto 256 1024 - registers 256x4", "us": 80}
`
)

func TestMeasurementsReachTheTables(t *testing.T) {
	dir := t.TempDir()
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return string(b)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "policy.txt"), []byte(text), 0o600))
	a := filepath.Join(dir, "a.jsonl")
	require.NoError(t, os.WriteFile(a, []byte(measurements), 0o600))
	var report bytes.Buffer
	require.NoError(t, run(dir, "", &report))
	assert.Empty(t, report.String())
	assert.NotContains(t, read("table_gen.go"), "Threads: 256")
	require.NoError(t, run(dir, a, &report))
	assert.Equal(t, "moved: h100; softmax_forward; bfloat16; aligned: 4096 rows of 256 vectors: "+
		"registers:256x4, 80 us in place of 100\n", report.String())
	row := "# Measured: a.jsonl.\nauto 255 256 4096.. registers  256x4 ratio=1.12 "
	assert.Contains(t, read("policy.txt"), row)
	literal := "UpTo: 256, From: Count{N: 4096}, Regime: Registers, Threads: 256, Vectors: 4"
	assert.Contains(t, read("table_gen.go"), literal)
	require.ErrorContains(t, run(dir, a+"x", &report), "a.jsonlx")
	require.NoError(t, os.WriteFile(a, []byte("{}\n"), 0o600))
	require.ErrorContains(t, run(dir, a, &report), "a.jsonl: line 1: us, m and n are 0")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "policy.txt"), []byte("auto\n"), 0o600))
	require.ErrorContains(t, run(dir, "", &report), "policy.txt: line 1: ")
}

func TestCandidates(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, printCandidates(&b))
	var all map[string][]struct {
		Row  string `json:"row"`
		UpTo int64  `json:"up_to"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &all))
	rows := all["softmax_forward bfloat16 aligned"]
	require.NotEmpty(t, rows)
	assert.Equal(t, "auto - 8 - registers 8x1", rows[0].Row)
	assert.EqualValues(t, 8, rows[0].UpTo)
	assert.NotEmpty(t, all["rmsnorm_backward float32 same-offset"])
	assert.Empty(t, all["softmax_forward float32 mixed-types"])
}
