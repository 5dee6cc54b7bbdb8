package ops

import (
	"compress/gzip"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/kernels"
)

var update = flag.Bool("update", false, "write the stored list of plans anew")

const storedPlans = "testdata/plans.txt.gz"

// The devices whose plans are stored: two that were measured, one without clusters, one with 99 KiB a CTA.
var storedDevices = []string{"h100", "h200", "a100", "sm120"}

// Lengths that models have, and those around the limits of kernels.
var storedLengths = []int64{
	1, 3, 8, 64, 128, 256, 512, 1000, 1024, 1025, 2048, 4096, 5120, 7168, 8192, 11008, 16384, 20480, 32768,
	43008, 50257, 65536, 98304, 128256, 151936, 262144, 300001, 524288, 1 << 20, 1 << 22, 1 << 25,
}

// Row counts around those at which choices change.
var storedRows = []int64{1, 4, 16, 17, 131, 512, 1056, 4224, 32768, 262144}

// buffer is what operands point into: the planner looks at addresses, never at elements.
var buffer [64]byte

// storedCase is a kind of call, of which plans are stored for all lengths and row counts.
type storedCase struct {
	operator  string
	x         kernels.DType
	layout    string // aligned, same offset, mixed offsets, strided
	weight    string // of RMSNorm; "-" for other operators
	algorithm Algorithm
	invariant bool
}

func (c storedCase) String() string {
	text := fmt.Sprintf("%s %v, %s", c.operator, c.x, c.layout)
	if c.weight != "-" {
		text += ", weight " + c.weight
	}
	if c.invariant {
		text += ", batch invariant"
	}
	if c.algorithm != Auto {
		text += ", " + c.algorithm.String()
	}
	return text
}

// requestOf is the request of a call of cross-entropy.
func requestOf(a interface {
	spec() kernels.CrossEntropy
	request(s *kernels.CrossEntropy) request
}) request {
	s := a.spec()
	return a.request(&s)
}

