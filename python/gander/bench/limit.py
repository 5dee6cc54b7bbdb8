"""What the memory of this GPU gives: plain kernels that move the bytes of an operator and compute nothing.

ceiling.cu is compiled when it is needed, by the NVRTC that comes with torch: a GPU host needs no CUDA
toolkit.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_UNROLLS = (1, 2, 4, 8)  # the kernels' vectors per thread
_THREADS = (128, 256, 512, 1024)
_VECTOR = 16  # bytes


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


@functools.cache
def _functions(architecture: str) -> dict[str, ctypes.c_void_p]:
    cuda, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _driver(cuda.cuModuleLoadData(ctypes.byref(module), compiled(architecture)))
    functions = {}
    for traffic in ("r", "rw", "rrw"):
        for unroll in _UNROLLS:
            function = functions[f"{traffic}_{unroll}"] = ctypes.c_void_p()
            _driver(cuda.cuModuleGetFunction(ctypes.byref(function), module, f"{traffic}_{unroll}".encode()))
    return functions


def launches(traffic: str, tensors: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Plain kernels by name that move the bytes of these tensors: "r" reads the first, "rw" writes as much
    besides, "rrw" reads the first two and writes as much as one of them."""
    major, minor = torch.cuda.get_device_capability()
    functions = _functions(f"sm_{major}{minor}")
    cuda = ctypes.CDLL("libcuda.so.1")
    a, b = tensors[0], tensors[-1]
    out = torch.empty_like(a) if traffic != "r" else a.new_empty(_VECTOR)
    count = a.numel() * a.element_size() // _VECTOR
    values = [*(ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)), ctypes.c_longlong(count)]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

    def launch(function, grid, threads, alive=(tensors, out, values)):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver(cuda.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, stream, arguments, None))

    found = {}
    for unroll in _UNROLLS:
        for threads in _THREADS:
            if unroll * threads <= 4096:  # beyond that the registers of an SM do not hold two blocks
                grid = max(1, -(-count // (unroll * threads)))
                found[f"{unroll} x {threads}"] = functools.partial(
                    launch, functions[f"{traffic}_{unroll}"], grid, threads
                )
    return found
