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
from .tensors import nested

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


# What torch says of an argument that is no number of the kind that an operator takes.
_CAST = re.compile(r"Expected a value of type '(\w+)' for argument '(\w+)' .*\n.*\nValue: (.*)")
_NUMBERS = {"float": "a number", "int": "an integer of 64 bits", "bool": "True or False"}


def explained(error: RuntimeError, **arguments) -> Exception:
    """The exception to raise for an error from the dispatcher: one of the right type.

    A kernel can only make torch raise RuntimeError. It keeps the status of its failure, which decides the
    type.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            return TypeError(
                f"{name} is a {type(value).__name__}, expected a torch.Tensor, like the first argument"
            )
        if value is not None and value.is_nested:
            return nested(name)
    if is_dynamo_compiling():  # which raises the error itself, and could not trace what follows
        return error
    if cast := _CAST.search(str(error)):
        expected, argument, value = cast.groups()
        return TypeError(f"{argument} is {value}, expected {_NUMBERS.get(expected, expected)}")
    message = ctypes.c_char_p()
    status = _kernels.gander_torch_failure(ctypes.byref(message))
    text = (message.value or b"").decode(errors="replace")
    if not status or text not in str(error):
        return error
    if status == library.STATUS_MEMORY:
        return torch.cuda.OutOfMemoryError(text)
    return library.exception(status, text)
