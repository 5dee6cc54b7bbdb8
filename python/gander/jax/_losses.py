"""cross_entropy.

The operators give the loss of each row; JAX adds them up, and XLA does so over a mesh. So rows may be
sharded, and a mean is over the rows of all devices. Its denominator is known before the loss is, so that the
gradient can be made in the same pass over the logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._functions.arguments import code_of, loss_options, refuse_z_loss
from .._functions.cross_entropy import check_sum
from .._functions.probabilities import check_ignored
from .._table import LOSS_OPTIONS, NONE, REDUCTIONS, SUM, Reduction
from .._words import check_flags, integer, number
from ._arguments import as_arrays
from ._gradients import apply
from ._sharding import alike

_PARTS = "2L"  # of the log-sum-exp of rows, the maximum and the logarithm of the sum, which lose no digits


class Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    z_loss: float
    scale: float
    softcap: float
    temperature: float
    batch_invariant: bool
    one_pass: bool
    mean: bool


def statistic(x: Any) -> Any:
    """The dtype of losses."""
    return jnp.dtype("float64" if x.dtype == jnp.float64 else "float32")


def cross_entropy(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    divisor: float | jax.Array | None = None,
    upstream: float | jax.Array | None = None,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Cross-entropy of logits and class indices, or class probabilities.

    The loss of a row is weight[t] * (lse(x) - x[t]), where t is its target and lse(x) its log-sum-exp. With
    e = label_smoothing it is (1 - e) * weight[t] * (lse - x[t]) + e / N * sum(weight * (lse - x)): Szegedy et
    al., "Rethinking the Inception Architecture for Computer Vision", 2016. With class probabilities it is
    sum(weight * ((1 - e) * target + e / N) * (lse - x)).

    Args:
        x: (..., N), N >= 1 classes, of float16, bfloat16 or float32, on the CPU also float64.
        target: x.shape[:-1], uint8, int32 or int64. Rows whose target is ignore_index are ignored. Another
            target that is not in [0, N) is never used as an index. It makes the loss of its row NaN, and with
            "mean" those of all rows. Or class probabilities, as in gander.cross_entropy: x.shape, float16,
            bfloat16 or float32 (float64 for float64). They have no gradient.
        weight: (N) class weights, float16, bfloat16 or float32 (float64 for float64), or None. It has no
            gradient.
        ignore_index: The target of rows that are ignored.
        reduction: "mean", "sum" or "none". The mean is over the sum of the weights of the rows that are not
            ignored. If all are ignored it is NaN and the gradients are zero.
        label_smoothing: The share of a row's loss that all classes have alike, 0 to 1.
        z_loss: As in gander.cross_entropy.
        scale: As in gander.cross_entropy.
        softcap: As in gander.cross_entropy.
        temperature: As in gander.cross_entropy.
        divisor: What loss and gradient are divided by, with reduction "sum": a number or an array of one.
        upstream: The gradient of the loss that backward is expected to bring, a number or an array of one:
            1/4 if the loss is divided by 4 afterwards. The single pass makes the gradient for it, for 1 by
            default, and where its size is not from 2^-64 to 2^64.
        one_pass: Whether a gradient is made in the same pass over x as the loss, with "mean" and "sum". It is
            kept for backward in place of x. Backward multiplies it if another upstream gradient came than the
            expected one, and rounds once more then. False computes it in backward, which reads x again. None
            is True, but for float16 without upstream, which could underflow.
        batch_invariant: As in gander.softmax, for the loss of each row.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or one value for each row with "none".

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: Classes that are sharded over a mesh, or a gradient of weight.

    Examples:
        >>> gander.jax.cross_entropy(jnp.zeros((3, 4)), jnp.array([0, 3, -100]))
        Array(1.3862944, dtype=float32)
    """
    x, target, weight = as_arrays(x=x, target=as_target(target, x), weight=weight)
    code = code_of("reduction", reduction, REDUCTIONS)
    check_flags(batch_invariant=batch_invariant, **({} if one_pass is None else {"one_pass": one_pass}))
    check_sum(divisor, upstream, reduction)
    if one_pass is None:
        one_pass = x.dtype != jnp.float16 or upstream is not None
    more = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    options = Options(
        integer("ignore_index", ignore_index),
        *(LOSS_OPTIONS | more).values(),
        batch_invariant,
        one_pass,
        reduction == "mean",
    )
    check_class_weights(x, weight)
    if jnp.issubdtype(target.dtype, jnp.floating):
        losses = _of_probabilities(options, x, target, weight)
        if code == NONE:
            return losses
        if options.mean:
            return losses.mean()
        return _divided(losses.sum(), None if divisor is None else as_scalar("divisor", divisor, x))
    if weight is not None and options.mean:
        refuse_z_loss(more, "weight")
    if code == NONE:
        return _each_row(options, *alike_or_none(x, target, weight))
    if reduction == "mean" and x.ndim:
        divisor = denominator(target, weight, x.shape[-1], options.ignore_index, statistic(x))
    else:
        divisor = None if divisor is None else as_scalar("divisor", divisor, x)
    upstream = None if upstream is None else as_upstream(upstream, x)
    return _of_all_rows(options, *alike_or_none(x, target, weight, divisor, upstream))


