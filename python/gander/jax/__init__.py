"""gander in programs of JAX: under jit, grad, vmap, scan, checkpoint, shard_map and export.

The functions call XLA's foreign functions, which libgander_jax.so has. Outside of a program they are compiled
like operations of jax.numpy. See docs/jax.md.
"""

from ._versions import CHECKED, require

require()

from ._glu import geglu, gelu_and_mul, silu_and_mul, swiglu  # noqa: E402
from ._library import disabled_checks  # noqa: E402
from ._linear_cross_entropy import linear_cross_entropy  # noqa: E402
from ._losses import cross_entropy  # noqa: E402
from ._norms import l2norm, layernorm, rmsnorm  # noqa: E402
from ._rotary import qk_norm_rotary, rotary  # noqa: E402
from ._softmax import log_softmax, logsumexp, softmax  # noqa: E402
from ._tokens import token_statistics  # noqa: E402

__all__ = [
    "CHECKED",
    "cross_entropy",
    "disabled_checks",
    "geglu",
    "gelu_and_mul",
    "l2norm",
    "layernorm",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "qk_norm_rotary",
    "rmsnorm",
    "rotary",
    "silu_and_mul",
    "softmax",
    "swiglu",
    "token_statistics",
]

for _name in __all__:
    if callable(_function := globals()[_name]):
        _function.__module__ = __name__
