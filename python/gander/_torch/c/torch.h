/* Shared by kernels.c, the kernels for PyTorch's dispatcher, and fast.c, the fast path that calls them
 * directly from Python. */
#ifndef GANDER_TORCH_H
#define GANDER_TORCH_H

#include <stdbool.h>
#include <stdint.h>

#include "gander.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- torch's types: torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h ---- */

/* StableIValue: an int, a double or a handle. An optional is NULL or a Value* that the kernel deletes. */
typedef uint64_t Value;
typedef struct AtenTensorOpaque* Tensor;
typedef struct TorchLibraryOpaque* TorchLibrary;
typedef void (*Kernel)(Value* stack, uint64_t inputs, uint64_t outputs);
typedef struct _object PyObject;

/* Each element type: torch's code and DLPack's type. */
// clang-format off
#define DTYPES(F) \
  F(float16, kDLFloat, 16) F(bfloat16, kDLBfloat, 16) F(float32, kDLFloat, 32) F(float64, kDLFloat, 64) \
  F(int32, kDLInt, 32) F(int64, kDLInt, 64) F(int8, kDLInt, 8) F(int16, kDLInt, 16) F(uint8, kDLUInt, 8) \
  F(uint16, kDLUInt, 16) F(uint32, kDLUInt, 32) F(uint64, kDLUInt, 64) F(bool, kDLBool, 8) \
  F(complex32, kDLComplex, 32) F(complex64, kDLComplex, 64) F(complex128, kDLComplex, 128) \
  F(float8_e4m3fn, kDLFloat8_e4m3fn, 8) F(float8_e4m3fnuz, kDLFloat8_e4m3fnuz, 8) \
  F(float8_e5m2, kDLFloat8_e5m2, 8) F(float8_e5m2fnuz, kDLFloat8_e5m2fnuz, 8) \
  F(float8_e8m0fnu, kDLFloat8_e8m0fnu, 8)
// clang-format on
extern struct DType {
  const char* getter; /* the function of torch that returns its code */
  int32_t torch;
  DLDataType dl;
  const char* name;
  PyObject* object; /* torch.float32 and so on. NULL: no result has this dtype */
} dtypes[];
#define COUNT_DTYPE(name, code, bits) +1
enum { DTYPE_COUNT = 0 DTYPES(COUNT_DTYPE) };

/* ---- One call of a kernel ---- */

enum { MAX_ARGUMENTS = 24, MAX_OPERANDS = 16, MAX_OWNED = 48, MAX_RANK = 64 };

typedef struct {
  bool failed; /* everything after the first failure is skipped */
  bool python; /* called from Python, without the GIL: inputs and boxes are borrowed, and a failure throws no
                * exception, since gander._torch.fast repeats the call through the dispatcher */
  bool whole;  /* a result that is not asked for is a tensor without elements, else it is NULL */
  int owned_count;
  Tensor owned[MAX_OWNED];           /* deleted when the call ends */
  Tensor scratch;                    /* deleted too */
  int32_t device_type, device_index; /* torch's codes for the device of the first operand */
  void* stream;
  gander_allocator allocator;
} Call;

typedef struct {
  Tensor handle; /* NULL: absent. A contiguous copy if the kernels do not support the tensor's strides. */
  DLTensor dl;
  int32_t dtype;  /* torch's code */
  DLTensor given; /* the argument itself, also if it was copied */
} Operand;

/* ---- The table of operators (operators_gen.h, from internal/operators) ---- */

/* How the elements of an argument have to lie: Layout in internal/operators/rules.go. */
typedef enum { IN_ROWS, CONTIGUOUS, REGULAR, BROADCASTS, IN_HEADS, TABLES } Layout;

/* What a letter of a form stands for beside the first operand: internal/sizes. */
typedef struct {
  int from, to;
  int64_t times, over, plus;
} Letter;

typedef struct {
  const char* name;
  const char* operator; /* the operator's name in messages */
  int32_t (*call)(Call* call, const Operand* operands, const Value* arguments);
  const char* arguments; /* T: a tensor, O: a tensor or None, d: a dtype or None, f: a float, i: an int,
                          * b: a bool, e: a bool that only the gradient uses, E: such a bool or None */
  int reduction;         /* the argument of this name, or -1 */
  int operand_count;
  struct {
    const char* name;
    Layout layout;
    const char* sizes[2]; /* of a new tensor, without and with a reduction: letters of internal/operators */
    bool statistic;       /* a new tensor has the dtype of statistics by default, else the first operand's */
    DLDataType dtype;     /* or always this one, if its bits are not 0 */
    int argument;         /* the argument that it is, or -1 */
    int over;             /* the operand that it is written over, or -1 */
    int choice;           /* the argument that chooses the dtype of a new tensor, or -1 */
    int like, fits;       /* the operands whose dtype, and whose shape, a new tensor has if they are given */
    bool written;         /* the argument's tensor is written */
    bool made;            /* a new tensor */
    bool index;           /* of an index type, to which uint8 is converted */
    int demand;           /* the argument that asks for it, or -1; without it, a result has no elements */
    bool saved;           /* a result that backward reads, so that autograd asks for it */
    int saved_with;       /* only if this argument is given, or -1 */
  } operands[MAX_OPERANDS];
  int result_count;
  int results[MAX_OPERANDS];
  bool fast; /* fast.c has a function for it */
  bool has_gradient;
  bool differentiable[MAX_ARGUMENTS]; /* arguments that have a gradient */
  bool typed;                         /* backward gets the dtypes of the gradients */
  int saved_count;
  struct {
    int result, argument; /* -1: none. The result if there are both and it was computed */
  } saved[MAX_ARGUMENTS]; /* the tensors that backward reads */
} Operator;

/* Defined in kernels.c, used by fast.c. */
const Operator* find_operator(int index); /* NULL if index is too large */
/* false: failed, called from Python */
bool run_operator(const Operator* op, Value* stack, bool python, bool whole);

#endif
