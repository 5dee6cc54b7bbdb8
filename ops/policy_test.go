package ops

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gander-go/gander/internal/driver"
	"github.com/gander-go/gander/internal/policy"
	"github.com/gander-go/gander/kernels"
)

func TestPolicyNamesTheAlgorithms(t *testing.T) {
	assert.Equal(t, algorithmNames[:], policy.AlgorithmNames)
}

func TestDeviceOf(t *testing.T) {
	h100, h200 := *testDevices["h100"], *testDevices["h200"]
	slice, slower, newer := h100, h100, h200
	slice.SMs, slower.MemoryGBs = 60, 2039
	newer.Major, newer.SMs, newer.MemoryGBs = 10, 148, 8000
	ptx := h200
	ptx.Major = 8
	for _, c := range []struct {
		facts driver.Facts
		want  policy.Device
	}{
		{h100, policy.H100}, {h200, policy.H200}, {*testDevices["a100"], policy.Other}, {slice, policy.Other},
		{slower, policy.Other}, {newer, policy.OtherFast}, {ptx, policy.OtherFast},
	} {
		assert.Equal(t, c.want, deviceOf(&c.facts), "%+v", c.facts)
	}
}

// TestFirstRowThatFitsWins: a regime that declines leaves nothing behind for the next one.
func TestFirstRowThatFitsWins(t *testing.T) {
	r := request{
		op: kernels.CrossEntropyForwardDX, x: kernels.BFloat16, m: 64, n: 65536, total: true, onePass: true,
	}
	q := newQuery(testDevices["h100"], r)
	rows := policy.Rows(policy.H100, policy.CrossEntropyForwardDX, kernels.BFloat16, policy.Aligned)
	before := *q
	alone := q.choose(rows)
	for i := range rows {
		regimes[rows[i].Regime](q, &rows[i])
		assert.Equal(t, before, *q, "%v", &rows[i])
	}
	assert.Equal(t, alone, q.choose(rows))
}
