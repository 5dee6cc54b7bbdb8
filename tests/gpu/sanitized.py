"""Calls every op through the C ABI, without torch, under compute-sanitizer: python sanitized.py bfloat16.

Every tensor is an allocation of exactly its size, and so is the scratch memory. The sanitizer then sees any
access beyond it. The other arguments (short, race, diverge) make a mistake on purpose that the sanitizer must
find.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from gander._native import library as abi

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "bool": 1}

LENGTHS = (1, 3, 31, 64, 128, 255, 256, 512, 513, 1000, 1024, 2048, 4096, 4097)
# synccheck of CUDA 13.0 reports "Missing wait" and "Missing init" for the barriers of CTAs of rank 8 and more
# in clusters of more than 8, in a correct program of 20 lines too, once there are more clusters than fit on
# the device at a time. So large clusters have few rows here.
#
# (rows, columns). Few rows take kernels with clusters, more rows those with one CTA per row. Many rows take
# persistent kernels, for several rounds, and the reduction of losses by a cluster.
GRID = (
    *((m, n) for m in (3, 150) for n in LENGTHS),
    *((m, n) for m in (2, 140) for n in (8192, 16384, 20001)),
    *((2, n) for n in (32768, 50257, 65536, 131072, 262144, 1 << 20, (1 << 20) + 3, 1 << 22)),
    *((m, n) for m, n in ((17000, 8), (20000, 64), (9000, 129), (3000, 1024))),
)


def check(code):
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {code}: {text.value.decode()}")


cuda = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))

live = []


def allocate(size):
    pointer = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(size, 1))))
    live.append(pointer)
    return pointer.value


def free_all():
    check(cuda.cuCtxSynchronize())
    while live:
        check(cuda.cuMemFree_v2(live.pop()))


def encoded(values, dtype):
    """An array with the bytes of the values in a dtype, which NumPy need not know."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


class Tensor:
    """A tensor in a new allocation, which begins with `offset` unused elements and ends with the tensor.

    claimed: the shape in the DLPack tensor, if it differs from the allocated one.
    """

    def __init__(self, dtype, *shape, values=None, offset=0, claimed=None):
        count = int(np.prod(shape))
        pointer = allocate((count + offset) * SIZES[dtype])
        if values is not None:
            data = encoded(values, dtype)
            check(
                cuda.cuMemcpyHtoD_v2(
                    ctypes.c_uint64(pointer + offset * SIZES[dtype]),
                    data.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_size_t(data.nbytes),
                )
            )
        self.shape = (ctypes.c_int64 * len(shape))(*(claimed or shape))
        kind = abi.DType(*abi.DTYPES[dtype], 1)
        start = pointer + offset * SIZES[dtype]
        self.dl = abi.Tensor(start, abi.Device(abi.CUDA, 0), len(shape), kind, self.shape, None, 0)


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def scratch(context, size):
    try:
        return allocate(size)
    except RuntimeError:
        return None  # the library reports it; after an exception ctypes would return an undefined value


class Allocator(ctypes.Structure):
    """gander_allocator"""

    _fields_ = (("context", ctypes.c_void_p), ("allocate", type(scratch)))


ALLOCATOR = Allocator(None, scratch)
IGNORED = -100  # the default of ignore_index
MEAN, ONE_PASS = dict(reduction=1), dict(reduction=1, one_pass=1)
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.standard_normal(1 << 24, dtype=np.float32)


def call(operator, **given):
    """Calls the function for borrowed tensors. given: operands and options."""
    tensors = {name: v.dl for name, v in given.items() if isinstance(v, Tensor)}
    abi.check(abi.call(f"gander_{operator}", allocator=ctypes.addressof(ALLOCATOR), **given | tensors))
    return 1


