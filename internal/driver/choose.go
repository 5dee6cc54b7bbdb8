package driver

import (
	"fmt"
	"strconv"
	"strings"
)

// choice is the architecture of the images that a device runs, and the compute capability that they may use.
type choice struct {
	arch         string
	major, minor int
}

// choose selects one of the architectures that images were built for. Machine code runs on devices with the
// same major capability and at least its minor one, and the highest such image is best. PTX runs on devices
// of at least its capability, and the highest is the fallback. force, if not empty, requires the PTX image of
// that number.
func choose(archs []string, major, minor int, force string) (choice, error) {
	device := 10*major + minor
	native, ptx := -1, -1
	for _, arch := range archs {
		kind, digits, _ := strings.Cut(arch, "_")
		number, err := strconv.Atoi(digits)
		if err != nil || number > device {
			continue // too new, or like "sm_90a", which runs on one architecture only and is not built here
		}
		switch {
		case kind == "sm" && number/10 == major:
			native = max(native, number)
		case kind == "compute" && (force == "" || force == digits):
			ptx = max(ptx, number)
		}
	}
	switch {
	case native >= 0 && force == "":
		return choice{fmt.Sprintf("sm_%d", native), major, minor}, nil
	case ptx >= 0:
		return choice{fmt.Sprintf("compute_%d", ptx), ptx / 10, ptx % 10}, nil
	}
	if len(archs) == 0 {
		return choice{}, ErrNoImages
	}
	have := strings.Join(archs, ", ")
	if force != "" {
		return choice{}, fmt.Errorf("%w: GANDER_FORCE_PTX=%s asks for compute_%s, which the library lacks or a "+
			"device of compute capability %d.%d cannot run; unset it, or set it to the number of a PTX image "+
			"(images: %s)",
			ErrArch, force, force, major, minor, have)
	}
	return choice{}, fmt.Errorf("%w: its compute capability is %d.%d; build with sm_%d%d in GANDER_ARCHS "+
		"(images: %s)",
		ErrArch, major, minor, major, minor, have)
}
