//go:build cgo

package dlpack_test

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/dlpack/internal/producer"
)

func TestSizesAgreeWithC(t *testing.T) {
	assert.Equal(t, [3]uintptr{
		unsafe.Sizeof(dlpack.Tensor{}), unsafe.Sizeof(dlpack.Managed{}), unsafe.Sizeof(dlpack.ManagedVersioned{}),
	}, producer.Sizes())
}

func TestAdopt(t *testing.T) {
	p := producer.New()
	defer p.Close()
	adopters := map[string]func(deleter bool) (*dlpack.Owned, error){
		"versioned": func(deleter bool) (*dlpack.Owned, error) {
			return dlpack.Adopt((*dlpack.ManagedVersioned)(p.Versioned(1, deleter)))
		},
		"unversioned": func(deleter bool) (*dlpack.Owned, error) {
			return dlpack.AdoptUnversioned((*dlpack.Managed)(p.Unversioned(deleter)))
		},
	}
	for name, adopt := range adopters {
		t.Run(name, func(t *testing.T) {
			before := p.Deleted()
			o, err := adopt(true)
			require.NoError(t, err)
			assert.Equal(t, before, p.Deleted(), "adopting must not release")
			o.Release()
			o.Release()
			assert.Equal(t, before+1, p.Deleted(), "the deleter must be called exactly once")

			o, err = adopt(false)
			require.NoError(t, err)
			o.Release() // no deleter: nothing to call
			assert.Equal(t, before+1, p.Deleted())
		})
	}
}

func TestAdoptReleasesWhatItRefuses(t *testing.T) {
	p := producer.New()
	defer p.Close()

	_, err := dlpack.Adopt((*dlpack.ManagedVersioned)(p.Versioned(2, true)))
	require.ErrorIs(t, err, dlpack.ErrVersion)
	assert.Equal(t, 1, p.Deleted())

	bad := (*dlpack.ManagedVersioned)(p.Versioned(1, true))
	bad.Tensor.NDim = -1
	_, err = dlpack.Adopt(bad)
	require.ErrorIs(t, err, dlpack.ErrShape)
	assert.Equal(t, 2, p.Deleted())

	old := (*dlpack.Managed)(p.Unversioned(true))
	old.Tensor.NDim = -1
	_, err = dlpack.AdoptUnversioned(old)
	require.ErrorIs(t, err, dlpack.ErrShape)
	assert.Equal(t, 3, p.Deleted())

	_, err = dlpack.Adopt(nil)
	require.ErrorIs(t, err, dlpack.ErrNull)
	_, err = dlpack.AdoptUnversioned(nil)
	require.ErrorIs(t, err, dlpack.ErrNull)
}

func TestNewManaged(t *testing.T) {
	m, err := dlpack.NewManaged(dlpack.BFloat16, []int64{3, 5})
	require.NoError(t, err)
	assert.EqualValues(t, dlpack.MajorVersion, m.Version.Major)
	assert.Zero(t, uintptr(m.Tensor.Data)%256)
	o, err := dlpack.Adopt(m)
	require.NoError(t, err)
	defer o.Release()
	values := []float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	require.NoError(t, o.Tensor.SetFloat64s(values))
	got, err := o.Tensor.Float64s()
	require.NoError(t, err)
	assert.Equal(t, values, got)
	assert.Equal(t, []int64{5, 1}, []int64{o.Tensor.Stride(0), o.Tensor.Stride(1)})
}

func TestNewManagedEdges(t *testing.T) {
	m, err := dlpack.NewManaged(dlpack.Float32, []int64{0, 1 << 62, 1 << 62})
	require.NoError(t, err)
	assert.Nil(t, m.Tensor.Data, "a tensor without elements has no data")
	m.Release()

	m, err = dlpack.NewManaged(dlpack.Float32, nil)
	require.NoError(t, err)
	assert.EqualValues(t, 1, m.Tensor.Len())
	m.Release()

	m, err = dlpack.NewHeader(dlpack.Device{Type: dlpack.CUDA, ID: 3}, dlpack.Float16, []int64{4})
	require.NoError(t, err)
	assert.Nil(t, m.Tensor.Data)
	assert.Equal(t, "cuda:3", m.Tensor.Device.String())
	m.Release()

	_, err = dlpack.NewManaged(dlpack.Float32, []int64{1 << 45})
	require.ErrorIs(t, err, dlpack.ErrMemory)
	_, err = dlpack.NewManaged(dlpack.Float32, []int64{-1})
	require.ErrorIs(t, err, dlpack.ErrShape)
	_, err = dlpack.NewHeader(dlpack.Device{Type: dlpack.CUDA}, dlpack.Float32, []int64{-1})
	require.ErrorIs(t, err, dlpack.ErrShape)
}
