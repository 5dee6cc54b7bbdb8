package kernels

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// folder makes a folder with an image of every family for each architecture, as internal/cmd/compile does.
func folder(t *testing.T, archs ...string) string {
	images := map[string][]byte{}
	for _, arch := range archs {
		for family := range Family(Families) {
			images[imageName(family, arch)] = []byte("code of " + family.String() + " for " + arch)
		}
	}
	folder := t.TempDir()
	for name, data := range images {
		write(t, folder, name, string(data))
	}
	write(t, folder, SumsFile, string(Sums(images)))
	return folder
}

func write(t *testing.T, folder, name, text string) {
	require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
}

func TestReadImages(t *testing.T) {
	folder := folder(t, "sm_90", "compute_80")
	write(t, folder, "README.md", "not an image")
	images, err := ReadImages(folder)
	require.NoError(t, err)
	assert.Equal(t, []string{"compute_80", "sm_90"}, images.Architectures())
	family := FamilyOf(RMSNormForward, Float32)
	assert.Equal(t, "code of rmsnorm_float32 for sm_90", string(images.Image(family, "sm_90")))
	assert.Nil(t, images.Image(0, "sm_80"))
}

// An error names the folder, says what is wrong with it, and how a good one is made.
func TestReadImagesRefuses(t *testing.T) {
	const image = "softmax_bfloat16.sm_90.fatbin"
	edit := func(t *testing.T, folder string, change func(sums string) string) {
		sums, err := os.ReadFile(filepath.Join(folder, SumsFile))
		require.NoError(t, err)
		write(t, folder, SumsFile, change(string(sums)))
	}
	for name, c := range map[string]struct {
		change func(t *testing.T, folder string)
		says   string
	}{
		"no folder": {
			func(t *testing.T, folder string) { require.NoError(t, os.RemoveAll(folder)) },
			"which is no folder",
		},
		"an empty folder": {
			func(t *testing.T, folder string) {
				require.NoError(t, os.RemoveAll(folder))
				require.NoError(t, os.Mkdir(folder, 0o700))
			},
			"which has no SHA256SUMS",
		},
		"no digests": {
			func(t *testing.T, folder string) { require.NoError(t, os.Remove(filepath.Join(folder, SumsFile))) },
			"which has no SHA256SUMS",
		},
		"no images": {
			func(t *testing.T, folder string) { write(t, folder, SumsFile, string(Sums(nil))) },
			"which has no images",
		},
		"an image is missing": {
			func(t *testing.T, folder string) { require.NoError(t, os.Remove(filepath.Join(folder, image))) },
			"which lacks " + image,
		},
		"an image is cut off": {
			func(t *testing.T, folder string) { write(t, folder, image, "code") },
			"whose " + image + " is damaged: 4 bytes with another digest than in SHA256SUMS",
		},
		"an image is unreadable": {
			func(t *testing.T, folder string) {
				require.NoError(t, os.Remove(filepath.Join(folder, image)))
				require.NoError(t, os.Mkdir(filepath.Join(folder, image), 0o700))
			},
			"whose " + image + " cannot be read",
		},
		"a family was never there": {
			func(t *testing.T, folder string) {
				edit(t, folder, func(sums string) string {
					lines := strings.SplitAfter(sums, "\n")
					kept := lines[:0]
					for _, line := range lines {
						if !strings.Contains(line, " "+image) {
							kept = append(kept, line)
						}
					}
					return strings.Join(kept, "")
				})
			},
			"which lacks " + image,
		},
		"other kernels": {
			func(t *testing.T, folder string) {
				variants := Variants
				t.Cleanup(func() { Variants = variants })
				Variants = Variants[1:]
			},
			"whose images are those of another version of gander than this program's",
		},
		"digests of something else": {
			func(t *testing.T, folder string) {
				edit(t, folder, func(sums string) string { return sums[strings.Index(sums, "\n")+1:] })
			},
			"whose SHA256SUMS begins with",
		},
		"a name that leads elsewhere": {
			func(t *testing.T, folder string) {
				edit(t, folder, func(sums string) string { return sums + "00  ../elsewhere\n" })
			},
			`whose SHA256SUMS has the line "00  ../elsewhere\n"`,
		},
		"half a line": {
			func(t *testing.T, folder string) {
				edit(t, folder, func(sums string) string { return sums + "0123" })
			},
			`whose SHA256SUMS has the line "0123"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			folder := folder(t, "sm_90")
			c.change(t, folder)
			images, err := ReadImages(folder)
			assert.Nil(t, images)
			assert.ErrorContains(t, err, `folder is "`+folder+`", `+c.says)
			assert.ErrorContains(t, err, "./build.sh build in a checkout of gander makes it, as kernels/images")
		})
	}
}

// An architecture counts only where every family has an image.
func TestComplete(t *testing.T) {
	names := []string{"README.md", SumsFile, imageName(0, "sm_80")}
	for family := range Family(Families) {
		names = append(names, imageName(family, "sm_90"))
	}
	archs, missing := complete(names)
	assert.Equal(t, []string{"sm_90"}, archs)
	assert.Contains(t, missing, ".sm_80.fatbin")
}

// The digest has the structs that kernels take. So another field in one of them is another digest.
func TestParametersAreThoseOfTheFamilies(t *testing.T) {
	require.Len(t, parameters, Families/3)
	for i, parameter := range parameters {
		assert.Equal(t, Family(3*i).ArgBytes(), parameter.Size(), Family(3*i).Group())
	}
	assert.Contains(t, layout(parameters[0]), "Rows at 0: kernels.Rows of ")
	assert.Contains(t, layout(parameters[0]), "AStride at 32: int64; ")
}
