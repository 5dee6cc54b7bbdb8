package kernels

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// Images are device images that were read from a folder.
type Images struct {
	archs []string
	files map[string][]byte // by name
}

// Architectures lists, sorted, what every family has an image for.
func (i *Images) Architectures() []string { return i.archs }

// Image returns a family's image for an architecture, nil if there is none.
func (i *Images) Image(family Family, arch string) []byte { return i.files[imageName(family, arch)] }

// SumsFile is the name of the file with the digests of the images beside it.
const SumsFile = "SHA256SUMS"

// Sums is the content of SumsFile for images by name. `sha256sum --check` reads it too, and skips the comment
// with the digest of the table of kernels.
func Sums(images map[string][]byte) []byte {
	text := tablePrefix + tableDigest() + "\n"
	for _, name := range slices.Sorted(maps.Keys(images)) {
		text += fmt.Sprintf("%x  %s\n", sha256.Sum256(images[name]), name)
	}
	return []byte(text)
}

const (
	tablePrefix = "# table of kernels "
	makeImages  = "./build.sh build in a checkout of gander makes it, as kernels/images"
)

// ReadImages reads a folder of images that ./build.sh build has made, or a copy of it. It refuses images of
// another table of kernels: this program would launch them with other arguments than they take.
func ReadImages(folder string) (*Images, error) {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("folder is %q, %w, expected a folder of device images: "+makeImages,
			folder, fmt.Errorf(format, args...))
	}
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		return nil, refuse("which is no folder")
	}
	sums, err := os.ReadFile(filepath.Join(folder, SumsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, refuse("which has no %s", SumsFile)
	} else if err != nil {
		return nil, refuse("whose %s cannot be read (%w)", SumsFile, err)
	}
	first, lines, _ := strings.Cut(string(sums), "\n")
	switch table, ok := strings.CutPrefix(first, tablePrefix); {
	case !ok:
		return nil, refuse("whose %s begins with %.80q and not with %q", SumsFile, first, tablePrefix)
	case table != tableDigest():
		return nil, refuse("whose images are those of another version of gander than this program's")
	}
	images := &Images{files: map[string][]byte{}}
	for line := range strings.Lines(lines) {
		digest, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if name == "" || name != filepath.Base(name) {
			return nil, refuse("whose %s has the line %.160q", SumsFile, line)
		}
		data, err := os.ReadFile(filepath.Join(folder, name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, refuse("which lacks %s", name)
		case err != nil:
			return nil, refuse("whose %s cannot be read (%w)", name, err)
		case fmt.Sprintf("%x", sha256.Sum256(data)) != digest:
			return nil, refuse("whose %s is damaged: %d bytes with another digest than in %s", name, len(data),
				SumsFile)
		}
		images.files[name] = data
	}
	var missing string
	if images.archs, missing = complete(slices.Collect(maps.Keys(images.files))); missing != "" {
		return nil, refuse("which lacks %s", missing)
	}
	if len(images.archs) == 0 {
		return nil, refuse("which has no images")
	}
	return images, nil
}

func imageName(family Family, arch string) string { return family.String() + "." + arch + ".fatbin" }

// complete lists, sorted, the architectures for which the names have an image of every family. missing is the
// name of an image that another architecture lacks, or "".
func complete(names []string) (archs []string, missing string) {
	there, found := map[string]bool{}, map[string]bool{}
	for _, name := range names {
		there[name] = true
		if stem, isImage := strings.CutSuffix(name, ".fatbin"); isImage {
			_, arch, _ := strings.Cut(stem, ".")
			found[arch] = true
		}
	}
	for _, arch := range slices.Sorted(maps.Keys(found)) {
		lacks := ""
		for family := range Family(Families) {
			if name := imageName(family, arch); !there[name] {
				lacks = name
			}
		}
		if lacks == "" {
			archs = append(archs, arch)
		} else {
			missing = lacks
		}
	}
	return archs, missing
}

// parameters has the struct that the kernels of each group of ops take.
var parameters = [...]reflect.Type{
	reflect.TypeFor[SoftmaxArgs](), reflect.TypeFor[RMSNormArgs](), reflect.TypeFor[CrossEntropyArgs](),
	reflect.TypeFor[NormArgs](), reflect.TypeFor[MaskedSoftmaxArgs](),
	reflect.TypeFor[GeneralCrossEntropyArgs](), reflect.TypeFor[GLUArgs](), reflect.TypeFor[RotaryArgs](),
	reflect.TypeFor[QKNormRotaryArgs](), reflect.TypeFor[TokenStatisticsArgs](),
	reflect.TypeFor[SoftCrossEntropyArgs](),
}

// tableDigest is a digest of what this package and the images must agree on: the kernels, the structs that
// they take, and the constants. Kernel bodies are not in it.
func tableDigest() string {
	h := sha256.New()
	for _, v := range Variants {
		fmt.Fprintf(h, "%+v\n", v)
	}
	for _, t := range parameters {
		fmt.Fprintln(h, layout(t))
	}
	fmt.Fprintln(h, Limits)
	return fmt.Sprintf("%x", h.Sum(nil))
}

// layout describes a struct: its fields with their offsets and types.
func layout(t reflect.Type) string {
	if t.Kind() != reflect.Struct {
		return t.String()
	}
	text := fmt.Sprintf("%s of %d bytes {", t, t.Size())
	for i := range t.NumField() {
		f := t.Field(i)
		text += fmt.Sprintf("%s at %d: %s; ", f.Name, f.Offset, layout(f.Type))
	}
	return text + "}"
}
