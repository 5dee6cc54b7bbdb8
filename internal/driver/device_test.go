//go:build cuda && cgo && linux && amd64

package driver

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gorgonia.org/cu"

	"github.com/gander-go/gander/kernels"
)

// Each test starts a child process that runs the same test with the fake driver of testdata/fake.c, because a
// process loads libcuda only once.

const (
	logVariable    = "FAKE_LOG"            // set in a child process that runs a test
	statusVariable = "GANDER_TEST_NO_CUDA" // set in a child process that only calls Status
)

func TestMain(m *testing.M) {
	if os.Getenv(statusVariable) != "" {
		if !errors.Is(Status(), ErrNoDriver) {
			os.Exit(3)
		}
		return
	}
	kernels.Variants = []kernels.Variant{
		{Index: 0, Family: 0, Symbol: "rows", Threads: 256},
		{Index: 1, Family: 0, Symbol: "small_clusters", Threads: 512, Cluster: true},
		{Index: 2, Family: 0, Symbol: "clusters", Threads: 1024, Cluster: true},
		{Index: 3, Family: 1, Symbol: "split", Threads: 128},
		{Index: 4, Family: 1, Symbol: "split_clusters", Threads: 512, Cluster: true},
		{Index: 5, Family: 1, Symbol: "ring", Threads: 128, Shape: kernels.Ring},
	}
	architectures = func() []string { return []string{"compute_80", "compute_90", "sm_90"} }
	image = func(family kernels.Family, arch string) []byte { return []byte(family.String() + "." + arch) }
	code := m.Run()
	for _, folder := range libraries {
		os.RemoveAll(folder)
	}
	os.Exit(code)
}

var libraries = map[string]string{} // folders of compiled fake drivers, by flag

// library compiles the fake driver with a flag of gcc and returns its folder.
func library(t *testing.T, flag string) string {
	if folder, ok := libraries[flag]; ok {
		return folder
	}
	folder, err := os.MkdirTemp("", "driver")
	require.NoError(t, err)
	libraries[flag] = folder
	// A shell splits CGO_CFLAGS into arguments as Go does: quotes are honored.
	compile := "exec gcc " + os.Getenv("CGO_CFLAGS") + ` -shared -fPIC -pthread "$@"`
	out, err := exec.Command("sh", "-c", compile, "gcc", flag, "-o", filepath.Join(folder, "libcuda.so.1"),
		"testdata/fake.c").CombinedOutput()
	require.NoError(t, err, string(out))
	return folder
}

// inChild returns true in the child process that runs a test. In the parent it runs the child, with the fake
// driver and the given environment, and returns false.
func inChild(t *testing.T, env ...string) bool {
	if os.Getenv(logVariable) != "" {
		return true
	}
	runChild(t, library(t, "-O1"), env...)
	return false
}

