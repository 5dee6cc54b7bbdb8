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

// Measurement is a line that bench/tune.py writes: how long a row of the policy took on one shape.
type Measurement struct {
	Device   string  `json:"device"`
	Operator string  `json:"operator"`
	Type     string  `json:"dtype"`
	Layout   string  `json:"layout"`
	M        int64   `json:"m"`
	N        int64   `json:"n"`
	Row      string  `json:"row"`      // empty: what the policy takes
	Policy   string  `json:"policy"`   // with an empty Row: the row that it takes, where that is known
	US       float64 `json:"us"`       // microseconds
	LimitUS  float64 `json:"limit_us"` // of the best plain kernel with the same traffic; 0 where not measured
}

// ReadMeasurements reads a file of them, a JSON object on each line.
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
		all = append(all, m)
	}
	return all, scanner.Err()
}

// Noise is the share by which two times may differ and count as equal.
const Noise = 0.02

// shape is a measured point of a key.
type shape struct{ vectors, m int64 }

// point is what was measured for a shape.
type point struct {
	limitUS  float64
	policyUS float64         // 0 where it was not measured
	policy   Row             // the row that the policy takes; zero where it is not known
	us       map[Row]float64 // by row, without its conditions
}

// choice is a row without the conditions under which it is taken, and without what was measured.
func (r Row) choice() Row {
	r.For, r.Over, r.UpTo, r.From, r.Below = 0, 0, 0, Count{}, Count{}
	r.MinKiB, r.MaxKiB, r.MinFill, r.NoClusters, r.OneWave = 0, 0, 0, false, false
	r.Ratio, r.RunnerUp = 0, ""
	return r
}

// kernel is a row's choice of a compiled kernel.
type kernel struct {
	regime                     Regime
	threads, vectors, together int
}

func (r *Row) kernel() kernel { return kernel{r.Regime, r.Threads, r.Vectors, r.Together} }

// Apply brings measurements into the policy, and says what it did.
//
// A shape's choice moves only where another row is more than Noise faster than what the policy takes. Of
// the rows within Noise of the fastest one, those that serve the most such shapes are taken, and rather
// kernels that the list has already: so that fewer kernels are needed. A moved choice holds for lengths
// above the next shorter one that was measured with as many rows (or for its own length alone), and for at
// least its number of rows, but fewer than the next larger number that was measured for its length. What
// was not measured keeps its rows.
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
		return nil, fmt.Errorf("%v was measured, but the policy has no rows for it", k)
	}
	return report, nil
}

// collect sorts measurements by key and shape. Of several times of one row the shortest counts.
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
		elements := 16 / k.Type.Size()
		s := shape{(m.N + elements - 1) / elements, m.M}
		if k.Layout != Aligned {
			s.vectors = (m.N + 2*elements - 2) / elements
		}
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

// move changes the rows of one key.
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

// extend appends a row, or lets the last one that is alike but for its lengths reach as far.
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

// replaces tells whether a row that an earlier measurement brought is no longer reached.
func (l *Line) replaces(old Line) bool {
	measured := len(old.Comment) > 0 && strings.HasPrefix(old.Comment[0], "# Measured: ")
	fewer := l.Below == Count{} || old.Below != Count{} && old.Below.N <= l.Below.N
	shorter := old.Over >= l.Over && old.UpTo <= l.UpTo
	return measured && old.For == l.For && shorter && old.From.N >= l.From.N && fewer
}

// mostWanted returns the row that is good for the most shapes that have not moved yet; of several, one
// whose kernel is used already, then the fastest.
func mostWanted(
	good map[shape][]Row, moved map[shape]Row, used map[kernel]bool, shapes map[shape]*point,
) Row {
	type vote struct {
		row    Row
		shapes int
		loss   float64 // summed over the fastest
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
			votes[row].loss += shapes[s].us[row] / shapes[s].best()
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
			cmp.Compare(a.loss, b.loss), cmp.Compare(a.row.String(), b.row.String()))
	})
	return best.row
}

// best is the shortest time that was measured for other rows than the policy's.
func (p *point) best() float64 {
	if len(p.us) == 0 {
		return 0
	}
	return slices.Min(slices.Collect(maps.Values(p.us)))
}

func ratio(limitUS, us float64) float64 { return float64(int(limitUS/us*1000+0.5)) / 1000 }

// name is a row's regime and tile, without blanks.
func (r *Row) name() string {
	f := r.fields()
	return f[4] + ":" + f[5]
}

// annotate fills in what was measured of a row that stays, unless it is there already and differs by no
// more than Noise.
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

// Spare lists the kernels that, wherever they were measured as the policy's choice, are within Noise of
// another kernel that is chosen somewhere else.
func Spare(measurements []Measurement) ([]string, error) {
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
		for own, at := range chosen {
			spare := !slices.ContainsFunc(at, func(p *point) bool {
				for row, us := range p.us {
					if row.kernel() != own && chosen[row.kernel()] != nil && us <= p.policyUS*(1+Noise) {
						return false
					}
				}
				return true
			})
			if spare {
				report = append(report, fmt.Sprintf(
					"%v: %v %dx%d is chosen for %d shapes, and another chosen kernel is as fast",
					k, own.regime, own.threads, own.vectors, len(at)))
			}
		}
	}
	slices.Sort(report)
	return report, nil
}
