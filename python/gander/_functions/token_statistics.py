"""Statistics of tokens' logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from .. import _debug
from .._backend import BACKENDS, backend_of
from .._words import check_flags, integer
from .arguments import FAILURES, ONE, A, Array, check_targets, loss_options, overridden
from .named_tuples import check_outputs, named_tuple

Statistic = Literal["log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted"]

# In the order of the operator's results.
STATISTICS = ("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "is_top1", "predicted")


class TokenStatistics(Protocol):
    """What token_statistics returns: a named tuple of the statistics that were asked for, in that order."""

    log_prob: Any
    entropy: Any
    log_sum_sq_probs: Any
    mean_logit: Any
    is_top1: Any
    predicted: Any

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def named_statistics(names: tuple[str, ...], results: Sequence[Any]) -> TokenStatistics:
    """Of all statistics those of these names."""
    found: TokenStatistics = named_tuple(
        "TokenStatistics", names, [results[STATISTICS.index(name)] for name in names]
    )
    return found


def token_statistics(
    logits: A,
    index: Array,
    *,
    temperature: float = ONE,
    softcap: float | None = None,
    scale: float = ONE,
    row_mask: Array | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    batch_invariant: bool = False,
    outputs: Sequence[Statistic] = ("log_prob", "entropy"),
) -> TokenStatistics:
    """Log-probability, entropy and other statistics of each token's logits, in one read of them.

    With z = softcap * tanh(scale * logits / softcap) / temperature, without a softcap scale * logits /
    temperature, and p = softmax(z) of a row:

    - log_prob: log p[index], never above 0. Differentiable.
    - entropy: -sum p log p, never below 0. Differentiable.
    - log_sum_sq_probs: log sum p^2, minus the Renyi entropy of order 2.
    - mean_logit: the mean of z.
    - predicted: the column of the largest z, the first one of several.
    - is_top1: whether predicted is index.

    Gradient, in one pass, without a tensor besides dlogits: dz[j] = dlog_prob * ([j = index] - p[j]) -
    dentropy * p[j] * (log p[j] + entropy). The entropy is log1p(r) + e / (1 + r), where r and e are the sums
    of exp(z - max z) without the largest element's own 1, and of (max z - z) exp(z - max z). So it keeps its
    digits where one token has nearly all of the probability.

    Args:
        logits: (M, N) or (..., N), N >= 1 tokens, of float16, bfloat16 or float32 (on the CPU also float64),
            any strides. A torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no
            gradient).
        index: logits.shape[:-1], uint8, int32 or int64 (uint8 is copied to int64): the token of each row.
            One that is not in [0, N) is never used as an index. It makes log_prob NaN, and the gradient of
            its row if log_prob takes part in it (see set_debug).
        temperature: z is divided by it. More than 0.
        softcap: See above. More than 0, or None.
        scale: See above. More than 0.
        row_mask: logits.shape[:-1], bool, uint8, int32 or int64, or None: a row where it is 0 is left out.
            Its results and its gradient are 0, predicted is -1, and its logits are not read.
        ignore_index: A row with this index is left out likewise. A GPU may read its logits, if they are fewer
            than 16384.
        inplace_backward: As in cross_entropy: backward writes the gradient over logits.
        batch_invariant: As in softmax.
        outputs: The names of the statistics that are computed. Others than log_prob and entropy take a little
            longer.

    Returns:
        A named tuple of the outputs, each of logits.shape[:-1]: float32 (float64 for float64), is_top1 bool,
        predicted int64. Of a row with a NaN or +inf, or of -inf alone, the first three are NaN, as in torch;
        with a NaN or +inf its predicted is -1.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: An index, under set_debug(True).
        NotImplementedError: A nested or sparse tensor; a gradient of another statistic, except in a graph of
            torch.compile, which cannot raise: there the gradient of its row is NaN.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.token_statistics(torch.zeros(1, 4), torch.tensor([2]))
        TokenStatistics(log_prob=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    names = check_outputs(outputs, STATISTICS)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    options: dict[str, Any] = {}
    if not (scale is temperature is ONE and softcap is None):
        options = loss_options(0.0, 0.0, scale, softcap, temperature)
    ops = BACKENDS.get(type(logits)) or backend_of(logits)
    if ops is None:
        return overridden(token_statistics, locals())  # type: ignore[no-any-return]
    try:
        if _debug.is_enabled:
            check_targets(ops, logits, index, ignore_index, "index")
        results = ops.token_statistics(
            logits,
            index,
            row_mask,
            ignore_index=ignore_index,
            batch_invariant=batch_invariant,
            inplace_backward=inplace_backward,
            needs_log_prob="log_prob" in names,
            needs_entropy="entropy" in names,
            needs_log_sum_sq_probs="log_sum_sq_probs" in names,
            needs_mean_logit="mean_logit" in names,
            needs_is_top1="is_top1" in names,
            needs_predicted="predicted" in names,
            **options,
        )
    except FAILURES as error:
        raise ops.explained(error, logits=logits, index=index, row_mask=row_mask) from None
    return named_statistics(names, results)