# ---- Arguments ----


def as_target(target: Any, x: Any = None) -> Any:
    """Targets in a dtype that the operators take. x: the logits, where they may be class probabilities."""
    (array,) = as_arrays(target=target)
    floating = array is not None and jnp.issubdtype(array.dtype, jnp.floating)
    if floating and x is not None and array.ndim == jnp.ndim(x):
        return array
    if array is None or array.dtype not in (jnp.uint8, jnp.int32, jnp.int64):
        found = "is None" if array is None else f"has dtype {array.dtype}"
        raise TypeError(f"target {found}, expected an array of uint8, int32 or int64; convert it")
    return array.astype(jnp.int32) if array.dtype == jnp.uint8 else array


def as_scalar(name: str, value: Any, x: Any) -> Any:
    """A number, or an array of one, in the dtype of losses."""
    if not hasattr(value, "dtype"):
        return jnp.asarray(number(name, value), statistic(x))
    (array,) = as_arrays(**{name: value})
    if array.size != 1 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, expected one floating number"
        )
    return array.reshape(()).astype(statistic(x))


def as_upstream(value: Any, x: Any) -> Any:
    """The upstream gradient to make gradients for: the expected one, or 1 if what is made for it, such as 0,
    could not be multiplied into what comes."""
    upstream = as_scalar("upstream", value, x)
    size = jnp.abs(upstream)
    return jnp.where((size >= 2.0**-64) & (size <= 2.0**64), upstream, jnp.ones_like(upstream))


def check_class_weights(x: Any, weight: Any) -> None:
    """Refuses class weights before a denominator is made of them."""
    if weight is not None and x.ndim and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"cross_entropy_forward: weight has shape {weight.shape}, expected {x.shape[-1:]}: one for each "
            "column of x"
        )


def alike_or_none(*arrays: Any) -> list[Any]:
    """Arrays that vary over the same axes, where some may be absent."""
    given = iter(alike([array for array in arrays if array is not None]))
    return [None if array is None else next(given) for array in arrays]


def denominator(target: Any, weight: Any, classes: int, ignore_index: int, dtype: Any) -> Any:
    """The sum of the weights of the rows that are not ignored. NaN if a target is not a class."""
    inside = (target >= 0) & (target < classes)
    each = jnp.where(inside, jnp.asarray(1, dtype), jnp.asarray(jnp.nan, dtype))
    if weight is not None:
        each = each * weight.astype(dtype)[jnp.clip(target, 0, classes - 1)]
    info = jnp.iinfo(target.dtype)
    if info.min <= ignore_index <= info.max:
        each = jnp.where(target == ignore_index, jnp.asarray(0, dtype), each)
    return each.sum()


# ---- The loss of each row ----


def _of_probabilities(options: Options, x: Any, target: Any, weight: Any) -> Any:
    check_ignored(options.ignore_index)
    given = {"x": x, "target": target, "weight": weight, "reduction": NONE} | options._asdict()
    for name in ("ignore_index", "one_pass", "mean"):
        del given[name]
    return apply("soft_cross_entropy", given)["loss"]


def _given(options: Options, x: Any, target: Any, weight: Any, **more: Any) -> dict[str, Any]:
    kept = options._asdict()
    del kept["one_pass"], kept["mean"]
    return {"x": x, "target": target, "weight": weight} | kept | more


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each_row(options: Options, x: Any, target: Any, weight: Any) -> Any:
    return apply("cross_entropy_fwd", _given(options, x, target, weight))["loss"]


def _each_row_forward(options: Options, x: Any, target: Any, weight: Any) -> Any:
    refuse_perturbed(weight=weight)
    x, target, weight = values_of(x, target, weight)
    results = apply("cross_entropy_fwd", _given(options, x, target, weight, needs_lse=True), lse=_PARTS)
    return results["loss"], (x, target, weight, results["lse"])


def _each_row_backward(options: Options, residuals: Any, dloss: Any) -> Any:
    x, target, weight, lse = residuals
    given = _given(options, x, target, weight, dloss=_instance(dloss), lse=lse, reduction=NONE)
    return apply("cross_entropy_bwd", given)["dx"], None, None


def refuse_perturbed(**primals: Any) -> None:
    """Refuses gradients of arguments that have none."""
    for name, primal in primals.items():
        if primal is not None and primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.inexact):
            raise NotImplementedError(
                f"gander: a gradient of {name} is wanted, but cross_entropy has none for it, expected a "
                f"constant; pass jax.lax.stop_gradient({name})"
            )


def values_of(*primals: Any) -> list[Any]:
    return [None if primal is None else primal.value for primal in primals]


