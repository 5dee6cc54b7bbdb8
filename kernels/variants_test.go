package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestEveryRowOfOccupancyCounts: a row that no kernel reaches says nothing.
func TestEveryRowOfOccupancyCounts(t *testing.T) {
	kernels := map[int]int{}
	for i := range Variants {
		kernels[occupancyOf(&Variants[i])]++
	}
	for i, row := range occupancy {
		assert.Positive(t, kernels[i], "row %d, %+v", i, row)
	}
}

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