// storedOperators makes the request of a call as the call itself does. The matrices have the case's layout.
var storedOperators = map[string]func(c storedCase, first, second, out kernels.Matrix) request{
	"softmax_forward": func(_ storedCase, first, _, out kernels.Matrix) request {
		return (&softmaxForward{X: first, Y: out}).request()
	},
	"softmax_backward": func(_ storedCase, first, second, out kernels.Matrix) request {
		return (&softmaxBackward{DY: first, Y: second, DX: out}).request()
	},
	"rmsnorm_forward": func(c storedCase, first, _, out kernels.Matrix) request {
		a := rmsNormForward{X: first, Y: out}
		a.Weight, a.WeightOffset = c.weights(first)
		if a.extra() != "" {
			n := a.norm()
			return n.forwardRequest()
		}
		return a.request()
	},
	"rmsnorm_backward": func(c storedCase, first, second, out kernels.Matrix) request {
		a := rmsNormBackward{X: first, DOut: second, DX: out}
		a.Weight, a.WeightOffset = c.weights(first)
		a.DW = a.Weight
		if a.extra() != "" {
			n := a.norm()
			return n.backwardRequest()
		}
		return a.request()
	},
	"rmsnorm_backward without dw": func(c storedCase, first, second, out kernels.Matrix) request {
		a := rmsNormBackward{X: first, DOut: second, DX: out}
		a.Weight, a.WeightOffset = c.weights(first)
		if a.extra() != "" {
			n := a.norm()
			return n.backwardRequest()
		}
		return a.request()
	},
	"cross_entropy_forward": func(_ storedCase, first, _, _ kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first})
	},
	"cross_entropy_forward mean": func(_ storedCase, first, _, _ kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first, Reduction: kernels.ReduceMean})
	},
	"cross_entropy_forward_dx": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first, DX: out})
	},
	"cross_entropy_forward_dx one pass": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first, DX: out, Reduction: kernels.ReduceMean, OnePass: true})
	},
	"cross_entropy_backward": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyBackward{X: first, DX: out})
	},
	"cross_entropy_backward one pass": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyBackward{X: first, DX: out, Reduction: kernels.ReduceMean, OnePass: true})
	},
	"cross_entropy_forward with options": func(_ storedCase, first, _, _ kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first, ZLoss: 1})
	},
	"cross_entropy_forward_dx with options": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyForward{X: first, DX: out, ZLoss: 1})
	},
	"cross_entropy_backward with options": func(_ storedCase, first, _, out kernels.Matrix) request {
		return requestOf(&crossEntropyBackward{X: first, DX: out, ZLoss: 1})
	},
	"token_statistics_forward": func(_ storedCase, first, _, _ kernels.Matrix) request {
		return (&tokenStatisticsForward{Logits: first}).request(&kernels.TokenStatistics{})
	},
	"token_statistics_forward all": func(_ storedCase, first, _, _ kernels.Matrix) request {
		every := kernels.TokenStatistics{MeanLogit: kernels.Vector{Data: at(0)}}
		return (&tokenStatisticsForward{Logits: first}).request(&every)
	},
	"token_statistics_backward": func(_ storedCase, first, _, out kernels.Matrix) request {
		return (&tokenStatisticsBackward{Logits: first, DLogits: out}).request()
	},
	"layernorm_forward": func(_ storedCase, first, _, out kernels.Matrix) request {
		n := (&layerNormForward{X: first, Y: out}).norm()
		return n.forwardRequest()
	},
	"layernorm_forward residual": func(_ storedCase, first, second, out kernels.Matrix) request {
		n := (&layerNormForward{X: first, Residual: second, Y: out, ResidualOut: out}).norm()
		return n.forwardRequest()
	},
	"layernorm_backward": func(_ storedCase, first, second, out kernels.Matrix) request {
		sum := kernels.Vector{Data: at(0), DType: first.DType, Len: first.Cols, Stride: 1}
		n := (&layerNormBackward{X: first, DOut: second, DX: out, DW: sum, DB: sum}).norm()
		return n.backwardRequest()
	},
	"layernorm_backward residual": func(_ storedCase, first, second, out kernels.Matrix) request {
		sum := kernels.Vector{Data: at(0), DType: first.DType, Len: first.Cols, Stride: 1}
		a := layerNormBackward{X: first, DOut: second, DResidualOut: second, DX: out, DResidual: out, DW: sum}
		n := a.norm()
		return n.backwardRequest()
	},
	"masked_softmax_forward": func(_ storedCase, first, _, out kernels.Matrix) request {
		return (&maskedSoftmaxForward{X: first, Y: out}).request()
	},
	"masked_softmax_backward": func(_ storedCase, first, second, out kernels.Matrix) request {
		return (&maskedSoftmaxBackward{DY: first, Y: second, DX: out}).request()
	},
	"logsumexp_forward": func(_ storedCase, first, _, _ kernels.Matrix) request {
		return (&logSumExpForward{X: first}).request()
	},
	"logsumexp_backward": func(_ storedCase, first, _, out kernels.Matrix) request {
		return (&logSumExpBackward{X: first, DX: out}).request()
	},
}

// at is an address so many bytes after one that is aligned to 16 bytes.
func at(offset int64) unsafe.Pointer {
	start := -uintptr(unsafe.Pointer(&buffer)) & 15
	return unsafe.Pointer(&buffer[start+uintptr(offset)])
}

func (c storedCase) weights(x kernels.Matrix) (w kernels.Vector, offset float64) {
	w = kernels.Vector{Data: at(0), DType: x.DType, Len: x.Cols, Stride: 1}
	switch c.weight {
	case "none":
		if !strings.HasPrefix(c.operator, "rmsnorm_backward") || strings.HasSuffix(c.operator, "without dw") {
			w = kernels.Vector{}
		}
	case "float32":
		w.DType = kernels.Float32
	case "unaligned":
		w.Data = at(x.DType.Size())
	case "offset 1":
		offset = 1
	}
	return w, offset
}

// request is what the planner is asked for (m, n) rows.
func (c storedCase) request(m, n int64) request {
	size := c.x.Size()
	first := kernels.Matrix{Data: at(0), DType: c.x, Rows: m, Cols: n, Stride: n}
	second, out := first, first
	switch c.layout {
	case "same offset":
		first.Data, second.Data, out.Data = at(size), at(size), at(size)
	case "mixed offsets":
		first.Data = at(size)
	case "strided": // a part of the columns of a wider matrix
		first.Stride = 2*n + 1
	case "dout float32":
		second.DType = kernels.Float32
	}
	r := storedOperators[c.operator](c, first, second, out)
	r.Choice = Choice{Algorithm: c.algorithm, BatchInvariant: c.invariant}
	return r
}

