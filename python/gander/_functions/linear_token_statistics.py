"""Statistics of the tokens whose logits a linear layer makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .. import _debug
from .._backend import BACKENDS, backend_of, is_tensor
from .._words import check_flags, integer, kind
from .arguments import FAILURES, ONE, check_targets, code_of, loss_options, overridden
from .linear_cross_entropy import check_chunks
from .named_tuples import check_outputs
from .token_statistics import STATISTICS, Statistic, TokenStatistics, named_statistics

if TYPE_CHECKING:
    from torch import Tensor

KEPT = ("nothing", "logits")


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = ONE,
    softcap: float | None = None,
    scale: float = ONE,
    row_mask: Tensor | None = None,
    ignore_index: int = -100,
    batch_invariant: bool = False,
    keep: Literal["nothing", "logits"] = "nothing",
    chunk: int | None = None,
    outputs: Sequence[Statistic] = ("log_prob", "entropy"),
) -> TokenStatistics:
    """token_statistics(hidden @ weight.T + bias, index), which never holds all logits. Torch tensors only.

    Differentiable in hidden, weight and bias. Forward holds the logits of a chunk of rows. Backward computes
    them again, and writes their gradient over them. For the gradient of weight it holds columns instead, all
    rows of as many as have the same size. So each row of that gradient comes from one matrix product, and is
    rounded once. The gradient of hidden is added up in float32, and so is that of bias.

    If weight and bias need no gradient, and no entropy is asked for, forward already makes the gradient of
    hidden, in float32: then the step has two matrix products in place of three. Not with a divided weight.

    Rows that are left out take part in the matrix products. Inside torch.func's transforms all logits are
    held.

    weight may be a DTensor whose tokens are sharded over a mesh of one dimension, with hidden replicated and
    bias sharded alike: a column-parallel head. All ranks return the same statistics, DTensors, after one
    all-gather, as that of gander.distributed.linear_token_statistics. The gradient of hidden is a partial
    sum.

    Args:
        hidden: (..., K), of float16, bfloat16 or float32 (on the CPU also float64). Under autocast hidden,
            weight and bias are cast, as in torch.nn.functional.linear.
        weight: (V, K). Cast to hidden's dtype, but for float64.
        index: hidden.shape[:-1], as in token_statistics.
        bias: (V) or None. Cast to hidden's dtype, but for float64.
        temperature: As in token_statistics.
        softcap: As in token_statistics.
        scale: As in token_statistics.
        row_mask: hidden.shape[:-1] or None, as in token_statistics.
        ignore_index: As in token_statistics.
        batch_invariant: As in token_statistics. It does not concern the matrix products.
        keep: "logits" keeps the logits of all rows for backward, which then has two matrix products in place
            of three. Backward writes over them; a second backward pass computes them again.
        chunk: The rows whose logits are held at a time. None takes a quarter of all rows, where weight
            or bias is trained a sixth.
        outputs: As in token_statistics.

    Returns:
        What token_statistics returns.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: An index, under set_debug(True).
        NotImplementedError: A nested or sparse tensor, other placements of DTensors, or a gradient of another
            statistic.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> head, index = torch.zeros(4, 3), torch.tensor([0, 3])
        >>> gander.linear_token_statistics(torch.ones(2, 3), head, index, outputs=("log_prob",))
        TokenStatistics(log_prob=tensor([-1.3863, -1.3863]))
    """
    names = check_outputs(outputs, STATISTICS)
    ops = BACKENDS.get(type(hidden)) or backend_of(hidden)
    others = weight, index, bias, row_mask
    if ops is None or any(type(value) not in BACKENDS and backend_of(value) is None for value in others):
        handed: TokenStatistics = overridden(linear_token_statistics, locals())
        return handed
    if not is_tensor(hidden):
        raise TypeError(f"hidden is {kind(hidden)}, expected a torch.Tensor")
    check_chunks(chunk, None)
    keeps = bool(code_of("keep", keep, KEPT))
    check_flags(batch_invariant=batch_invariant)
    options = loss_options(0.0, 0.0, scale, softcap, temperature)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    try:
        if _debug.is_enabled and hasattr(weight, "shape"):
            check_targets(ops, weight.shape[0], index, ignore_index, "index")
        results = ops.linear_token_statistics(
            hidden,
            weight,
            index,
            bias,
            row_mask,
            ignore_index,
            chunk,
            keeps,
            batch_invariant,
            options,
            names,
        )
    except FAILURES as error:
        given = {"hidden": hidden, "weight": weight, "index": index, "bias": bias, "row_mask": row_mask}
        raise ops.explained(error, **given) from None
    return named_statistics(names, results)
