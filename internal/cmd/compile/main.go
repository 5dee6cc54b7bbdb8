// Command compile compiles CUDA sources to the device images that package kernels embeds: one fatbin for each
// source and architecture. It uses all cores, caches images by a hash of their content, and rejects kernels
// that spill registers.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/gander-go/gander/kernels"
)

func main() {
	nvcc := flag.String("nvcc", "nvcc", "CUDA's compiler")
	cache := flag.String("cache", "", "folder of compiled objects")
	out := flag.String("out", "", "folder for the images; other images in it are removed")
	archs := flag.String("archs", "sm_90 compute_80 compute_90", "sm_XY for machine code, compute_XY for PTX")
	costs := flag.Bool("costs", false, "print kernels, bytes of code and seconds of each image of machine code")
	flag.Parse()
	jobs, err := run(os.Stdout, *nvcc, *cache, *out, strings.Fields(*archs), flag.Args())
	if err == nil && *costs {
		err = printCosts(os.Stdout, filepath.Dir(*nvcc), *out, jobs)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "compile:", err)
		os.Exit(1)
	}
}

// run compiles and installs the images, and returns what it did for each.
func run(progress io.Writer, nvcc, cache, out string, archs, sources []string) ([]*job, error) {
	switch {
	case cache == "":
		return nil, fmt.Errorf("-cache is missing, expected a folder for compiled objects")
	case out == "":
		return nil, fmt.Errorf("-out is missing, expected a folder for the images")
	case len(archs) == 0:
		return nil, fmt.Errorf("-archs is empty, expected sm_XY or compute_XY, such as sm_90")
	case len(sources) == 0:
		return nil, fmt.Errorf("no sources, expected the paths of .cu files after the flags")
	}
	compiler, err := newCompiler(progress, nvcc, cache)
	if err != nil {
		return nil, err
	}
	defer func() { _ = compiler.close() }() // an error only leaves temporary files behind
	// Machine code first: the PTX jobs are short, and keep all cores busy while the last long job ends.
	jobs := plan(sources, archs)
	start := time.Now()
	compiled, err := compileAll(compiler, jobs)
	if err != nil {
		return nil, err
	}
	if err := install(jobs, out); err != nil {
		return nil, err
	}
	kernels, registers, problems := review(jobs)
	fmt.Fprintf(progress, "%d images, %d compiled in %.1f s; %d kernels of machine code, at most %d registers\n",
		len(jobs), compiled, time.Since(start).Seconds(), kernels, registers)
	if len(problems) > 0 {
		return nil, fmt.Errorf("kernels must keep everything in registers:\n  %s", strings.Join(problems, "\n  "))
	}
	return jobs, nil
}

// job is one image: a source compiled for one architecture.
type job struct {
	source, arch string
	cached       string // the object's path in the cache
	object
}

// unit is the name of the source: softmax_bfloat16 for softmax_bfloat16_gen.cu.
func (j *job) unit() string {
	return strings.TrimSuffix(strings.TrimSuffix(filepath.Base(j.source), ".cu"), "_gen")
}

// name is the image's file name: softmax_bfloat16_gen.cu for sm_90 becomes softmax_bfloat16.sm_90.fatbin.
func (j *job) name() string { return j.unit() + "." + j.arch + ".fatbin" }

func plan(sources, archs []string) []*job {
	var native, ptx []*job
	for _, arch := range archs {
		for _, source := range sources {
			j := &job{source: source, arch: arch}
			if isNative(arch) {
				native = append(native, j)
			} else {
				ptx = append(ptx, j)
			}
		}
	}
	return append(native, ptx...)
}

func isNative(arch string) bool { return strings.HasPrefix(arch, "sm_") }

// compileAll sets every job's object and returns how many were not in the cache. It stops after the first
// failure.
func compileAll(c *compiler, jobs []*job) (int, error) {
	var missing []*job
	for _, j := range jobs {
		switch found, err := c.find(j); {
		case err != nil:
			return 0, fmt.Errorf("%s for %s: %w", j.source, j.arch, err)
		case !found:
			missing = append(missing, j)
		}
	}
	var mu sync.Mutex
	var failure error
	var next, compiled int
	start := time.Now()
	take := func() *job {
		mu.Lock()
		defer mu.Unlock()
		if failure != nil || next == len(missing) {
			return nil
		}
		next++
		return missing[next-1]
	}
	work := func() {
		for j := take(); j != nil; j = take() {
			err := c.compile(j)
			mu.Lock()
			if err == nil {
				compiled++
				left := time.Since(start) / time.Duration(compiled) * time.Duration(len(missing)-compiled)
				fmt.Fprintf(c.progress, "%d of %d: %s, %v left\n", compiled, len(missing), j.name(),
					left.Round(time.Second))
			} else if failure == nil {
				failure = fmt.Errorf("%s for %s: %w", j.source, j.arch, err)
			}
			mu.Unlock()
		}
	}
	var workers sync.WaitGroup
	for range min(runtime.NumCPU(), len(missing)) {
		workers.Go(work)
	}
	workers.Wait()
	return compiled, failure
}

// install makes the folder contain exactly the jobs' images, and their digests. It only writes files that
// differ.
func install(jobs []*job, out string) error {
	if err := os.MkdirAll(out, 0o777); err != nil {
		return err
	}
	files := map[string][]byte{}
	for _, j := range jobs {
		files[j.name()] = j.image
	}
	files[kernels.SumsFile] = kernels.Sums(files)
	wanted := map[string]bool{}
	for name, data := range files {
		path := filepath.Join(out, name)
		wanted[path] = true
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
			continue
		}
		if err := writeFile(path, data); err != nil {
			return err
		}
	}
	for _, pattern := range []string{"*.fatbin", temporaryPrefix + "*"} {
		present, err := filepath.Glob(filepath.Join(out, pattern))
		if err != nil {
			return err
		}
		for _, path := range present {
			if wanted[path] {
				continue
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// review counts the kernels in machine code, and lists those that use a stack or spill registers.
func review(jobs []*job) (kernels, registers int, problems []string) {
	for _, j := range jobs {
		if !isNative(j.arch) {
			continue
		}
		usage := parseUsage(j.log)
		entries := 0
		for _, u := range usage {
			if u.entry {
				entries++
			}
			registers = max(registers, u.registers)
			if u.stack+u.spillStores+u.spillLoads > 0 {
				problems = append(problems, fmt.Sprintf(
					"%s in %s: %d bytes of stack, %d of spill stores, %d of spill loads",
					u.function, j.name(), u.stack, u.spillStores, u.spillLoads))
			}
		}
		if entries == 0 {
			problems = append(problems, j.name()+": ptxas reported no kernel")
		}
		kernels += entries
	}
	return kernels, registers, problems
}
