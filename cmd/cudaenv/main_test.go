package main

import (
	"archive/zip"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakePython stands for Python with pip: it "downloads" the package beside it, and logs its arguments and the
// lock file.
const fakePython = `#!/bin/sh
here=$(dirname "$0")
[ "$3" != --version ] || exit "$(cat "$here/pip")"
echo "$*" >>"$here/log"
while [ $# -gt 0 ]; do
  [ "$1" != --requirement ] || cat "$2" >>"$here/log"
  [ "$1" != --dest ] || folder=$2
  shift
done
[ -e "$here/a.whl" ] || { echo "no matching distribution"; exit 1; }
cp "$here/a.whl" "$folder"
`

// python makes a fake Python whose pip finds a package with these files, or no package for nil.
func python(t *testing.T, files map[string]string) (folder string) {
	folder = t.TempDir()
	write(t, filepath.Join(folder, "python"), fakePython)
	write(t, filepath.Join(folder, "pip"), "0")
	t.Setenv("GANDER_PYTHON", filepath.Join(folder, "python"))
	if files == nil {
		return folder
	}
	var wheel bytes.Buffer
	archive := zip.NewWriter(&wheel)
	for name, text := range files {
		file, err := archive.Create(name)
		require.NoError(t, err)
		_, err = io.WriteString(file, text)
		require.NoError(t, err)
	}
	require.NoError(t, archive.Close())
	write(t, filepath.Join(folder, "a.whl"), wheel.String())
	return folder
}

func write(t *testing.T, path, text string) {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o700))
}

func read(t *testing.T, path string) string {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

var headers = map[string]string{
	"nvidia/cuda_runtime/include/cuda.h":     "// CUDA",
	"nvidia/cuda_runtime/include/crt/host.h": "// more",
	"nvidia/cuda_runtime/lib/libcudart.so":   "not a header",
}

func TestTheFirstRunDownloads(t *testing.T) {
	fake, cache := python(t, headers), filepath.Join(t.TempDir(), "a cache", "gander")
	var progress bytes.Buffer
	for range 2 {
		folder, err := find(cache, &progress)
		require.NoError(t, err)
		assert.True(t, strings.HasPrefix(folder, cache+"/cuda-headers-"), folder)
		assert.Equal(t, "// CUDA", read(t, filepath.Join(folder, "cuda.h")))
		assert.Equal(t, "// more", read(t, filepath.Join(folder, "crt/host.h")))
		assert.NoDirExists(t, filepath.Join(folder, "../lib"))
	}
	log := read(t, filepath.Join(fake, "log"))
	assert.Equal(t, 1, strings.Count(log, "pip download"), log)
	assert.Contains(t, log, "--require-hashes")
	entry := `(?m)^nvidia-cuda-runtime-cu11==11\.8\.\d+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+\z`
	assert.Regexp(t, entry, log)
	assert.Equal(t, 1, strings.Count(progress.String(), "CUDA's headers into"))
	left, err := os.ReadDir(cache)
	require.NoError(t, err)
	assert.Len(t, left, 1, "only the headers are left")
}

func TestTheHeadersOfBuildShAreUsed(t *testing.T) {
	t.Setenv("GANDER_PYTHON", "no python")
	cache := t.TempDir()
	built := filepath.Join(cache, "requirements-toolchain-"+digest(toolchain), include)
	write(t, filepath.Join(built, "cuda.h"), "// CUDA")
	folder, err := find(cache, io.Discard)
	require.NoError(t, err)
	assert.Equal(t, built, folder)
	out, err := exec.Command("sh", "-c", "sha256sum <../../requirements-toolchain.txt | cut -c1-16").Output()
	require.NoError(t, err)
	assert.Equal(t, digest(toolchain), strings.TrimSpace(string(out)), "the folder's name in build.sh")
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		files  map[string]string
		change func(t *testing.T, fake string)
		says   []string
	}{
		"no Python": {
			nil, func(t *testing.T, fake string) { t.Setenv("GANDER_PYTHON", "no-python") },
			[]string{"no no-python on PATH", "set GANDER_PYTHON"},
		},
		"no pip": {
			nil, func(t *testing.T, fake string) { write(t, filepath.Join(fake, "pip"), "1") },
			[]string{"has no pip", "apt-get install python3-pip", "GANDER_PYTHON"},
		},
		"pip fails": {
			nil, nil, []string{"pip cannot download CUDA's headers", "no matching distribution"},
		},
		"no headers": {
			map[string]string{"a": "b"}, nil, []string{"it has no " + include + "/cuda.h"},
		},
		"names of elsewhere": {
			map[string]string{include + "/../../../../a": "b"}, nil, []string{"it has the name"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			fake, cache := python(t, c.files), t.TempDir()
			if c.change != nil {
				c.change(t, fake)
			}
			_, err := find(cache, io.Discard)
			for _, part := range c.says {
				assert.ErrorContains(t, err, part)
			}
			left, err := os.ReadDir(cache)
			require.NoError(t, err)
			assert.Empty(t, left, "nothing is left in the cache")
		})
	}
}

// The flags are quoted for Go, and these again for the shell.
func TestTheShellGetsTheFlags(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "it costs $5 & more")
	t.Setenv("XDG_CACHE_HOME", cache)
	python(t, headers)
	for given, want := range map[string]string{"": "-O2 -g ", "-O1 -DNAME='a b'": "-O1 -DNAME='a b' "} {
		t.Setenv("CGO_CFLAGS", given)
		var commands bytes.Buffer
		require.NoError(t, run(&commands, io.Discard))
		out, err := exec.Command("sh", "-c", commands.String()+`printf %s "$CGO_ENABLED $CGO_CFLAGS"`).Output()
		require.NoError(t, err)
		flags, _ := strings.CutPrefix(string(out), "1 ")
		folder, err := find(filepath.Join(cache, "gander"), io.Discard)
		require.NoError(t, err)
		assert.Equal(t, want+"'-I"+folder+"' "+quiet, flags)

		t.Setenv("CGO_CFLAGS", flags)
		var again bytes.Buffer
		require.NoError(t, run(&again, io.Discard))
		assert.Equal(t, commands.String(), again.String(), "a second time nothing is added")
	}
	_, err := compilerFlags("", "/it's")
	assert.ErrorContains(t, err, "XDG_CACHE_HOME")
}
