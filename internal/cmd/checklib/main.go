// Command checklib checks that the shared library can be loaded anywhere:
//
//	checklib libgander.so gander.h
//
// It must export exactly the functions that the header declares. Its SONAME must end in the ABI version that
// the header declares, or a process could load two copies. It must not need libcuda or undefined cu*
// symbols, which would make it unloadable without a driver. It must have no text relocations and no
// executable stack, which hardened systems refuse. It must have no debug information, which names folders of
// the machine that it was built on.
package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: checklib LIBRARY HEADER")
		os.Exit(2)
	}
	if err := check(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "checklib:", err)
		os.Exit(1)
	}
}

// check returns all problems, joined.
func check(library, header string) error {
	text, err := os.ReadFile(header)
	if err != nil {
		return err
	}
	file, err := elf.Open(library)
	if err != nil {
		return err
	}
	defer file.Close()
	dynamic, err := file.DynamicSymbols()
	if err != nil {
		return err
	}
	needed, err := file.ImportedLibraries()
	if err != nil {
		return err
	}
	textrel, err := textRelocations(file)
	if err != nil {
		return err
	}
	sonames, err := file.DynString(elf.DT_SONAME)
	if err != nil {
		return err
	}

	var problems []error
	problem := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf(library+": "+format, args...))
	}
	exported := map[string]bool{}
	for _, symbol := range dynamic {
		switch {
		case symbol.Section != elf.SHN_UNDEF:
			exported[symbol.Name] = true
		case driverFunction.MatchString(symbol.Name):
			problem("%s is undefined: run go generate ./internal/driver", symbol.Name)
		}
	}
	declared := declarations(string(text))
	for _, name := range missing(declared, exported) {
		problem("does not export %s, which %s declares", name, header)
	}
	for _, name := range missing(exported, declared) {
		problem("exports %s, which %s does not declare", name, header)
	}
	for _, name := range needed {
		if strings.HasPrefix(name, "libcuda") {
			problem("needs %s to load", name)
		}
	}
	version := abiVersion.FindStringSubmatch(string(text))
	if version == nil {
		problem("%s does not define GANDER_ABI_VERSION", header)
	} else if want := "libgander.so." + version[1]; !slices.Equal(sonames, []string{want}) {
		problem("has the SONAME %q, expected %q: build.sh takes it from %s", sonames, want, header)
	}
	if textrel {
		problem("has text relocations")
	}
	if file.Section(".debug_info") != nil {
		problem("has debug information: the linker got no -s, or -g after it")
	}
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_GNU_STACK && segment.Flags&elf.PF_X != 0 {
			problem("asks for an executable stack")
		}
	}
	return errors.Join(problems...)
}

var (
	driverFunction = regexp.MustCompile(`^cu[A-Z]`)
	comment        = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	directive      = regexp.MustCompile(`(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$`)
	abiVersion     = regexp.MustCompile(`(?m)^#define GANDER_ABI_VERSION (\d+)$`)
	function       = regexp.MustCompile(`\b(\w+)\s*\([^()]*\)\s*;`)
)

// declarations returns the functions that a C header declares. It does not understand parameters that are
// written as function pointers rather than with a typedef.
func declarations(header string) map[string]bool {
	header = comment.ReplaceAllString(header, " ")
	header = directive.ReplaceAllString(header, "")
	names := map[string]bool{}
	for _, match := range function.FindAllStringSubmatch(header, -1) {
		names[match[1]] = true
	}
	return names
}

// missing returns what is in a and not in b, sorted.
func missing(a, b map[string]bool) []string {
	left := maps.Clone(a)
	maps.DeleteFunc(left, func(name string, _ bool) bool { return b[name] })
	return slices.Sorted(maps.Keys(left))
}

func textRelocations(file *elf.File) (bool, error) {
	entries, err := file.DynValue(elf.DT_TEXTREL)
	if err != nil || len(entries) > 0 {
		return len(entries) > 0, err
	}
	flags, err := file.DynValue(elf.DT_FLAGS)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(flags, func(f uint64) bool { return elf.DynFlag(f)&elf.DF_TEXTREL != 0 }), nil
}
