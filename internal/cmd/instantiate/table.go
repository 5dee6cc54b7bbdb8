package main

import (
	"bufio"
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/gander-go/gander/kernels"
)

// columns of a row of kernels/variants.txt that have no name: shape, tile, layout, per SM, types.
const columns = 5

var (
	types = map[string][]kernels.DType{
		"any":      {kernels.Float16, kernels.BFloat16, kernels.Float32},
		"16-bit":   {kernels.Float16, kernels.BFloat16},
		"float16":  {kernels.Float16},
		"bfloat16": {kernels.BFloat16},
		"float32":  {kernels.Float32},
	}
	layouts = map[string]kernels.Variant{
		"aligned":     {},
		"unaligned":   {Unaligned: true},
		"same-offset": {Unaligned: true, SameOffset: true},
	}
)

// option is what a row says by name. With a value it sets a field of the variant, else it inverts one.
type option struct {
	field string
	fits  func(v *kernels.Variant) bool // whether such a kernel asks about it
}

var options = map[string]option{
	"cluster":           {"Cluster", func(*kernels.Variant) bool { return true }},
	"all-threads":       {"ExactWarps", func(v *kernels.Variant) bool { return v.ExactWarps && isRows(v) }},
	"keeps-exp":         {"KeepsExp", keepsExp},
	"late-weights":      {"LateWeights", loadsWeights},
	"late-wide-weights": {"LateWideWeights", loadsWideWeights},
	"merges-threads":    {"MergesThreads", mergesThreads},
	"patches-target": {"PatchesTarget", func(v *kernels.Variant) bool {
		return v.StatsRows && v.Op == kernels.CrossEntropyForwardDX
	}},
	"excludes-target": {"ExcludesTarget", func(v *kernels.Variant) bool { return v.StatsRows }},
	"min-stages": {"MinStages", func(v *kernels.Variant) bool {
		return v.Shape == kernels.GridCooperative
	}},
	"stages": {"Stages", func(v *kernels.Variant) bool { return v.Shape == kernels.Lanes }},
	"up-to":  {"UpTo", func(v *kernels.Variant) bool { return v.Shape == kernels.Finish }},
}

func isRows(v *kernels.Variant) bool { return v.Shape == kernels.InRegisters }

// oneRow tells whether a CTA has one row at a time.
func oneRow(v *kernels.Variant) bool { return v.RowThreads == v.Threads }

func keepsExp(v *kernels.Variant) bool {
	return isRows(v) && (v.Op == kernels.SoftmaxForward || v.Op == kernels.CrossEntropyForwardDX)
}

func mergesThreads(v *kernels.Variant) bool {
	return isRows(v) && v.Op == kernels.CrossEntropyForward && oneRow(v) && !v.Cluster
}

func loadsWeights(v *kernels.Variant) bool {
	switch v.Op {
	case kernels.LayerNormForward, kernels.RMSNormResidualForward, kernels.NormForward:
		return isRows(v)
	case kernels.RMSNormForward, kernels.RMSNormBackward:
		return !v.Unaligned && (isRows(v) || v.Shape == kernels.GridCooperative)
	}
	return false
}

func loadsWideWeights(v *kernels.Variant) bool {
	return v.Op == kernels.RMSNormForward && v.Family.DType() != kernels.Float32 && !v.Unaligned &&
		(isRows(v) || v.Shape == kernels.Staged)
}

func layoutOf(v *kernels.Variant) string {
	switch {
	case v.SameOffset:
		return "same-offset"
	case v.Unaligned:
		return "unaligned"
	}
	return "aligned"
}

// parse reads kernels/variants.txt, and returns the variants of one element type after the other, without
// Index.
func parse(text []byte) ([]kernels.Variant, error) {
	var byType [kernels.Float32 + 1][]kernels.Variant
	symbols := map[string]bool{}
	op := kernels.Ops
	scanner := bufio.NewScanner(bytes.NewReader(text))
	for number := 1; scanner.Scan(); number++ {
		line := strings.TrimSpace(scanner.Text())
		switch {
		case line == "", strings.HasPrefix(line, "#"):
			continue
		case strings.HasPrefix(line, "["):
			var err error
			if op, err = named(strings.Trim(line, "[]"), "op", kernels.Ops); err != nil {
				return nil, fmt.Errorf("line %d: %w", number, err)
			}
			continue
		case op == kernels.Ops:
			return nil, fmt.Errorf("line %d: a row before the first section", number)
		}
		variants, err := parseRow(op, strings.Fields(line))
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		for _, v := range variants {
			if symbols[v.Symbol] {
				return nil, fmt.Errorf("line %d: there is a row for %s already", number, v.Symbol)
			}
			symbols[v.Symbol] = true
			byType[v.Family.DType()] = append(byType[v.Family.DType()], v)
		}
	}
	return slices.Concat(byType[:]...), scanner.Err()
}

