package policy

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/kernels"
)

// Names in policy.txt, in the order of the constants.
var (
	DeviceNames   = []string{"h100", "h200", "other", "other-fast"}
	OperatorNames = []string{
		"softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward", "rmsnorm_backward_dx",
		"cross_entropy_forward", "cross_entropy_forward_dx", "cross_entropy_backward",
		"norm_forward", "norm_backward", "masked_softmax_forward", "masked_softmax_backward",
		"general_cross_entropy_forward", "general_cross_entropy_forward_dx",
		"token_statistics_forward", "all_token_statistics_forward", "soft_cross_entropy_forward",
		"layernorm_forward", "layernorm_backward", "rmsnorm_residual_forward", "rmsnorm_residual_backward",
	}
	TypeNames   = []string{"float16", "bfloat16", "float32"}
	LayoutNames = []string{"aligned", "same-offset", "mixed-offsets", "mixed-types"}
	RegimeNames = []string{
		"registers", "cluster-registers", "shared-memory", "cluster-shared-memory", "persistent-loop",
		"persistent-lanes", "persistent-ring", "grid-cooperative", "grid-shared-memory", "stream",
		"two-passes", "by-columns", "elementwise",
	}
	AlgorithmNames = []string{
		"auto", "warp", "block", "register", "medium", "extreme", "cluster", "arbitrary", "splitk",
	}
)

func (r Regime) String() string { return RegimeNames[r] }

// Key names a list of rows.
type Key struct {
	Device   Device
	Operator Operator
	Type     kernels.DType
	Layout   Layout
}

func (k Key) String() string {
	return strings.Join([]string{
		DeviceNames[k.Device], OperatorNames[k.Operator], TypeNames[k.Type], LayoutNames[k.Layout],
	}, "; ")
}

// Line is a row of the file with the comment lines above it.
type Line struct {
	Comment []string
	Row
}

// File is policy.txt.
type File struct {
	Comment []string // before the first section
	Lists   map[Key][]Line
}

// Parse reads policy.txt: sections of "[devices; operators; types; layouts]", which hold for all
// combinations of what they name, with a line for each row. The name "any" stands for all of a list.
func Parse(text []byte) (*File, error) {
	f := &File{Lists: map[Key][]Line{}}
	var keys []Key
	var comment []string
	scanner := bufio.NewScanner(bytes.NewReader(text))
	for number := 1; scanner.Scan(); number++ {
		fail := func(err error) error { return fmt.Errorf("line %d: %w", number, err) }
		line := strings.TrimSpace(scanner.Text())
		switch {
		case line == "":
			if keys == nil && len(comment) > 0 {
				f.Comment = append(f.Comment, comment...)
				comment = nil
			}
		case strings.HasPrefix(line, "#"):
			comment = append(comment, line)
		case strings.HasPrefix(line, "["):
			var err error
			if keys, err = parseSection(line); err != nil {
				return nil, fail(err)
			}
			for _, k := range keys {
				if f.Lists[k] != nil {
					return nil, fail(fmt.Errorf("there are rows for %v already", k))
				}
			}
		default:
			row, err := ParseRow(line)
			if err != nil {
				return nil, fail(err)
			}
			if keys == nil {
				return nil, fail(fmt.Errorf("a row before the first section"))
			}
			var devices uint8
			for _, k := range keys {
				f.Lists[k] = append(f.Lists[k], Line{comment, row})
				devices |= 1 << k.Device
			}
			if row.Only&^devices != 0 || row.Only == devices {
				return nil, fail(fmt.Errorf("only=%s, expected some of the section's devices, not all",
					strings.Join(row.only(), ",")))
			}
			comment = nil
		}
	}
	return f, scanner.Err()
}