// storedCases lists all kinds of calls, and how many requests there are on each device.
func storedCases() (cases []storedCase, requests int) {
	for _, operator := range slices.Sorted(maps.Keys(storedOperators)) {
		norm := strings.HasPrefix(operator, "rmsnorm")
		layouts := []string{"aligned", "same offset", "mixed offsets", "strided"}
		weights := []string{"-"}
		if norm {
			weights = []string{"none", "x's type", "float32", "unaligned", "offset 1"}
		}
		for x := kernels.Float16; x <= kernels.Float32; x++ {
			for _, weight := range weights {
				for _, layout := range layouts {
					c := storedCase{operator: operator, x: x, layout: layout, weight: weight}
					cases = append(cases, c)
					c.invariant = true
					cases = append(cases, c)
				}
			}
			c := storedCase{operator: operator, x: x, layout: "dout float32", weight: weights[0]}
			if norm && operator != "rmsnorm_forward" && x != kernels.Float32 {
				cases = append(cases, c)
			}
			c.layout = layouts[0]
			if !choosable(c.request(1, 1).op) || x != kernels.BFloat16 {
				continue
			}
			for c.algorithm = Warp; c.algorithm <= SplitK; c.algorithm++ {
				for _, c.layout = range layouts[:3] {
					cases = append(cases, c)
				}
			}
		}
	}
	return cases, len(cases) * len(storedLengths) * len(storedRows)
}

// describe names a plan's kernels, without operator and type, with CTAs per cluster and how rows are divided.
func describe(p *plan) string {
	var b strings.Builder
	for i, l := range p.launches {
		if i > 0 {
			b.WriteString(" + ")
		}
		v := l.variant
		name := strings.Replace(v.Symbol, "_"+v.Family.DType().String(), "", 1)
		if v.Shape != kernels.Finish {
			name = strings.TrimPrefix(name, v.Op.String()+"_")
		}
		b.WriteString(name)
		if l.geometry.Cluster > 1 {
			fmt.Fprintf(&b, " x%d", l.geometry.Cluster)
		}
	}
	for _, number := range []struct {
		name  string
		value int32
		none  int32
	}{{"splits", p.splits, 1}, {"stages", p.stages, 0}, {"depth", p.depth, 0}, {"threads", p.rowThreads, 0}} {
		if number.value != number.none {
			fmt.Fprintf(&b, " %s=%d", number.name, number.value)
		}
	}
	if p.singleCTATotal {
		b.WriteString(" total")
	}
	if p.prefetch > 0 {
		b.WriteString(" prefetch")
	}
	return b.String()
}

// numbers are all of a plan but its words.
func numbers(b []byte, p *plan) []byte {
	add := func(values ...int64) {
		for _, v := range values {
			b = append(strconv.AppendInt(b, v, 10), ' ')
		}
	}
	for _, l := range p.launches {
		b = append(b, l.variant.Symbol...)
		g := l.geometry
		add(int64(g.Grid), int64(g.Cluster), int64(g.Shared))
		b = append(strconv.AppendBool(b, g.Cooperative), ' ')
		b = append(strconv.AppendBool(b, g.Dependent), ' ')
	}
	b = append(strconv.AppendBool(b, p.singleCTATotal), ' ')
	s := p.scratch
	add(p.chunk, int64(p.splits), int64(p.stages), int64(p.depth), int64(p.prefetch), int64(p.prefetchFrom))
	add(int64(p.partials), int64(s.partial), int64(s.dwPartial), int64(s.rowLosses), int64(s.logits))
	add(int64(s.denominator), int64(s.size), int64(p.taken))
	add(int64(p.parts), int64(p.rowsPerCTA), int64(p.rowThreads))
	return b
}

// planned is a plan as it is stored.
type planned struct {
	text string
	sum  uint32 // of its numbers
}

// planning makes the plans of one device. Many cases come to the same requests.
type planning struct {
	facts  *driver.Facts
	seen   map[request]planned
	buffer []byte
}

func (p *planning) plan(r request) planned {
	if known, ok := p.seen[r]; ok {
		return known
	}
	made, served, err := attempt(p.facts, r)
	answer := planned{text: "refused"}
	if err == nil && served {
		p.buffer = numbers(p.buffer[:0], made)
		answer = planned{describe(made), crc32.ChecksumIEEE(p.buffer)}
	}
	p.seen[r] = answer
	return answer
}

