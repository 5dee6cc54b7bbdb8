package policy

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gander-go/gander/kernels"
)

// Measurement is the time of one shape with one row of the policy: a line that bench/tune.py writes.
type Measurement struct {
	Device   string  `json:"device"`
	Operator string  `json:"operator"`
	Type     string  `json:"dtype"`
	Layout   string  `json:"layout"`
	M        int64   `json:"m"`
	N        int64   `json:"n"`
	Row      string  `json:"row"`      // the row that was timed; empty for the one that the policy chooses
	Policy   string  `json:"policy"`   // if Row is empty: the row that the policy chooses, if known
	US       float64 `json:"us"`       // microseconds
	LimitUS  float64 `json:"limit_us"` // of the fastest kernel that only moves the bytes; 0 if not measured
	Weight   string  `json:"weight"`   // the type of the weights, if it is not Type
}

// ReadMeasurements parses a file of measurements, with a JSON object on each line. It leaves out those with
// weights of another type, which say nothing of other calls.
func ReadMeasurements(text []byte) (all []Measurement, err error) {
	scanner := bufio.NewScanner(bytes.NewReader(text))
	scanner.Buffer(nil, 1<<20)
	for number := 1; scanner.Scan(); number++ {
		var m Measurement
		if err := json.Unmarshal(scanner.Bytes(), &m); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if m.US <= 0 || m.M < 1 || m.N < 1 {
			return nil, fmt.Errorf("line %d: us, m and n are %v, %d, %d, expected numbers above 0",
				number, m.US, m.M, m.N)
		}
		if m.Weight == "" {
			all = append(all, m)
		}
	}
	return all, scanner.Err()
}

// Noise is the relative difference up to which two times count as equal.
const Noise = 0.02

// shape is the shape of a measured matrix: 16-byte vectors per row, and the number of rows M.
type shape struct{ vectors, m int64 }

// point is what was measured for one key and shape.
type point struct {
	limitUS  float64
	policyUS float64         // 0 if not measured
	policy   Row             // the row that the policy chooses; zero if not known
	us       map[Row]float64 // by Row.choice
}

// choice returns the row without its conditions, such as lengths, and without its measured figures.
func (r Row) choice() Row {
	r.For, r.Over, r.UpTo, r.From, r.Below = 0, 0, 0, Count{}, Count{}
	r.MinKiB, r.MaxKiB, r.NoClusters, r.OneWave, r.Bits, r.WideWeights, r.Only = 0, 0, false, false, 0, false, 0
	r.Ratio, r.RunnerUp = 0, ""
	return r
}

// kernel identifies the compiled kernel that a row chooses.
type kernel struct {
	regime                     Regime
	threads, vectors, together int
}

func (r *Row) kernel() kernel { return kernel{r.Regime, r.Threads, r.Vectors, r.RowsPerStep} }

// Apply updates the policy by measurements, and returns a line for each shape that gets another row. Comments
// in the policy name the source.
//
// A shape gets another row only if that is more than Noise faster than the one that the policy chooses. Of
// the rows within Noise of the fastest, it gets the one that is good for the most such shapes. In a tie, a
// row whose kernel the list already uses is preferred. So fewer kernels are needed.
//
// The new row holds for the shape's length, and for shorter ones down to the next that was measured with the
// same M, or for its own length alone if there is none. It holds for the shape's M and more, up to the next
// larger M that was measured for this length. Shapes that were not measured keep their rows.
func (f *File) Apply(measurements []Measurement, source string) (report []string, err error) {
	points, err := collect(measurements)
	if err != nil {
		return nil, err
	}
	for _, k := range f.Keys() {
		if shapes := points[k]; shapes != nil {
			report = append(report, f.move(k, shapes, source)...)
			delete(points, k)
		}
	}
	for k := range points {
		return nil, fmt.Errorf("%v was measured, but the policy has no rows for it; add a section to "+
			"policy.txt", k)
	}
	return report, nil
}

