//go:build cuda

package kernels

import (
	"embed"
	"slices"
	"strings"
)

// Made by ./build.sh build, named <family>.<arch>.fatbin.
//
//go:embed images/*.fatbin
var images embed.FS

// Architectures lists, sorted, what every family has an image for: "sm_90", "compute_80" and so on.
func Architectures() []string {
	counts := map[string]int{}
	files, _ := images.ReadDir("images") // it is there: the embedding would not compile without it
	for _, file := range files {
		_, arch, _ := strings.Cut(strings.TrimSuffix(file.Name(), ".fatbin"), ".")
		counts[arch]++
	}
	var archs []string
	for arch, count := range counts {
		if count == Families {
			archs = append(archs, arch)
		}
	}
	slices.Sort(archs)
	return archs
}

// Image returns a family's device image for an architecture, nil if there is none.
func Image(family Family, arch string) []byte {
	data, err := images.ReadFile("images/" + family.String() + "." + arch + ".fatbin")
	if err != nil {
		return nil
	}
	return data
}
