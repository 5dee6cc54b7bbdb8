// Command cudaenv prepares a shell for `go build -tags cuda` of a program that imports gander:
//
//	eval "$(go run github.com/gander-go/gander/cmd/cudaenv)"
//
// It prints the variables of cgo with which the compiler finds CUDA's headers. gorgonia.org/cu, gander's
// binding of the CUDA driver, includes them. NVIDIA's licence does not allow them to be a part of gander. So
// the first run downloads them with pip into the user's cache. They are those of the lock file that build.sh
// uses. A program that is built with them needs no CUDA to start.
//
// It needs Linux on x86-64, and Python 3 with pip: python3, or what GANDER_PYTHON names.
package main

import (
	"archive/zip"
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
)

//go:generate cp ../../requirements-toolchain.txt toolchain_gen.txt

// A module's files can only be embedded from the package's own folder.
//
//go:embed toolchain_gen.txt
var toolchain []byte

// include is the headers' folder, in the package and in the cache.
const include = "nvidia/cuda_runtime/include"

func main() {
	if err := run(os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "cudaenv:", err)
		os.Exit(1)
	}
}

// run prints the shell commands to out, and to progress what takes long.
func run(out, progress io.Writer) error {
	if platform := runtime.GOOS + "/" + runtime.GOARCH; platform != "linux/amd64" {
		return fmt.Errorf("this is %s, and the tag cuda needs linux/amd64: build without it", platform)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return fmt.Errorf("no folder for the headers: %w; set XDG_CACHE_HOME", err)
	}
	headers, err := find(filepath.Join(cache, "gander"), progress)
	if err != nil {
		return err
	}
	flags, err := compilerFlags(os.Getenv("CGO_CFLAGS"), headers)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "export CGO_ENABLED=1\nexport CGO_CFLAGS=%s\n", shellQuoted(flags))
	return err
}

// find returns the headers' folder in the cache. It fills the cache first if needed.
func find(cache string, progress io.Writer) (string, error) {
	wanted, err := requirement(toolchain)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(cache, "cuda-headers-"+digest(wanted))
	ours := filepath.Join(folder, include)
	built := filepath.Join(cache, "requirements-toolchain-"+digest(toolchain), include) // by build.sh
	for _, headers := range []string{built, ours} {
		if _, err := os.Stat(filepath.Join(headers, "cuda.h")); err == nil {
			return headers, nil
		}
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", fmt.Errorf("no folder for the headers: %w; XDG_CACHE_HOME names another cache", err)
	}
	fresh, err := os.MkdirTemp(cache, ".new-headers-")
	if err != nil {
		return "", fmt.Errorf("no folder for the headers: %w; XDG_CACHE_HOME names another cache", err)
	}
	defer os.RemoveAll(fresh)
	fmt.Fprintln(progress, "cudaenv: CUDA's headers into", folder)
	wheel, err := download(fresh, wanted)
	if err != nil {
		return "", err
	}
	whole := filepath.Join(fresh, "whole")
	if err := unpack(wheel, whole); err != nil {
		return "", fmt.Errorf("%s: %w", filepath.Base(wheel), err)
	}
	err = os.Rename(whole, folder) // so that a folder of this name has all headers
	if _, done := os.Stat(filepath.Join(ours, "cuda.h")); err != nil && done != nil {
		return "", err // else another process was faster
	}
	return ours, nil
}

// requirement returns the headers' entry in a lock file: a line with the version, and lines with digests.
func requirement(lock []byte) ([]byte, error) {
	entry := regexp.MustCompile(`(?m)^nvidia-cuda-runtime-cu11==.*\n( .*\n)+`).Find(lock)
	if entry == nil {
		return nil, errors.New("the lock file has no digests of nvidia-cuda-runtime-cu11: please report it")
	}
	return entry, nil
}

// digest names a folder as build.sh's `unpacked` does.
func digest(text []byte) string { return fmt.Sprintf("%.8x", sha256.Sum256(text)) }

// download fetches the package that the lock file's entry names into a folder, and returns its path. pip
// refuses another one than that of the digest.
func download(folder string, entry []byte) (string, error) {
	python := cmp.Or(os.Getenv("GANDER_PYTHON"), "python3")
	if _, err := exec.LookPath(python); err != nil {
		return "", fmt.Errorf("no %s on PATH, whose pip would download CUDA's headers: install Python 3 with pip, "+
			"or set GANDER_PYTHON to a Python that has it", python)
	}
	if out, err := exec.Command(python, "-m", "pip", "--version").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s has no pip, which would download CUDA's headers: install it, for example with "+
			"apt-get install python3-pip, or set GANDER_PYTHON to a Python that has it\n%s", python, out)
	}
	lock := filepath.Join(folder, "requirements.txt")
	if err := os.WriteFile(lock, entry, 0o644); err != nil {
		return "", err
	}
	pip := exec.Command(python, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
		"--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", lock, "--dest", folder)
	if out, err := pip.CombinedOutput(); err != nil {
		return "", fmt.Errorf("pip cannot download CUDA's headers (%w):\n%s", err, bytes.TrimSpace(out))
	}
	wheels, err := filepath.Glob(filepath.Join(folder, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("pip has downloaded %d packages, expected 1: %q", len(wheels), wheels)
	}
	return wheels[0], nil
}

// unpack extracts the headers of a package into a folder.
func unpack(wheel, folder string) error {
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer archive.Close()
	for _, file := range archive.File {
		if !strings.HasPrefix(file.Name, include+"/") || file.FileInfo().IsDir() {
			continue
		}
		if !filepath.IsLocal(file.Name) {
			return fmt.Errorf("it has the name %q", file.Name)
		}
		if err := extract(file, filepath.Join(folder, file.Name)); err != nil {
			return err
		}
	}
	if _, err := os.Stat(filepath.Join(folder, include, "cuda.h")); err != nil {
		return fmt.Errorf("it has no %s/cuda.h", include)
	}
	return nil
}

func extract(file *zip.File, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	content, err := file.Open()
	if err != nil {
		return err
	}
	defer content.Close()
	data, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

// The warnings that gorgonia.org/cu gives, of which compilers may make errors.
const quiet = "-Wno-deprecated-declarations -Wno-implicit-function-declaration"

// compilerFlags adds the headers to the flags of CGO_CFLAGS, or to Go's own if it is not set.
func compilerFlags(given, headers string) (string, error) {
	if strings.ContainsAny(headers, "'\n") {
		return "", fmt.Errorf("the cache is %q, and CGO_CFLAGS takes no quote: XDG_CACHE_HOME names another cache",
			headers)
	}
	added := "'-I" + headers + "' " + quiet
	if strings.Contains(given, added) {
		return given, nil
	}
	return cmp.Or(given, "-O2 -g") + " " + added, nil
}

// shellQuoted is a word for the shell.
func shellQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