// runChild runs the test in a child process that loads libcuda from a folder.
func runChild(t *testing.T, folder string, env ...string) {
	parts := strings.Split(t.Name(), "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	command := exec.Command(os.Args[0], "-test.count=1", "-test.run="+strings.Join(parts, "/"))
	command.Env = append(os.Environ(), "LD_LIBRARY_PATH="+folder,
		logVariable+"="+filepath.Join(t.TempDir(), "log"), "GANDER_FORCE_PTX=", "GORACE=atexit_sleep_ms=0")
	command.Env = append(command.Env, env...)
	out, err := command.CombinedOutput()
	require.NoError(t, err, string(out))
	require.NotContains(t, string(out), "no tests to run")
}

// calls returns the log of the fake driver since the last time, without queries of attributes. A line ends
// with the current context and the thread's stream capture mode.
func calls(t *testing.T) []string {
	path := os.Getenv(logVariable)
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	var lines []string
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "cuDeviceGetAttribute") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// count returns how many lines begin with the prefix.
func count(lines []string, prefix string) (n int) {
	for _, line := range lines {
		if strings.HasPrefix(line, prefix) {
			n++
		}
	}
	return n
}

func opened(t *testing.T) *Device {
	d, err := Open(0)
	require.NoError(t, err)
	return d
}

// facts returns the device's properties for the first kernel family.
func facts(t *testing.T, d *Device) *Facts {
	f, err := d.Facts(0)
	require.NoError(t, err)
	return f
}

// makeCurrent locks the test to its thread, and makes a context current there.
func makeCurrent(t *testing.T, context uintptr) {
	runtime.LockOSThread()
	require.NoError(t, cu.SetCurrentContext(*(*cu.CUContext)(unsafe.Pointer(&context))))
}

// arguments is the struct that a kernel takes as its only parameter. In the log, "args 42/16" is the value of
// `first` and the size that was passed, or 0 where none is.
type arguments struct {
	first, second int32
	third         int64
}

const argumentBytes = unsafe.Sizeof(arguments{})

func launch(d *Device, index int, g kernels.Geometry, stream uintptr) error {
	args := arguments{first: 42}
	return d.Launch(&kernels.Variants[index], g, unsafe.Pointer(&args), argumentBytes, stream)
}

func TestWithoutDriver(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "libcuda.so.1"), []byte("no library"), 0o600))
	t.Run("prints nothing", func(t *testing.T) {
		command := exec.Command(os.Args[0])
		command.Env = append(os.Environ(), "LD_LIBRARY_PATH="+folder, statusVariable+"=1")
		out, err := command.CombinedOutput()
		assert.NoError(t, err)
		assert.Empty(t, string(out))
	})
	t.Run("returns errors", func(t *testing.T) {
		if os.Getenv(logVariable) == "" {
			runChild(t, folder)
			return
		}
		_, err := cu.NumDevices()
		assert.Equal(t, cu.NotInitialized, err, "before binding")
		for _, err := range []error{Status(), Status()} {
			assert.ErrorIs(t, err, ErrNoDriver)
			assert.ErrorContains(t, err, "libcuda.so.1")
			assert.ErrorContains(t, err, "R580")
		}
		d, err := Open(0)
		assert.Nil(t, d)
		assert.ErrorIs(t, err, ErrNoDriver)
		_, err = cu.NumDevices()
		assert.Equal(t, cu.NotInitialized, err, "after binding failed")
	})
}

func TestOldDriver(t *testing.T) {
	if !inChild(t, "FAKE_VERSION=12040") {
		return
	}
	_, err := Open(0)
	assert.ErrorIs(t, err, ErrTooOld)
	assert.EqualError(t, err, "the NVIDIA driver is too old: it supports CUDA 12.4, the kernels need 13.0; "+
		"install driver R580 or newer")
}

func TestDriverThatFails(t *testing.T) {
	if !inChild(t, "FAKE_FAIL=cuInit=100") {
		return
	}
	_, err := Open(0)
	var failure *Error
	require.ErrorAs(t, err, &failure)
	assert.Equal(t, Error{Code: 100, Name: "CUDA_ERROR_FAKE", Op: "cuInit", Text: "it is fake"}, *failure)
	assert.EqualError(t, err, "cuInit: CUDA_ERROR_FAKE (100): it is fake")
	assert.Equal(t, err, Status())
}

