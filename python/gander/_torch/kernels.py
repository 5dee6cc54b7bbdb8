"""The kernels for PyTorch's dispatcher (c/kernels.c): registers them, and makes exceptions of their
failures.

The first kernel that runs loads libgander.
"""

import ctypes
import os
import re
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._native import library
from .._words import REFUSALS, renamed
from .dtensor import is_dtensor
from .tensors import unusable

BINARY = Path(__file__).with_name("libgander_torch.so")


def _register_kernels() -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(BINARY))
    kernels.gander_torch_register.restype = ctypes.c_char_p
    kernels.gander_torch_failure.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
    error = kernels.gander_torch_register(os.fsencode(library.path()))
    if error:
        raise RuntimeError(f"{error.decode()}; expected torch 2.10 or newer, this is {torch.__version__}")
    return kernels


_kernels = _register_kernels()


# What torch says of an integer of more than 64 bits.
_CAST = re.compile(r"Expected a value of type 'int' for argument '(\w+)' .*\n.*\nValue: (.*)")


def _of_dtensors(error: Exception, arguments: dict) -> Exception:
    """An error of DTensor without what it says about operators that the caller did not call."""
    given = {name: is_dtensor(value) for name, value in arguments.items() if isinstance(value, Tensor)}
    if "got mixed torch.Tensor and DTensor" in str(error) and len({*given.values()}) == 2:
        plain, like = (next(name for name in given if given[name] == is_one) for is_one in (False, True))
        return TypeError(f"{plain} is a plain tensor, expected a DTensor as {like}; distribute it")
    text, found, _ = str(error).partition("\n\nSharding propagation failed")
    cause = type(error.__cause__)
    return (cause if cause in REFUSALS else type(error))(text) if found else error


def explained(error: Exception, names: dict[str, str] | None = None, **arguments) -> Exception:
    """The exception to raise for an error from the dispatcher: one of the right type.

    A kernel can only make torch raise RuntimeError. It keeps the status of its failure, which decides the
    type.
    """
    like = ""
    for name, value in arguments.items():
        if (value is not None or not like) and (refusal := unusable(name, value, like)):
            return refusal
        like = like or name
    if is_dynamo_compiling():  # which raises the error itself, and could not trace what follows
        return error
    if cast := _CAST.search(str(error)):
        argument, value = cast.groups()
        value = value if len(value) <= 40 else f"of {len(value)} digits"
        return ValueError(f"{argument} is {value}, expected an integer of 64 bits")
    error = _of_dtensors(error, arguments)
    message = ctypes.c_char_p()
    status = _kernels.gander_torch_failure(ctypes.byref(message))
    text = (message.value or b"").decode(errors="replace")
    if status and text in str(error):
        if status == library.STATUS_MEMORY:
            return torch.cuda.OutOfMemoryError(text)
        error = library.exception(status, text)
    return renamed(error, names)