// body writes the plans of a case: a line for lengths that have the same kernels, with ranges of row counts
// and, for each length, a checksum of all numbers.
func (p *planning) body(c storedCase) string {
	var b, line strings.Builder
	from, last := 0, ""
	sums := make([]uint32, len(storedLengths))
	flush := func(to int) {
		fmt.Fprintf(&b, "%s: %s", between(storedLengths[from], storedLengths[to]), last)
		for i := from; i <= to; i++ {
			fmt.Fprintf(&b, "%s%x", map[bool]string{true: " #", false: ","}[i == from], sums[i])
		}
		b.WriteByte('\n')
	}
	for i, n := range storedLengths {
		line.Reset()
		run, text := 0, ""
		for j, m := range storedRows {
			answer := p.plan(c.request(m, n))
			sums[i] = sums[i]*31 + answer.sum
			if answer.text == text {
				continue
			}
			if j > 0 {
				fmt.Fprintf(&line, "%s %s; ", between(storedRows[run], storedRows[j-1]), text)
			}
			run, text = j, answer.text
		}
		fmt.Fprintf(&line, "%s %s", between(storedRows[run], storedRows[len(storedRows)-1]), text)
		if line.String() == last {
			continue
		}
		if i > 0 {
			flush(i - 1)
		}
		from, last = i, line.String()
	}
	flush(len(storedLengths) - 1)
	return b.String()
}

func between(from, to int64) string {
	if from == to {
		return strconv.FormatInt(from, 10)
	}
	return fmt.Sprintf("%d-%d", from, to)
}

// TestStoredPlans compares all plans with those in the repository, so that a change shows what it changed.
// With -update it writes them.
func TestStoredPlans(t *testing.T) {
	cases, requests := storedCases()
	require.Greater(t, requests, 100_000)
	bodies := map[string]string{} // by case
	var order []string
	for _, device := range storedDevices {
		p := planning{facts: testDevices[device], seen: map[request]planned{}}
		for _, c := range cases {
			name := fmt.Sprintf("%s: %v", device, c)
			bodies[name] = p.body(c)
			order = append(order, name)
		}
	}
	if *update {
		storePlans(t, order, bodies)
		return
	}
	stored := readPlans(t)
	var kernelsDiffer, numbersDiffer []string // the first of each case
	counts := map[string]int{}
	total := 0
	for _, name := range order {
		was, is := stored[name], bodies[name]
		delete(stored, name)
		if was == is {
			continue
		}
		kernels, numbers := compareBodies(was, is)
		total += len(kernels) + len(numbers)
		counts[strings.Join(strings.Fields(name)[:2], " ")] += len(kernels) + len(numbers)
		for _, d := range kernels[:min(1, len(kernels))] {
			kernelsDiffer = append(kernelsDiffer, name+", "+d)
		}
		for _, d := range numbers[:min(1, len(numbers))] {
			numbersDiffer = append(numbersDiffer, name+", "+d)
		}
	}
	require.Empty(t, slices.Sorted(maps.Keys(stored)), "cases that are stored, but no longer made")
	if total == 0 {
		return
	}
	var summary strings.Builder
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&summary, "%7d %s\n", counts[key], key)
	}
	const shown = 30
	differences := append(kernelsDiffer, numbersDiffer...)
	t.Errorf("%d of %d plans differ from %s (go test ./ops -run TestStoredPlans -update writes it)\n%s\n%s",
		total, requests*len(storedDevices), storedPlans,
		strings.Join(differences[:min(shown, len(differences))], "\n"), summary.String())
}

// storePlans writes each body once, after the names of all cases that have it.
func storePlans(t *testing.T, order []string, bodies map[string]string) {
	names := map[string][]string{}
	for _, name := range order {
		names[bodies[name]] = append(names[bodies[name]], name)
	}
	file, err := os.Create(storedPlans)
	require.NoError(t, err)
	w, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	require.NoError(t, err)
	for _, name := range order {
		if same := names[bodies[name]]; same[0] == name {
			_, err := fmt.Fprintf(w, "== %s\n%s", strings.Join(same, "\n== "), bodies[name])
			require.NoError(t, err)
		}
	}
	require.NoError(t, w.Close())
	require.NoError(t, file.Close())
}

