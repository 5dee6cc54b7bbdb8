// Package dlpack implements DLPack, the in-memory tensor structure that array libraries exchange.
// Its structs have the memory layout of dlpack.h, so that Go can read a C struct in place.
//
// A Tensor is borrowed: its producer owns the memory. New makes a tensor on the Go heap. With cgo, Adopt
// takes ownership of a managed tensor from C, and NewManaged makes one for C. The package does not use CUDA,
// and never accesses the elements of a tensor that is not in host memory.
package dlpack

import (
	"errors"
	"fmt"
	"strconv"
	"unsafe"
)

// The version of the structs below. Another minor version only adds enumerators. Another major version
// may move all fields except Version, Context and Deleter of ManagedVersioned.
const (
	MajorVersion = 1
	MinorVersion = 3
)

// MaxRank is the largest rank that Validate accepts. No array library makes larger ones, and it limits
// how far beyond a shape a corrupt rank makes Validate read.
const MaxRank = 64

// The errors of this package wrap one of these.
var (
	ErrNull    = errors.New("a NULL pointer")
	ErrShape   = errors.New("a bad shape")
	ErrDType   = errors.New("a bad dtype")
	ErrLayout  = errors.New("a bad layout")
	ErrVersion = errors.New("a DLPack version that cannot be read")
	ErrDevice  = errors.New("a device that cannot be read")
	ErrMemory  = errors.New("out of memory")
)

// DeviceType is DLDeviceType.
type DeviceType int32

// The device types with names. Others are formatted as numbers.
const (
	CPU         DeviceType = 1
	CUDA        DeviceType = 2
	CUDAHost    DeviceType = 3 // pinned host memory
	CUDAManaged DeviceType = 13
)

// Device is DLDevice.
type Device struct {
	Type DeviceType
	ID   int32
}

// Host tells whether the device's memory is host memory. Managed memory is not.
func (d Device) Host() bool { return d.Type == CPU || d.Type == CUDAHost }

// String returns "cpu", "cuda:1" and the like.
func (d Device) String() string {
	switch d.Type {
	case CPU:
		return "cpu"
	case CUDAHost:
		return "cuda_host"
	case CUDA:
		return "cuda:" + strconv.Itoa(int(d.ID))
	case CUDAManaged:
		return "cuda_managed:" + strconv.Itoa(int(d.ID))
	}
	return fmt.Sprintf("device type %d:%d", d.Type, d.ID)
}

// The type codes with names. Others are formatted as numbers.
const (
	codeInt     = 0
	codeUInt    = 1
	codeFloat   = 2
	codeOpaque  = 3 // the producer's type has no code
	codeBFloat  = 4
	codeComplex = 5
	codeBool    = 6
	codeFloat8  = 7 // the first of narrow
)

// narrow has the names of the float types of 8 bits or fewer, by their code from codeFloat8 on.
var narrow = [...]string{"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
	"float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn",
	"float4_e2m1fn"}

// DType is DLDataType.
type DType struct {
	Code  uint8
	Bits  uint8
	Lanes uint16
}

// The dtypes with names. Float64s and SetFloat64s convert all but Uint8 and Bool.
var (
	Float16  = DType{codeFloat, 16, 1}
	BFloat16 = DType{codeBFloat, 16, 1}
	Float32  = DType{codeFloat, 32, 1}
	Float64  = DType{codeFloat, 64, 1}
	Int32    = DType{codeInt, 32, 1}
	Int64    = DType{codeInt, 64, 1}
	Uint8    = DType{codeUInt, 8, 1}
	Bool     = DType{codeBool, 8, 1}
)

// Size returns the bytes of one element, rounded up.
func (d DType) Size() int64 { return (int64(d.Bits)*int64(d.Lanes) + 7) / 8 }

// String returns the name that torch and NumPy use, if there is one.
func (d DType) String() string {
	name := fmt.Sprintf("DLPack code %d of %d bits", d.Code, d.Bits)
	switch d.Code {
	case codeInt:
		name = fmt.Sprintf("int%d", d.Bits)
	case codeUInt:
		name = fmt.Sprintf("uint%d", d.Bits)
	case codeFloat:
		name = fmt.Sprintf("float%d", d.Bits)
	case codeBFloat:
		name = fmt.Sprintf("bfloat%d", d.Bits)
	case codeBool:
		name = "bool"
	case codeComplex:
		name = fmt.Sprintf("complex%d", d.Bits)
	case codeOpaque:
		name = "opaque"
	}
	if i := int(d.Code) - codeFloat8; i >= 0 && i < len(narrow) {
		name = narrow[i]
	}
	if d.Lanes != 1 {
		name += fmt.Sprintf(" x %d lanes", d.Lanes)
	}
	return name
}

// Tensor is DLTensor. Shape and Strides point to NDim numbers. Strides counts elements; nil means
// row-major and compact (producers before DLPack 1.2). Data can be nil if the tensor has no elements.
type Tensor struct {
	Data       unsafe.Pointer
	Device     Device
	NDim       int32
	DType      DType
	Shape      *int64
	Strides    *int64
	ByteOffset uint64
}

// Managed is DLManagedTensor, the exchange structure before DLPack 1.0.
type Managed struct {
	Tensor  Tensor
	Context unsafe.Pointer
	Deleter unsafe.Pointer // void (*)(DLManagedTensor*), or nil
}

// Version is DLPackVersion.
type Version struct{ Major, Minor uint32 }

// Bits of ManagedVersioned.Flags.
const (
	FlagReadOnly      = 1 << 0
	FlagCopied        = 1 << 1 // the producer made a copy for the consumer alone
	FlagSubbytePadded = 1 << 2
)

// ManagedVersioned is DLManagedTensorVersioned.
type ManagedVersioned struct {
	Version Version
	Context unsafe.Pointer
	Deleter unsafe.Pointer // void (*)(DLManagedTensorVersioned*), or nil
	Flags   uint64
	Tensor  Tensor
}

// Import validates m's tensor and returns it. The caller must still release m, even after an error. If the
// major version differs, only the version is read.
func (m *ManagedVersioned) Import() (*Tensor, error) {
	if m == nil {
		return nil, fmt.Errorf("%w: the managed tensor is NULL, expected a DLManagedTensorVersioned", ErrNull)
	}
	if m.Version.Major != MajorVersion {
		return nil, fmt.Errorf("%w: it is %d.%d, expected %d.x; ask the producer for version %d",
			ErrVersion, m.Version.Major, m.Version.Minor, MajorVersion, MajorVersion)
	}
	return &m.Tensor, m.Tensor.Validate()
}

// Import validates m's tensor and returns it. The caller must still release m, even after an error.
func (m *Managed) Import() (*Tensor, error) {
	if m == nil {
		return nil, fmt.Errorf("%w: the managed tensor is NULL, expected a DLManagedTensor", ErrNull)
	}
	return &m.Tensor, m.Tensor.Validate()
}
