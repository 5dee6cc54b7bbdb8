"""What torch.utils.flop_counter counts of gander's operators: their matrix products.

torch.utils.flop_counter takes long to import, so the formula is registered when a program imports it.
"""

import math

import torch

from .. import _imports
from . import linear_cross_entropy, linear_token_statistics  # noqa: F401 - define the operators


def products(x, weight, *others, **options) -> int:
    """x: (M, K), weight: (V, K): the shapes of the operator's arguments."""
    (rows, columns), (classes, _), (needs_dx, needs_dw, *_) = x, weight, others[-4:]
    return 2 * rows * columns * classes * (1 + needs_dx + needs_dw)


def forward_products(x, weight, *others, **options) -> int:
    """The products of linear_token_statistics."""
    makes_dx = others[6]
    return 2 * math.prod(x) * weight[0] * (1 + makes_dx)


def backward_products(x, weight, *others, **options) -> int:
    """Those of its gradient, which computes the logits unless they were kept."""
    logits, (needs_dx, needs_dw, _) = others[4], others[-3:]
    return 2 * math.prod(x) * weight[0] * ((0 in logits) + needs_dx + needs_dw)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.gander.linear_cross_entropy)(products)
    register_flop_formula(torch.ops.gander.linear_token_statistics)(forward_products)
    register_flop_formula(torch.ops.gander.linear_token_statistics_bwd)(backward_products)


_imports.after_import("torch.utils.flop_counter", _register)
