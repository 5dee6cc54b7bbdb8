//go:build cgo

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func header(t *testing.T) string {
	text, err := os.ReadFile("gander.h")
	require.NoError(t, err)
	return string(text)
}

// find returns the sorted first groups of a pattern's matches.
func find(pattern, text string) (names []string) {
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	return names
}

// The version script exports exactly the functions that the header declares.
func TestExports(t *testing.T) {
	script, err := os.ReadFile("exports_gen.map")
	require.NoError(t, err)
	declared := find(`(?m)^[a-z].*[ *](gander_[a-z0-9_]+)\(`, header(t))
	assert.NotEmpty(t, declared)
	assert.Equal(t, declared, find(`(?m)^ +(gander_[a-z0-9_]+);$`, string(script)))
}

func TestAlgorithms(t *testing.T) {
	list, err := ops.Algorithms("softmax_forward")
	require.NoError(t, err)
	found := regexp.MustCompile(`GANDER_ALGORITHM_([A-Z]+) = ([0-9]+)`).FindAllStringSubmatch(header(t), -1)
	require.Len(t, found, len(list))
	for i, m := range found {
		assert.Equal(t, strconv.Itoa(i), m[2])
		assert.Equal(t, strings.ToUpper(list[i].Name), m[1])
	}
	assert.Equal(t, ops.Choice{Algorithm: ops.Register, BatchInvariant: true}, choice(int32(ops.Register), 1))
}

func TestPanicsBecomeStatuses(t *testing.T) {
	assert.EqualValues(t, ops.StatusInternal, run(func() error { panic("a defect") }))
	assert.EqualValues(t, ops.StatusInternal, run(func() error {
		var missing *dlpack.Tensor
		missing.NDim++
		return nil
	}))
	assert.EqualValues(t, ops.StatusOK, run(func() error { return nil }))
	assert.EqualValues(t, ops.StatusMemory, run(func() error { return dlpack.ErrMemory }))
	assert.EqualValues(t, ops.StatusShape, run(func() error { return dlpack.ErrShape }))
	assert.EqualValues(t, ops.StatusDType, run(func() error { return dlpack.ErrDType }))
}

func TestBuildInfo(t *testing.T) {
	p := unsafe.Pointer(buildInfo())
	length := 0
	for *(*byte)(unsafe.Add(p, length)) != 0 {
		length++
	}
	var info map[string]any
	require.NoError(t, json.Unmarshal(unsafe.Slice((*byte)(p), length), &info))
	assert.Len(t, info, 7)
	python, err := os.ReadFile("../python/gander/info.py")
	require.NoError(t, err)
	assert.Contains(t, string(python), fmt.Sprintf("\n__version__ = %q\n", info["version"]))
	assert.IsType(t, []any{}, info["architectures"])
}
