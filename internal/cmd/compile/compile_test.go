package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/internal/cubin"
	"github.com/gander-go/gander/kernels"
)

// fakeNVCC appends a line to runs.txt for each compilation. Its image is the source's text, and it reports
// the spills that the source names.
const fakeNVCC = `#!/bin/sh
here=$(dirname "$0")
[ "$1" = --version ] && { cat "$here/version.txt"; exit; }
for last; do :; done
while [ "$1" != -o ]; do arguments="$arguments $1"; shift; done
echo "$arguments" >>"$here/runs.txt"
grep -q '#error' "$last" && { echo "$last: error"; exit 2; }
cat "$last" >"$2"
echo "ptxas info    : Compiling entry function 'kernel' for 'sm_90'"
echo "ptxas info    : Function properties for kernel"
echo "    0 bytes stack frame, $(grep -c SPILL "$last") bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 40 registers, used 0 barriers"
`

type fixture struct {
	*testing.T
	folder string
}

// newFixture makes a folder of sources that are not in the table of variants.
func newFixture(t *testing.T) *fixture {
	variants := kernels.Variants
	t.Cleanup(func() { kernels.Variants = variants })
	kernels.Variants = nil
	f := &fixture{t, t.TempDir()}
	f.write("nvcc", fakeNVCC)
	f.write("version.txt", "13.0")
	f.write("softmax_float16_gen.cu", "#include \"body.cuh\"\n#include <cuda.h>\n#include \"not_ours.h\"\n")
	f.write("body.cuh", "  #  include \"parts/part.cuh\"\n")
	f.write("parts/part.cuh", "#include \"../body.cuh\"\n")
	return f
}

func (f *fixture) path(name string) string { return filepath.Join(f.folder, name) }

func (f *fixture) write(name, text string) {
	require.NoError(f, os.MkdirAll(filepath.Dir(f.path(name)), 0o777))
	require.NoError(f, os.WriteFile(f.path(name), []byte(text), 0o777))
}

// run compiles and returns the number of runs of nvcc so far.
func (f *fixture) run(archs ...string) (runs int, err error) {
	sources := []string{f.path("softmax_float16_gen.cu")}
	_, err = run(io.Discard, f.path("nvcc"), f.path("cache"), f.path("images"), archs, sources)
	lines, _ := os.ReadFile(f.path("runs.txt")) // absent before the first run
	return strings.Count(string(lines), "\n"), err
}

