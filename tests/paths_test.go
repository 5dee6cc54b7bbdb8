package tests

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	// A path that begins with a folder of this repository. cuda/ and cpu/ lie in kernels/.
	named = regexp.MustCompile(
		`(?:^|[^\w./@$}{*-])((?:bench|capi|dlpack|docs|examples|internal|kernels|ops|python|tests|cuda|cpu)` +
			`/[\w./*-]*[\w*])`)
	// Markdown's links, and in Markdown the name of a single source file.
	linked = regexp.MustCompile(`\]\(([^)#:]+)\)`)
	fenced = regexp.MustCompile("(?ms)^```.*?^```$")
	single = regexp.MustCompile("(?:^|[ (`])(\\w+\\.(?:go|cuh?|[chs]|py|sh|md|jsonl|svg))\\b")
	// What is built, what stands for any name, and what a test makes.
	absent = regexp.MustCompile(`\.so$|^kernels/images|^python/gander/(lib|include)|` +
		`/(FILE|DEVICE-COMMIT)\.jsonl$|/stand_in_gen\.cu$|results/gpu-test$`)
)

// sources are the endings of the files that are read.
var sources = regexp.MustCompile(`\.(md|go|[chsS]|cuh?|py|sh|toml|in)$`)

// TestNamedPathsExist holds documents, comments and strings to what lies in the repository.
func TestNamedPathsExist(t *testing.T) {
	files := map[string]string{} // text by path from the root
	base := map[string]bool{}
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		made := strings.HasPrefix(d.Name(), ".") || d.Name() == "dist" || d.Name() == "build"
		if d.IsDir() && path != ".." && made {
			return fs.SkipDir
		}
		base[d.Name()] = true
		if !d.IsDir() && sources.MatchString(path) {
			text, err := os.ReadFile(path)
			files[filepath.ToSlash(strings.TrimPrefix(path, ".."+string(filepath.Separator)))] = string(text)
			return err
		}
		return nil
	}))
	require.Contains(t, files, "README.md")

	exists := func(folders []string, path string) bool {
		for _, folder := range folders {
			if found, err := filepath.Glob(filepath.Join("..", folder, path)); err == nil && found != nil {
				return true
			}
		}
		return false
	}
	for file, text := range files {
		here := filepath.Dir(file)
		for _, match := range named.FindAllStringSubmatch(text, -1) {
			path := strings.TrimSuffix(match[1], ".")
			assert.Truef(t, absent.MatchString(path) || exists([]string{".", here, "kernels"}, path),
				"%s names %s, which does not exist", file, path)
		}
		if !strings.HasSuffix(file, ".md") {
			continue
		}
		for _, match := range linked.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			assert.Truef(t, exists([]string{here}, match[1]), "%s links to %s, which does not exist", file, match[1])
		}
		for _, match := range single.FindAllStringSubmatch(text, -1) {
			assert.Truef(t, base[match[1]], "%s names %s, which does not exist", file, match[1])
		}
	}
}
