// Package cubin takes the machine code out of device images, for programs that build and check the library.
package cubin

import (
	"debug/elf"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// Extract writes an image's machine code to ELF files in an empty folder, and returns their paths. tools is
// the folder of cuobjdump.
func Extract(tools, image, folder string) ([]string, error) {
	image, err := filepath.Abs(image)
	if err != nil {
		return nil, err
	}
	extract := exec.Command(filepath.Join(tools, "cuobjdump"), "-xelf", "all", image)
	extract.Dir = folder // cuobjdump writes to its working directory
	if output, err := extract.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("cuobjdump %s: %w\n%s", image, err, output)
	}
	return filepath.Glob(filepath.Join(folder, "*.cubin"))
}

// CodeBytes adds up the machine code of all kernels in an ELF file.
func CodeBytes(path string) (bytes uint64, err error) {
	file, err := elf.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	for _, section := range file.Sections {
		if strings.HasPrefix(section.Name, ".text") {
			bytes += section.Size
		}
	}
	return bytes, nil
}
