package main

import (
	"regexp"
	"strconv"
	"strings"
)

// usage is what `ptxas -v` reports for one function.
type usage struct {
	function                       string
	entry                          bool // a kernel, not a device function that was not inlined
	stack, spillStores, spillLoads int  // bytes
	registers                      int
}

var (
	entryLine    = regexp.MustCompile(`Compiling entry function '([^']+)'`)
	functionLine = regexp.MustCompile(`Function properties for (\S+)`)
	spillLine    = regexp.MustCompile(
		`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	registersLine = regexp.MustCompile(`Used (\d+) registers`)
)

// parseUsage reads the report. For each kernel it has a line with the name, a pair of lines with the stack
// usage of the kernel and of each function that it calls, and a line with the kernel's registers.
func parseUsage(log string) []usage {
	var all []usage
	var kernel, function string
	for line := range strings.Lines(log) {
		if m := entryLine.FindStringSubmatch(line); m != nil {
			kernel = m[1]
		} else if m := functionLine.FindStringSubmatch(line); m != nil {
			function = m[1]
		} else if m := spillLine.FindStringSubmatch(line); m != nil {
			all = append(all, usage{function: function, entry: function == kernel,
				stack: number(m[1]), spillStores: number(m[2]), spillLoads: number(m[3])})
		} else if m := registersLine.FindStringSubmatch(line); m != nil && len(all) > 0 {
			all[len(all)-1].registers = number(m[1])
		}
	}
	return all
}

// number converts digits that a pattern has matched.
func number(digits string) int {
	n, _ := strconv.Atoi(digits)
	return n
}
