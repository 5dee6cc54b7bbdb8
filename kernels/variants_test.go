package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// The driver asks about a family's clusters with one of its kernels.
func TestEveryFamilyHasAKernelInClusters(t *testing.T) {
	families := map[Family]bool{}
	for _, v := range Variants {
		if v.Cluster {
			families[v.Family] = true
		}
	}
	assert.Len(t, families, Families)
}