func TestDriverThatLacksAFunction(t *testing.T) {
	if os.Getenv(logVariable) == "" {
		runChild(t, library(t, "-DWITHOUT_LAUNCH_EX"))
		return
	}
	d := opened(t)
	assert.NoError(t, launch(d, 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
	err := launch(d, 2, kernels.Geometry{Grid: 2, Cluster: 2}, 0)
	var failure *Error
	require.ErrorAs(t, err, &failure)
	assert.Equal(t, 302, failure.Code)
	assert.Contains(t, failure.Text, "install a newer NVIDIA driver")
}

func TestOpen(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	assert.Equal(t, []string{
		"cuInit 0| 0 global",
		"cuDeviceGet 0| 0 global",
		"cuDevicePrimaryCtxRetain 0| 0 global",
	}, calls(t))
	assert.Same(t, d, opened(t))
	assert.Empty(t, calls(t), "a cached device makes no calls")
	assert.Zero(t, testing.AllocsPerRun(100, func() { Open(0) }))

	second, err := Open(1)
	require.NoError(t, err)
	assert.NotSame(t, d, second)
	for _, ordinal := range []int32{2, 63, 64, 1 << 20, -1, -1 << 31} {
		_, err := Open(ordinal)
		var failure *Error
		require.ErrorAs(t, err, &failure)
		assert.Equal(t, CodeInvalidDevice, failure.Code)
	}
}

func TestFacts(t *testing.T) {
	base := Facts{
		Major: 9, Minor: 0, Arch: "sm_90", SMs: 132, SharedPerBlock: 232448, SharedPerSM: 233472,
		L2Bytes: 50 << 20, MemoryGBs: 3352, Name: "Fake 0", DriverVersion: 13000,
		Clusters: [17]int{1: 128, 64, 42, 32, 25, 21, 18, 16},
	}
	ptx := func(arch string, major int, clusters [17]int) Facts {
		f := base
		f.Arch, f.Major, f.Clusters = arch, major, clusters
		return f
	}
	unknown := base
	unknown.MemoryGBs = 0
	for name, c := range map[string]struct {
		env  []string
		want Facts
	}{
		"native":                {nil, base},
		"forced 80":             {[]string{"GANDER_FORCE_PTX=80"}, ptx("compute_80", 8, [17]int{})},
		"forced 90":             {[]string{"GANDER_FORCE_PTX=90"}, ptx("compute_90", 9, base.Clusters)},
		"newer GPU":             {[]string{"FAKE_CAPABILITY=120"}, ptx("compute_90", 9, base.Clusters)},
		"older GPU":             {[]string{"FAKE_CAPABILITY=89"}, ptx("compute_80", 8, [17]int{})},
		"bus width unsupported": {[]string{"FAKE_ATTRIBUTE_37=!801"}, unknown},
		"negative bus width":    {[]string{"FAKE_ATTRIBUTE_37=-1"}, unknown},
	} {
		t.Run(name, func(t *testing.T) {
			if !inChild(t, c.env...) {
				return
			}
			d := opened(t)
			calls(t)
			assert.Equal(t, c.want, *facts(t, d))
			queries := calls(t)
			if c.want.Clusters[1] > 0 {
				assert.Contains(t, queries,
					"cuModuleLoadData softmax_float16."+c.want.Arch+"| 0x1000 relaxed")
				assert.Contains(t, queries,
					"cuOccupancyMaxActiveClusters small_clusters 4 1 x 4 512 117760| 0x1000 relaxed")
			} else {
				assert.Empty(t, queries)
			}
			assert.Same(t, facts(t, d), facts(t, d))
			assert.Empty(t, calls(t), "queried once")
			assert.Zero(t, testing.AllocsPerRun(100, func() { d.Facts(0) }))
		})
	}
}

func TestFactsLoadOneImage(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	f, err := d.Facts(1)
	require.NoError(t, err)
	assert.Equal(t, [17]int{1: 128, 64, 42, 32, 25, 21, 18, 16}, f.Clusters)
	all := calls(t)
	assert.Equal(t, 1, count(all, "cuModuleLoadData"))
	assert.Equal(t, 1, count(all, "cuModuleLoadData softmax_bfloat16.sm_90"))
	assert.Equal(t, 16, count(all, "cuOccupancyMaxActiveClusters split_clusters "))
	assert.Same(t, f, facts(t, d), "the same for all families")
	assert.Empty(t, calls(t))
}

// After a temporary failure Facts returns an error, and its next call queries the driver again.
func TestFactsAreRetried(t *testing.T) {
	want := [17]int{1: 128, 64, 42, 32, 25, 21, 18, 16}
	for name, c := range map[string]struct {
		env  []string
		code int
		text string
	}{
		"image": {[]string{"FAKE_FAIL=cuModuleLoadData=2"}, 2, "cuModuleLoadData of softmax_float16.sm_90: "},
		"first query": {[]string{"FAKE_FAIL=cuOccupancyMaxActiveClusters=2"}, 2,
			"cuOccupancyMaxActiveClusters of small_clusters in clusters of 1: CUDA_ERROR_OUT_OF_MEMORY (2)"},
		"fifth query": {[]string{"FAKE_FAIL=cuOccupancyMaxActiveClusters=999", "FAKE_FAIL_AFTER=4"}, 999,
			"cuOccupancyMaxActiveClusters of small_clusters in clusters of 5: "},
		"last query": {[]string{"FAKE_FAIL=cuOccupancyMaxActiveClusters=2", "FAKE_FAIL_AFTER=15"}, 2,
			"clusters of 16"},
		"context": {[]string{"FAKE_FAIL=cuCtxPushCurrent=201", "FAKE_FAIL_AFTER=1"}, 201,
			"cuCtxPushCurrent: "},
	} {
		t.Run(name, func(t *testing.T) {
			if !inChild(t, c.env...) {
				return
			}
			d := opened(t)
			f, err := d.Facts(0)
			assert.Nil(t, f)
			var failure *Error
			require.ErrorAs(t, err, &failure)
			assert.Equal(t, c.code, failure.Code)
			assert.ErrorContains(t, err, c.text)
			require.NoError(t, os.Unsetenv("FAKE_FAIL"))
			assert.Equal(t, want, facts(t, d).Clusters)
		})
	}
	t.Run("unsupported cluster size", func(t *testing.T) {
		for _, code := range []string{"1", "801", "912"} { // permanent failures
			t.Run(code, func(t *testing.T) {
				if !inChild(t, "FAKE_FAIL=cuOccupancyMaxActiveClusters="+code, "FAKE_FAIL_AFTER=4") {
					return
				}
				assert.Equal(t, [17]int{1: 128, 64, 42, 32}, facts(t, opened(t)).Clusters)
			})
		}
	})
	t.Run("memory clock", func(t *testing.T) {
		if !inChild(t, "FAKE_ATTRIBUTE_36=!2") {
			return
		}
		_, err := Open(0)
		assert.EqualError(t, err, "cuDeviceGetAttribute 36: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
		require.NoError(t, os.Unsetenv("FAKE_ATTRIBUTE_36"))
		assert.Equal(t, 3352, facts(t, opened(t)).MemoryGBs)
	})
}

func TestImpossibleProperties(t *testing.T) {
	for name, c := range map[string]struct{ attribute, text string }{
		"no SMs":           {"16=0", "multiprocessors: 0, expected 1 to 65536"},
		"negative SMs":     {"16=-1", "multiprocessors: -1, expected"},
		"no shared memory": {"97=0", "bytes of shared memory per block: 0, expected 49152 to"},
		"less than per block": {"81=100000",
			"bytes of shared memory per multiprocessor: 100000, expected 232448 to"},
		"no L2":           {"38=0", "bytes of L2 cache: 0, expected 1 to"},
		"no capability":   {"75=0", "major compute capability: 0, expected 1 to 99"},
		"major too large": {"75=1000000000", "major compute capability: 1000000000, expected"},
		"negative minor":  {"76=-1", "minor compute capability: -1, expected 0 to 9"},
		"minor too large": {"76=10", "minor compute capability: 10, expected"},
	} {
		t.Run(name, func(t *testing.T) {
			if !inChild(t, "FAKE_ATTRIBUTE_"+c.attribute) {
				return
			}
			for range 2 {
				d, err := Open(0)
				assert.Nil(t, d)
				assert.ErrorIs(t, err, ErrFacts)
				assert.ErrorContains(t, err,
					"device 0 (Fake 0): the driver reports impossible device properties: "+c.text)
				assert.ErrorContains(t, err, "reinstall NVIDIA's driver")
			}
			assert.Zero(t, count(calls(t), "cuDevicePrimaryCtxRetain"), "its primary context is not retained")
		})
	}
}

func TestNoImage(t *testing.T) {
	if !inChild(t, "FAKE_CAPABILITY=75") {
		return
	}
	_, err := Open(0)
	assert.ErrorIs(t, err, ErrArch)
	assert.ErrorContains(t, err, "device 0 (Fake 0)")
	assert.Zero(t, count(calls(t), "cuDevicePrimaryCtxRetain"), "its primary context is not retained")
}

func TestWithoutImages(t *testing.T) {
	if !inChild(t) {
		return
	}
	architectures = func() []string { return nil }
	_, err := Open(0)
	assert.ErrorIs(t, err, ErrNoImages)
	assert.ErrorIs(t, err, ErrArch)
	assert.EqualError(t, err, "no kernels for this device: this program was built without kernels; call "+
		"ops.OpenImages before the first call with CUDA tensors, with the folder kernels/images that ./build.sh "+
		"build makes in a checkout of gander")
	assert.Empty(t, calls(t), "libcuda is not loaded")
}

// imageFolder makes a folder of images, as ./build.sh build does.
func imageFolder(t *testing.T) string {
	images := map[string][]byte{}
	for family := range kernels.Family(kernels.Families) {
		images[family.String()+".sm_90.fatbin"] = []byte("opened " + family.String() + "\x00")
	}
	folder := t.TempDir()
	images[kernels.SumsFile] = kernels.Sums(images)
	for name, data := range images {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), data, 0o600))
	}
	return folder
}

