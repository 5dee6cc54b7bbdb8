package driver

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestChoose(t *testing.T) {
	standard := []string{"compute_80", "compute_90", "sm_90"}
	wheel := []string{"compute_80", "compute_90", "sm_100", "sm_120", "sm_80", "sm_86", "sm_89", "sm_90"}
	for name, c := range map[string]struct {
		archs        []string
		major, minor int
		force        string
		want         choice
	}{
		"exact":                      {standard, 9, 0, "", choice{"sm_90", 9, 0}},
		"exact among many":           {wheel, 8, 6, "", choice{"sm_86", 8, 6}},
		"same major, lower minor":    {wheel, 8, 7, "", choice{"sm_86", 8, 7}},
		"newer chip of a generation": {wheel, 10, 3, "", choice{"sm_100", 10, 3}},
		"a higher minor is no use":   {[]string{"sm_86", "compute_80"}, 8, 0, "", choice{"compute_80", 8, 0}},
		"next generation":            {standard, 10, 0, "", choice{"compute_90", 9, 0}},
		"another major's code":       {[]string{"sm_90", "compute_80"}, 12, 0, "", choice{"compute_80", 8, 0}},
		"older chip, PTX":            {standard, 8, 9, "", choice{"compute_80", 8, 0}},
		"forced 80":                  {standard, 9, 0, "80", choice{"compute_80", 8, 0}},
		"forced 90":                  {standard, 9, 0, "90", choice{"compute_90", 9, 0}},
		"forced on a newer chip":     {wheel, 12, 0, "80", choice{"compute_80", 8, 0}},
		"names of one chip only": {
			[]string{"sm_90a", "compute_90a", "compute_80"}, 9, 0, "", choice{"compute_80", 8, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := choose(c.archs, c.major, c.minor, c.force)
			assert.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

func TestChooseRefuses(t *testing.T) {
	standard := []string{"compute_80", "compute_90", "sm_90"}
	for name, c := range map[string]struct {
		archs        []string
		major, minor int
		force        string
		says         []string
	}{
		"too old a chip":       {standard, 7, 5, "", []string{"is 7.5", "sm_75", "compute_80, compute_90, sm_90"}},
		"no images":            {nil, 9, 0, "", []string{"built without kernels", "ops.OpenImages", "build.sh"}},
		"forced beyond":        {standard, 8, 0, "90", []string{"GANDER_FORCE_PTX=90", "8.0"}},
		"forced and not built": {[]string{"sm_90"}, 9, 0, "80", []string{"GANDER_FORCE_PTX=80", "images: sm_90"}},
		"forced to nonsense":   {standard, 9, 0, "yes", []string{"GANDER_FORCE_PTX=yes"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := choose(c.archs, c.major, c.minor, c.force)
			assert.ErrorIs(t, err, ErrArch)
			for _, part := range c.says {
				assert.ErrorContains(t, err, part)
			}
		})
	}
}