def calls(dtype, m, n, offset):
    """Calls every op on operands that begin `offset` elements after an aligned address."""

    def given(*shape, dtype=dtype):
        return Tensor(dtype, *shape, values=VALUES[: int(np.prod(shape))], offset=offset)

    def empty(*shape, dtype=dtype):
        return Tensor(dtype, *shape, offset=offset)

    def statistic(*shape, values=None):
        return Tensor("float32", *shape, values=values)

    x, dy, y, dx = given(m, n), given(m, n), empty(m, n), empty(m, n)
    weight, dw, rstd = given(n), empty(n), statistic(m)
    classes = RANDOM.integers(0, n, m)
    classes[3::7] = IGNORED
    classes[5::11] = n + 5
    target = Tensor("int64" if m % 2 else "int32", m, values=classes)
    loss, lse, parts, dloss = statistic(m), statistic(m), statistic(2, m), statistic(m, values=VALUES[:m])
    mean, denominator = statistic(1), statistic(1)
    class_weight = given(n, dtype="float32")
    count = call("softmax_forward", x=x, y=y)
    count += call("softmax_backward", dy=dy, y=y, dx=dx)
    count += call("rmsnorm_forward", x=x, weight=weight, y=y, rstd=rstd)
    count += call("rmsnorm_backward", x=x, dout=dy, rstd=rstd, dx=dx)
    count += call("rmsnorm_backward", x=x, weight=weight, dout=dy, rstd=rstd, dx=dx, dw=dw)
    rows, weighted = dict(x=x, target=target), dict(x=x, target=target, weight=class_weight)
    forward, backward = "cross_entropy_forward", "cross_entropy_backward"
    count += call(forward, **rows, loss=loss, lse=lse)
    count += call(forward, **weighted, loss=mean, lse=parts, denominator=denominator, **MEAN)
    count += call(backward, **weighted, dloss=mean, lse=parts, denominator=denominator, dx=dx, **MEAN)
    count += call(backward, **rows, dloss=dloss, lse=lse, dx=dx)
    half = statistic(1, values=np.array([0.5]))
    for dmean in (1.0, 0.5):  # backward keeps forward's gradient, or computes it again
        dmean = statistic(1, values=np.array([dmean]))
        for expected in (None, half):
            both = dict(upstream=expected, lse=parts, dx=dx, denominator=denominator)
            count += call(forward, **weighted, **both, loss=mean, **ONE_PASS)
            count += call(backward, **weighted, **both, dloss=dmean, **ONE_PASS)
    count += call(forward, **rows, divisor=half, upstream=half, loss=loss, lse=parts, dx=dx)
    count += call(backward, **rows, dloss=half, lse=parts, divisor=half, dx=dx)
    smooth, capped = dict(label_smoothing=0.1), dict(softcap=20.0, scale=0.5, z_loss=0.1)
    for operands, options_of_loss in (rows, capped), (rows, smooth), (weighted, smooth):
        count += call(forward, **operands, loss=loss, lse=parts, **options_of_loss)
        count += call(forward, **operands, loss=loss, lse=parts, dx=dx, **options_of_loss)
        count += call(backward, **operands, dloss=dloss, lse=parts, dx=dx, **options_of_loss)
        count += call(
            forward,
            **operands,
            denominator=denominator,
            loss=mean,
            lse=parts,
            dx=dx,
            **options_of_loss,
            **ONE_PASS,
        )
    count += call("l2norm_forward", x=x, y=y, rnorm=rstd)
    count += call("l2norm_backward", x=x, dy=dy, rnorm=rstd, dx=dx)
    for options in {}, dict(gelu=1), dict(gelu=1, tanh=1, round_activation=1):
        count += call("glu_forward", gate=x, up=dy, y=y, **options)
        count += call("glu_backward", gate=x, up=y, dy=dy, dgate=dx, dup=y, **options)
    count += call(forward, **weighted, loss=loss, dx=x)
    slices, high, weights = statistic(2, 4, m, values=VALUES[: 8 * m]), statistic(m), statistic(m)
    combined = dict(max=high, log_sum=lse, losses=loss, loss=mean, weights=weights, denominator=denominator)
    count += call(
        "sharded_cross_entropy_combine", parts=slices, target=target, **combined, mean=1, weighted=1
    )
    slices, states = statistic(2, 8, m, values=VALUES[: 16 * m]), statistic(m, 3)
    combined = dict(log_prob=high, entropy=lse, log_sum_sq_probs=loss, mean_logit=weights, state=states)
    count += call("sharded_token_statistics_combine", parts=slices, index=target, **combined)
    if dtype != "float32":  # operands of several types
        wide = given(m, n, dtype="float32")
        count += call("rmsnorm_forward", x=dy, weight=class_weight, y=wide, rstd=rstd)
        count += call("rmsnorm_backward", x=dy, dout=wide, rstd=rstd, dx=dx)
        count += call("rmsnorm_backward", x=dy, weight=weight, dout=wide, rstd=rstd, dx=dx, dw=dw)
    count += norms(x, dy, y, dx, weight, dw, rstd, given, empty, statistic, dtype, m, n)
    count += masked_softmax(x, dy, y, dx, given, empty, dtype, m, n)
    if n > 1:  # a pair has two elements
        count += rotary(given, empty, dtype, m, n)
    free_all()
    return count


