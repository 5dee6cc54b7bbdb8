"""gander.cross_entropy, and what its outputs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, overload

from .. import _debug
from .._backend import BACKENDS, backend_of
from .._table import MEAN, REDUCTIONS, Reduction
from .._words import check_flags, integer, shown
from .arguments import (
    FAILURES,
    ONE,
    ZERO,
    A,
    Array,
    check_targets,
    code_of,
    loss_options,
    overridden,
    refuse_loss_options,
    refuse_z_loss,
)
from .named_tuples import check_outputs, named_tuple
from .probabilities import has_probabilities, of_probabilities

_MEAN = REDUCTIONS[MEAN]  # compared by identity, like AUTO

LossOutput = Literal["loss", "z_loss", "lse", "predicted", "is_top1"]
OUTPUTS = ("loss", "z_loss", "lse", "predicted", "is_top1")


class CrossEntropyOutput(Protocol):
    """What cross_entropy returns with outputs: a named tuple of what was asked for, in that order."""

    loss: Any
    z_loss: Any
    lse: Any
    predicted: Any
    is_top1: Any

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def check_sum(divisor: Any, upstream: Any, reduction: Any) -> None:
    """Refuses what needs another reduction."""
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor is given with reduction {reduction!r}, expected 'sum', which it divides")
    if upstream is not None and reduction == "none":
        raise ValueError(
            "upstream is given with reduction 'none', expected 'sum' or 'mean': it is one number"
        )


@overload
def cross_entropy(
    x: A,
    target: Array,
    lse_partial: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    upstream: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    outputs: None = ...,
) -> A: ...
@overload
def cross_entropy(
    x: A,
    target: Array,
    lse_partial: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    upstream: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    outputs: Sequence[LossOutput],
) -> CrossEntropyOutput: ...
def cross_entropy(
    x: A,
    target: Array,
    lse_partial: Array | None = None,
    weight: Array | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    *,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
    divisor: float | Array | None = None,
    upstream: float | Array | None = None,
    label_smoothing: float = ZERO,
    z_loss: float = ZERO,
    scale: float = ONE,
    softcap: float | None = None,
    temperature: float = ONE,
    outputs: Sequence[LossOutput] | None = None,
) -> A | CrossEntropyOutput:
    """Cross-entropy of logits and class indices, or class probabilities, differentiable in x.

    The loss of a row is weight[t] * (lse(x) - x[t]), where t is its target and lse(x) its log-sum-exp.
    Gradient: dx = dloss * weight[t] * (softmax(x) - 1[t]). For accuracy, the maximum and the logarithm of the
    sum are saved for it as two numbers, not as lse.

    With e = label_smoothing the loss of a row is (1 - e) * weight[t] * (lse - x[t]) + e / N * sum(weight *
    (lse - x)). Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016.
    z_loss: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022. softcap: Gemma Team,
    "Gemma 2: Improving Open Language Models at a Practical Size", 2024.

    With class probabilities q it is sum(weight * q * (lse - x)), where label_smoothing makes (1 - e) * q +
    e / N of q. Gradient: dx = dloss * (sum(weight * q) * softmax(x) - weight * q). Forward reads x and target
    once, as backward does, and no other tensor of their size is made but dx.

    Args:
        x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU also float64), any
            strides. A torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
        target: x.shape[:-1], uint8, int32 or int64 (uint8 is copied to int64). Rows whose target is
            ignore_index are ignored. Another target that is not in [0, N) is never used as an index. It makes
            the loss and the gradient of its row NaN, and with "mean" those of all rows (see set_debug).
            Or class probabilities: of x's shape and float16, bfloat16 or float32 (float64 for float64). They
            may be any numbers, as in torch, but have no gradient. A class of probability or weight 0 counts
            for nothing, even if its logit is -inf (where torch's loss is NaN). one_pass and upstream do not
            apply.
        lse_partial: (..., K), of any of these dtypes, not only x's: parts of the log-sum-exp of each row,
            such as the log-sum-exps of slices of x. The log-sum-exp of a row of lse_partial is taken for that
            of the row of x, which forward then only reads at the target. It gets no gradient: that of x is
            complete. Torch tensors only. one_pass, upstream and batch_invariant do not apply.
        weight: (N) class weights, float16, bfloat16 or float32 (float64 for float64), or None.
        ignore_index: The target of rows that are ignored. Negative with class probabilities, none of which is
            ignored.
        reduction: "mean", "sum" or "none". The mean is over the sum of the weights of the rows that are not
            ignored. If all are ignored it is NaN and the gradients are zero, as in torch. With class
            probabilities it is over the number of rows, as in torch.
        inplace_backward: Backward writes the gradient over x, which saves a tensor of the size of x. x must
            not be used afterwards: autograd refuses a backward pass that still needs it. Ignored inside
            torch.compile, under hooks on saved tensors, where autograd does not see that x was written, and
            where x is expanded.
            Torch tensors only.
        one_pass: True computes the gradient together with the loss. This reads x once, and keeps a tensor of
            the size of x until backward. False computes it in backward, which reads x again. None chooses by
            size, and inside torch.compile False, because Inductor writes the gradient over x. It applies only
            to a mean or a sum on a CUDA device, without inplace_backward and batch_invariant. Inside
            torch.compile it also takes Inductor, outside of activation checkpoints, with donated buffers
            (torch's default).
        batch_invariant: As in softmax, for the loss of each row, and for its gradient with "none" or "sum".
            The gradient of a mean depends on all rows.
        divisor: What loss and gradient are divided by, with reduction "sum": a number, or a 0-dim tensor of
            any real dtype on x's device, which is read there, without synchronization. For a sum over all
            tokens of a step, whose number only the training loop knows.
        upstream: The gradient of the loss that backward is expected to bring, a number or such a tensor: 1/4
            for `(loss / 4).backward()`, a GradScaler's scale. The single pass makes the gradient for it (for
            1 by default). Backward compares the two on the device, and computes the gradient again if they
            differ. So upstream changes the time, never the result. A tensor is copied when the loss is
            computed, except inside torch.compile: there autograd refuses a backward pass after it was written
            to.
        label_smoothing: The share of a row's loss that all classes have alike, 0 to 1, as in torch. A row
            whose target has weight 0 then counts. A logit of -inf makes the loss +inf, unless its class has
            weight 0 (where torch's is NaN). Not with lse_partial.
        z_loss: The factor of lse^2 that is added to the loss of a row that is not ignored, at least 0. A row
            whose target has weight 0 then counts. The mean is over rows, so it takes no weight, unless target
            has class probabilities. Not with lse_partial.
        scale: x is first mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap
            to z = scale * x / temperature. All of this is then of z, but dx is the gradient of x. More than
            0. Not with lse_partial.
        softcap: See scale. More than 0, or None.
        temperature: See scale. More than 0.
        outputs: None, or the names of what is returned as a named tuple, in that order. "loss" is the loss,
            z-loss included; "z_loss" is the z-loss alone, reduced as the loss is, and 0 without one. Of each
            row, "lse" is the log-sum-exp, "predicted" the class with the largest logit, the first one of
            several, and "is_top1" tells whether that is the target. The logits are read once; for predicted
            and is_top1 with label_smoothing twice. loss, z_loss and lse have gradients, in a pass of their
            own: one_pass and upstream do not apply. Not with lse_partial.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or one value for each row with "none". With outputs
        a named tuple: lse is float32 (float64 for float64), predicted int64, is_top1 bool. An ignored row has
        lse 0, predicted -1 and is_top1 False. A row with a NaN or +inf has lse NaN and predicted -1.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: A target, under set_debug(True).
        NotImplementedError: A nested or sparse tensor; outputs of a DTensor; a gradient of target.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> x, target = torch.zeros(3, 4), torch.tensor([0, 3, -100])
        >>> gander.cross_entropy(x, target)
        tensor(1.3863)
        >>> gander.cross_entropy(x, target, outputs=("loss", "predicted"))
        CrossEntropyOutput(loss=tensor(1.3863), predicted=tensor([ 0,  0, -1]))
        >>> gander.cross_entropy(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
        tensor(1.3863)
    """
    names = None if outputs is None else check_outputs(outputs, OUTPUTS, "None or ")
    code = MEAN if reduction is _MEAN else code_of("reduction", reduction, REDUCTIONS)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    if one_pass is not None:
        check_flags(one_pass=one_pass)
    options: dict[str, Any] = {}
    if not (label_smoothing is z_loss is ZERO and scale is temperature is ONE and softcap is None):
        options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy, locals())  # type: ignore[no-any-return]
    if divisor is not None or upstream is not None:
        check_sum(divisor, upstream, reduction)
        divisor = None if divisor is None else ops.scalar("divisor", divisor, x)
        upstream = None if upstream is None else ops.scalar("upstream", upstream, x)
    try:
        if has_probabilities(ops, x, target):
            options |= {"batch_invariant": batch_invariant, "inplace_backward": inplace_backward}
            given = x, target, weight, divisor, lse_partial, names, ignore_index, code
            return of_probabilities(ops, *given, **options)
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        if lse_partial is not None:
            refuse_loss_options(options, "with lse_partial")
            if names is not None:
                raise NotImplementedError(
                    f"outputs is {shown(names)} with lse_partial, expected None: x is only read at the "
                    "target then; leave one of them out"
                )
            loss = ops.with_lse_partial(x, target, lse_partial, weight, ignore_index, code, inplace_backward)
            return loss if divisor is None else loss / divisor
        if names is not None:
            if code == MEAN and weight is not None:
                refuse_z_loss(options, "weight")
            found = ops.cross_entropy_outputs(
                names,
                x,
                target,
                weight,
                divisor,
                ignore_index=ignore_index,
                reduction=code,
                batch_invariant=batch_invariant,
                inplace_backward=inplace_backward,
                **options,
            )
            return named_tuple("CrossEntropyOutput", names, [found[name] for name in names])
        return ops.cross_entropy(
            x,
            target,
            weight,
            divisor,
            upstream,
            ignore_index=ignore_index,
            reduction=code,
            batch_invariant=batch_invariant,
            inplace_backward=inplace_backward,
            one_pass=one_pass,
            **options,
        )[0]
    except FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "lse_partial": lse_partial}
        raise ops.explained(error, **given) from None
