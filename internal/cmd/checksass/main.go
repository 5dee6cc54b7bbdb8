// Command checksass reads the machine code of the sm_90 images, and refuses kernels whose rows do not move as the table
// of variants says:
//
//	checksass FOLDER-OF-CUOBJDUMP-AND-NVDISASM FOLDER-OF-IMAGES
//
// No kernel touches local memory, which is where spilled registers and arrays on the stack go. Rows are read and written
// 16 bytes at a time, or by bulk copies.
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
	fmt.Printf("%d kernels for %s: rows move in 16-byte vectors or bulk copies, and nothing through local memory\n",
		len(kernels.Variants), arch)
}

// check returns all that is wrong, joined.
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

// disassemble takes the machine code out of an image and returns what nvdisasm makes of it.
func disassemble(tools, image string) (string, error) {
	image, err := filepath.Abs(image)
	if err != nil {
		return "", err
	}
	scratch, err := os.MkdirTemp("", "gander-sass-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(scratch)
	extract := exec.Command(filepath.Join(tools, "cuobjdump"), "-xelf", "all", image)
	extract.Dir = scratch // where it writes
	if said, err := extract.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cuobjdump %s: %w\n%s", image, err, said)
	}
	elfs, err := filepath.Glob(filepath.Join(scratch, "*.cubin"))
	if err != nil {
		return "", err
	}
	text, err := exec.Command(filepath.Join(tools, "nvdisasm"), append([]string{"--print-code"}, elfs...)...).Output()
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
		if !present {
			problems = append(problems, fmt.Errorf("%s is not in the image", v.Symbol))
			continue
		}
		for _, problem := range got.against(expected(v), v.General) {
			problems = append(problems, fmt.Errorf("%s %s", v.Symbol, problem))
		}
	}
	return errors.Join(problems...)
}

// rows is how many rows an op reads, and whether it writes one, for each row that it works on. The ops that are not
// here finish what others left, and see no rows.
var rows = map[kernels.Op]struct {
	reads  int
	writes bool
}{
	kernels.SoftmaxForward:        {1, true},
	kernels.SoftmaxBackward:       {2, true},
	kernels.RMSNormForward:        {1, true},
	kernels.RMSNormBackward:       {2, true},
	kernels.CrossEntropyForward:   {1, false},
	kernels.CrossEntropyForwardDX: {1, true},
	kernels.CrossEntropyBackward:  {1, true},
}

// expected is the least that a variant's code must hold.
func expected(v *kernels.Variant) (least moves) {
	op := rows[v.Op]
	switch v.Shape {
	case kernels.Ring, kernels.Team:
		least.copies = op.reads
	case kernels.Apply:
		if op.writes { // or it joins what the Partial kernels have found, and no more
			least.loads = op.reads * v.Vectors
		}
	case kernels.Finish:
	case kernels.Held: // a part of which lies in shared memory
		least.copies, least.loads = op.reads, op.reads*v.Vectors
	default:
		least.loads = op.reads * v.Vectors
	}
	if op.writes && v.Shape != kernels.Partial {
		least.stores = v.Vectors
	}
	switch {
	case v.General && v.Shape == kernels.Columns: // a thread has one column, so that any alignment will do
		least.loads, least.stores = 0, 0
	case v.General && v.Shape != kernels.InRegisters && v.Shape != kernels.Lanes: // the second operand may be of any type
		least.loads = min(least.loads, v.Vectors)
	}
	return least
}

// moves counts a kernel's instructions that move rows. The kernels write these, and nothing else, with the hint that they
// stream (EF, evict first); among the loads are those of RMSNorm's weights.
type moves struct {
	loads, stores, copies int // LDG.E.128 or, into shared memory, LDGSTS.E.128; STG.E.EF.128; UBLKCP
	narrow                int // streaming stores of less than 16 bytes
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
	case (operation == "LDG" || operation == "LDGSTS") && wide:
		m.loads++
	case operation == "STG" && streams && wide:
		m.stores++
	case operation == "STG" && streams:
		m.narrow++
	}
}

// against lists what is missing or too much.
func (m moves) against(least moves, general bool) (problems []string) {
	atLeast := func(what string, got, want int) {
		if got < want {
			problems = append(problems, fmt.Sprintf("has %d %s, expected %d or more", got, what, want))
		}
	}
	atLeast("loads LDG.E.128 or LDGSTS.E.128 of rows", m.loads, least.loads)
	atLeast("stores STG.E.EF.128 of rows", m.stores, least.stores)
	atLeast("bulk copies UBLKCP of rows", m.copies, least.copies)
	if m.narrow > 0 && !general {
		problems = append(problems, fmt.Sprintf("writes rows in less than 16 bytes, %d times", m.narrow))
	}
	if m.local > 0 {
		problems = append(problems, fmt.Sprintf("has %d instructions LDL or STL: it spills or has arrays on the stack", m.local))
	}
	return problems
}

// parse reads nvdisasm's text: a section for each kernel with all that it calls, a line for each instruction, such as
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
