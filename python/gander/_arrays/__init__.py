"""The operators on objects with `__dlpack__` (NumPy, CuPy, JAX, ...), without torch and without gradients."""

from .. import _backend
from . import backend

_backend.serve_arrays(backend)