func TestOpenImages(t *testing.T) {
	t.Run("in place of none", func(t *testing.T) {
		if !inChild(t) {
			return
		}
		architectures = func() []string { return nil }
		_, err := Open(0)
		assert.ErrorIs(t, err, ErrNoImages)
		folder := imageFolder(t)
		assert.ErrorContains(t, OpenImages(t.TempDir()), "has no SHA256SUMS")
		_, err = Open(0)
		assert.ErrorIs(t, err, ErrNoImages, "a refused folder changes nothing")
		require.NoError(t, OpenImages(folder))
		require.NoError(t, os.RemoveAll(folder), "the images are in memory")

		require.NoError(t, launch(opened(t), 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
		all := calls(t)
		assert.Equal(t, 1, count(all, "cuModuleLoadData opened softmax_float16|"), all)
		assert.Equal(t, 1, count(all, "cuLaunchKernel rows"), all)
		assert.EqualError(t, OpenImages("again"), `folder is "again", but the images of "`+folder+
			`" are open already, expected one call in a process`)
	})
	t.Run("in place of embedded ones", func(t *testing.T) {
		if !inChild(t) {
			return
		}
		require.NoError(t, OpenImages(imageFolder(t)))
		require.NoError(t, launch(opened(t), 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
		assert.Equal(t, 1, count(calls(t), "cuModuleLoadData opened softmax_float16|"))
	})
	t.Run("too late", func(t *testing.T) {
		if !inChild(t) {
			return
		}
		d, err := Open(1)
		require.NoError(t, err)
		folder := imageFolder(t)
		assert.EqualError(t, OpenImages(folder), `folder is "`+folder+`", but device 1 has been used with the `+
			"images that the program embeds, expected the call before the first one with CUDA tensors")
		require.NoError(t, launch(d, 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
		assert.Equal(t, 1, count(calls(t), "cuModuleLoadData softmax_float16.sm_90|"))
	})
	t.Run("by several goroutines", func(t *testing.T) {
		if !inChild(t) {
			return
		}
		architectures = func() []string { return nil }
		folder := imageFolder(t)
		var workers sync.WaitGroup
		var succeeded atomic.Int32
		for range 8 {
			workers.Go(func() {
				if OpenImages(folder) == nil {
					succeeded.Add(1)
				}
			})
			workers.Go(func() { _, _ = Open(0) })
		}
		workers.Wait()
		assert.EqualValues(t, 1, succeeded.Load())
		assert.NoError(t, launch(opened(t), 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
	})
}

func TestFamilyWithoutImage(t *testing.T) {
	if !inChild(t) {
		return
	}
	image = func(kernels.Family, string) []byte { return nil }
	err := launch(opened(t), 0, kernels.Geometry{Grid: 1, Cluster: 1}, 0)
	assert.ErrorIs(t, err, ErrArch)
	assert.ErrorContains(t, err, "no softmax_float16 image for sm_90")
}

func TestContextIsRestored(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	launchRows := func() { require.NoError(t, launch(d, 0, kernels.Geometry{Grid: 7, Cluster: 1}, 5)) }
	makeCurrent(t, 0xBEEF)
	launchRows()
	calls(t)
	launchRows()
	assert.Equal(t, []string{
		"cuCtxPushCurrent 0x1000| 0xbeef global",
		"cuLaunchKernel rows grid 7 block 256 shared 0 stream 0x5 args 42/16| 0x1000 global",
		"cuCtxPopCurrent 0x1000| 0xbeef global",
	}, calls(t))

	makeCurrent(t, 0x1000)
	launchRows()
	assert.Equal(t, []string{
		"cuLaunchKernel rows grid 7 block 256 shared 0 stream 0x5 args 42/16| 0x1000 global",
	}, calls(t), "the primary context is already current")

	makeCurrent(t, 0xBEEF)
	p, err := d.Allocate(8, 5)
	require.NoError(t, err)
	d.Free(p, 5)
	p, err = d.AllocateOwned(8, 5)
	require.NoError(t, err)
	require.NoError(t, d.Seal(p, 5))
	d.FreeOwned(p)
	require.NoError(t, d.Warmup())
	after, err := cu.CurrentContext()
	require.NoError(t, err)
	assert.Equal(t, "0xbeef", after.String())
	all := calls(t)
	assert.Zero(t, count(all, "cuCtxCreate"))
	assert.Equal(t, count(all, "cuCtxPushCurrent"), count(all, "cuCtxPopCurrent"))
	for _, line := range all { // every call but cuCtxPush and cuCtxPop runs in the device's context
		assert.True(t, strings.Contains(line, "| 0x1000 ") != strings.HasPrefix(line, "cuCtxP"), line)
	}
}

func TestModulesLoadOnce(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	calls(t)
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			for index := range kernels.Variants {
				assert.NoError(t, launch(d, index, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
			}
		})
	}
	workers.Wait()
	all := calls(t)
	assert.Equal(t, 16*len(kernels.Variants), count(all, "cuLaunchKernel"))
	for _, once := range []string{
		"cuModuleLoadData softmax_float16.sm_90| 0x1000 relaxed",
		"cuModuleLoadData softmax_bfloat16.sm_90| 0x1000 relaxed",
		"cuModuleGetFunction softmax_float16.sm_90 rows| 0x1000 relaxed",
		"cuModuleGetFunction softmax_float16.sm_90 clusters| 0x1000 relaxed",
		"cuModuleGetFunction softmax_bfloat16.sm_90 ring| 0x1000 relaxed",
		"cuFuncSetAttribute rows 8 232400| 0x1000 relaxed",
		"cuFuncSetAttribute clusters 8 232400| 0x1000 relaxed",
		"cuFuncSetAttribute clusters 14 1| 0x1000 relaxed",
	} {
		assert.Equal(t, 1, count(all, once), once)
	}
	assert.Zero(t, count(all, "cuFuncSetAttribute rows 14"))
	assert.Equal(t, 2, count(all, "cuModuleLoadData"))
}

func TestLoadingIsRetried(t *testing.T) {
	if !inChild(t, "FAKE_FAIL=cuModuleLoadData=2") {
		return
	}
	d := opened(t)
	for range 2 {
		err := launch(d, 3, kernels.Geometry{Grid: 1, Cluster: 1}, 0)
		var failure *Error
		require.ErrorAs(t, err, &failure)
		assert.Equal(t, CodeOutOfMemory, failure.Code)
		assert.EqualError(t, err,
			"cuModuleLoadData of softmax_bfloat16.sm_90: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
	}
	assert.Equal(t, 2, count(calls(t), "cuModuleLoadData"))
}

func TestLaunch(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	makeCurrent(t, 0x1000)
	for _, c := range []struct {
		index  int
		g      kernels.Geometry
		stream uintptr
		want   string
	}{
		{
			0, kernels.Geometry{Grid: 1, Cluster: 1}, 0,
			"cuLaunchKernel rows grid 1 block 256 shared 0 stream 0 args 42/16",
		},
		{
			0, kernels.Geometry{Grid: 1}, 2,
			"cuLaunchKernel rows grid 1 block 256 shared 0 stream 0x2 args 42/16",
		},
		{
			5, kernels.Geometry{Grid: 1<<31 - 1, Cluster: 1, Shared: 230000}, 0xABC,
			"cuLaunchKernel ring grid 2147483647 block 128 shared 230000 stream 0xabc args 42/16",
		},
		{
			2, kernels.Geometry{Grid: 32, Cluster: 16, Shared: 4096}, 1,
			"cuLaunchKernelEx clusters grid 2 x 16 block 1024 shared 4096 stream 0x1 args 42/16 cluster 16 " +
				"cooperative 0",
		},
		{
			5, kernels.Geometry{Grid: 132, Cluster: 1, Cooperative: true}, 1,
			"cuLaunchKernelEx ring grid 132 x 1 block 128 shared 0 stream 0x1 args 42/0 cluster 0 " +
				"cooperative 1",
		},
		{
			2, kernels.Geometry{Grid: 4, Cluster: 2, Cooperative: true}, 1,
			"cuLaunchKernelEx clusters grid 2 x 2 block 1024 shared 0 stream 0x1 args 42/0 cluster 2 " +
				"cooperative 1",
		},
	} {
		require.NoError(t, launch(d, c.index, c.g, c.stream))
		all := calls(t)
		assert.Equal(t, c.want+"| 0x1000 global", all[len(all)-1])
	}
}

func TestLaunchAllocatesNothing(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	for _, g := range []kernels.Geometry{
		{Grid: 1, Cluster: 1}, {Grid: 2, Cluster: 2, Shared: 64, Cooperative: true},
	} {
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			if launch(d, 2, g, 0) != nil {
				t.Error("launch failed")
			}
		}))
	}
}

func TestLaunchFails(t *testing.T) {
	t.Run("with a known result", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuLaunchKernel=719") {
			return
		}
		err := launch(opened(t), 0, kernels.Geometry{Grid: 3, Cluster: 1, Shared: 8}, 0)
		assert.EqualError(t, err, "launch of rows (grid 3, cluster 1, block 256, shared memory 8, "+
			"arguments 16 bytes): CUDA_ERROR_FAKE (719): it is fake")
	})
	t.Run("with an unknown result", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuLaunchKernelEx=9999") {
			return
		}
		err := launch(opened(t), 2, kernels.Geometry{Grid: 2, Cluster: 2}, 0)
		assert.ErrorContains(t, err, "CUDA_ERROR (9999): the driver has no description")
	})
	t.Run("if the image lacks the kernel", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuModuleGetFunction=500") {
			return
		}
		err := launch(opened(t), 0, kernels.Geometry{Grid: 1}, 0)
		assert.ErrorContains(t, err, "cuModuleGetFunction of rows: ")
	})
	t.Run("if the context cannot be pushed", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuCtxPushCurrent=201") {
			return
		}
		d := opened(t)
		assert.ErrorContains(t, launch(d, 0, kernels.Geometry{Grid: 1}, 0), "cuCtxPushCurrent: ")
		_, err := d.Allocate(1, 0)
		assert.ErrorContains(t, err, "(201)")
		assert.Zero(t, count(calls(t), "cuCtxPopCurrent"), "nothing was pushed, so nothing is popped")
	})
}