def _instance(gradient: Any) -> Any:
    """An upstream gradient, also one that JAX knows to be zero."""
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype)
    return gradient


_each_row.defvjp(_each_row_forward, _each_row_backward, symbolic_zeros=True)


# ---- Their sum, divided or not ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_all_rows(options: Options, x: Any, target: Any, weight: Any, divisor: Any, upstream: Any) -> Any:
    losses = apply("cross_entropy_fwd", _given(options, x, target, weight))["loss"]
    return _divided(losses.sum(), divisor)


def _divided(loss: Any, divisor: Any) -> Any:
    return loss if divisor is None else loss / divisor


def _of_all_rows_forward(
    options: Options, x: Any, target: Any, weight: Any, divisor: Any, upstream: Any
) -> tuple[Any, Any]:
    refuse_perturbed(weight=weight, divisor=divisor, upstream=upstream)
    x, target, weight, divisor, upstream = values_of(x, target, weight, divisor, upstream)
    if options.one_pass:
        losses, dx = _with_gradient(options, x, target, weight, divisor, upstream)
        return _divided(losses.sum(), divisor), (dx, upstream)
    results = apply("cross_entropy_fwd", _given(options, x, target, weight, needs_lse=True), lse=_PARTS)
    loss = _divided(results["loss"].sum(), divisor)
    return loss, (x, target, weight, divisor, results["lse"])


def _of_all_rows_backward(options: Options, residuals: Any, dloss: Any) -> Any:
    dloss = _instance(dloss)
    if options.one_pass:
        dx, upstream = residuals
        dx = _rescaled(*alike([dx, dloss, jnp.ones_like(dloss) if upstream is None else upstream]))
    else:
        x, target, weight, divisor, lse = residuals
        # Divided here: a divisor for each sample of a batch would be a call for each.
        given = _given(
            options, x, target, weight, dloss=over(dloss, divisor, options.mean), lse=lse, reduction=SUM
        )
        dx = apply("cross_entropy_bwd", given)["dx"]
    return dx, None, None, None, None


_of_all_rows.defvjp(_of_all_rows_forward, _of_all_rows_backward, symbolic_zeros=True)


def over(dloss: Any, divisor: Any, mean: bool) -> Any:
    """dloss / divisor. If that of a mean is 0, all rows are ignored, and their gradients are 0."""
    if divisor is None:
        return dloss
    return jnp.where(divisor == 0, jnp.zeros_like(dloss), dloss / divisor) if mean else dloss / divisor


def _with_gradient(
    options: Options, x: Any, target: Any, weight: Any, divisor: Any, upstream: Any
) -> tuple[Any, Any]:
    """The losses of rows, and the gradient of their sum divided by divisor, times upstream."""
    expected = jnp.ones((), statistic(x)) if upstream is None else upstream
    factor = over(expected, divisor, options.mean)
    x, target, weight, factor = alike_or_none(x, target, weight, factor)
    return _one_pass(options)(x, target, weight, factor)


def _one_pass(options: Options) -> Any:
    """The losses of rows, and the gradient of their sum times a factor.

    Under vmap the samples of a batch have factors of their own, and the operator takes one. So they are
    multiplied afterwards, which rounds once more.
    """

    def call(x: Any, target: Any, weight: Any, factor: Any) -> tuple[Any, Any]:
        given = _given(options, x, target, weight, upstream=factor, needs_dx=True)
        results = apply("cross_entropy_fwd", given)
        return results["loss"], results["dx"]

    function = jax.custom_batching.custom_vmap(call)

    @function.def_vmap
    def rule(size: int, batched: Any, x: Any, target: Any, weight: Any, factor: Any) -> Any:
        axes = [0 if flag else None for flag in batched[:3]]
        if not any(flag == 0 for flag in axes):  # a batch of factors alone
            axes[0], x = 0, jnp.broadcast_to(x, (size, *x.shape))
        losses, dx = jax.vmap(partial(call, factor=None), axes, axis_size=size)(x, target, weight)
        return (losses, _times(dx, factor)), (True, True)

    return function


def _times(dx: Any, factor: Any) -> Any:
    """dx of a batch, times a factor or one for each sample."""
    factor = factor.reshape(*factor.shape, *[1] * (dx.ndim - 1)) if factor.ndim else factor
    return (dx.astype(factor.dtype) * factor).astype(dx.dtype)


@jax.custom_batching.custom_vmap
def _rescaled(dx: Any, dloss: Any, upstream: Any) -> Any:
    """dx * dloss / upstream. dx is neither read nor written if the two are the same."""
    return apply("rescale_", {"x": dx, "dloss": dloss, "upstream": upstream})["y"]


@_rescaled.def_vmap
def _(size: int, batched: Any, dx: Any, dloss: Any, upstream: Any) -> Any:
    dx = dx if batched[0] else jnp.broadcast_to(dx, (size, *dx.shape))
    return _times(dx, dloss / upstream), True
