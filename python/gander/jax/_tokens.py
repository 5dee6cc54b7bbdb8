"""token_statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._functions.arguments import loss_options
from .._functions.named_tuples import check_outputs, named_tuple
from .._functions.token_statistics import STATISTICS, Statistic, TokenStatistics
from .._words import check_flags, integer
from ._arguments import as_arrays
from ._gradients import apply


def token_statistics(
    logits: jax.Array,
    index: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    where: jax.Array | None = None,
    ignore_index: int = -100,
    batch_invariant: bool = False,
    outputs: Sequence[Statistic] = ("log_prob", "entropy"),
) -> TokenStatistics:
    """Log-probability, entropy and other statistics of each token's logits, in one read of them.

    They are those of gander.token_statistics. log_prob and entropy are differentiable, together in one pass.

    Args:
        logits: (..., N), N >= 1 tokens, of float16, bfloat16 or float32, on the CPU also float64.
        index: logits.shape[:-1], int32 or int64: the token of each row. One that is not in [0, N) is never
            used as an index. It makes log_prob NaN, and the gradient of its row if log_prob takes part in it.
        temperature: As in gander.token_statistics.
        softcap: As in gander.token_statistics.
        scale: As in gander.token_statistics.
        where: logits.shape[:-1], bool, uint8, int32 or int64, or None: rows where it is 0 are left out. Their
            results and gradients are 0, and predicted is -1.
        ignore_index: A row with this index is left out likewise.
        batch_invariant: As in gander.softmax.
        outputs: The names of the statistics that are computed.

    Returns:
        A named tuple of the outputs, each of logits.shape[:-1]: float32 (float64 for float64), is_top1 bool,
        predicted int64, or int32 without 64-bit types.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: A gradient of another statistic than log_prob and entropy; pass it through
            jax.lax.stop_gradient.

    Examples:
        >>> gander.jax.token_statistics(jnp.zeros((1, 4)), jnp.array([2])).entropy
        Array([1.3862944], dtype=float32)
    """
    names = check_outputs(outputs, STATISTICS)
    ignore_index = integer("ignore_index", ignore_index)
    check_flags(batch_invariant=batch_invariant)
    logits, index, where = as_arrays(logits=logits, index=index, where=where)
    given: dict[str, Any] = {"logits": logits, "index": index, "row_mask": where}
    given |= {"ignore_index": ignore_index, "batch_invariant": batch_invariant}
    given |= loss_options(0.0, 0.0, scale, softcap, temperature)
    given |= {f"needs_{name}": name in names for name in STATISTICS}
    results = apply("token_statistics", given)
    statistics: TokenStatistics = named_tuple("TokenStatistics", names, [results[name] for name in names])
    return statistics