func TestWarmup(t *testing.T) {
	t.Run("all", func(t *testing.T) {
		if !inChild(t) {
			return
		}
		d := opened(t)
		require.NoError(t, d.Warmup())
		all := calls(t)
		assert.Equal(t, 2, count(all, "cuModuleLoadData"))
		assert.Equal(t, len(kernels.Variants), count(all, "cuModuleGetFunction"))
		require.NoError(t, launch(d, 2, kernels.Geometry{Grid: 1, Cluster: 1}, 0))
		assert.Zero(t, count(calls(t), "cuModule"), "nothing is left to load")
	})
	t.Run("only what the images hold", func(t *testing.T) {
		if !inChild(t, "GANDER_FORCE_PTX=80") {
			return
		}
		require.NoError(t, opened(t).Warmup())
		all := calls(t)
		assert.Equal(t, 2, count(all, "cuModuleGetFunction"))
		assert.Equal(t, 1, count(all, "cuModuleGetFunction softmax_float16.compute_80 rows"))
	})
	t.Run("fails", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuFuncSetAttribute=1") {
			return
		}
		assert.ErrorContains(t, opened(t).Warmup(), "cuFuncSetAttribute of rows: ")
	})
	t.Run("without cluster counts", func(t *testing.T) {
		if !inChild(t, "FAKE_FAIL=cuOccupancyMaxActiveClusters=2") {
			return
		}
		assert.ErrorContains(t, opened(t).Warmup(),
			"cuOccupancyMaxActiveClusters of small_clusters in clusters of 1: ")
	})
}