// named returns the value below a limit that has a name.
func named[N interface {
	~uint8
	fmt.Stringer
}](name, kind string, limit N) (N, error) {
	for n := range limit {
		if n.String() == name {
			return n, nil
		}
	}
	return 0, fmt.Errorf("there is no %s %q; kernels/variants.go names them", kind, name)
}

// parseRow returns a row's variants, one for each element type.
func parseRow(op kernels.Op, fields []string) (variants []kernels.Variant, err error) {
	if len(fields) < columns {
		return nil, fmt.Errorf("%q, expected shape, tile, layout, per SM, types", strings.Join(fields, " "))
	}
	like, ok := layouts[fields[2]]
	if !ok {
		return nil, fmt.Errorf("layout %q, expected aligned, unaligned or same-offset", fields[2])
	}
	like.Op = op
	if like.Shape, err = named(fields[0], "shape", kernels.Shapes); err != nil {
		return nil, err
	}
	if err := parseTile(&like, fields[1]); err != nil {
		return nil, err
	}
	if like.Resident, err = strconv.Atoi(fields[3]); err != nil || like.Resident < 1 {
		return nil, fmt.Errorf("%q CTAs per SM, expected a number of at least 1", fields[3])
	}
	for name := range strings.SplitSeq(fields[4], ",") {
		if types[name] == nil {
			return nil, fmt.Errorf("type %q, expected any, 16-bit, float16, bfloat16 or float32", name)
		}
		for _, x := range types[name] {
			v := like
			v.Family = kernels.FamilyOf(op, x)
			derive(&v)
			for i, name := range fields[columns:] {
				if slices.Contains(fields[columns:columns+i], name) {
					return nil, fmt.Errorf("%s stands twice", name)
				}
				if err := parseOption(&v, name); err != nil {
					return nil, err
				}
			}
			if err := complete(&v); err != nil {
				return nil, err
			}
			variants = append(variants, v)
		}
	}
	return variants, nil
}

func parseTile(v *kernels.Variant, tile string) error {
	parts := strings.Split(tile, "x")
	into := []*int{&v.RowThreads, &v.Vectors, &v.RowsPerStep}
	if v.Shape != kernels.GridCooperative {
		into = into[:2]
	}
	for i, part := range parts {
		n, err := strconv.Atoi(part)
		if len(parts) != len(into) || err != nil || n < 1 {
			return fmt.Errorf("tile %q, expected threads x vectors, of grid_cooperative x rows", tile)
		}
		*into[i] = n
	}
	return nil
}

func parseOption(v *kernels.Variant, text string) error {
	name, value, valued := strings.Cut(text, "=")
	n, err := strconv.Atoi(value)
	switch _, known := options[name]; {
	case text == "only=8x":
		v.NoClusters = true
		return nil
	case strings.HasSuffix(name, "x") && valued && err == nil: // 8x=9
		if n < 0 || n >= v.Resident {
			return fmt.Errorf("%s, expected less than on sm_90, %d", text, v.Resident)
		}
		major, err := strconv.Atoi(strings.TrimSuffix(name, "x"))
		v.Elsewhere = append(v.Elsewhere, kernels.Residency{Major: major, Resident: n})
		return err
	case name == "not" && strings.HasSuffix(value, "x"): // not=12x
		v.Without, err = strconv.Atoi(strings.TrimSuffix(value, "x"))
		return err
	case !known:
		return fmt.Errorf("option %q; the head of kernels/variants.txt lists them", text)
	case !options[name].fits(v):
		return fmt.Errorf("%s, which a kernel %s_%s_%s %s does not ask about", name, v.Op, v.Shape,
			v.Family.DType(), layoutOf(v))
	}
	field := reflect.ValueOf(v).Elem().FieldByName(options[name].field)
	switch takesNumber := field.CanInt(); {
	case takesNumber != valued, valued && (err != nil || n < 1):
		return fmt.Errorf("option %q; the head of kernels/variants.txt says which have a number", text)
	case takesNumber:
		field.SetInt(int64(n))
	default:
		field.SetBool(!field.Bool())
	}
	return nil
}

