package tests

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const columns = 110

var (
	written = regexp.MustCompile(`\.(go|[chsS]|cuh?|cpp|py|sh|md|toml|in|txt)$|/\.clang-format$|/\.ci/run$`)
	// What programs write, and what others wrote.
	otherwise = regexp.MustCompile(
		`_gen[._]|/RESULTS\.md$|/requirements[^/]*\.txt$|/dlpack/dlpack\.h$|/gander/include/|/testdata/`)
	// Markdown's tables and pictures have a line for each row, and cannot be broken.
	unbroken = regexp.MustCompile(`^(\||!\[)`)
	// What internal/site/fill.py fills in, and the expression that makes it.
	filled = regexp.MustCompile(`<!--= .*?-->(.*?<!--/-->)?`)
)

// TestLinesAreShort holds all that is written by hand to 110 columns, in which a tab counts as one.
func TestLinesAreShort(t *testing.T) {
	read := 0
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		hidden := strings.HasPrefix(name, ".") && name != ".." && name != ".ci"
		switch {
		case d.IsDir() && (hidden || name == "dist" || name == "build"):
			return fs.SkipDir
		case d.IsDir() || !written.MatchString(path) || otherwise.MatchString(path):
			return nil
		}
		text, err := os.ReadFile(path)
		read++
		for i, line := range strings.Split(string(text), "\n") {
			if strings.HasSuffix(path, ".md") {
				line = filled.ReplaceAllString(line, "")
			}
			long := utf8.RuneCountInString(line) > columns
			if long && !(strings.HasSuffix(path, ".md") && unbroken.MatchString(line)) {
				assert.Fail(t, "a long line", "%s:%d has %d columns, expected at most %d",
					path, i+1, utf8.RuneCountInString(line), columns)
			}
		}
		return err
	}))
	require.Greater(t, read, 150)
}