func (f *fixture) images() []string {
	entries, err := os.ReadDir(f.path("images"))
	require.NoError(f, err)
	var names []string
	for _, e := range entries {
		if e.Name() != kernels.SumsFile {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	for _, c := range []struct {
		cache, out     string
		archs, sources []string
		message        string
	}{
		{"", "out", []string{"sm_90"}, []string{"a.cu"}, "-cache is missing, expected a folder"},
		{"cache", "", []string{"sm_90"}, []string{"a.cu"}, "-out is missing, expected a folder"},
		{"cache", "out", nil, []string{"a.cu"}, "-archs is empty, expected sm_XY or compute_XY"},
		{"cache", "out", []string{"sm_90"}, nil, "no sources, expected the paths of .cu files"},
	} {
		_, err := run(io.Discard, "nvcc", c.cache, c.out, c.archs, c.sources)
		require.ErrorContains(t, err, c.message)
	}
	_, err := run(io.Discard, "no-nvcc", t.TempDir(), t.TempDir(), []string{"sm_90"}, []string{"a.cu"})
	require.ErrorContains(t, err, `no-nvcc --version: exec: "no-nvcc": executable file not found`)
}

func TestEachSourceAndArchitectureIsAnImage(t *testing.T) {
	f := newFixture(t)
	runs, err := f.run("compute_90", "compute_80", "sm_90")
	require.NoError(t, err)
	assert.Equal(t, 5, runs, "the PTX of sm_90 is that of compute_90")
	assert.Equal(t, []string{"softmax_float16.compute_80.fatbin", "softmax_float16.compute_90.fatbin",
		"softmax_float16.sm_90.fatbin"}, f.images())
	flags, err := os.ReadFile(f.path("runs.txt"))
	require.NoError(t, err)
	for _, flag := range []string{"-ptx -arch=compute_80", "-ptx -arch=compute_90",
		"-gencode=arch=compute_90,code=sm_90",
		"-gencode=arch=compute_80,code=compute_80", "-gencode=arch=compute_90,code=compute_90"} {
		assert.Equal(t, 1, strings.Count(string(flags), flag), flag)
	}
}

func TestImagesOfOtherArchitecturesGo(t *testing.T) {
	f := newFixture(t)
	_, err := f.run("sm_90", "compute_80")
	require.NoError(t, err)
	runs, err := f.run("sm_90")
	require.NoError(t, err)
	assert.Equal(t, 4, runs, "nothing had to be compiled again")
	assert.Equal(t, []string{"softmax_float16.sm_90.fatbin"}, f.images())
}

func TestOnlyWhatChangedIsCompiledAgain(t *testing.T) {
	f := newFixture(t)
	want := 2
	compile := func(why string) {
		t.Helper()
		runs, err := f.run("sm_90")
		require.NoError(t, err)
		assert.Equal(t, want, runs, why)
	}
	compile("first")
	compile("nothing changed")
	for _, name := range []string{"softmax_float16_gen.cu", "body.cuh", "parts/part.cuh", "version.txt",
		"not_ours.h"} {
		before, _ := os.ReadFile(f.path(name)) // not_ours.h does not exist yet
		f.write(name, string(before)+"// changed\n")
		want += 2
		compile(name)
	}
	require.NoError(t, os.Remove(f.path("not_ours.h")))
	compile("a state that was compiled before")
}

// TestAFieldMoreRecompilesItsGroupAlone: each group of ops has the struct of its arguments in a header of its
// own, and no source includes another group's. But some groups' arguments begin with those of another one.
func TestAFieldMoreRecompilesItsGroupAlone(t *testing.T) {
	based := map[string]string{
		"general_cross_entropy": "cross_entropy", "token_statistics": "general_cross_entropy",
		"soft_cross_entropy": "general_cross_entropy",
		"qk_norm_rotary":     "rotary",
	}
	const folder = "../../../kernels/cuda"
	for changed := range kernels.Family(kernels.Families) {
		for f := range kernels.Family(kernels.Families) {
			files := map[string][]byte{}
			require.NoError(t, collect(filepath.Join(folder, f.String()+"_gen.cu"), files))
			before := (&compiler{}).key(files, nil, nil)
			header := filepath.Join(folder, changed.Group()+"_args_gen.cuh")
			if files[header] != nil {
				files[header] = append(files[header], "// a field more\n"...)
			}
			recompiled := before != (&compiler{}).key(files, nil, nil)
			same := false
			for group := f.Group(); group != ""; group = based[group] {
				same = same || group == changed.Group()
			}
			assert.Equal(t, same, recompiled, "%s, of %s", f, changed.Group())
		}
	}
}

// damage changes the only object in the cache and returns its path.
func (f *fixture) damage(change func(path string, data []byte)) {
	objects, err := filepath.Glob(f.path("cache/*"))
	require.NoError(f, err)
	require.Len(f, objects, 1)
	data, err := os.ReadFile(objects[0])
	require.NoError(f, err)
	change(objects[0], data)
}

func TestADamagedObjectIsCompiledAgain(t *testing.T) {
	overwrite := func(path string, data []byte) { require.NoError(t, os.WriteFile(path, data, 0o666)) }
	for what, change := range map[string]func(path string, data []byte){
		"truncated":      func(path string, data []byte) { overwrite(path, data[:len(data)-9]) },
		"almost nothing": func(path string, data []byte) { overwrite(path, data[:9]) },
		"empty":          func(path string, _ []byte) { overwrite(path, nil) },
		"one bit": func(path string, data []byte) {
			data[len(data)/2] ^= 1
			overwrite(path, data)
		},
		"another's": func(path string, data []byte) {
			other := filepath.Join(t.TempDir(), strings.Repeat("0", 64)+".object")
			o := object{image: []byte("another image")}
			require.NoError(t, o.write(other))
			moved, err := os.ReadFile(other)
			require.NoError(t, err)
			overwrite(path, moved)
		},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t)
			_, err := f.run("sm_90")
			require.NoError(t, err)
			want, err := os.ReadFile(f.path("images/softmax_float16.sm_90.fatbin"))
			require.NoError(t, err)
			require.NoError(t, os.RemoveAll(f.path("images")))
			f.damage(change)
			for range 2 { // the second run uses the repaired cache
				runs, err := f.run("sm_90")
				require.NoError(t, err)
				assert.Equal(t, 4, runs)
			}
			got, err := os.ReadFile(f.path("images/softmax_float16.sm_90.fatbin"))
			require.NoError(t, err)
			assert.Equal(t, want, got)
		})
	}
}