// derive sets what follows from op, shape and tile, before options change it.
func derive(v *kernels.Variant) {
	const warp = 32
	switch v.Threads = max(v.RowThreads, kernels.MinThreads); {
	case v.Shape == kernels.GridCooperative: // five warps exchange states, one copies rows
		v.ComputeGroups = v.RowsPerStep // the threads of one row would be too few for a CTA
		v.Threads = v.ComputeGroups*v.RowThreads + 6*warp
	case v.Op == kernels.NormBackward && v.Shape == kernels.Ring:
		v.Threads = max(v.RowThreads, kernels.ChunkThreads)
	case v.Op == kernels.WeightGradient || v.Op == kernels.NormGradient: // 16 columns at least
		v.Threads = max(16*v.RowThreads, kernels.ChunkThreads)
	case v.Shape == kernels.Lanes:
		v.Threads = kernels.ChunkThreads
	}
	v.StatsRows = v.Shape == kernels.InRegisters && v.RowThreads <= warp &&
		(v.Op == kernels.CrossEntropyForward || v.Op == kernels.CrossEntropyForwardDX)
	switch v.Shape {
	case kernels.InRegisters:
		v.ExactWarps = oneRow(v) && layoutOf(v) != "unaligned"
	case kernels.Staged, kernels.Ring:
		v.ExactWarps = oneRow(v)
	}
}

// complete sets what follows from the options, and refuses what no SM or architecture has.
func complete(v *kernels.Variant) error {
	const maxThreads = 2048 // of an SM
	if v.Shape == kernels.Lanes {
		v.Shared = v.Stages * v.Threads * (2*16*v.Vectors + 4) // vectors of x and dy, rstd
	}
	v.Symbol = fmt.Sprintf("%s_%s_%s_%dx%d", v.Op, v.Shape, v.Family.DType(), v.RowThreads, v.Vectors)
	if v.RowsPerStep > 0 {
		v.Symbol += fmt.Sprintf("x%d", v.RowsPerStep)
	}
	if v.Unaligned {
		v.Symbol += "_" + strings.ReplaceAll(layoutOf(v), "-", "_")
	}
	if v.Cluster {
		v.Symbol += "_cluster"
	}
	switch {
	case v.Cluster && v.NoClusters:
		return fmt.Errorf("cluster and only=8x: 8.x has no clusters")
	case v.Resident*v.Threads > maxThreads:
		return fmt.Errorf("%d CTAs of %d threads, expected at most %d threads on an SM", v.Resident, v.Threads,
			maxThreads)
	case v.Shape == kernels.Lanes && v.Stages == 0:
		return fmt.Errorf("stages is missing, expected how many rows a thread loads early")
	case v.Shape == kernels.GridCooperative && v.MinStages == 0:
		return fmt.Errorf("min-stages is missing, expected the stages that pay")
	}
	return nil
}

// goTable writes the variants as Go.
func goTable(variants []kernels.Variant) []byte {
	var b bytes.Buffer
	b.WriteString("// Code generated by internal/cmd/instantiate from kernels/variants.txt. DO NOT EDIT.\n\n" +
		"package kernels\n\n// Variants is the table of all kernels.\nvar Variants = numbered([]Variant{\n")
	for i := range variants {
		v := reflect.ValueOf(variants[i])
		var set []string
		for f := range v.NumField() {
			if !v.Field(f).IsZero() {
				set = append(set, v.Type().Field(f).Name+": "+literal(v.Field(f)))
			}
		}
		fmt.Fprintf(&b, "\t{%s},\n", strings.Join(set, ", "))
	}
	b.WriteString("})\n")
	return b.Bytes()
}

// literal is a field's value. Ops and so on are written as numbers.
func literal(v reflect.Value) string {
	switch value := v.Interface().(type) {
	case string:
		return strconv.Quote(value)
	case []kernels.Residency:
		var all []string
		for _, r := range value {
			all = append(all, fmt.Sprintf("{%d, %d}", r.Major, r.Resident))
		}
		return "[]Residency{" + strings.Join(all, ", ") + "}"
	}
	if v.CanUint() {
		return fmt.Sprint(v.Uint())
	}
	return fmt.Sprint(v)
}
