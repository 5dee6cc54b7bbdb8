"""What the memory of this GPU gives: plain kernels that move the bytes of an operator and compute nothing.

ceiling.cu is compiled when it is needed, by the NVRTC that comes with torch: a GPU host needs no CUDA
toolkit.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

TRAFFICS = ("r", "rr", "rw", "rrw", "rrww", "rrrw", "rrrww")  # those of ceiling.cu
_UNROLLS = (1, 2, 4, 8)  # the kernels' vectors per thread
_THREADS = (128, 256, 512, 1024)
_VECTOR = 16  # bytes
_MAX_THREADS_PER_BLOCK = 0  # of CUfunction_attribute


class Unavailable(Exception):
    """The limit cannot be measured here."""


def _nvrtc(result):
    status, *values = result
    if int(status):
        raise Unavailable(f"NVRTC says {status.name}")
    return values[0] if values else None


@functools.cache
def compiled(architecture: str) -> bytes:
    """The machine code of ceiling.cu for an architecture such as "sm_90"."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise Unavailable(f"the limit needs the package cuda-bindings: {error}") from None
    source = Path(__file__).with_name("ceiling.cu").read_bytes()
    try:
        program = _nvrtc(nvrtc.nvrtcCreateProgram(source, b"ceiling.cu", 0, [], []))
    except RuntimeError as error:  # the package is there, the library is not
        raise Unavailable(f"the limit needs NVRTC: {error}") from None
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    _nvrtc(nvrtc.nvrtcCompileProgram(program, len(options), options))
    image = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    _nvrtc(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def _driver(status: int) -> None:
    if status:
        raise Unavailable(f"the CUDA driver returned {status}")


class _Tensors(ctypes.Structure):
    _fields_ = [("read", ctypes.c_void_p * 3), ("written", ctypes.c_void_p * 2)]


@functools.cache
def _functions(architecture: str) -> dict[str, tuple[ctypes.c_void_p, int]]:
    """The kernels by name, each with the most threads of a block that its registers allow."""
    cuda, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _driver(cuda.cuModuleLoadData(ctypes.byref(module), compiled(architecture)))
    functions = {}
    for traffic in TRAFFICS:
        for unroll in _UNROLLS:
            name, function, threads = f"{traffic}_{unroll}", ctypes.c_void_p(), ctypes.c_int()
            _driver(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            _driver(cuda.cuFuncGetAttribute(ctypes.byref(threads), _MAX_THREADS_PER_BLOCK, function))
            functions[name] = function, threads.value
    return functions


def launches(traffic: str, tensors: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Plain kernels by name that move bytes as the traffic says: each "r" reads one of these tensors, each
    "w" writes as much as one of them."""
    read = tensors[: traffic.count("r")]
    # A kernel that writes nothing still has somewhere to write to.
    written = [torch.empty_like(read[0]) for _ in range(traffic.count("w"))] or [read[0].new_empty(_VECTOR)]
    return moves(traffic, read, written)


def moves(
    traffic: str, read: list[torch.Tensor], written: list[torch.Tensor]
) -> dict[str, Callable[[], None]]:
    """The plain kernels: the exclusive or of all that is read goes to each of `written`."""
    major, minor = torch.cuda.get_device_capability()
    functions = _functions(f"sm_{major}{minor}")
    cuda = ctypes.CDLL("libcuda.so.1")
    moved = _Tensors()
    for pointers, of in ((moved.read, read), (moved.written, written)):
        for i, tensor in enumerate(of):
            pointers[i] = tensor.data_ptr()
    count = read[0].numel() * read[0].element_size() // _VECTOR
    values = moved, ctypes.c_longlong(count)
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

    def launch(function, grid, threads, alive=(read, written, values)):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver(cuda.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, stream, arguments, None))

    found = {}
    for unroll in _UNROLLS:
        function, most = functions[f"{traffic}_{unroll}"]
        for threads in _THREADS:
            if threads <= most and unroll * threads <= 4096:  # beyond that an SM hardly holds two blocks
                grid = max(1, -(-count // (unroll * threads)))
                found[f"{unroll} x {threads}"] = functools.partial(launch, function, grid, threads)
    return found
