//go:build cuda

package kernels

import "embed"

// Made by ./build.sh build, named <family>.<arch>.fatbin. A pattern for them alone would not compile where
// there are none.
//
//go:embed images
var images embed.FS

// Architectures lists, sorted, what every family has an embedded image for: "sm_90", "compute_80" and so on.
func Architectures() []string {
	files, _ := images.ReadDir("images") // it is there: the embedding would not compile without it
	names := make([]string, len(files))
	for i, file := range files {
		names[i] = file.Name()
	}
	archs, _ := complete(names)
	return archs
}

// Image returns a family's embedded image for an architecture, nil if there is none.
func Image(family Family, arch string) []byte {
	data, err := images.ReadFile("images/" + imageName(family, arch))
	if err != nil {
		return nil
	}
	return data
}
