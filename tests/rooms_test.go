// Package tests has the tests of more than one package.
package tests

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/gander-go/gander/"

// rooms are the folders of the Go library, with the rooms that each may import. Tests may import more.
var rooms = map[string][]string{
	"dlpack":          {"dlpack"},
	"kernels":         {"kernels"},
	"internal/driver": {"internal/driver", "kernels", "dlpack"},
	"internal/policy": {"internal/policy", "kernels"},
	"internal/sizes":  {"internal/sizes"},
	"ops":             {"ops", "internal/driver", "internal/policy", "internal/sizes", "kernels", "dlpack"},
	"capi":            {"capi", "ops", "internal/driver", "internal/sizes", "kernels", "dlpack"},
}

// walk calls f with the path and text of each file of a room that has one of the endings.
func walk(t *testing.T, room string, f func(path, text string), endings ...string) {
	t.Helper()
	found := false
	root := filepath.Join("..", room)
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !slices.Contains(endings, filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		found = true
		f(path, string(text))
		return err
	}))
	require.True(t, found, "the room %s has no files: was it moved?", room)
}

// imports returns the paths that a Go file imports.
func imports(t *testing.T, path string) (paths []string) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	require.NoError(t, err)
	for _, i := range file.Imports {
		name, err := strconv.Unquote(i.Path.Value)
		require.NoError(t, err)
		paths = append(paths, name)
	}
	return paths
}

func TestImportsPointOneWay(t *testing.T) {
	for room, allowed := range rooms {
		walk(t, room, func(path, _ string) {
			if strings.HasSuffix(path, "_test.go") {
				return
			}
			for _, name := range imports(t, path) {
				local, ours := strings.CutPrefix(name, module)
				inside := func(room string) bool { return local == room || strings.HasPrefix(local, room+"/") }
				if ours {
					assert.Truef(t, slices.ContainsFunc(allowed, inside), "%s imports %s", path, local)
				}
			}
		}, ".go")
	}
}

func TestNoCgo(t *testing.T) {
	for _, room := range []string{"ops", "kernels", "dlpack"} {
		walk(t, room, func(path, _ string) {
			producer := strings.Contains(filepath.ToSlash(path), "dlpack/internal/producer/")
			if strings.HasSuffix(path, "_cgo.go") || producer {
				return // these files have the build tag cgo
			}
			assert.NotContainsf(t, imports(t, path), "C", "%s", path)
		}, ".go")
	}
}

func TestKernelsKnowNothingOfDLPack(t *testing.T) {
	use := regexp.MustCompile(`(?m)^\s*#\s*include.*dlpack|\bDL(Managed)?Tensor|gander/dlpack"`)
	walk(t, "kernels", func(path, text string) {
		assert.Emptyf(t, use.FindString(text), "%s", path)
	}, ".go", ".cu", ".cuh", ".h")
}

// Only the Python package and the tests may use torch. Other code may mention it.
func TestNoTorchBelowPython(t *testing.T) {
	use := regexp.MustCompile(
		`(?m)^\s*(import|from)\s+torch\b|#\s*include\s*[<"](torch|ATen|c10)/|` +
			`\b(torch|at|c10)::|\b(aoti_)?torch_[a-z]`)
	for room := range rooms {
		walk(t, room, func(path, text string) {
			assert.Emptyf(t, use.FindString(text), "%s", path)
		}, ".go", ".c", ".h", ".cu", ".cuh", ".S", ".py")
	}
}

// pythonPrivate is a private name of gander in a program that uses it.
var pythonPrivate = regexp.MustCompile(`\bgander(\.\w+)*\._[a-z]\w*|` +
	`\bfrom gander(\.\w+)* import (\([^)]*|[^\n(]*)\b_[a-z]\w*`)

// gander does not know its benchmark, which uses what every user may: no private name of gander.
func TestTheBenchmarkIsAUser(t *testing.T) {
	walk(t, "python/gander", func(path, text string) {
		assert.NotContainsf(t, text, "gander_bench", "%s", path)
	}, ".py")
	for _, used := range []string{"import gander._a", "from gander._a import b", "  from gander import a, _b",
		"from gander import (\n    a,\n    _b,\n)", "gander.nn._a", "x = gander._ops.a"} {
		require.NotEmpty(t, pythonPrivate.FindString(used), used)
	}
	require.Empty(t, pythonPrivate.FindString("gander.__version__ + from gander import nn"))
	for _, folder := range []string{"bench", "notebooks"} {
		walk(t, folder, func(path, text string) {
			assert.Emptyf(t, pythonPrivate.FindString(text), "%s", path)
		}, ".py", ".ipynb")
	}
}
