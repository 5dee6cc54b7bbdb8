// Command gomodule is a program of another module. ./build.sh test gomodule builds it with and without the
// tag cuda, from a copy of gander that has no compiled kernels.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func main() {
	if len(os.Args) != 3 {
		stop("usage: gomodule FOLDER cuda|host")
	}
	images, cuda := os.Args[1], os.Args[2] == "cuda"
	softmax()
	if !cuda {
		const sentence = "built without CUDA: build with -tags cuda"
		expect("a CUDA call", explain(), sentence)
		expect("OpenImages", ops.OpenImages(images), sentence)
		return
	}
	for _, part := range []string{"built without kernels", "ops.OpenImages", "./build.sh build"} {
		expect("a CUDA call without images", explain(), part)
	}
	expect("OpenImages of a folder without images", ops.OpenImages("."), "./build.sh build")
	if err := ops.OpenImages(images); err != nil {
		stop("OpenImages: %v", err)
	}
	// There may be no device. But the kernels are there.
	if err := explain(); err != nil && strings.Contains(err.Error(), "built without kernels") {
		stop("after OpenImages: %v", err)
	}
	expect("a second OpenImages", ops.OpenImages(images), "open already")
}

// softmax checks a softmax in host memory.
func softmax() {
	x, err := dlpack.FromSlice([]float32{1, 1, 1, 1}, 2, 2)
	if err != nil {
		stop("%v", err)
	}
	y, err := ops.Softmax(x)
	if err != nil {
		stop("%v", err)
	}
	values, err := y.Float32s()
	if err != nil || len(values) != 4 || values[0] != 0.5 || values[3] != 0.5 {
		stop("softmax: %v, %v, expected 0.5 four times", values, err)
	}
}

// explain opens the first CUDA device as every call on CUDA tensors does, and launches nothing.
func explain() error {
	device := dlpack.Device{Type: dlpack.CUDA}
	_, err := ops.Explain("softmax_forward", 4, 4, dlpack.Float32, device, ops.Choice{})
	return err
}

func expect(what string, err error, part string) {
	if err == nil || !strings.Contains(err.Error(), part) {
		stop("%s: error %v, expected one with %q", what, err, part)
	}
}

func stop(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}
