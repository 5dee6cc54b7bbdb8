package ops

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

func TestTuning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "row")
	tuningFile = path
	defer func() { tuningFile = "" }()
	f := testDevices["h100"]
	r := request{op: kernels.SoftmaxForward, x: kernels.BFloat16, m: 4096, n: 4096}
	byRow := func(row string) (*plan, error) {
		require.NoError(t, os.WriteFile(path, []byte(row+"\n"), 0o600))
		return planFor(0, f, r)
	}
	usual, err := byRow("")
	require.NoError(t, err)
	assert.Equal(t, "softmax_forward_rows_bfloat16_128x4", usual.launches[0].variant.Symbol)
	assert.Contains(t, usual.String(), "\npolicy: auto,register - 512 - registers 128x4")
	for row, symbol := range map[string]string{
		"auto - - - registers 512x8":                    "softmax_forward_rows_bfloat16_512x8",
		"auto - - - cluster-registers 256x4 ctas=4..16": "softmax_forward_rows_bfloat16_256x4_cluster",
		"auto - - - two-passes - per-sm=16":             "softmax_forward_partial_bfloat16_256x4",
	} {
		p, err := byRow(row)
		require.NoError(t, err, row)
		assert.Equal(t, symbol, p.launches[0].variant.Symbol)
	}
	for row, message := range map[string]string{
		"auto - - - registers 16x4":           "of 4096 rows of 4096 elements cannot be served",
		"auto - - - persistent-ring 256x2":    "cannot be served",
		"auto - - - stream 256x4 per-sm=4":    "cannot be served",
		"auto - - - by-columns - per-sm=4":    "cannot be served",
		"auto - - - shared-memory 512x8":      "cannot be served",
		"auto - - - registers 100x4":          "cannot be served",
		"auto - - - two-passes":               "expected algorithms, over, up to, rows, regime, tile",
		"warp - - - registers 512x8":          "cannot be served", // auto may not take it
		"auto 512 - - registers 512x8":        "cannot be served", // for longer rows
		"auto - - - persistent-lanes 32x2":    "cannot be served",
		"auto - - - grid-cooperative 512x2x1": "cannot be served", // too short
	} {
		_, err := byRow(row)
		assert.ErrorContains(t, err, message, row)
	}
	tuningFile = filepath.Join(t.TempDir(), "absent")
	_, err = planFor(0, f, r)
	assert.ErrorContains(t, err, "GANDER_TUNE: open ")
}

// TestEveryCandidateCoversItsRows: each row that bench/tune.py may time makes a right plan or none.
func TestEveryCandidateCoversItsRows(t *testing.T) {
	f, served := testDevices["h100"], map[policy.Regime]int{}
	candidates := map[policy.Key][]policy.Row{}
	enumerate(func(r request) { // a sample would leave out regimes that serve few
		if r.m != 4 && r.m != 128 && r.m != 32768 || r.x == kernels.Float16 {
			return
		}
		key := policy.Key{Operator: r.operator(), Type: r.x, Layout: r.layout}
		if candidates[key] == nil {
			candidates[key] = policy.Candidates(key.Operator, key.Type, key.Layout)
		}
		rows := candidates[key]
		for i := range rows {
			p, ok, err := attemptBy(f, r, rows[i:i+1])
			if !ok || err != nil {
				continue
			}
			served[rows[i].Regime]++
			requireCovered(t, f, r, p, func() string { return fmt.Sprintf("%v: %+v", &rows[i], r) })
		}
	})
	for regime := range policy.RegimeNames {
		assert.Positive(t, served[policy.Regime(regime)], "%v", policy.Regime(regime))
	}
}
