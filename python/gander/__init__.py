"""Softmax, norms, gated linear units and cross-entropy at the speed of memory, forward and backward.

The functions take PyTorch tensors (CPU or CUDA, with gradients, under torch.compile) and any other object
with `__dlpack__` (NumPy, CuPy, JAX). Importing gander imports neither torch nor the library. The operators
(`torch.ops.gander`) are registered when torch is imported, and the first call loads the library.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _arrays, _backend  # noqa: F401 - _arrays registers itself
from ._debug import set_debug
from ._functions.cross_entropy import cross_entropy
from ._functions.cross_entropy_out import cross_entropy_bwd_out, cross_entropy_fwd_out
from ._functions.cross_entropy_rows import cross_entropy_bwd, cross_entropy_fwd
from ._functions.fused_add_rmsnorm import fused_add_rmsnorm
from ._functions.glu import geglu, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul, swiglu
from ._functions.l2norm import l2norm
from ._functions.layernorm import layernorm, layernorm_bwd, layernorm_fwd
from ._functions.linear_cross_entropy import linear_cross_entropy
from ._functions.linear_token_statistics import linear_token_statistics
from ._functions.rmsnorm import rmsnorm, rmsnorm_bwd, rmsnorm_fwd
from ._functions.rotary import apply_rotary_emb, qk_norm_rotary, rotary
from ._functions.softmax import log_softmax, logsumexp, softmax, softmax_bwd, softmax_fwd
from ._functions.token_statistics import token_statistics
from .info import __version__, algorithms, explain, get_include, info, warmup
from .info import prefix as _prefix

__all__ = [
    "__version__",
    "algorithms",
    "apply_rotary_emb",
    "cmake_prefix_path",
    "cross_entropy",
    "cross_entropy_bwd",
    "cross_entropy_bwd_out",
    "cross_entropy_fwd",
    "cross_entropy_fwd_out",
    "distributed",
    "explain",
    "fused_add_rmsnorm",
    "geglu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_include",
    "info",
    "l2norm",
    "layernorm",
    "layernorm_bwd",
    "layernorm_fwd",
    "linear_cross_entropy",
    "linear_token_statistics",
    "log_softmax",
    "logsumexp",
    "nn",
    "qk_norm_rotary",
    "rmsnorm",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "rotary",
    "set_debug",
    "silu_and_mul",
    "softmax",
    "softmax_bwd",
    "softmax_fwd",
    "swiglu",
    "token_statistics",
    "warmup",
]

# The name by which pickles and traced graphs find a public function, wherever it is defined.
for _name in __all__:
    if callable(_function := globals().get(_name)):
        _function.__module__ = __name__


def _load_torch() -> None:
    from . import _torch

    # Functions that torch.fx must not drop from a graph because nothing uses their result.
    writing = fused_add_rmsnorm, cross_entropy_fwd_out, cross_entropy_bwd_out
    for function in (*writing, rotary, qk_norm_rotary, apply_rotary_emb):
        _torch.has_side_effect(function)


_backend.load_with_torch(_load_torch)

if _TYPE_CHECKING:
    from . import distributed, nn

    cmake_prefix_path: str
else:

    def __getattr__(name):
        if name == "cmake_prefix_path":  # not at import, because it raises where nothing has been built
            return _prefix()
        if name in ("distributed", "nn"):  # imported at their first use, because they import torch
            import importlib

            try:
                return importlib.import_module(f".{name}", __name__)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
            raise ImportError(f"gander.{name} needs torch, which is not installed: pip install torch")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
