// Command stubgen generates the jump table of internal/driver, an assembly file. It defines every cu*
// function that this program calls as a jump through a table entry, which bind.c sets from libcuda at first
// use.
//
// The functions are the undefined symbols of the compiled objects of gorgonia.org/cu and internal/driver.
// Reading objects rather than sources gives the names after the renaming in cuda.h (cuCtxCreate is
// cuCtxCreate_v2).
//
// Run it in any folder of the repository with the environment of ./build.sh env. With -check it fails if the
// file is not current, and writes nothing.
package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	binding = "gorgonia.org/cu"
	output  = "internal/driver/stubs_gen_amd64.S"
)

func main() {
	check := flag.Bool("check", false, "only check that the file is current")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, "stubgen:", err)
		os.Exit(1)
	}
}

func run(check bool) error {
	root, err := command("go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return err
	}
	version, err := command("go", "list", "-m", "-f", "{{.Version}}", binding)
	if err != nil {
		return err
	}
	found := symbols{called: map[string]bool{}, defined: map[string]bool{}}
	if err := found.archive(); err != nil {
		return err
	}
	if err := found.sources(filepath.Join(root, "internal/driver")); err != nil {
		return err
	}
	// Not the driver's: helpers of gorgonia.org/cu whose names start with cu, and cuInit, which bind.c
	// defines.
	maps.DeleteFunc(found.called, func(name string, _ bool) bool { return found.defined[name] })
	text := generate(slices.Sorted(maps.Keys(found.called)), version)
	path := filepath.Join(root, output)
	if !check {
		return os.WriteFile(path, text, 0o644)
	}
	current, err := os.ReadFile(path)
	if err == nil && !bytes.Equal(current, text) {
		err = fmt.Errorf("%s is not current: run go generate ./internal/driver", output)
	}
	return err
}

// command returns what a command prints, without the last newline.
func command(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, failed.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

// symbols are the cu* functions that objects call or define.
type symbols struct{ called, defined map[string]bool }

// archive adds the symbols of gorgonia.org/cu.
func (s symbols) archive() error {
	path, err := command("go", "list", "-export", "-f", "{{.Export}}", binding)
	if err != nil {
		return err
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	// An ar archive is a magic line followed by members at even offsets, each with a header of 60 bytes. The
	// Go compiler's own members are not ELF.
	const magic, header, sizeAt, sizeEnd = 8, 60, 48, 58
	for at := int64(magic); ; {
		var h [header]byte
		if _, err := file.ReadAt(h[:], at); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		size, err := strconv.ParseInt(strings.TrimSpace(string(h[sizeAt:sizeEnd])), 10, 64)
		if err != nil {
			return fmt.Errorf("%s: not an archive: %w", path, err)
		}
		member := io.NewSectionReader(file, at+header, size)
		ident := make([]byte, len(elf.ELFMAG))
		if _, err := member.ReadAt(ident, 0); err == nil && string(ident) == elf.ELFMAG {
			if err := s.object(member); err != nil {
				return err
			}
		}
		at += header + size + size&1
	}
}

// sources adds the symbols of a folder's C files.
func (s symbols) sources(folder string) error {
	cc, err := command("go", "env", "CC")
	if err != nil {
		return err
	}
	flags, err := command("go", "env", "CGO_CFLAGS")
	if err != nil {
		return err
	}
	sources, err := filepath.Glob(filepath.Join(folder, "*.c"))
	if err != nil {
		return err
	}
	temporary, err := os.MkdirTemp("", "stubgen")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	for _, source := range sources {
		object := filepath.Join(temporary, "object.o")
		// The shell splits both as Go does, with quotes.
		compile := "exec " + cc + " " + flags + ` -c -o "$0" "$1"`
		if _, err := command("sh", "-c", compile, object, source); err != nil {
			return err
		}
		file, err := os.Open(object)
		if err != nil {
			return err
		}
		err = s.object(file)
		file.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

var driverFunction = regexp.MustCompile(`^cu[A-Z]\w*$`)

func (s symbols) object(object io.ReaderAt) error {
	file, err := elf.NewFile(object)
	if err != nil {
		return err
	}
	all, err := file.Symbols()
	if err != nil {
		return err
	}
	for _, symbol := range all {
		switch {
		case !driverFunction.MatchString(symbol.Name):
		case symbol.Section == elf.SHN_UNDEF:
			s.called[symbol.Name] = true
		default:
			s.defined[symbol.Name] = true
		}
	}
	return nil
}

func generate(names []string, version string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b,
		`// Code generated by internal/cmd/stubgen from the objects of gorgonia.org/cu %s; DO NOT EDIT.

//go:build cuda && cgo && linux && amd64

// Returns CUDA_ERROR_NOT_INITIALIZED. The target of every entry until bind.c sets it.
	.text
	.type unbound, @function
unbound:
	endbr64
	movl $3, %%eax
	ret
	.size unbound, .-unbound

// Defines one function: the jump, the name, and the table entry {name, target}.
	.macro cu function
	.text
	.globl \function
	.hidden \function
	.type \function, @function
\function:
	endbr64
	jmp *\function\()_slot+8(%%rip)
	.size \function, .-\function
	.section .rodata.str1.1, "aMS", @progbits, 1
\function\()_name:
	.asciz "\function"
	.section .data.gander_driver_slots, "aw", @progbits
\function\()_slot:
	.quad \function\()_name, unbound
	.endm

	.section .data.gander_driver_slots, "aw", @progbits
	.balign 16
	.globl gander_driver_slots
	.hidden gander_driver_slots
	.type gander_driver_slots, @object
gander_driver_slots:

`, version)
	for _, name := range names {
		fmt.Fprintf(&b, "\tcu %s\n", name)
	}
	fmt.Fprintf(&b, `
	.section .data.gander_driver_slots, "aw", @progbits
	.size gander_driver_slots, .-gander_driver_slots

	.section .rodata
	.balign 8
	.globl gander_driver_slot_count
	.hidden gander_driver_slot_count
	.type gander_driver_slot_count, @object
gander_driver_slot_count:
	.quad %d
	.size gander_driver_slot_count, 8

	.section .note.GNU-stack, "", @progbits
`, len(names))
	return b.Bytes()
}
