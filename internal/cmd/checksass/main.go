// Command checksass checks the memory instructions in the machine code of the sm_90 images against the table
// of variants:
//
//	checksass FOLDER-OF-CUOBJDUMP-AND-NVDISASM FOLDER-OF-IMAGES
//
// No kernel may access local memory, which holds spilled registers and arrays on the stack. Rows must be read
// and written with 16-byte vectors or bulk copies. A kernel that is launched after another one of the same
// call, and may start before that has ended, must wait for it.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/gander-go/gander/internal/cubin"
	"github.com/gander-go/gander/kernels"
)

const arch = "sm_90"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: checksass TOOLS IMAGES")
		os.Exit(2)
	}
	if err := check(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "checksass:", err)
		os.Exit(1)
	}
	count := 0
	for i := range kernels.Variants {
		if kernels.Variants[i].In(arch) {
			count++
		}
	}
	fmt.Printf("%d kernels for %s: rows move in 16-byte vectors or bulk copies, none through local memory, and "+
		"later launches wait for those before\n", count, arch)
}

// check returns all problems, joined.
func check(tools, images string) error {
	var found [kernels.Families]error
	var families sync.WaitGroup
	cores := make(chan struct{}, runtime.NumCPU())
	for f := range kernels.Family(kernels.Families) {
		families.Go(func() {
			cores <- struct{}{}
			defer func() { <-cores }()
			text, err := disassemble(tools, filepath.Join(images, f.String()+"."+arch+".fatbin"))
			if err == nil {
				err = review(f, parse(text))
			}
			found[f] = err
		})
	}
	families.Wait()
	return errors.Join(found[:]...)
}

// disassemble extracts the machine code of an image and returns nvdisasm's text.
func disassemble(tools, image string) (string, error) {
	scratch, err := os.MkdirTemp("", "gander-sass-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(scratch)
	elfs, err := cubin.Extract(tools, image, scratch)
	if err != nil {
		return "", err
	}
	arguments := append([]string{"--print-code"}, elfs...)
	text, err := exec.Command(filepath.Join(tools, "nvdisasm"), arguments...).Output()
	if err != nil {
		return "", fmt.Errorf("nvdisasm on the code of %s: %w", image, err)
	}
	return string(text), nil
}

// review compares the kernels of one family with the table.
func review(f kernels.Family, found map[string]moves) error {
	var problems []error
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		if v.Family != f {
			continue
		}
		got, present := found[v.Symbol]
		switch {
		case present && !v.In(arch):
			err := fmt.Errorf("%s is in the image, but no plan for %s launches it", v.Symbol, arch)
			problems = append(problems, err)
		case !present && v.In(arch):
			problems = append(problems, fmt.Errorf("%s is not in the image", v.Symbol))
		}
		if !present {
			continue
		}
		for _, problem := range got.against(expected(v), v.Unaligned || rows[v.Op].anyType) {
			problems = append(problems, fmt.Errorf("%s %s", v.Symbol, problem))
		}
	}
	return errors.Join(problems...)
}

// rows is how many rows an op reads, and whether it writes one, per row of its result. Ops that are not in
// this map only combine partial results. anyType: aligned kernels, too, write rows of another type than x's,
// of which a thread may have less than 16 bytes.
var rows = map[kernels.Op]struct {
	reads   int
	writes  bool
	anyType bool
}{
	kernels.SoftmaxForward:        {1, true, false},
	kernels.SoftmaxBackward:       {2, true, false},
	kernels.RMSNormForward:        {1, true, false},
	kernels.RMSNormBackward:       {2, true, false},
	kernels.CrossEntropyForward:   {1, false, false},
	kernels.CrossEntropyForwardDX: {1, true, false},
	kernels.CrossEntropyBackward:  {1, true, false},
	kernels.Rescale:               {1, true, false},

	kernels.GeneralCrossEntropyForward:   {1, false, false},
	kernels.GeneralCrossEntropyForwardDX: {1, true, false},
	kernels.GeneralCrossEntropyBackward:  {1, true, false},

	kernels.TokenStatisticsForward:    {1, false, false},
	kernels.AllTokenStatisticsForward: {1, false, false},
	kernels.TokenStatisticsBackward:   {1, true, false},

	kernels.SoftCrossEntropyForward:  {2, false, false},
	kernels.SoftCrossEntropyBackward: {2, true, false},

	kernels.NormForward:       {1, true, true},
	kernels.NormBackward:      {2, true, true},
	kernels.LayerNormForward:  {1, true, false},
	kernels.LayerNormBackward: {2, true, false},

	kernels.RMSNormResidualForward:  {2, true, false},
	kernels.RMSNormResidualBackward: {3, true, false},
	kernels.MaskedSoftmaxForward:    {1, true, true},
	kernels.MaskedSoftmaxBackward:   {2, true, true},

	kernels.GLUForward:  {2, true, false},
	kernels.GLUBackward: {3, true, false},

	// Two vectors of each head, and backward of what forward read too.
	kernels.Rotate:               {2, true, false},
	kernels.QKNormRotate:         {2, true, false},
	kernels.QKNormRotateBackward: {4, true, false},
}

