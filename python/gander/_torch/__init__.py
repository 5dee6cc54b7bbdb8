"""gander's operators in PyTorch: schemas, kernels, fake kernels, gradients, and rules for vmap, autocast and
DTensor.

Importing this package registers them. The first kernel that runs loads the library. What is said of all
operators is made from their table (gander._table), so a new operator or option needs no change here.
"""

import torch.overrides
from torch import Tensor
from torch.fx import has_side_effect
from torch.nn import Parameter

from .. import _backend
from . import (
    autocast,
    autograd,
    cross_entropy,
    fakes,
    fast,
    flops,
    inductor,
    kernels,
    sharding,
    tensors,
    vmap,
    writes,
)

autograd.register(
    {"cross_entropy": cross_entropy.choose},
    {
        "cross_entropy": sharding.cross_entropy_of_slices,
        "cross_entropy_bwd": inductor.gradient,
        "token_statistics": sharding.token_statistics_of_slices,
    },
)
fast.start(kernels.BINARY, autograd.fast_functions(), cross_entropy.ONE_PASS)

from . import backend  # noqa: E402 - its operators have to be registered

_backend.serve_tensors(
    backend, Tensor, Parameter, overrides=tensors.overrides, hand=torch.overrides.handle_torch_function
)

__all__ = ["autocast", "backend", "fakes", "flops", "has_side_effect", "vmap", "writes"]
