package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/gander-go/gander/internal/cubin"
)

// cost is what an image's machine code costs.
type cost struct {
	kernels                  int
	bytes                    uint64  // of machine code
	ptxSeconds, imageSeconds float64 // of one processor; images of a virtual architecture share the PTX
}

func (c *cost) add(other cost) {
	c.kernels += other.kernels
	c.bytes += other.bytes
	c.ptxSeconds += other.ptxSeconds
	c.imageSeconds += other.imageSeconds
}

// printCosts prints what each image of machine code costs, and their sum for each architecture. images is the
// folder where install has written them.
func printCosts(to io.Writer, tools, images string, jobs []*job) error {
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	var sum cost
	row := func(name string, c cost) {
		fmt.Fprintf(table, "%s\t%d\t%d\t%.1f\t%.1f\t\n", name, c.kernels, c.bytes, c.ptxSeconds, c.imageSeconds)
	}
	for i, j := range jobs {
		if !isNative(j.arch) {
			continue
		}
		if i == 0 || jobs[i-1].arch != j.arch {
			sum = cost{}
			fmt.Fprintln(table, j.arch+"\tkernels\tbytes of code\ts to PTX\ts from PTX\t")
		}
		c := cost{ptxSeconds: j.ptxSeconds, imageSeconds: j.imageSeconds}
		for _, u := range parseUsage(j.log) {
			if u.entry {
				c.kernels++
			}
		}
		var err error
		if c.bytes, err = codeBytes(tools, filepath.Join(images, j.name())); err != nil {
			return err
		}
		row(j.unit(), c)
		sum.add(c)
		if i+1 == len(jobs) || jobs[i+1].arch != j.arch {
			row("all", sum)
		}
	}
	return table.Flush()
}

// codeBytes is the size of an image's machine code, which is compressed in it.
func codeBytes(tools, image string) (bytes uint64, err error) {
	scratch, err := os.MkdirTemp("", "gander-code-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(scratch)
	elfs, err := cubin.Extract(tools, image, scratch)
	for _, path := range elfs {
		n, err := cubin.CodeBytes(path)
		if err != nil {
			return 0, err
		}
		bytes += n
	}
	return bytes, err
}
