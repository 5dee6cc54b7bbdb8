"""Cross-entropy of a linear layer's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .. import _debug
from .._backend import BACKENDS, backend_of, is_tensor
from .._table import REDUCTIONS, Reduction
from .._words import integer, kind
from .arguments import FAILURES, check_targets, code_of, loss_options, overridden, refuse_z_loss
from .cross_entropy import OUTPUTS, CrossEntropyOutput, LossOutput, check_sum
from .named_tuples import check_outputs, named_tuple
from .probabilities import refuse_probabilities

if TYPE_CHECKING:
    from torch import Tensor


def check_chunks(chunk: Any, accumulate: Any) -> None:
    """Refuses the options of linear_cross_entropy's chunks."""
    expected = "a number of rows of 1 or more, or None"
    if chunk is not None and integer("chunk", chunk, expected) < 1:
        raise ValueError(f"chunk is {chunk}, expected {expected}")
    if accumulate is not None:
        code_of("accumulate", accumulate, ("float32",), "None or ")


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = ...,
    weight_ce: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    divisor: float | Tensor | None = ...,
    upstream: float | Tensor | None = ...,
    chunk: int | None = ...,
    *,
    accumulate: Literal["float32"] | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    outputs: None = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = ...,
    weight_ce: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    divisor: float | Tensor | None = ...,
    upstream: float | Tensor | None = ...,
    chunk: int | None = ...,
    *,
    accumulate: Literal["float32"] | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    outputs: Sequence[LossOutput],
) -> CrossEntropyOutput: ...


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    weight_ce: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    upstream: float | Tensor | None = None,
    chunk: int | None = None,
    *,
    accumulate: Literal["float32"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    outputs: Sequence[LossOutput] | None = None,
) -> Any:
    """cross_entropy(x @ weight.T + bias, target), which never holds all logits. Torch tensors only.

    Differentiable in x, weight and bias. Ignored rows take part in the matrix products. Inside torch.func's
    transforms all logits are held.

    weight may be a DTensor whose classes are sharded over a mesh of one dimension, with x replicated and bias
    sharded alike: a column-parallel head. All ranks return the same loss, a DTensor. For each chunk they
    gather 12 bytes per row, 16 with label smoothing. The gradient of x is a partial sum. weight_ce goes with
    neither label_smoothing nor z_loss there. See gander.distributed for what ranks have to agree on.

    Args:
        x: (..., K), of float16, bfloat16 or float32 (on the CPU also float64). Under autocast x, weight and
            bias are cast, as in torch.nn.functional.linear.
        weight: (V, K), of x's dtype.
        target: Class indices, as in cross_entropy.
        bias: (V) or None, of x's dtype. Its gradient is always added in float32.
        weight_ce: (V), the class weights of cross_entropy, or None.
        ignore_index: As in cross_entropy.
        reduction: As in cross_entropy.
        divisor: As in cross_entropy.
        upstream: The gradient of the loss that backward is expected to bring, as in cross_entropy. It is 1 by
            default, and if its size is not from 2^-64 to 2^64. Forward makes the gradients for it, with
            torch's matrix products. Gradients of bfloat16 and float32 are multiplied in backward if another
            one comes, which rounds once more. Gradients of float16 would have underflowed: they are made
            again, and so are those of a second backward pass. Without upstream, gradients of float16 are made
            in backward, and with reduction "none" all are. With upstream, float16's backward waits for the
            device to see whether they have to be.
        chunk: The rows whose logits are held at a time. None takes a quarter of all rows. More chunks need
            less memory, and more time to add up the gradient of weight.
        accumulate: "float32" adds up the gradient of weight over the chunks in float32, in a tensor of its
            own. By default each sum is rounded to weight's dtype.
        label_smoothing: As in cross_entropy.
        z_loss: As in cross_entropy.
        scale: As in cross_entropy.
        softcap: As in cross_entropy.
        temperature: As in cross_entropy.
        outputs: As in cross_entropy, but "z_loss" and "lse" have no gradient. All but the loss come from
            another read of each chunk's logits.

    Returns:
        The loss, or a named tuple of the outputs, as cross_entropy returns them.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: A target, under set_debug(True).
        NotImplementedError: A nested or sparse tensor, other placements of DTensors, an option that a sharded
            weight does not have, or a gradient of "z_loss" or "lse", except in a graph of torch.compile,
            which cannot raise: there all gradients are NaN, or with "none" those of its row.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]))
        tensor(1.3863)
    """
    ops = BACKENDS.get(type(x)) or backend_of(x)
    others = weight, target, bias, weight_ce
    if ops is None or any(type(value) not in BACKENDS and backend_of(value) is None for value in others):
        return overridden(linear_cross_entropy, locals())
    if not is_tensor(x):
        raise TypeError(f"x is {kind(x)}, expected a torch.Tensor")
    code = code_of("reduction", reduction, REDUCTIONS)
    check_sum(divisor, upstream, reduction)
    check_chunks(chunk, accumulate)
    names = ("loss",) if outputs is None else check_outputs(outputs, OUTPUTS, "None or ")
    options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    if weight_ce is not None and reduction == "mean":
        refuse_z_loss(options, "weight_ce")
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    try:
        if _debug.is_enabled and hasattr(weight, "shape"):
            check_targets(ops, weight.shape[0], target, ignore_index)
        found = ops.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            weight_ce,
            ignore_index,
            code,
            divisor,
            upstream,
            chunk,
            accumulate is not None,
            options,
            names,
        )
    except FAILURES as error:
        refuse_probabilities(ops, x, target)
        given = {"x": x, "weight": weight, "target": target, "bias": bias, "weight_ce": weight_ce}
        raise ops.explained(error, **given) from None
    if outputs is None:
        return found["loss"]
    return named_tuple("CrossEntropyOutput", names, [found[name] for name in names])
