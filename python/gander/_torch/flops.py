"""What torch.utils.flop_counter counts of gander's operators: the matrix products of linear_cross_entropy.

torch.utils.flop_counter takes long to import, so the formula is registered when a program imports it.
"""

import torch

from .. import _imports
from . import linear_cross_entropy  # noqa: F401 - defines the operator


def products(x, weight, *others, **options) -> int:
    """x: (M, K), weight: (V, K): the shapes of the operator's arguments."""
    (rows, columns), (classes, _), (needs_dx, needs_dw, _) = x, weight, others[-3:]
    return 2 * rows * columns * classes * (1 + needs_dx + needs_dw)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.gander.linear_cross_entropy)(products)


_imports.after_import("torch.utils.flop_counter", _register)