def rotary(given, empty, dtype, m, n):
    """Calls rotary embeddings of all columns and of some, of tokens that follow each other or are divided."""

    def tables(rows, width, dtype):
        return dict(cos=given(rows, width, dtype=dtype), sin=given(rows, width, dtype=dtype))

    heads = given(m, 2, n), given(m, 1, n), empty(m, 2, n), empty(m, 1, n)
    some = n // 4 or 1
    ends = Tensor("int32", 3, values=np.array([0, m // 2, m]))
    starts = Tensor("int64", 2, values=np.array([1, 0]))
    count = 0
    for options in (
        tables(m, n // 2, dtype),
        tables(m + 1, 2 * some, "float32") | dict(per_element=1, interleaved=1, offset=1),
        tables(m, some, "float32") | dict(cu_seqlens=ends, offsets=starts),
    ):
        forward = dict(zip(("q", "k", "q_out", "k_out"), heads, strict=True))
        backward = dict(zip(("dq_out", "dk_out", "dq", "dk"), heads, strict=True))
        in_place = dict(zip(("q", "q_out"), heads[:1] * 2, strict=True))
        count += call("rotary_forward", **forward, **options)
        count += call("rotary_backward", **backward, **options)
        count += call("rotary_forward", **in_place, **options, round_products=1)
    return count


def masked_softmax(x, dy, y, dx, given, empty, dtype, m, n):
    """Calls softmax with masks of several types and shapes, and with other types of y and dx."""
    other = "float16" if dtype == "float32" else "float32"
    forward, backward = "masked_softmax_forward", "masked_softmax_backward"
    plain, log, causal = {}, dict(log=1), dict(log=1, causal=1)
    count = 0
    for mask, options in (
        (given(m, n, dtype="bool"), plain),
        (given(1, n, dtype="bool"), log),
        (given(m, 1, dtype=other), plain),
        (given(m, n), log),
        (given(n, dtype=other), causal),
        (None, causal),
    ):
        options = options | dict(mask=mask)
        count += call(forward, x=x, y=y, **options)
        count += call(forward, x=x, y=empty(m, n, dtype=other), **options)
        count += call(backward, dy=dy, y=x, dx=dx, **options)
        y_of_other = given(m, n, dtype=other)
        count += call(backward, dy=dy, y=y_of_other, dx=empty(m, n, dtype=other), **options)
    return count


def norms(x, dy, y, dx, weight, dw, rstd, given, empty, statistic, dtype, m, n):
    """Calls LayerNorm, and RMSNorm with all options, some of them in place."""
    other = "float16" if dtype == "float32" else "float32"
    residual, wide, narrow = given(m, n), given(m, n, dtype=other), empty(m, n, dtype=other)
    bias, db, mean = given(n, dtype=other), empty(n, dtype=other), statistic(m)
    forward, backward = "layernorm_forward", "layernorm_backward"
    saved = dict(mean=mean, rstd=rstd)
    count = call(forward, x=x, weight=weight, bias=bias, y=y, **saved)
    into = dict(y=narrow, residual_out=empty(m, n))
    count += call(forward, x=x, weight=weight, bias=bias, residual=wide, **into, **saved)
    rows = dict(x=x, weight=weight, dx=dx, dw=dw)
    count += call(backward, **rows, dout=dy, dresidual_out=residual, dresidual=narrow, db=db, **saved)
    count += call(backward, **rows, dout=wide, **saved)
    count += call("rmsnorm_backward", **rows, dout=dy, dresidual_out=residual, rstd=rstd)
    count += call("rmsnorm_backward", x=x, dout=dy, dresidual_out=dy, rstd=rstd, dx=dx)
    in_place = dict(y=x, residual_out=residual)
    return count + call("rmsnorm_forward", x=x, weight=weight, residual=residual, **in_place, rstd=rstd)


def grid(dtype, which="all"):
    """which: "fewer" is for racecheck, which is slow: no longest rows, and larger shapes once."""
    count = 0
    for m, n in GRID:
        if which == "fewer" and n > (1 << 20 if m == 2 else 8192):
            continue
        for offset in (0, 1) if which == "all" or m * n <= 200000 else (0,):
            count += calls(dtype, m, n, offset)
    print(count, "calls")


def short():
    """The memory of x has half the rows of its shape."""
    x = Tensor("float32", 64, 4096, values=VALUES[: 64 * 4096], claimed=(128, 4096))
    call("softmax_forward", x=x, y=Tensor("float32", 128, 4096))
    free_all()


MISTAKES = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry race() {
  .shared .align 4 .b32 word;
  .reg .b32 %r;
  mov.u32 %r, %tid.x;
  st.shared.b32 [word], %r;
  ret;
}
.visible .entry diverge() {
  .reg .b32 %r;
  .reg .pred %p;
  mov.u32 %r, %tid.x;
  and.b32 %r, %r, 1;
  setp.eq.u32 %p, %r, 0;
  @%p bra LAST;
  bar.sync 0;
LAST:
  bar.sync 0;
  ret;
}
"""


def mistake(name):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), MISTAKES))
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    check(cuda.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, None, None))
    check(cuda.cuCtxSynchronize())


name = sys.argv[1]
if name == "short":
    short()
elif name in ("race", "diverge"):
    mistake(name)
else:
    grid(*sys.argv[1:])
