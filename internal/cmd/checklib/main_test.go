package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const header = `
#define GANDER_ABI_VERSION 7
#define GANDER_CALL(x) gander_macro(x); \
  gander_other(x);
/* int gander_in_comment(void); */
typedef struct { void* (*allocate)(void* context, unsigned long bytes); } gander_allocator;
typedef void (*gander_callback)(void*); // int gander_in_line_comment(void);
const char* gander_version(void);
int gander_softmax(const void* x,
                   const gander_allocator* allocator);
`

func TestDeclarations(t *testing.T) {
	assert.Equal(t, map[string]bool{"gander_version": true, "gander_softmax": true}, declarations(header))
}

func TestCheck(t *testing.T) {
	const (
		version = "const char* gander_version(void) { return \"1\"; }\n"
		softmax = "int gander_softmax(void) { return 0; }\n"
	)
	for name, c := range map[string]struct {
		source string
		flags  []string
		want   []string // empty: the library is accepted
	}{
		"accepted": {
			source: version + softmax + "__attribute__((visibility(\"hidden\"))) int helper(void) { return 1; }",
		},
		"missing": {source: version, want: []string{"does not export gander_softmax"}},
		"too much": {
			source: version + softmax + "int helper(void) { return 1; }", want: []string{"exports helper"},
		},
		"undefined": {
			source: version + "int cuInit(int); int gander_softmax(void) { return cuInit(0); }",
			want:   []string{"cuInit is undefined"},
		},
		"executable stack": {
			source: version + softmax, flags: []string{"-Wl,-z,execstack"}, want: []string{"executable stack"},
		},
		"text relocation": {
			source: version + softmax + "__asm__(\".text\\n.quad gander_version\");", flags: []string{"-Wl,-z,notext"},
			want: []string{"text relocations"},
		},
		"debug information": {
			source: version + softmax, flags: []string{"-g"}, want: []string{"debug information"},
		},
		"soname": {
			source: version + softmax, flags: []string{"-Wl,-soname,libgander.so.6"},
			want: []string{`["libgander.so.6"], expected "libgander.so.7"`},
		},
		"two problems": {
			source: softmax + "int helper(void) { return 1; }", want: []string{"gander_version", "helper"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			library, header := build(t, c.source, c.flags...)
			err := check(library, header)
			if c.want == nil {
				assert.NoError(t, err)
			}
			for _, part := range c.want {
				assert.ErrorContains(t, err, part)
			}
		})
	}
}

func TestNeedsLibcuda(t *testing.T) {
	folder := t.TempDir()
	out, err := exec.Command("gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o",
		filepath.Join(folder, "libcuda.so"), "-x", "c", os.DevNull).CombinedOutput()
	require.NoError(t, err, string(out))
	library, header := build(t, "int f;", "-Wl,--no-as-needed", "-L"+folder, "-lcuda")
	assert.ErrorContains(t, check(library, header), "needs libcuda.so.1")
}

func TestUnreadable(t *testing.T) {
	library, header := build(t, "int f;")
	assert.Error(t, check(library+".missing", header))
	assert.Error(t, check(library, header+".missing"))
	assert.Error(t, check(header, header), "not a library")
}

// build compiles a shared library and writes the header next to it.
func build(t *testing.T, source string, flags ...string) (library, headerPath string) {
	folder := t.TempDir()
	code := filepath.Join(folder, "code.c")
	library, headerPath = filepath.Join(folder, "lib.so"), filepath.Join(folder, "gander.h")
	require.NoError(t, os.WriteFile(code, []byte(source), 0o600))
	require.NoError(t, os.WriteFile(headerPath, []byte(header), 0o600))
	args := append([]string{"-shared", "-fPIC", "-Wl,-soname,libgander.so.7", "-o", library, code}, flags...)
	out, err := exec.Command("gcc", args...).CombinedOutput()
	require.NoError(t, err, string(out))
	return library, headerPath
}