// collect groups measurements by key and shape. Of several times of the same row, the shortest counts.
func collect(measurements []Measurement) (map[Key]map[shape]*point, error) {
	points := map[Key]map[shape]*point{}
	for _, m := range measurements {
		k, err := m.key()
		if err != nil {
			return nil, err
		}
		if points[k] == nil {
			points[k] = map[shape]*point{}
		}
		s := shape{k.Layout.Vectors(m.N, 16/k.Type.Size()), m.M}
		p := points[k][s]
		if p == nil {
			p = &point{us: map[Row]float64{}}
			points[k][s] = p
		}
		p.limitUS = m.LimitUS
		shorter := func(known float64) float64 {
			if known == 0 {
				return m.US
			}
			return min(known, m.US)
		}
		if m.Row == "" {
			p.policyUS = shorter(p.policyUS)
			if m.Policy == "" {
				continue
			}
			if p.policy, err = ParseRow(m.Policy); err != nil {
				return nil, err
			}
			continue
		}
		row, err := ParseRow(m.Row)
		if err != nil {
			return nil, err
		}
		p.us[row.choice()] = shorter(p.us[row.choice()])
	}
	return points, nil
}

func (m *Measurement) key() (k Key, err error) {
	var numbers [4]int
	names := [][]string{DeviceNames, OperatorNames, TypeNames, LayoutNames}
	for i, name := range []string{m.Device, m.Operator, m.Type, m.Layout} {
		if numbers[i], err = indexOf(name, names[i]); err != nil {
			return k, err
		}
	}
	return Key{Device(numbers[0]), Operator(numbers[1]), kernels.DType(numbers[2]), Layout(numbers[3])}, nil
}

// move gives shapes of one key other rows where those are faster (see Apply), and reports which.
func (f *File) move(k Key, shapes map[shape]*point, source string) (report []string) {
	used := map[kernel]bool{}
	for _, line := range f.Lists[k] {
		if line.Takes(0) {
			used[line.kernel()] = true
		}
	}
	order := slices.SortedFunc(maps.Keys(shapes), func(a, b shape) int {
		return cmp.Or(cmp.Compare(a.vectors, b.vectors), cmp.Compare(a.m, b.m))
	})
	good := map[shape][]Row{} // for the shapes whose choice moves: the rows within Noise of the fastest
	for _, s := range order {
		p := shapes[s]
		best := p.best()
		if p.policyUS == 0 || best == 0 || p.policyUS <= best*(1+Noise) {
			f.annotate(k, p)
			continue
		}
		for row, us := range p.us {
			if us <= best*(1+Noise) {
				good[s] = append(good[s], row)
			}
		}
	}
	moved := map[shape]Row{}
	for len(moved) < len(good) {
		row := mostWanted(good, moved, used, shapes)
		used[row.kernel()] = true
		for s, rows := range good {
			if _, done := moved[s]; !done && slices.Contains(rows, row) {
				moved[s] = row
			}
		}
	}
	var lines []Line
	for _, s := range order {
		row, ok := moved[s]
		if !ok {
			continue
		}
		p := shapes[s]
		report = append(report, fmt.Sprintf("%v: %d rows of %d vectors: %s, %.4g us in place of %.4g",
			k, s.m, s.vectors, row.name(), p.us[row], p.policyUS))
		row.For = 1
		row.Over, row.UpTo = s.vectors-1, s.vectors
		row.From = Count{N: s.m}
		for _, other := range order {
			if other.m == s.m && other.vectors < s.vectors {
				row.Over = other.vectors
			}
			if other.vectors == s.vectors && other.m > s.m && row.Below.N == 0 {
				row.Below = Count{N: other.m}
			}
		}
		if p.limitUS > 0 {
			row.Ratio = ratio(p.limitUS, p.us[row.choice()])
			if p.policy.For != 0 {
				row.RunnerUp = fmt.Sprintf("%s:%.3g", p.policy.name(), ratio(p.limitUS, p.policyUS))
			}
		}
		lines = extend(lines, Line{[]string{"# Measured: " + source + "."}, row})
	}
	if lines != nil {
		kept := slices.DeleteFunc(slices.Clone(f.Lists[k]), func(old Line) bool {
			return slices.ContainsFunc(lines, func(l Line) bool { return l.replaces(old) })
		})
		f.Lists[k] = append(lines, kept...)
	}
	return report
}

// extend appends a row. If there is one that differs only in its lengths, and ends where the new one begins,
// that one is extended instead.
func extend(lines []Line, next Line) []Line {
	for i := range lines {
		l := &lines[i].Row
		same := l.choice() == next.choice() && l.From == next.From && l.Below == next.Below
		if same && l.UpTo == next.Over {
			l.UpTo, l.Ratio, l.RunnerUp = next.UpTo, next.Ratio, next.RunnerUp
			return lines
		}
	}
	return append(lines, next)
}