func TestWhatAKilledProcessLeftGoes(t *testing.T) {
	f := newFixture(t)
	f.write("cache/.new-123", "half")
	f.write("cache/.new-456", "half")
	long := time.Now().Add(-2 * time.Hour)
	require.NoError(t, os.Chtimes(f.path("cache/.new-123"), long, long))
	f.write("images/.new-789", "half")
	_, err := f.run("sm_90")
	require.NoError(t, err)
	assert.NoFileExists(t, f.path("cache/.new-123"))
	assert.FileExists(t, f.path("cache/.new-456"), "another process may be writing it")
	assert.Equal(t, []string{"softmax_float16.sm_90.fatbin"}, f.images())
}

func TestArchitecturesOfAGenerationSharePTX(t *testing.T) {
	for arch, want := range map[string]string{
		"sm_75": "compute_75", "sm_80": "compute_80", "sm_86": "compute_80",
		"sm_89": "compute_80", "sm_90": "compute_90",
		"sm_90a": "compute_90a", "sm_100": "compute_90", "sm_120": "compute_90",
		"compute_86": "compute_86", "compute_120": "compute_120",
	} {
		assert.Equal(t, want, virtual(arch), arch)
	}
	f := newFixture(t)
	runs, err := f.run("sm_80", "sm_86", "compute_80")
	require.NoError(t, err)
	assert.Equal(t, 4, runs, "PTX once, and three images")
	flags, err := os.ReadFile(f.path("runs.txt"))
	require.NoError(t, err)
	assert.Contains(t, string(flags), "-gencode=arch=compute_80,code=sm_86")
}

// ptx is a kernel as nvcc 13.0 writes it.
func ptx(symbol string, resident int) string {
	return fmt.Sprintf(`.visible .entry %[1]s(
	.param .align 8 .b8 %[1]s_param_0[80]
)
.maxntid 128, 1, 1
.minnctapersm %[2]d
{
	// begin inline asm
	{
.reg .pred p;
}
	// end inline asm
	ret;

}
`, symbol, resident)
}

func TestPTXIsAdaptedToTheArchitecture(t *testing.T) {
	const (
		limited    = "rmsnorm_forward_rows_float16_8x4"
		clusters   = "rmsnorm_forward_rows_float16_8x4_cluster"
		persistent = "rmsnorm_backward_grid_cooperative_float16_256x1x2"
	)
	f := newFixture(t)
	source := func(residents ...int) string {
		text := ".version 9.0\n"
		for i, symbol := range []string{limited, clusters, persistent, "unknown"} {
			if residents[i] >= 0 {
				text += ptx(symbol, residents[i])
			}
		}
		return text
	}
	const gone = -1
	table := []kernels.Variant{
		{Symbol: limited, Resident: 10, Elsewhere: []kernels.Residency{{Major: 8, Resident: 9},
			{Major: 10, Resident: 9}, {Major: 12, Resident: 9}}},
		{Symbol: clusters, Resident: 10, Cluster: true},
		{Symbol: persistent, Resident: 1, Shape: kernels.GridCooperative,
			Elsewhere: []kernels.Residency{{Major: 12, Resident: 0}}},
	}
	kernels.Variants = table
	f.write("softmax_float16_gen.cu", source(10, 10, 1, 7))
	_, err := f.run("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_80", "compute_90")
	require.NoError(t, err)
	for arch, want := range map[string]string{
		"sm_80":      source(9, gone, gone, 7),
		"sm_86":      source(9, gone, gone, 7),
		"sm_90":      source(10, 10, 1, 7),
		"sm_100":     source(9, 10, 1, 7),
		"sm_120":     strings.Replace(source(9, 10, 0, 7), ".minnctapersm 0\n", "", 1),
		"compute_80": source(9, gone, gone, 7),
		"compute_90": strings.Replace(source(9, 10, 0, 7), ".minnctapersm 0\n", "", 1),
	} {
		image, err := os.ReadFile(f.path("images/softmax_float16." + arch + ".fatbin"))
		require.NoError(t, err)
		assert.Equal(t, want, string(image), arch)
	}

	before, err := f.run("sm_80")
	require.NoError(t, err)
	kernels.Variants = table[1:]
	after, err := f.run("sm_80")
	require.NoError(t, err)
	assert.Equal(t, before+2, after, "other changes are another image")

	kernels.Variants = append(table, kernels.Variant{Symbol: "absent", Cluster: true})
	_, err = f.run("sm_80")
	require.ErrorContains(t, err, "the PTX has no kernel absent")
	kernels.Variants = table
	f.write("softmax_float16_gen.cu", strings.ReplaceAll(source(10, 10, 1, 7), ".minnctapersm 10\n", ""))
	_, err = f.run("sm_80")
	require.ErrorContains(t, err, "the PTX of "+limited+" has no directive .minnctapersm")
}

