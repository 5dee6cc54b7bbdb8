package kernels

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// TestIndices: Index is the position, by which package driver stores what it has loaded.
func TestIndices(t *testing.T) {
	for i := range Variants {
		assert.Equal(t, i, Variants[i].Index, Variants[i].Symbol)
	}
}

// The driver asks about a family's clusters with one of its kernels. Gated linear units have none, because
// they reduce nothing.
func TestFamiliesHaveKernelsInClusters(t *testing.T) {
	families := map[Family]bool{}
	for _, v := range Variants {
		if v.Cluster {
			families[v.Family] = true
		}
	}
	without := []Op{GLUForward, Rotate, QKNormRotate, SoftCrossEntropyForward}
	assert.Len(t, families, Families-3*len(without))
	for _, op := range without {
		assert.False(t, families[FamilyOf(op, Float32)], op)
	}
}
