package policy

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/kernels"
)

func read(t *testing.T) (*File, []byte) {
	text, err := os.ReadFile("policy.txt")
	require.NoError(t, err)
	f, err := Parse(text)
	require.NoError(t, err)
	return f, text
}

func TestTablesAreThoseOfTheFile(t *testing.T) {
	f, text := read(t)
	assert.Equal(t, string(text), string(f.Format()), "not in its usual form: go generate ./internal/policy")
	want, err := f.Generate()
	require.NoError(t, err)
	have, err := os.ReadFile("table_gen.go")
	require.NoError(t, err)
	assert.Equal(t, string(want), string(have), "go generate ./internal/policy")
	for _, k := range f.Keys() {
		rows := Rows(k.Device, k.Operator, k.Type, k.Layout)
		require.Len(t, rows, len(f.Lists[k]), "%v", k)
		for i, line := range f.Lists[k] {
			assert.Equal(t, line.Row, rows[i], "%v", k)
		}
	}
}

// TestEveryListServesEveryRow: the last row that auto may take has no conditions, so that no request goes
// unserved. The planner takes the kernels of norms with options for aligned norms that theirs do not serve.
func TestEveryListServesEveryRow(t *testing.T) {
	for d := range DeviceNames {
		for op := range OperatorNames {
			for x := range TypeNames {
				for l := range LayoutNames {
					k := Key{Device(d), Operator(op), kernels.DType(x), Layout(l)}
					rows := Rows(k.Device, k.Operator, k.Type, k.Layout)
					mixes := k.Operator == RMSNormBackward || k.Operator == RMSNormBackwardDX ||
						k.Operator == SoftCrossEntropyForward
					if k.Layout == MixedTypes && !mixes {
						assert.Empty(t, rows, "%v", k)
						continue
					}
					if k.Operator >= LayerNormForward {
						assert.Equal(t, k.Layout == Aligned, len(rows) > 0, "%v", k)
						continue
					}
					require.NotEmpty(t, rows, "%v", k)
					last := rows[len(rows)-1]
					assert.True(t, last.Takes(0), "%v", k)
					for i := range rows[:len(rows)-1] {
						r := &rows[i]
						assert.False(t, r.UpTo > 0 && r.UpTo <= r.Over, "%v: %v holds no length", k, r)
					}
					tile := last
					tile.For, tile.Regime, tile.Threads, tile.Vectors = 0, 0, 0, 0
					tile.Resident, tile.Ratio = 0, 0
					assert.Equal(t, Row{}, tile, "%v: the last row has conditions", k)
				}
			}
		}
	}
}

// TestEveryTileIsCompiled: each row names a kernel of the table.
func TestEveryTileIsCompiled(t *testing.T) {
	type kernel struct {
		op                         kernels.Op
		x                          kernels.DType
		aligned                    bool
		threads, vectors, together int
	}
	compiled := map[kernel]bool{}
	for _, v := range kernels.Variants {
		compiled[kernel{v.Op, v.Family.DType(), !v.Unaligned, v.RowThreads, v.Vectors, v.RowsPerStep}] = true
	}
	f, _ := read(t)
	for _, k := range f.Keys() {
		for _, line := range f.Lists[k] {
			r := line.Row
			if r.Threads > 0 && r.TakesType(k.Type) {
				want := kernel{
					kernelOps[k.Operator], k.Type, k.Layout == Aligned, r.Threads, r.Vectors, r.RowsPerStep,
				}
				assert.True(t, compiled[want], "%v: %v", k, &r)
			}
		}
	}
}

// TestSharedListsAreDivided: a list that is changed for one device leaves out the rows that are for others.
func TestSharedListsAreDivided(t *testing.T) {
	const shared = "[h100 h200; softmax_forward; float32; aligned]\n" +
		"auto - 8 - registers 8x1 only=h100\n" +
		"auto - 8 - registers 8x4 only=h200\n" +
		"auto - - - two-passes -\n"
	f, err := Parse([]byte(shared))
	require.NoError(t, err)
	list := f.Lists[Key{H100, SoftmaxForward, kernels.Float32, Aligned}]
	list[len(list)-1].Resident = 16
	f, err = Parse(f.Format())
	require.NoError(t, err)
	for device, want := range map[Device][]string{
		H100: {"auto - 8 - registers 8x1", "auto - - - two-passes - per-sm=16"},
		H200: {"auto - 8 - registers 8x4", "auto - - - two-passes -"},
	} {
		var have []string
		for _, line := range f.Lists[Key{device, SoftmaxForward, kernels.Float32, Aligned}] {
			have = append(have, line.String())
		}
		assert.Equal(t, want, have)
	}
}

