package tests

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestTrainingStep runs Go's example by the command in its head.
func TestTrainingStep(t *testing.T) {
	command := exec.Command("go", "run", "./examples/training_step")
	command.Dir = ".."
	out, err := command.CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Regexp(t, `^step  0: loss 2\.3026\n(?s:.*)\nstep 29: loss 0\.\d+\n$`, string(out))
}