func TestScratch(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	makeCurrent(t, 0x1000)
	calls(t)
	p, err := d.Allocate(1<<40, 0xCA)
	require.NoError(t, err)
	d.Free(p, 0xCA)
	assert.Equal(t, []string{
		"cuMemAllocAsync 1099511627776 0xca = 0x7100| 0x1000 global",
		"cuMemFreeAsync 0x7100 0xca| 0x1000 global",
	}, calls(t))
	nothing, err := d.Allocate(0, 0)
	require.NoError(t, err)
	assert.Zero(t, nothing)
	d.Free(nothing, 0)
	assert.Empty(t, calls(t))
}

func TestMemoryRunsOut(t *testing.T) {
	if !inChild(t, "FAKE_FAIL=cuMemAllocAsync=2") {
		return
	}
	d := opened(t)
	for _, allocate := range []func(uint64, uintptr) (uintptr, error){d.Allocate, d.AllocateOwned} {
		_, err := allocate(100, 0)
		assert.EqualError(t, err, "cuMemAllocAsync of 100 bytes: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
	}
	all := calls(t)
	assert.Equal(t, count(all, "cuEventCreate"), count(all, "cuEventDestroy"))
}

func TestOwned(t *testing.T) {
	if !inChild(t) {
		return
	}
	d := opened(t)
	makeCurrent(t, 0x1000)
	calls(t)
	p, err := d.AllocateOwned(64, 5)
	require.NoError(t, err)
	require.NoError(t, d.Seal(p, 5))
	d.FreeOwned(p)
	assert.Equal(t, []string{
		"cuEventCreate 2 = 0xe1| 0x1000 relaxed",
		"cuMemAllocAsync 64 0x5 = 0x7100| 0x1000 relaxed",
		"cuEventRecord 0xe1 0x5| 0x1000 relaxed",
		"cuEventRecord 0xe1 0x5| 0x1000 global",
		"cuStreamWaitEvent 0x1 0xe1 0| 0x1000 relaxed",
		"cuMemFreeAsync 0x7100 0x1| 0x1000 relaxed",
		"cuEventDestroy 0xe1| 0x1000 relaxed",
	}, calls(t))

	nothing, err := d.AllocateOwned(0, 5)
	require.NoError(t, err)
	require.NoError(t, d.Seal(nothing, 5))
	d.FreeOwned(nothing)
	assert.Empty(t, calls(t))
	assert.Empty(t, d.owned)
}

// While the file `implicit` exists, the fake driver behaves as if a stream that synchronizes with the legacy
// stream were being captured.
func TestOwnedWhileCapturing(t *testing.T) {
	implicit := filepath.Join(t.TempDir(), "implicit")
	if !inChild(t, "FAKE_IMPLICIT="+implicit) {
		return
	}
	implicit = os.Getenv("FAKE_IMPLICIT")
	d := opened(t)
	_, err := d.AllocateOwned(64, 0xCA)
	var failure *Error
	require.ErrorAs(t, err, &failure)
	assert.Equal(t, CodeCaptureUnsupported, failure.Code)
	assert.Zero(t, count(calls(t), "cuMemAllocAsync"))

	first, err := d.AllocateOwned(64, 5)
	require.NoError(t, err)
	second, err := d.AllocateOwned(64, 5)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(implicit, nil, 0o600))
	d.FreeOwned(first)
	assert.Zero(t, count(calls(t), "cuMemFreeAsync"), "not freed yet: that would invalidate the capture")
	require.NoError(t, os.Remove(implicit))
	d.FreeOwned(second)
	assert.Equal(t, 2, count(calls(t), "cuMemFreeAsync"))
	assert.Empty(t, d.owned)
	assert.Empty(t, d.pending)
}
