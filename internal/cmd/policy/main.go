// Command policy keeps package policy:
//
//	policy                              brings policy.txt into its usual form and writes table_gen.go
//	                                    (go generate ./internal/policy)
//	policy -measurements FILE,FILE...   brings measurements of bench/tune.py into policy.txt first
//	policy -candidates                  prints the rows that bench/tune.py times
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

func main() {
	dir := flag.String("dir", ".", "folder of policy.txt and table_gen.go")
	measurements := flag.String("measurements", "", "files of measurements, separated by commas")
	candidates := flag.Bool("candidates", false, "print the rows to be timed, write nothing")
	flag.Parse()
	var err error
	if *candidates {
		err = printCandidates(os.Stdout)
	} else {
		err = run(*dir, *measurements, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "policy:", err)
		os.Exit(1)
	}
}

func run(dir, measurements string, report io.Writer) error {
	source := filepath.Join(dir, "policy.txt")
	text, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	file, err := policy.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	if measurements != "" {
		if err := apply(file, strings.Split(measurements, ","), report); err != nil {
			return err
		}
	}
	tables, err := file.Generate()
	if err != nil {
		return err
	}
	if err := write(source, file.Format()); err != nil {
		return err
	}
	return write(filepath.Join(dir, "table_gen.go"), tables)
}

// apply brings measurements into the policy, file by file: each names itself in the rows that it moves.
func apply(file *policy.File, paths []string, report io.Writer) error {
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		all, err := policy.ReadMeasurements(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		moved, err := file.Apply(all, filepath.Base(path))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		redundant, err := policy.Redundant(all)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, line := range moved {
			fmt.Fprintln(report, "moved:", line)
		}
		for _, line := range redundant {
			fmt.Fprintln(report, "redundant:", line)
		}
	}
	return nil
}

// printCandidates writes a JSON object: the rows by "operator dtype layout".
func printCandidates(w io.Writer) error {
	type candidate struct {
		Row  string `json:"row"`
		Over int64  `json:"over"`
		UpTo int64  `json:"up_to"` // 0 for no limit
	}
	all := map[string][]candidate{}
	for op, operator := range policy.OperatorNames {
		for x, dtype := range policy.TypeNames {
			for l, layout := range policy.LayoutNames {
				key := fmt.Sprintf("%s %s %s", operator, dtype, layout)
				rows := policy.Candidates(policy.Operator(op), kernels.DType(x), policy.Layout(l))
				for i := range rows {
					all[key] = append(all[key], candidate{rows[i].String(), rows[i].Over, rows[i].UpTo})
				}
			}
		}
	}
	return json.NewEncoder(w).Encode(all)
}

// write leaves a file that is right untouched.
func write(path string, text []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, text) {
		return nil
	}
	return os.WriteFile(path, text, 0o644)
}
