package tests

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pythonRooms are the packages and modules of python/gander, with the rooms that each may import. Imports in
// functions and for type checkers count. __init__ and __main__ may import all.
var pythonRooms = map[string][]string{
	"_table":      {},
	"_imports":    {},
	"_debug":      {"_words"},
	"_words":      {},
	"_native":     {"_table", "_words"},
	"_backend":    {"_table", "_imports"},
	"_arrays":     {"_table", "_native", "_backend", "_debug", "_words"},
	"_torch":      {"_table", "_native", "_backend", "_debug", "_imports", "_words"},
	"_functions":  {"_table", "_backend", "_debug", "_words"},
	"info":        {"_table", "_native", "_backend", "_functions", "_words"},
	"distributed": {"_table", "_debug", "_functions", "_torch", "_words"},
	"nn":          {"_table", "_functions", "_torch", "_words"},
	"jax":         {"_table", "_native", "_functions", "_words"},
	"check":       {"__init__"},
	"hf":          {"__init__"}, // an adapter
	"rl":          {"__init__"}, // an adapter
	"__init__":    nil,
	"__main__":    nil,
}

// Adapters stand above the package, each against one other library. They use public functions alone, and no
// room imports them, __init__ and __main__ neither.
var pythonAdapters = []string{"hf", "rl"}

var (
	// An import of the package's own modules, with the names in parentheses or up to the end of the line.
	pythonFrom = regexp.MustCompile(
		`(?m)^\s*from\s+(\.+[\w.]*|gander[\w.]*)\s+import\s+(?:\(([^)]*)\)|([^\n#]*))`)
	pythonImport = regexp.MustCompile(`(?m)^\s*import\s+(gander[\w.]*)`)
	// A module that is imported by its name would be seen by nobody.
	pythonByName = regexp.MustCompile(`import_module\(\s*f?["']\.|__import__\(`)
	pythonDoc    = regexp.MustCompile(`(?s)""".*?"""`)
	pythonName   = regexp.MustCompile(`\w+`)
)

// pythonModules returns the source of each module of python/gander, by its dotted name. "" is gander itself.
func pythonModules(t *testing.T) map[string]string {
	modules, root := map[string]string{}, filepath.Join("..", "python", "gander")
	require.NoError(t, filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".py" {
			return err
		}
		text, err := os.ReadFile(file)
		name, _ := filepath.Rel(root, strings.TrimSuffix(file, ".py"))
		name = strings.ReplaceAll(filepath.ToSlash(name), "/", ".")
		name = strings.TrimSuffix(strings.TrimSuffix("."+name, ".__init__"), ".")
		modules[strings.TrimPrefix(name, ".")] = pythonDoc.ReplaceAllString(string(text), "")
		return err
	}))
	require.Contains(t, modules, "_torch.fast")
	return modules
}

// pythonImports returns which modules of python/gander a module imports.
func pythonImports(modules map[string]string, module string) (list []string) {
	add := func(name string) {
		if _, ok := modules[name]; ok && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	isPackage := module == "" || slices.ContainsFunc(sorted(modules), func(other string) bool {
		return strings.HasPrefix(other, module+".")
	})
	for _, found := range pythonFrom.FindAllStringSubmatch(modules[module], -1) {
		from := strings.TrimPrefix(strings.TrimPrefix(found[1], "gander"), ".")
		if strings.HasPrefix(found[1], ".") {
			dots := len(found[1]) - len(strings.TrimLeft(found[1], "."))
			parts := strings.Split(module, ".")
			if isPackage {
				dots--
			}
			folder := parts[:max(len(parts)-dots, 0)]
			from = strings.Trim(strings.Join(folder, ".")+"."+strings.TrimLeft(found[1], "."), ".")
		}
		names := pythonName.FindAllString(found[2]+found[3], -1)
		submodules := 0
		for _, name := range names {
			full := strings.TrimPrefix(from+"."+name, ".")
			if _, ok := modules[full]; ok {
				add(full)
				submodules++
			}
		}
		if submodules < len(names) {
			add(from)
		}
	}
	for _, found := range pythonImport.FindAllStringSubmatch(modules[module], -1) {
		add(strings.TrimPrefix(strings.TrimPrefix(found[1], "gander"), "."))
	}
	return list
}

func sorted(modules map[string]string) (names []string) {
	for name := range modules {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// pythonRoom is the room of a module.
func pythonRoom(module string) string {
	if module == "" {
		return "__init__"
	}
	return strings.Split(module, ".")[0]
}

func TestPythonImportsPointOneWay(t *testing.T) {
	modules := pythonModules(t)
	for _, module := range sorted(modules) {
		room := pythonRoom(module)
		require.Containsf(t, pythonRooms, room, "%s is in no room: add it to the table", module)
		if module != "" { // gander imports nn and distributed at their first use
			assert.Emptyf(t, pythonByName.FindString(modules[module]), "%s imports a module by its name", module)
		}
		for _, other := range pythonImports(modules, module) {
			allowed := room == pythonRoom(other) || pythonRooms[room] == nil ||
				slices.Contains(pythonRooms[room], pythonRoom(other))
			assert.Truef(t, allowed, "%s imports %s", module, other)
			if to := pythonRoom(other); slices.Contains(pythonAdapters, to) {
				assert.Equalf(t, to, room, "%s imports the adapter %s", module, other)
			}
		}
	}
}

func TestPythonAdaptersUsePublicNames(t *testing.T) {
	for module, text := range pythonModules(t) {
		if slices.Contains(pythonAdapters, pythonRoom(module)) {
			assert.Emptyf(t, pythonPrivate.FindString(text), "%s", module)
		}
	}
}

func TestPythonHasNoCircles(t *testing.T) {
	modules := pythonModules(t)
	const running, done = 1, 2
	state := map[string]int{}
	var visit func(module string, trail []string)
	visit = func(module string, trail []string) {
		trail = append(trail, module)
		if state[module] == running {
			assert.Fail(t, "a circle of imports", strings.Join(trail, " -> "))
		}
		if state[module] != 0 {
			return
		}
		state[module] = running
		for _, other := range pythonImports(modules, module) {
			if !(strings.HasPrefix(module, other+".") || other == module) { // a package runs before its modules
				visit(other, trail)
			}
		}
		state[module] = done
	}
	for _, module := range sorted(modules) {
		visit(module, nil)
	}
}

// The measures of the package: no file by hand is longer, and no module is found by its name.
func TestPythonFilesAreShort(t *testing.T) {
	const most = 450
	require.NoError(t, filepath.WalkDir("../python/gander", func(file string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".py" || strings.HasSuffix(file, "_gen.py") {
			return err
		}
		text, err := os.ReadFile(file)
		assert.LessOrEqualf(t, strings.Count(string(text), "\n"), most, "%s", file)
		return err
	}))
}