func TestRowsAreReadAsTheyAreWritten(t *testing.T) {
	for _, line := range []string{
		"auto - - - two-passes - per-sm=16",
		"auto,block 1024 2048 <1/sm cluster-registers 256x4 ctas=2..16 one-wave ratio=0.9 next=a:1",
		"splitk - - 1..16 grid-shared-memory 256x2 per-sm=2 kib-per-sm=30..1024",
		"medium - 8192 >=8/sm registers 1024x8 no-clusters",
		"auto - - 17.. grid-cooperative 256x1x2",
		"auto - - 7..20/sm grid-cooperative 256x1x2",
		"auto,extreme,cluster - 1024 - persistent-ring 256x2 ctas=2 per-sm=3 stages=8",
		"auto - 8192 - cluster-registers 512x10 ctas=5 16-bit",
		"auto - 8192 - cluster-registers 512x10 ctas=4 32-bit",
		"auto - 8192 - registers 512x8 wide-weights only=h200,other-fast ratio=0.9",
	} {
		r, err := ParseRow(line)
		require.NoError(t, err, line)
		assert.Equal(t, line, r.String())
	}
	for line, message := range map[string]string{
		"auto - - -":                              "expected algorithms, over, up to, rows, regime, tile",
		"fast - - - two-passes -":                 `"fast", expected one of auto, warp`,
		"auto - - - tensor-cores -":               `"tensor-cores", expected one of registers`,
		"auto - - few two-passes -":               `rows are "few", expected -, 1..16`,
		"auto - - 7/sm two-passes -":              `rows are "7/sm", expected -, 1..16`,
		"auto - - /sm two-passes -":               `rows are "/sm", expected -, 1..16`,
		"auto - - 16..1 two-passes -":             `rows are "16..1", expected -, 1..16`,
		"auto - - 20..7/sm two-passes -":          `rows are "20..7/sm", expected -, 1..16`,
		"auto - - <0/sm two-passes -":             `rows are "<0/sm", expected -, 1..16`,
		"auto - - >=-3/sm two-passes -":           `rows are ">=-3/sm", expected -, 1..16`,
		"auto - x - two-passes -":                 "invalid syntax",
		"auto - - - registers 8x4x2x1":            "expected a tile as 256x4",
		"auto - - - registers 8x4 clusters=2":     `"clusters" is none of ctas`,
		"auto - - - persistent-ring 8x4 ctas=-2":  "a number of 0 or more",
		"auto - - - registers 8x4 only=h100,b300": `"b300", expected one of h100`,
	} {
		_, err := ParseRow(line)
		assert.ErrorContains(t, err, message, line)
	}
	for text, message := range map[string]string{
		"auto - - - two-passes -":                  "line 1: a row before the first section",
		"[h100; relu; float32; aligned]":           `line 1: "relu", expected one of softmax_forward`,
		"[h100; softmax_forward; float32]":         "expected [devices; operators; types; layouts]",
		"\n[h100; softmax_forward; int8; aligned]": "line 2: ",
		"[h100; softmax_forward; float32; aligned]\nauto - - - two-passes -\n" +
			"[h100 h200; softmax_forward; float32; aligned]": "there are rows for h100",
		"[h100 h200; softmax_forward; float32; aligned]\nauto - - - two-passes - only=h200,other": "line 2: only=",
		"[h100 h200; softmax_forward; float32; aligned]\nauto - - - two-passes - only=h100,h200":  "line 2: only=",
	} {
		_, err := Parse([]byte(text))
		assert.ErrorContains(t, err, message, text)
	}
}
