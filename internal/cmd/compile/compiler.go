package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// compiler runs nvcc behind a cache.
type compiler struct {
	progress io.Writer // gets a line for each compilation
	nvcc     string
	version  string // output of `nvcc --version`, part of every cache key
	cache    string
	scratch  string   // for PTX and nvcc's temporary files; removed at the end
	ptxs     sync.Map // name of a PTX file -> func() (seconds, error) that compiles it once
}

func newCompiler(progress io.Writer, nvcc, cache string) (*compiler, error) {
	version, err := exec.Command(nvcc, "--version").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w\n%s", nvcc, err, version)
	}
	if err := os.MkdirAll(cache, 0o777); err != nil {
		return nil, err
	}
	if err := removeAbandoned(cache); err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp("", "gander-compile-")
	return &compiler{
		progress: progress, nvcc: nvcc, version: string(version), cache: cache, scratch: scratch,
	}, err
}

func (c *compiler) close() error { return os.RemoveAll(c.scratch) }

// generations are the compute capabilities that the kernels' source distinguishes. For those in between nvcc
// emits the same PTX with another target name. For 10.0 and higher it uses a different front end, with which
// more kernels spill, so images for those are compiled from the PTX for 9.0.
var generations = []int{90, 80}

// virtual is the architecture of the PTX that an image is compiled from: compute_80 for sm_86, compute_90 for
// sm_120 and for compute_90.
func virtual(arch string) string {
	kind, digits, _ := strings.Cut(arch, "_")
	number, err := strconv.Atoi(digits)
	i := slices.IndexFunc(generations, func(g int) bool { return g <= number })
	if kind == "sm" && err == nil && i >= 0 {
		return fmt.Sprintf("compute_%d", generations[i])
	}
	return "compute_" + digits
}

func ptxArguments(virtual string) []string {
	return []string{"-std=c++17", "-O3", "-ptx", "-arch=" + virtual}
}

func imageArguments(unit, arch string) []string {
	target := "-gencode=arch=" + virtual(arch) + ",code=" + arch
	all := []string{"-fatbin", target, "--compress-mode=size", "-Xptxas", "-v"}
	if strings.HasPrefix(unit, "cross_entropy") && arch == "sm_120" {
		// Some kernels with 1024 threads spill, although their register limit is already the highest
		// possible.
		all = append(all, "-Xptxas", "--register-usage-level=3")
	}
	return all
}

// find fills in the job's object if the cache has it.
func (c *compiler) find(j *job) (found bool, err error) {
	files := map[string][]byte{}
	if err := collect(j.source, files); err != nil {
		return false, err
	}
	arguments := [][]string{ptxArguments(virtual(j.arch)), imageArguments(j.unit(), j.arch)}
	j.cached = filepath.Join(c.cache, c.key(files, arguments, adaptations(j.unit(), j.arch))+".object")
	err = j.object.read(j.cached)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(c.progress, "%s: the cache is damaged, compiling again: %v\n", j.name(), err)
	}
	return err == nil, nil
}

// compile makes the object of a job that find has not found, and adds it to the cache.
func (c *compiler) compile(j *job) error {
	ptx, seconds, err := c.ptx(j.source, virtual(j.arch))
	if err != nil {
		return err
	}
	j.ptxSeconds = seconds
	if ptx, err = c.adapted(ptx, j.arch, adaptations(j.unit(), j.arch)); err != nil {
		return err
	}
	j.image, j.log, j.imageSeconds, err = c.invoke(j.name(), ptx, imageArguments(j.unit(), j.arch))
	if err != nil {
		return err
	}
	return j.object.write(j.cached)
}

// ptx compiles a source to PTX, once, and returns the file and the seconds. This takes most of the time, and
// is shared by all images of the same virtual architecture.
func (c *compiler) ptx(source, arch string) (string, float64, error) {
	name := strings.TrimSuffix(filepath.Base(source), ".cu") + "." + arch + ".ptx"
	compileOnce, _ := c.ptxs.LoadOrStore(name, sync.OnceValues(func() (float64, error) {
		_, _, seconds, err := c.invoke(name, source, ptxArguments(arch))
		return seconds, err
	}))
	seconds, err := compileOnce.(func() (float64, error))()
	return filepath.Join(c.scratch, name), seconds, err
}

// adapted applies the changes for an architecture to a copy of the PTX, and returns the copy's path.
func (c *compiler) adapted(ptx, arch string, changes []adaptation) (string, error) {
	if len(changes) == 0 {
		return ptx, nil
	}
	text, err := os.ReadFile(ptx)
	if err != nil {
		return "", err
	}
	if text, err = adapt(text, changes); err != nil {
		return "", err
	}
	path := strings.TrimSuffix(ptx, ".ptx") + "." + arch + ".ptx"
	return path, os.WriteFile(path, text, 0o644)
}

// invoke runs nvcc and returns the file that it made, its messages, and the seconds that it and the programs
// that it ran had a processor.
func (c *compiler) invoke(name, source string, arguments []string) (
	made []byte, log string, seconds float64, err error) {
	output := filepath.Join(c.scratch, name)
	command := exec.Command(c.nvcc, append(slices.Clone(arguments), "-o", output, source)...)
	command.Env = append(os.Environ(), "TMPDIR="+c.scratch)
	messages, err := command.CombinedOutput()
	if err != nil {
		return nil, "", 0, fmt.Errorf("%w\n%s", err, messages)
	}
	made, err = os.ReadFile(output)
	used := command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	return made, string(messages), used.Seconds(), err
}

// key is a digest of everything that the compiled image depends on.
func (c *compiler) key(files map[string][]byte, arguments [][]string, changes []adaptation) string {
	digest := sha256.New()
	fmt.Fprintf(digest, "%q %q %v", c.version, arguments, changes)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(digest, " %q %x", filepath.ToSlash(path), sha256.Sum256(files[path]))
	}
	return hex.EncodeToString(digest.Sum(nil))
}

var include = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]*"([^"]+)"`)

// collect reads a source and all files that it includes by relative path. Headers in angle brackets, and
// those that do not exist at the path, come with the compiler, whose version is part of the key.
func collect(path string, files map[string][]byte) error {
	if _, seen := files[path]; seen {
		return nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	files[path] = text
	for _, match := range include.FindAllSubmatch(text, -1) {
		err := collect(filepath.Join(filepath.Dir(path), string(match[1])), files)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