func TestASpillIsAnErrorEachTime(t *testing.T) {
	f := newFixture(t)
	f.write("softmax_float16_gen.cu", "// SPILL\n")
	for range 2 {
		runs, err := f.run("sm_90")
		require.ErrorContains(t, err, "kernel in softmax_float16.sm_90.fatbin: 0 bytes of stack, 1 of spill stores")
		assert.Equal(t, 2, runs)
	}
}

func TestACompilerErrorIsReported(t *testing.T) {
	f := newFixture(t)
	f.write("softmax_float16_gen.cu", "#error\n")
	_, err := f.run("sm_90")
	require.ErrorContains(t, err, "softmax_float16_gen.cu for sm_90: exit status 2")
	require.ErrorContains(t, err, "softmax_float16_gen.cu: error")
	assert.NoDirExists(t, f.path("images"))
}

// A report of ptxas 13.0 for a kernel that calls a function.
const report = `ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'caller' for 'sm_90'
ptxas info    : Function properties for caller
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for callee
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 104 bytes cumulative stack size, 384 bytes smem
ptxas info    : Compile time = 50.018 ms
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
`

func TestReview(t *testing.T) {
	kernels, registers, problems := review([]*job{
		{source: "a_gen.cu", arch: "sm_90", object: object{log: report}},
		{source: "b_gen.cu", arch: "sm_90", object: object{log: "nothing that ptxas would say"}},
		{source: "a_gen.cu", arch: "compute_90"},
	})
	assert.Equal(t, 2, kernels)
	assert.Equal(t, 128, registers)
	assert.Equal(t, []string{
		"caller in a.sm_90.fatbin: 16 bytes of stack, 8 of spill stores, 4 of spill loads",
		"b.sm_90.fatbin: ptxas reported no kernel",
	}, problems)
}

// TestCosts: the machine code in place of a kernel's is that of this test.
func TestCosts(t *testing.T) {
	f := newFixture(t)
	f.write("cuobjdump", "#!/bin/sh\ncp \"$3\" code.cubin\n")
	program, err := os.Executable()
	require.NoError(t, err)
	size, err := cubin.CodeBytes(program)
	require.NoError(t, err)
	require.Positive(t, size)
	code, err := os.ReadFile(program)
	require.NoError(t, err)
	f.write("a.sm_90.fatbin", string(code))
	f.write("b.sm_90.fatbin", string(code))
	var text strings.Builder
	require.NoError(t, printCosts(&text, f.folder, f.folder, []*job{
		{source: "a_gen.cu", arch: "sm_90", object: object{log: report, ptxSeconds: 9, imageSeconds: 0.5}},
		{source: "b_gen.cu", arch: "sm_90", object: object{log: report, ptxSeconds: 8, imageSeconds: 0.25}},
		{source: "a_gen.cu", arch: "compute_90"},
	}))
	var lines []string
	for line := range strings.Lines(text.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	assert.Equal(t, []string{
		"sm_90 kernels bytes of code s to PTX s from PTX",
		fmt.Sprintf("a 2 %d 9.0 0.5", size), fmt.Sprintf("b 2 %d 8.0 0.2", size),
		fmt.Sprintf("all 4 %d 17.0 0.8", 2*size),
	}, lines)
}
