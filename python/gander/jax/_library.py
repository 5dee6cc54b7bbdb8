"""The handlers of libgander_jax.so (c/handlers.c), which are registered with XLA here.

The first call loads libgander. Until then a process may fork.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import jax
import jax.export

from .._native import library
from .._table import ABI_VERSION, OPERATORS
from .._words import shortened
from ._versions import CHECKED

BINARY = Path(__file__).with_name("libgander_jax.so")


def target(operator: str) -> str:
    """The name by which programs of XLA call an operator, with the version of what it means."""
    return f"gander.{operator}.v{ABI_VERSION}"


def _register() -> None:
    handlers = ctypes.CDLL(str(BINARY))
    handlers.gander_jax_open.restype = ctypes.c_char_p
    handlers.gander_jax_handler.restype = ctypes.c_void_p
    handlers.gander_jax_handler.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    if error := handlers.gander_jax_open(os.fsencode(library.path())):
        raise ImportError(f"gander.jax: {error.decode()}")
    try:
        for operator in OPERATORS:
            for platform in "cpu", "CUDA":
                address = handlers.gander_jax_handler(operator.encode(), platform == "CUDA")
                jax.ffi.register_ffi_target(target(operator), jax.ffi.pycapsule(address), platform=platform)
    except Exception as error:
        raise ImportError(
            f"gander.jax: jax {jax.__version__} refuses gander's handlers ({shortened(error)}), expected jax "
            f"{CHECKED[0]} or newer; {CHECKED[1]} is the newest that was checked"
        ) from error


_register()

disabled_checks = [jax.export.DisabledSafetyCheck.custom_call(target(operator)) for operator in OPERATORS]