// expected is the minimum of each count in a variant's code.
func expected(v *kernels.Variant) (least moves) {
	op, vectors := rows[v.Op], v.Vectors
	if v.Op == kernels.QKNormRotateBackward { // one head after the other
		vectors = 1
	}
	switch v.Shape {
	case kernels.Ring, kernels.GridCooperative:
		least.copies = op.reads
	case kernels.Apply:
		if op.writes { // otherwise it only combines the results of the Partial kernels
			least.loads = op.reads * vectors
		}
	case kernels.Finish:
	case kernels.GridSharedMemory: // a part of the rows is in shared memory
		least.copies, least.loads = op.reads, op.reads*vectors
	default:
		least.loads = op.reads * vectors
	}
	if op.writes && v.Shape != kernels.Partial {
		least.stores = vectors
	}
	switch v.Shape {
	case kernels.Finish, kernels.Apply, kernels.Columns: // the launch before has made what they read
		if !comesFirst(v.Op) {
			least.waits = 1
		}
	}
	switch {
	// A thread processes one column, or one pair of a head, whatever its alignment.
	case v.Unaligned && (v.Shape == kernels.Columns || ofHeads(v.Op)):
		least.loads, least.stores = 0, 0
	case v.Unaligned && v.Shape != kernels.InRegisters && v.Shape != kernels.Lanes:
		// The second operand may have any type.
		least.loads = min(least.loads, vectors)
	}
	return least
}

// comesFirst tells whether a kernel of an op that combines results, or clears memory, is a call's first.
func comesFirst(op kernels.Op) bool {
	switch op {
	case kernels.Denominator, kernels.SoftmaxClear, kernels.RMSNormClear, kernels.CombineSlices,
		kernels.CombineTokenStatistics:
		return true
	}
	return false
}

// ofHeads tells whether an op works on the heads of tokens.
func ofHeads(op kernels.Op) bool {
	return op == kernels.Rotate || op == kernels.QKNormRotate || op == kernels.QKNormRotateBackward
}

// moves counts a kernel's instructions that move rows. Kernels store rows, and nothing else, with the hint EF
// (evict first). The loads include those of RMSNorm's weights.
type moves struct {
	loads, stores, copies int // LDG.E.128 or, into shared memory, LDGSTS.E.128; STG.E.EF.128; UBLKCP
	narrow                int // streaming stores of less than 16 bytes
	waits                 int // ACQBULK: griddepcontrol.wait
	local                 int // LDL, STL
}

func (m *moves) count(instruction string) {
	operation, modifiers, _ := strings.Cut(instruction, ".")
	streams := strings.Contains(modifiers+".", "EF.")
	wide := strings.HasSuffix(modifiers, "128")
	switch {
	case operation == "LDL" || operation == "STL":
		m.local++
	case operation == "UBLKCP":
		m.copies++
	case operation == "ACQBULK":
		m.waits++
	case (operation == "LDG" || operation == "LDGSTS") && wide:
		m.loads++
	case operation == "STG" && streams && wide:
		m.stores++
	case operation == "STG" && streams:
		m.narrow++
	}
}

// against lists the counts that are too small, and those that should be 0. narrow: rows may be written in
// less than 16 bytes at a time.
func (m moves) against(least moves, narrow bool) (problems []string) {
	atLeast := func(what string, got, want int) {
		if got < want {
			problems = append(problems, fmt.Sprintf("has %d %s, expected %d or more", got, what, want))
		}
	}
	atLeast("loads LDG.E.128 or LDGSTS.E.128 of rows", m.loads, least.loads)
	atLeast("stores STG.E.EF.128 of rows", m.stores, least.stores)
	atLeast("bulk copies UBLKCP of rows", m.copies, least.copies)
	atLeast("waits ACQBULK for the launch before", m.waits, least.waits)
	if m.narrow > 0 && !narrow {
		problems = append(problems, fmt.Sprintf("writes rows in less than 16 bytes, %d times", m.narrow))
	}
	if m.local > 0 {
		problems = append(problems,
			fmt.Sprintf("has %d instructions LDL or STL: it spills or has arrays on the stack", m.local))
	}
	return problems
}

// parse reads nvdisasm's text. Each kernel has a section, which includes the functions that it calls. Each
// instruction has a line such as
//
//	/*0400*/              @!P1 LDG.E.EF.128 R4, desc[UR4][R26.64] ;
func parse(text string) map[string]moves {
	found := map[string]moves{}
	kernel := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if section, ok := strings.CutPrefix(line, ".section"); ok {
			name, _, _ := strings.Cut(strings.TrimSpace(section), ",")
			kernel, _ = strings.CutPrefix(name, ".text.")
			if kernel == name {
				kernel = ""
			}
			continue
		}
		if kernel == "" || !strings.HasPrefix(line, "/*") {
			continue
		}
		_, instruction, _ := strings.Cut(line, "*/")
		words := strings.Fields(instruction)
		if len(words) > 1 && strings.HasPrefix(words[0], "@") {
			words = words[1:]
		}
		if len(words) > 0 {
			m := found[kernel]
			m.count(words[0])
			found[kernel] = m
		}
	}
	return found
}
