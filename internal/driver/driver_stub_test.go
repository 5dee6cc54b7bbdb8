//go:build !(cuda && cgo && linux && amd64)

package driver

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestBuiltWithout(t *testing.T) {
	assert.ErrorIs(t, Status(), ErrBuiltWithout)
	assert.ErrorContains(t, Status(), "-tags cuda")
	device, err := Open(0)
	assert.Nil(t, device)
	assert.ErrorIs(t, err, ErrBuiltWithout)
	assert.ErrorIs(t, OpenImages(t.TempDir()), ErrBuiltWithout)
}
