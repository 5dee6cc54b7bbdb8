"""cross_entropy of x @ weight.T + bias, which holds the logits of one chunk of rows at a time.

A loop computes the logits of a chunk, lets the loss kernel write their gradient over them, and multiplies
that into dx and dw. So forward makes the gradients already, and backward multiplies them by what came.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._functions.arguments import code_of, loss_options, refuse_z_loss
from .._functions.cross_entropy import check_sum
from .._functions.linear_cross_entropy import check_chunks
from .._table import NONE, REDUCTIONS, Reduction
from .._words import integer
from ._arguments import as_arrays
from ._gradients import apply
from ._losses import (
    alike_or_none,
    as_scalar,
    as_target,
    denominator,
    over,
    refuse_perturbed,
    statistic,
    values_of,
)

_CHUNKS = 4  # by default the logits of a quarter of the rows are held at a time


class Options(NamedTuple):
    ignore_index: int
    rows: int  # of a chunk
    reduced: bool
    mean: bool
    more: tuple[tuple[str, float], ...]  # the options of a loss that are not their defaults


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    bias: jax.Array | None = None,
    class_weight: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    divisor: float | jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """cross_entropy(x @ weight.T + bias, target), which never holds all logits.

    Differentiable in x, weight and bias. Forward makes the gradients with the loss, and backward multiplies
    them by the upstream gradient. Those of float16, which could underflow, and with reduction "none" all are
    made in backward, which computes the logits again. The gradients of weight and bias are added up in
    float32 (float64 for float64).

    Args:
        x: (..., K), of float16, bfloat16 or float32, on the CPU also float64.
        weight: (V, K), of x's dtype, as an embedding has it. Of a kernel (K, V) of Flax pass kernel.T, which
            XLA does not copy.
        target: As in cross_entropy.
        bias: (V) or None, of x's dtype.
        class_weight: (V), the class weights of cross_entropy, or None. It has no gradient.
        ignore_index: As in cross_entropy.
        reduction: As in cross_entropy.
        label_smoothing: As in cross_entropy.
        z_loss: As in cross_entropy.
        scale: As in cross_entropy.
        softcap: As in cross_entropy.
        temperature: As in cross_entropy.
        divisor: As in cross_entropy.
        chunk: The rows whose logits are held at a time. None takes a quarter of all rows. More chunks need
            less memory, and more time to add up the gradient of weight.

    Returns:
        The loss, as cross_entropy returns it.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: A number of rows that an exported program leaves open, a gradient of
            class_weight, or z_loss with class_weight and "mean".

    Examples:
        >>> gander.jax.linear_cross_entropy(jnp.ones((2, 3)), jnp.zeros((4, 3)), jnp.array([0, 3]))
        Array(1.3862944, dtype=float32)
    """
    x, weight, bias, class_weight = as_arrays(x=x, weight=weight, bias=bias, class_weight=class_weight)
    target = as_target(target)
    code = code_of("reduction", reduction, REDUCTIONS)
    check_sum(divisor, None, reduction)
    _check(x, weight, target, bias, class_weight)
    rows = x.size // x.shape[-1] if x.shape[-1] else 0
    check_chunks(chunk, None)
    more = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    if class_weight is not None and reduction == "mean":
        refuse_z_loss(more, "class_weight")
    options = Options(
        integer("ignore_index", ignore_index),
        chunk or max(-(-rows // _CHUNKS), 1),
        code != NONE,
        reduction == "mean",
        tuple(more.items()),
    )
    if reduction == "mean":
        divisor = denominator(target, class_weight, weight.shape[0], options.ignore_index, statistic(x))
    else:
        divisor = None if divisor is None else as_scalar("divisor", divisor, x)
    flat = x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias, class_weight, divisor
    loss = _loss(options, *alike_or_none(*flat))
    return loss if options.reduced else loss.reshape(target.shape)


def _check(x: Any, weight: Any, target: Any, bias: Any, class_weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"weight has shape {weight.shape}, expected (V, {x.shape[-1] if x.ndim else 'K'}) with V classes "
            f"and the last dimension of x, which has shape {x.shape}"
        )
    if not all(isinstance(size, int) for size in x.shape):
        raise NotImplementedError(
            f"x has shape {x.shape}, expected sizes that are known: rows are divided into chunks; export "
            "with that size fixed, or use cross_entropy"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target has shape {target.shape}, expected {x.shape[:-1]}, the leading dimensions of x"
        )
    for name, value in ("bias", bias), ("class_weight", class_weight):
        if value is not None and value.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} has shape {value.shape}, expected {weight.shape[:1]}: one for each class of weight"
            )
    for name, value in ("weight", weight), ("bias", bias):
        if value is not None and value.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {value.dtype}, expected {x.dtype} as x; convert one of them")


# ---- All chunks ----


def _chunks(options: Options, array: Any, padding: Any = 0) -> Any:
    """Rows as (chunks, rows of a chunk, ...). A chunk takes every so many rows, so that rows that are sharded
    over a mesh stay where they are."""
    count = max(-(-array.shape[0] // options.rows), 1)
    missing = count * options.rows - array.shape[0]
    array = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)), constant_values=padding)
    return jnp.moveaxis(array.reshape(options.rows, count, *array.shape[1:]), 1, 0)


def _whole(chunks: Any, rows: int) -> Any:
    """The rows of all chunks."""
    array = jnp.moveaxis(chunks, 0, 1)
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])[:rows]


def _compute(options: Options, makes: bool, given: Any, dloss: Any = None) -> tuple[Any, ...]:
    """The losses of rows; and with makes dx, dw and db for the upstream gradients dloss, one for each row or
    one divided by divisor for all."""
    x, weight, target, bias, class_weight, _ = given
    ignored = options.ignore_index
    info = jnp.iinfo(target.dtype)
    if not info.min <= ignored <= info.max:  # so that no target is ignored, and padding needs one that is
        ignored = -1 if info.min else info.max
        target = jnp.where(target == ignored, jnp.asarray(info.min, target.dtype), target)
    wide = statistic(x)
    each = {"weight": class_weight, "ignore_index": ignored} | dict(options.more)

    def step(sums: Any, part: Any) -> tuple[Any, Any]:
        rows, labels, heads = part
        logits = jnp.matmul(rows, weight.T)
        logits = logits if bias is None else logits + bias
        kept = each | {"x": logits, "target": labels}
        if not makes:
            return sums, (apply("cross_entropy_fwd", kept)["loss"], rows[:, :0])
        if heads is None:
            results = apply("cross_entropy_fwd_dx_", kept | {"upstream": dloss})
            loss, dlogits = results["loss"], results["dx"]
        else:
            results = apply("cross_entropy_fwd", kept | {"needs_lse": True}, lse="2L")
            loss = results["loss"]
            kept |= {"dloss": heads, "lse": results["lse"], "reduction": NONE}
            dlogits = apply("cross_entropy_bwd_", kept)["dx"]
        dw = jnp.matmul(dlogits.T, rows, preferred_element_type=wide)
        db = dlogits.sum(0, dtype=wide)
        return (sums[0] + dw, sums[1] + db), (loss, jnp.matmul(dlogits, weight))

    heads = None if dloss is None or not dloss.ndim else _chunks(options, dloss)
    parts = _chunks(options, x), _chunks(options, target, ignored), heads
    shapes = [weight.shape, weight.shape[:1]] if makes else [(0,), (0,)]
    zeros = alike_or_none(x, *(jnp.zeros(shape, wide) for shape in shapes))[1:]
    (dw, db), (losses, dx) = jax.lax.scan(step, tuple(zeros), parts)
    count = x.shape[0]
    return _whole(losses, count), _whole(dx, count), dw, db


def _result(options: Options, losses: Any, divisor: Any) -> Any:
    loss = losses.sum() if options.reduced else losses
    return loss if divisor is None else loss / divisor


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: Options, *given: Any) -> Any:
    return _result(options, _compute(options, False, given)[0], given[-1])


def _forward(options: Options, *primals: Any) -> tuple[Any, Any]:
    x, _, _, _, class_weight, divisor = primals
    refuse_perturbed(class_weight=class_weight, divisor=divisor)
    given = values_of(*primals)
    divisor = given[-1]
    if not options.reduced or x.value.dtype == jnp.float16:
        return _result(options, _compute(options, False, given)[0], divisor), (given, None)
    factor = alike_or_none(given[0], over(jnp.ones((), statistic(given[0])), divisor, options.mean))[1]
    losses, *gradients = _compute(options, True, given, factor)
    like = [None if array is None else array[:0] for array in (given[1], given[3])]
    return _result(options, losses, divisor), (like, gradients)


def _backward(options: Options, residuals: Any, dloss: Any) -> tuple[Any, ...]:
    if isinstance(dloss, jax.custom_derivatives.SymbolicZero):
        dloss = jnp.zeros(dloss.shape, dloss.dtype)
    kept, gradients = residuals
    if gradients is None:
        _, weight, target, bias, _, divisor = kept
        heads = jnp.broadcast_to(over(dloss, divisor, options.mean), target.shape)
        _, dx, dw, db = _compute(options, True, kept, heads)
    else:
        weight, bias = kept
        dx, dw, db = ((g.astype(dloss.dtype) * dloss).astype(g.dtype) for g in gradients)
    db = None if bias is None else db.astype(bias.dtype)
    return dx, dw.astype(weight.dtype), None, db, None, None


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