// replaces reports whether an old row came from a measurement, and the new row l makes it unreachable.
func (l *Line) replaces(old Line) bool {
	measured := len(old.Comment) > 0 && strings.HasPrefix(old.Comment[0], "# Measured: ")
	belowCovered := l.Below == Count{} || old.Below != Count{} && old.Below.N <= l.Below.N
	lengthsCovered := old.Over >= l.Over && old.UpTo <= l.UpTo
	return measured && old.For == l.For && lengthsCovered && old.From.N >= l.From.N && belowCovered
}

// mostWanted returns the row that is good for the most of the shapes that have no new row yet: a step of a
// greedy set cover. In a tie it prefers a row whose kernel is already used, and then the fastest.
func mostWanted(
	good map[shape][]Row, moved map[shape]Row, used map[kernel]bool, shapes map[shape]*point,
) Row {
	type vote struct {
		row      Row
		shapes   int
		slowdown float64 // sum over the shapes of its time divided by the shortest
	}
	votes := map[Row]*vote{}
	for s, rows := range good {
		if _, done := moved[s]; done {
			continue
		}
		for _, row := range rows {
			if votes[row] == nil {
				votes[row] = &vote{row: row}
			}
			votes[row].shapes++
			votes[row].slowdown += shapes[s].us[row] / shapes[s].best()
		}
	}
	unused := func(r Row) int {
		if used[r.kernel()] {
			return 0
		}
		return 1
	}
	best := slices.MinFunc(slices.Collect(maps.Values(votes)), func(a, b *vote) int {
		return cmp.Or(cmp.Compare(b.shapes, a.shapes), cmp.Compare(unused(a.row), unused(b.row)),
			cmp.Compare(a.slowdown, b.slowdown), cmp.Compare(a.row.String(), b.row.String()))
	})
	return best.row
}

// best returns the shortest time of the rows that were timed by name, or 0 if there are none.
func (p *point) best() float64 {
	if len(p.us) == 0 {
		return 0
	}
	return slices.Min(slices.Collect(maps.Values(p.us)))
}

// ratio is the share of the limit that a time reaches, rounded to three digits after the point.
func ratio(limitUS, us float64) float64 { return float64(int(limitUS/us*1000+0.5)) / 1000 }

// name returns a row's regime and tile. It has no spaces, since those separate the columns of policy.txt.
func (r *Row) name() string {
	f := r.fields()
	return f[4] + ":" + f[5]
}

// annotate sets the ratio and the runner-up of the row that the policy chooses for a point. It leaves a ratio
// that differs by less than Noise.
func (f *File) annotate(k Key, p *point) {
	if p.limitUS == 0 || p.policyUS == 0 || p.policy.For == 0 {
		return
	}
	r := ratio(p.limitUS, p.policyUS)
	lines := slices.Clone(f.Lists[k])
	for i := range lines {
		line := lines[i].Row
		same := p.policy
		same.Ratio, same.RunnerUp = line.Ratio, line.RunnerUp
		if line != same || line.Ratio > 0 && r > line.Ratio-Noise && r < line.Ratio+Noise {
			continue
		}
		lines[i].Ratio, lines[i].RunnerUp = r, ""
		us := 0.0
		for row, other := range p.us {
			if row.kernel() != line.kernel() && (us == 0 || other < us) {
				us = other
				lines[i].RunnerUp = fmt.Sprintf("%s:%.3g", row.name(), ratio(p.limitUS, other))
			}
		}
	}
	f.Lists[k] = lines
}

// Redundant lists kernels that the policy could do without: for each measured shape for which it chooses one,
// another kernel that it chooses for some shape of the same key is as fast, within Noise.
func Redundant(measurements []Measurement) ([]string, error) {
	points, err := collect(measurements)
	if err != nil {
		return nil, err
	}
	var report []string
	for k, shapes := range points {
		chosen := map[kernel][]*point{}
		for _, p := range shapes {
			if p.policy.For != 0 {
				chosen[p.policy.kernel()] = append(chosen[p.policy.kernel()], p)
			}
		}
		for candidate, at := range chosen {
			redundant := !slices.ContainsFunc(at, func(p *point) bool {
				for row, us := range p.us {
					other := row.kernel()
					if other != candidate && chosen[other] != nil && us <= p.policyUS*(1+Noise) {
						return false
					}
				}
				return true
			})
			if redundant {
				report = append(report, fmt.Sprintf(
					"%v: %v %dx%d is chosen for %d shapes; for each, another chosen kernel is as fast",
					k, candidate.regime, candidate.threads, candidate.vectors, len(at)))
			}
		}
	}
	slices.Sort(report)
	return report, nil
}