func readPlans(t *testing.T) map[string]string {
	file, err := os.Open(storedPlans)
	require.NoError(t, err)
	defer file.Close()
	r, err := gzip.NewReader(file)
	require.NoError(t, err)
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	bodies := map[string]string{}
	var names []string
	lines := strings.SplitAfter(string(text), "\n")
	for i := 0; i < len(lines); {
		names = names[:0]
		for ; i < len(lines) && strings.HasPrefix(lines[i], "== "); i++ {
			names = append(names, strings.TrimSpace(lines[i][3:]))
		}
		from := i
		for ; i < len(lines) && !strings.HasPrefix(lines[i], "== "); i++ {
		}
		for _, name := range names {
			bodies[name] = strings.Join(lines[from:i], "")
		}
	}
	return bodies
}

// compareBodies names the requests of a case whose kernels differ, and the lengths with the same kernels but
// other numbers.
func compareBodies(was, is string) (kernels, numbers []string) {
	old, oldSums := expand(was)
	now, nowSums := expand(is)
	for i, n := range storedLengths {
		found := false
		for j, m := range storedRows {
			if a, b := old[i*len(storedRows)+j], now[i*len(storedRows)+j]; a != b {
				kernels = append(kernels, fmt.Sprintf("%d x %d: was %s, is %s", m, n, a, b))
				found = true
			}
		}
		if !found && oldSums[i] != nowSums[i] {
			numbers = append(numbers, fmt.Sprintf("n = %d: the same kernels (%s), but another grid, "+
				"chunk, prefetch distance, number of partial sums or scratch memory",
				n, now[i*len(storedRows)]))
		}
	}
	return kernels, numbers
}

// expand is the inverse of body: each request's plan, by length and then by row count, and each length's sum.
func expand(body string) (plans, sums []string) {
	plans = slices.Repeat([]string{"nothing"}, len(storedLengths)*len(storedRows))
	sums = make([]string, len(storedLengths))
	for line := range strings.Lines(body) {
		lengths, rest, _ := strings.Cut(strings.TrimSpace(line), ": ")
		rest, allSums, _ := strings.Cut(rest, " #")
		lineSums := strings.Split(allSums, ",")
		from, to := limitsOf(lengths)
		for i, n := range storedLengths {
			if n < from || n > to {
				continue
			}
			sums[i], lineSums = lineSums[0], lineSums[1:]
			for run := range strings.SplitSeq(rest, "; ") {
				rows, text, _ := strings.Cut(run, " ")
				first, last := limitsOf(rows)
				for j, m := range storedRows {
					if m >= first && m <= last {
						plans[i*len(storedRows)+j] = text
					}
				}
			}
		}
	}
	return plans, sums
}

// limitsOf is the inverse of between.
func limitsOf(text string) (from, to int64) {
	first, last, ok := strings.Cut(text, "-")
	if !ok {
		last = first
	}
	from, _ = strconv.ParseInt(first, 10, 64)
	to, _ = strconv.ParseInt(last, 10, 64)
	return from, to
}

// TestStoredPlansAreReadBack proves that a difference in any single plan is found and named.
func TestStoredPlansAreReadBack(t *testing.T) {
	p := planning{facts: testDevices["h100"], seen: map[request]planned{}}
	c := storedCase{operator: "softmax_forward", x: kernels.BFloat16, layout: "aligned", weight: "-"}
	body := p.body(c)
	kernelsDiffer, numbersDiffer := compareBodies(body, body)
	require.Empty(t, kernelsDiffer)
	require.Empty(t, numbersDiffer)
	plans, _ := expand(body)
	for i, n := range storedLengths {
		for j, m := range storedRows {
			require.Equal(t, p.plan(c.request(m, n)).text, plans[i*len(storedRows)+j], "%d x %d", m, n)
		}
	}
	r := c.request(512, 1000)
	right := p.plan(r)
	p.seen[r] = planned{"another", right.sum}
	kernelsDiffer, numbersDiffer = compareBodies(body, p.body(c))
	require.Equal(t, []string{"512 x 1000: was " + right.text + ", is another"}, kernelsDiffer)
	require.Empty(t, numbersDiffer)
	p.seen[r] = planned{right.text, right.sum + 1}
	kernelsDiffer, numbersDiffer = compareBodies(body, p.body(c))
	require.Empty(t, kernelsDiffer)
	require.Len(t, numbersDiffer, 1)
	require.Contains(t, numbersDiffer[0], "n = 1000: the same kernels")
}