func parseSection(line string) (keys []Key, err error) {
	parts := strings.Split(strings.Trim(line, "[]"), ";")
	if len(parts) != 4 || !strings.HasSuffix(line, "]") {
		return nil, fmt.Errorf("%q, expected [devices; operators; types; layouts]", line)
	}
	var found [4][]int
	for i, names := range [][]string{DeviceNames, OperatorNames, TypeNames, LayoutNames} {
		wanted := strings.Fields(parts[i])
		if slices.Equal(wanted, []string{anyName}) {
			wanted = names
		}
		for _, name := range wanted {
			n, err := indexOf(name, names)
			if err != nil {
				return nil, err
			}
			found[i] = append(found[i], n)
		}
	}
	for _, d := range found[0] {
		for _, op := range found[1] {
			for _, x := range found[2] {
				for _, l := range found[3] {
					keys = append(keys, Key{Device(d), Operator(op), kernels.DType(x), Layout(l)})
				}
			}
		}
	}
	return keys, nil
}

func indexOf(name string, names []string) (int, error) {
	if i := slices.Index(names, name); i >= 0 {
		return i, nil
	}
	return 0, fmt.Errorf("%q, expected one of %s", name, strings.Join(names, ", "))
}

const columns = 6 // of a row that have no name: algorithms, over, up to, rows, regime, tile

