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

// TestEveryTileWithoutClustersIsCompiled: each row of clusterless names a kernel.
func TestEveryTileWithoutClustersIsCompiled(t *testing.T) {
	type key struct {
		op     Op
		layout layout
	}
	want, got := map[key]int{}, map[key]int{}
	for op, layouts := range clusterless {
		for l, tiles := range layouts {
			want[key{op, l}] = 3 * len(tiles)
		}
	}
	for i := range Variants {
		if v := &Variants[i]; v.NoClusters {
			got[key{v.Op, layoutOf(v)}]++
		}
	}
	assert.Equal(t, want, got)
}
