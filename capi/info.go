package main

// #include "internal.h"
import "C"

import (
	"cmp"
	"encoding/json"
	"runtime"
	"sync"
	"unicode/utf8"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
	"github.com/gander-go/gander/ops"
)

// Set by -ldflags "-X main.commit=... -X main.nvcc=...", and in a wheel "-X main.wheel=...", the version
// that Python has there.
var commit, nvcc, wheel = "unknown", "none", ""

// buildInfo is a C string that is never freed.
var buildInfo = sync.OnceValue(func() *C.char {
	architectures := append([]string{}, kernels.Architectures()...) // [] rather than null if there are none
	version := cmp.Or(wheel, C.GANDER_VERSION)
	text, err := json.Marshal(struct {
		Version       string   `json:"version"`
		ABIVersion    int      `json:"abi_version"`
		Commit        string   `json:"commit"`
		Go            string   `json:"go"`
		NVCC          string   `json:"nvcc"`
		Architectures []string `json:"architectures"`
		SIMD          string   `json:"simd"`
	}{version, C.GANDER_ABI_VERSION, commit, runtime.Version(), nvcc, architectures, cpu.SIMD()})
	if err != nil {
		panic(err) // strings and numbers
	}
	return C.CString(string(text))
})

//export ganderBuildInfo
func ganderBuildInfo() *C.char { return buildInfo() }

//export ganderWarmup
func ganderWarmup(deviceType, id int32) int32 {
	return run(func() error { return ops.Warmup(dlpack.Device{Type: dlpack.DeviceType(deviceType), ID: id}) })
}

//export ganderExplain
func ganderExplain(op unsafe.Pointer, m, n int64, code, bits uint8, lanes uint16, deviceType, id, algorithm,
	invariant int32, text unsafe.Pointer, capacity uintptr) int32 {
	device := dlpack.Device{Type: dlpack.DeviceType(deviceType), ID: id}
	return explain(op, code, bits, lanes, text, capacity, func(op string, t dlpack.DType) (string, error) {
		return ops.Explain(op, m, n, t, device, choice(algorithm, invariant))
	})
}

//export ganderExplainDevice
func ganderExplainDevice(op unsafe.Pointer, m, n int64, code, bits uint8, lanes uint16, device unsafe.Pointer,
	algorithm, invariant int32, text unsafe.Pointer, capacity uintptr) int32 {
	return explain(op, code, bits, lanes, text, capacity, func(op string, t dlpack.DType) (string, error) {
		if device == nil {
			return "", refuse(ops.StatusNull, "explain: device is NULL, expected the name of one")
		}
		return ops.ExplainDevice(op, m, n, t, C.GoString((*C.char)(device)), choice(algorithm, invariant))
	})
}

//export ganderExplainHeads
func ganderExplainHeads(op unsafe.Pointer, tokens, heads, n int64, code, bits uint8, lanes uint16, deviceType,
	id int32, name, text unsafe.Pointer, capacity uintptr) int32 {
	device, gpu := dlpack.Device{Type: dlpack.DeviceType(deviceType), ID: id}, ""
	if name != nil {
		gpu = C.GoString((*C.char)(name))
	}
	return explain(op, code, bits, lanes, text, capacity, func(op string, t dlpack.DType) (string, error) {
		return ops.ExplainHeads(op, tokens, heads, n, t, device, gpu)
	})
}

// explain writes an answer, truncated to the caller's capacity.
func explain(op unsafe.Pointer, code, bits uint8, lanes uint16, text unsafe.Pointer, capacity uintptr,
	ask func(op string, t dlpack.DType) (string, error)) int32 {
	return run(func() error {
		if err := checkText("explain", op, text, capacity); err != nil {
			return err
		}
		answer, err := ask(C.GoString((*C.char)(op)), dlpack.DType{Code: code, Bits: bits, Lanes: lanes})
		if err != nil {
			return err
		}
		if uintptr(len(answer)) >= capacity {
			answer = answer[:capacity-1]
			for len(answer) > 0 && !utf8.ValidString(answer) {
				answer = answer[:len(answer)-1]
			}
		}
		write(text, answer)
		return nil
	})
}

//export ganderAlgorithms
func ganderAlgorithms(op, text unsafe.Pointer, capacity uintptr) int32 {
	return run(func() error {
		if err := checkText("algorithms", op, text, capacity); err != nil {
			return err
		}
		list, err := ops.Algorithms(C.GoString((*C.char)(op)))
		if err != nil {
			return err
		}
		answer, err := json.Marshal(list)
		if err != nil {
			return err
		}
		if uintptr(len(answer)) >= capacity {
			write(text, "")
			return refuse(ops.StatusOption, "algorithms: capacity is %d, expected %d or more", capacity, len(answer)+1)
		}
		write(text, string(answer))
		return nil
	})
}

// checkText checks the arguments of functions that write text.
func checkText(function string, op, text unsafe.Pointer, capacity uintptr) error {
	if op == nil {
		return refuse(ops.StatusNull, "%s: op is NULL, expected an op's name", function)
	}
	if text == nil || capacity == 0 {
		return refuse(ops.StatusNull, "%s: text is NULL or of no capacity, expected a buffer for the answer",
			function)
	}
	return nil
}

// write writes an answer that fits, and a NUL.
func write(text unsafe.Pointer, answer string) {
	room := unsafe.Slice((*byte)(text), len(answer)+1)
	room[copy(room, answer)] = 0
}