// ParseRow reads a row as String writes it.
func ParseRow(line string) (r Row, err error) {
	fields := strings.Fields(line)
	if len(fields) < columns {
		return r, fmt.Errorf("%q, expected algorithms, over, up to, rows, regime, tile", line)
	}
	for name := range strings.SplitSeq(fields[0], ",") {
		i, err := indexOf(name, AlgorithmNames)
		if err != nil {
			return r, err
		}
		r.For |= 1 << i
	}
	number := func(text string, into *int64) {
		if text == "-" || err != nil {
			return
		}
		if *into, err = strconv.ParseInt(text, 10, 64); err == nil && *into < 0 {
			err = fmt.Errorf("%q, expected a number of 0 or more", text)
		}
	}
	number(fields[1], &r.Over)
	number(fields[2], &r.UpTo)
	if err != nil {
		return r, err
	}
	if r.From, r.Below, err = parseCounts(fields[3]); err != nil {
		return r, err
	}
	regime, err := indexOf(fields[4], RegimeNames)
	if err != nil {
		return r, err
	}
	r.Regime = Regime(regime)
	if fields[5] != "-" {
		for i, part := range strings.Split(fields[5], "x") {
			var n int64
			number(part, &n)
			if err != nil || i > 2 {
				return r, fmt.Errorf("%q, expected a tile as 256x4", fields[5])
			}
			*[]*int{&r.Threads, &r.Vectors, &r.RowsPerStep}[i] = int(n)
		}
	}
	for _, field := range fields[columns:] {
		name, value, _ := strings.Cut(field, "=")
		whole := func(into *int) {
			var n int64
			number(value, &n)
			*into = int(n)
		}
		switch name {
		case "ctas":
			low, high, _ := strings.Cut(value, "..")
			value = low
			whole(&r.MinCTAs)
			if value = high; value == "" {
				value = low
			}
			whole(&r.MaxCTAs)
		case "per-sm":
			whole(&r.Resident)
		case "stages":
			whole(&r.Stages)
		case "kib-per-sm":
			low, high, _ := strings.Cut(value, "..")
			number(low, &r.MinKiB)
			number(high, &r.MaxKiB)
		case "no-clusters":
			r.NoClusters = true
		case "one-wave":
			r.OneWave = true
		case "16-bit":
			r.Bits = 16
		case "32-bit":
			r.Bits = 32
		case "wide-weights":
			r.WideWeights = true
		case "only":
			for device := range strings.SplitSeq(value, ",") {
				var i int
				if i, err = indexOf(device, DeviceNames); err != nil {
					break
				}
				r.Only |= 1 << i
			}
		case "ratio":
			r.Ratio, err = strconv.ParseFloat(value, 64)
		case "next":
			r.RunnerUp = value
		default:
			err = fmt.Errorf("%q is none of ctas, per-sm, stages, kib-per-sm, no-clusters, "+
				"one-wave, 16-bit, 32-bit, wide-weights, only, ratio, next", name)
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// parseCounts reads "-", "1..16", "17..", "<1/sm", ">=8/sm", "7..20/sm", of which the last is at least 7 for
// each SM, and fewer than 20.
func parseCounts(text string) (from, below Count, err error) {
	if text == "-" {
		return from, below, nil
	}
	number, perSM := strings.CutSuffix(text, "/sm")
	count := func(digits string) Count {
		c := Count{PerSM: perSM}
		if err == nil {
			c.N, err = strconv.ParseInt(digits, 10, 64)
		}
		return c
	}
	low, high, isRange := strings.Cut(number, "..")
	switch {
	case isRange:
		from = count(low)
		if high != "" {
			below = count(high)
			if !perSM {
				below.N++
			}
		}
	case perSM && strings.HasPrefix(number, "<"):
		below = count(number[1:])
	case perSM && strings.HasPrefix(number, ">="):
		from = count(number[2:])
	default:
		err = strconv.ErrSyntax
	}
	if err == nil && (from.N < 0 || below != Count{} && below.N <= from.N) {
		err = strconv.ErrRange
	}
	if err != nil {
		err = fmt.Errorf("rows are %q, expected -, 1..16, 17.., <1/sm, >=8/sm or 7..20/sm", text)
	}
	return from, below, err
}

func formatCounts(from, below Count) string {
	switch {
	case from == Count{} && below == Count{}:
		return "-"
	case from.PerSM && below.PerSM:
		return fmt.Sprintf("%d..%d/sm", from.N, below.N)
	case below.PerSM:
		return fmt.Sprintf("<%d/sm", below.N)
	case from.PerSM:
		return fmt.Sprintf(">=%d/sm", from.N)
	case below == Count{}:
		return fmt.Sprintf("%d..", from.N)
	}
	return fmt.Sprintf("%d..%d", from.N, below.N-1)
}

// fields are the columns of a row.
func (r *Row) fields() []string {
	dash := func(n int64) string {
		if n == 0 {
			return "-"
		}
		return strconv.FormatInt(n, 10)
	}
	var algorithms []string
	for i, name := range AlgorithmNames {
		if r.For>>i&1 != 0 {
			algorithms = append(algorithms, name)
		}
	}
	tile := "-"
	if r.Threads > 0 {
		tile = fmt.Sprintf("%dx%d", r.Threads, r.Vectors)
	}
	if r.RowsPerStep > 0 {
		tile += fmt.Sprintf("x%d", r.RowsPerStep)
	}
	f := []string{
		strings.Join(algorithms, ","), dash(r.Over), dash(r.UpTo), formatCounts(r.From, r.Below),
		r.Regime.String(), tile,
	}
	add := func(present bool, format string, values ...any) {
		if present {
			f = append(f, fmt.Sprintf(format, values...))
		}
	}
	add(r.MaxCTAs > 0 && r.MaxCTAs == r.MinCTAs, "ctas=%d", r.MaxCTAs)
	add(r.MaxCTAs > r.MinCTAs, "ctas=%d..%d", r.MinCTAs, r.MaxCTAs)
	add(r.Resident > 0, "per-sm=%d", r.Resident)
	add(r.Stages > 0, "stages=%d", r.Stages)
	add(r.MinKiB > 0, "kib-per-sm=%d..%d", r.MinKiB, r.MaxKiB)
	add(r.NoClusters, "no-clusters")
	add(r.OneWave, "one-wave")
	add(r.Bits > 0, "%d-bit", r.Bits)
	add(r.WideWeights, "wide-weights")
	add(r.Only > 0, "only=%s", strings.Join(r.only(), ","))
	add(r.Ratio > 0, "ratio=%.3g", r.Ratio)
	add(r.RunnerUp != "", "next=%s", r.RunnerUp)
	return f
}

// only names the devices that the row is for, if not all of its list's are.
func (r *Row) only() (devices []string) {
	for i, name := range DeviceNames {
		if r.Only>>i&1 != 0 {
			devices = append(devices, name)
		}
	}
	return devices
}

// String writes a row as ParseRow reads it.
func (r *Row) String() string { return strings.Join(r.fields(), " ") }

// Format writes the file. Lists that are equal share a section.
func (f *File) Format() []byte {
	var b bytes.Buffer
	for _, line := range f.Comment {
		fmt.Fprintln(&b, line)
	}
	for _, s := range f.sections() {
		fmt.Fprintf(&b, "\n[%s; %s; %s; %s]\n", names(s.devices, DeviceNames),
			names(s.operators, OperatorNames), names(s.types, TypeNames), names(s.layouts, LayoutNames))
		var widths [columns]int
		for i := range s.lines {
			for c, field := range s.lines[i].fields()[:columns] {
				widths[c] = max(widths[c], len(field))
			}
		}
		for i := range s.lines {
			for _, c := range s.lines[i].Comment {
				fmt.Fprintln(&b, c)
			}
			fields := s.lines[i].fields()
			for c, width := range widths {
				fields[c] = fmt.Sprintf("%-*s", width, fields[c])
			}
			fmt.Fprintln(&b, strings.TrimRight(strings.Join(fields, " "), " "))
		}
	}
	return b.Bytes()
}

const anyName = "any" // of a section: all devices, operators, types or layouts

func names(numbers []int, of []string) string {
	if len(numbers) == len(of) {
		return anyName
	}
	var some []string
	for _, n := range numbers {
		some = append(some, of[n])
	}
	return strings.Join(some, " ")
}

// section is a list of rows, and the products of devices, operators, types and layouts that have it.
type section struct {
	devices, operators, types, layouts []int
	lines                              []Line
}

// sections groups equal lists: first over devices, then types, operators and layouts.
func (f *File) sections() []*section {
	var all []*section
	for op := range OperatorNames {
		for l := range LayoutNames {
			for x := range TypeNames {
				for d := range DeviceNames {
					lines := f.Lists[Key{Device(d), Operator(op), kernels.DType(x), Layout(l)}]
					if lines != nil {
						all = append(all, &section{[]int{d}, []int{op}, []int{x}, []int{l}, lines})
					}
				}
			}
		}
	}
	fields := []func(*section) *[]int{
		func(s *section) *[]int { return &s.devices }, func(s *section) *[]int { return &s.types },
		func(s *section) *[]int { return &s.operators }, func(s *section) *[]int { return &s.layouts },
	}
	for merged := range fields {
		var kept []*section
	next:
		for _, s := range all {
			for _, k := range kept {
				same := equalLines(k.lines, s.lines)
				for i, field := range fields {
					same = same && (i == merged || slices.Equal(*field(k), *field(s)))
				}
				if same {
					*fields[merged](k) = append(*fields[merged](k), *fields[merged](s)...)
					continue next
				}
			}
			kept = append(kept, s)
		}
		all = kept
	}
	for _, s := range all {
		s.narrow()
	}
	return all
}

// narrow leaves out the rows that are for other devices than the section's, after a list was changed for one
// of the devices that shared it.
func (s *section) narrow() {
	var devices uint8
	for _, d := range s.devices {
		devices |= 1 << d
	}
	var lines []Line
	for _, line := range s.lines {
		if line.Only != 0 {
			if line.Only &= devices; line.Only == 0 {
				continue
			}
		}
		if line.Only == devices {
			line.Only = 0
		}
		lines = append(lines, line)
	}
	s.lines = lines
}

func equalLines(a, b []Line) bool {
	return slices.EqualFunc(a, b, func(a, b Line) bool {
		return a.Row == b.Row && slices.Equal(a.Comment, b.Comment)
	})
}
