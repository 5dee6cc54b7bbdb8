// Command policy writes the Go tables of package policy from its policy.txt, which it also brings into its
// usual form. It is run by `go generate ./internal/policy`.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gander-go/gander/internal/policy"
)

func main() {
	dir := flag.String("dir", ".", "folder of policy.txt and table_gen.go")
	flag.Parse()
	if err := run(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "policy:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	source := filepath.Join(dir, "policy.txt")
	text, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	file, err := policy.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", source, err)
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

// write leaves a file that is right untouched.
func write(path string, text []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, text) {
		return nil
	}
	return os.WriteFile(path, text, 0o644)
}
