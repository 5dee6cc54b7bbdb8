"""Cross-entropy, also of a linear layer's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from .. import _debug
from .._backend import BACKENDS, backend_of, is_tensor
from .._table import MEAN, NONE, REDUCTIONS, Reduction
from .._words import check_flags, integer, kind
from .arguments import FAILURES, any_overrides, check_out, check_targets, code_of, overridden

if TYPE_CHECKING:
    from torch import Tensor


_MEAN = REDUCTIONS[MEAN]  # compared by identity, like AUTO


def check_chunks(chunk: Any, accumulate: Any) -> None:
    """Refuses the options of linear_cross_entropy's chunks."""
    expected = "a number of rows of 1 or more, or None"
    if chunk is not None and integer("chunk", chunk, expected) < 1:
        raise ValueError(f"chunk is {chunk}, expected {expected}")
    if accumulate is not None:
        code_of("accumulate", accumulate, ("float32",), "None or ")


def _of_sum(divisor: Any, upstream: Any, reduction: Any) -> None:
    """Refuses what needs another reduction."""
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor is given with reduction {reduction!r}, expected 'sum', which it divides")
    if upstream is not None and reduction == "none":
        raise ValueError(
            "upstream is given with reduction 'none', expected 'sum' or 'mean': it is one number"
        )


def cross_entropy(
    x: Any,
    target: Any,
    lse_partial: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    *,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
    divisor: Any = None,
    upstream: Any = None,
) -> Any:
    """Cross-entropy of logits and class indices, differentiable in x.

    The loss of a row is weight[t] * (lse(x) - x[t]), where t is its target and lse(x) its log-sum-exp.
    x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU also float64), any
    strides. A torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
    target: x.shape[:-1], int32 or int64, or uint8, which is copied to int64. Rows whose target is
    ignore_index are ignored. Another target that is not in [0, N) is never used as an index. It makes the
    loss and the gradient of its row NaN, and with "mean" those of all rows (see set_debug).
    weight: (N) class weights, float16, bfloat16 or float32 (float64 for float64), or None.
    reduction: "mean", "sum" or "none". The mean is over the sum of the weights of the rows that are not
    ignored. If all are ignored it is NaN and the gradients are zero, as in torch.
    inplace_backward: backward writes the gradient over x, which saves a tensor of the size of x. x must not
    be used afterwards: autograd refuses a backward pass that still needs it. Ignored inside torch.compile,
    and under hooks on saved tensors, where autograd does not see that x was written. Torch tensors only.
    one_pass: True computes the gradient together with the loss. This reads x once, and keeps a tensor of the
    size of x until backward. False computes it in backward, which reads x again. None chooses by size, and
    inside torch.compile False, because Inductor writes the gradient over x. It applies only to a mean or a
    sum on a CUDA device, without inplace_backward and batch_invariant. Inside torch.compile it also takes
    Inductor, outside of activation checkpoints, with donated buffers (torch's default).
    batch_invariant: as in softmax, for the loss of each row, and for its gradient with "none" or "sum". The
    gradient of a mean depends on all rows.
    divisor: what loss and gradient are divided by, with reduction "sum": a number, or a 0-dim tensor of any
    real dtype on x's device, which is read there, without synchronization. For a sum over all tokens of a
    step, whose number only the training loop knows.
    upstream: the gradient of the loss that backward is expected to bring, a number or such a tensor: 1/4 for
    `(loss / 4).backward()`, a GradScaler's scale. The single pass makes the gradient for it (for 1 by
    default). backward compares the two on the device, and computes the gradient again if they differ. So
    upstream changes the time, never the result. A tensor is copied when the loss is computed, except inside
    torch.compile: there autograd refuses a backward pass after it was written to.
    lse_partial: (..., K), of any of these dtypes, not only x's: parts of the log-sum-exp of each row, such as
    the log-sum-exps of slices of x. The log-sum-exp of a row of lse_partial is taken for that of the row of
    x, which forward then only reads at the target. It gets no gradient: that of x is complete. Torch tensors
    only. one_pass, upstream and batch_invariant do not apply. torch.compile breaks its graph at such a call.
    Returns the loss, float32 (float64 for float64): a scalar, or one value for each row with "none".
    Raises TypeError (dtype), ValueError (shape, reduction), RuntimeError (device, driver, memory).
    Gradient: dx = dloss * weight[t] * (softmax(x) - 1[t]). For accuracy, the maximum and the logarithm of the
    sum are saved for it as two numbers, not as lse.
    """
    code = MEAN if reduction is _MEAN else code_of("reduction", reduction, REDUCTIONS)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    if one_pass is not None:
        check_flags(one_pass=one_pass)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy, locals())
    if divisor is not None or upstream is not None:
        _of_sum(divisor, upstream, reduction)
        divisor = None if divisor is None else ops.scalar("divisor", divisor, x)
        upstream = None if upstream is None else ops.scalar("upstream", upstream, x)
    try:
        if _debug.enabled:
            check_targets(ops, x, target, ignore_index)
        if lse_partial is not None:
            loss = ops.with_lse_partial(x, target, lse_partial, weight, ignore_index, code, inplace_backward)
            return loss if divisor is None else loss / divisor
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
        )[0]
    except FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "lse_partial": lse_partial}
        raise ops.explained(error, **given) from None


def cross_entropy_fwd(
    x: Any,
    target: Any,
    target_logit: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_dx: bool = False,
    inplace_backward: bool = False,
    *,
    batch_invariant: bool = False,
    divisor: Any = None,
) -> Any:
    """The loss of each row, without a gradient. Returns loss, (loss, lse), (loss, dx) or (loss, lse, dx).

    loss and lse (the log-sum-exp of each row): float32 (float64 for float64) of shape x.shape[:-1].
    dx: the gradient of the sum of the losses, computed in the same pass over x, with x's shape and dtype.
    With inplace_backward it is written over x, and x itself is returned.
    divisor: as in cross_entropy, for the loss of each row and for dx.
    target_logit: the logits of the targets, in place of those in x, with x.shape[:-1]; or (..., K), of which
    target chooses one. x then only gives the log-sum-exp, and weight has an element for each class that
    target may name. With x.shape[:-1] and without weight any target >= 0 is a class. Refused with return_dx.
    Torch tensors only, for which torch.compile breaks its graph.
    Other arguments and errors are those of cross_entropy.
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(return_lse) is not bool or type(return_dx) is not bool:
        check_flags(return_lse=return_lse, return_dx=return_dx)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_fwd, locals())
    if divisor is not None:
        divisor = ops.scalar("divisor", divisor, x)
    try:
        if target_logit is not None:
            if return_dx:
                raise NotImplementedError(
                    "return_dx is set with target_logit, expected one of them; cross_entropy_bwd takes the "
                    "lse"
                )
            loss, lse = ops.with_target_logit(
                ops.detached(x), target, ops.detached(target_logit), ops.detached(weight), ignore_index
            )
            if divisor is not None:
                loss = loss / divisor
            return (loss, lse) if return_lse else loss
        if _debug.enabled:
            check_targets(ops, x, target, ignore_index)
        operands = ops.detached(x), target, ops.detached(weight), divisor
        options = {"ignore_index": ignore_index, "batch_invariant": batch_invariant}
        if return_dx and inplace_backward:
            loss, lse = ops.cross_entropy_fwd_dx_(*operands, **options)
            dx = x
        else:
            demands = {"needs_lse": return_lse, "needs_dx": return_dx}
            loss, lse, dx = ops.cross_entropy_fwd(*operands, **options, **demands)
    except FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "target_logit": target_logit}
        raise ops.explained(error, **given) from None
    results = (loss, *[lse] * bool(return_lse), *[dx] * bool(return_dx))
    return results if len(results) > 1 else loss


def cross_entropy_bwd(
    x: Any,
    target: Any,
    dloss: Any,
    lse: Any,
    weight: Any = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> Any:
    """The gradient of the rows' losses: dx = dloss * weight[t] * (softmax(x) - 1[t]), with x's shape and
    dtype.

    dloss: x.shape[:-1] with any strides, or a single value for all rows. lse: x.shape[:-1], as returned by
    cross_entropy_fwd. Both are float32 (float64 for float64).
    With inplace_backward dx is written over x, and x itself is returned.
    The bits of a row never depend on other rows. Other arguments and errors are those of cross_entropy.
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool:
        check_flags(inplace_backward=inplace_backward)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_bwd, locals())
    try:
        if _debug.enabled:
            check_targets(ops, x, target, ignore_index)
        if inplace_backward:
            ops.cross_entropy_bwd_(
                ops.detached(x), target, weight, dloss, lse, ignore_index=ignore_index, reduction=NONE
            )
            return x
        return ops.cross_entropy_bwd(x, target, weight, dloss, lse, ignore_index=ignore_index, reduction=NONE)
    except FAILURES as error:
        raise ops.explained(error, x=x, target=target, dloss=dloss, lse=lse, weight=weight) from None


def cross_entropy_fwd_out(
    x: Any,
    target: Any,
    target_logit: Any,
    loss: Any,
    lse: Any,
    dx: Any,
    weight: Any,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_fwd that writes its results to loss, lse and dx, of which the last two may be None.

    loss, lse: x.shape[:-1], float32 (float64 for float64), contiguous. dx: x's shape and dtype. It may be x.
    Torch tensors, or writable arrays of NumPy or CuPy. Other arguments and errors are those of
    cross_entropy_fwd.
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_fwd_out, locals())
    try:
        for name, statistic in ("loss", loss), ("lse", lse):
            if statistic is not None and statistic.shape != x.shape[:-1]:
                raise ValueError(
                    f"{name} has shape {tuple(statistic.shape)}, expected {tuple(x.shape[:-1])}, the leading "
                    "dimensions of x"
                )
        if target_logit is not None:
            if loss is None:
                raise ValueError("loss is None, expected a tensor")
            if dx is not None:
                raise NotImplementedError(
                    "dx is given with target_logit, expected None; cross_entropy_bwd takes the lse"
                )
            results = cross_entropy_fwd(x, target, target_logit, weight, ignore_index, return_lse=True)
            outputs = {"loss": loss} if lse is None else {"loss": loss, "lse": lse}
            for (name, out), result in zip(outputs.items(), results, strict=False):  # before the first write
                check_out(ops, name, result, out, result.dtype)
            ops.check_writable(**outputs)
            for out, result in zip(outputs.values(), results, strict=False):
                out.copy_(result)
            return
        if dx is not None:
            check_out(ops, "dx", x, dx)
        if _debug.enabled:
            check_targets(ops, x, target, ignore_index)
        operands = ops.detached(x), target, ops.detached(weight)
        ops.cross_entropy_fwd_out(*operands, loss=loss, lse=lse, dx=dx, ignore_index=ignore_index)
    except FAILURES as error:
        given = {"x": x, "target": target, "target_logit": target_logit, "weight": weight}
        given |= {"loss": loss, "lse": lse, "dx": dx}
        raise ops.explained(error, **given) from None


def cross_entropy_bwd_out(
    x: Any,
    target: Any,
    dloss: Any,
    lse: Any,
    dx: Any,
    weight: Any = None,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_bwd that writes its result to dx, of x's shape and dtype. dx may be x.

    Torch tensors, or writable arrays of NumPy or CuPy. Other arguments and errors are those of
    cross_entropy_bwd.
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_bwd_out, locals())
    try:
        check_out(ops, "dx", x, dx)
        if _debug.enabled:
            check_targets(ops, x, target, ignore_index)
        ops.cross_entropy_bwd_out(
            ops.detached(x), target, weight, dloss, lse, dx=dx, ignore_index=ignore_index
        )
    except FAILURES as error:
        given = {"x": x, "target": target, "dloss": dloss, "lse": lse, "weight": weight, "dx": dx}
        raise ops.explained(error, **given) from None


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
) -> Tensor:
    """cross_entropy(x @ weight.T + bias, target), which never holds all logits. Differentiable in x, weight
    and bias. Torch tensors only.

    x: (..., K), of float16, bfloat16 or float32 (on the CPU also float64). weight: (V, K) and bias: (V) or
    None, of x's dtype. Under autocast all three are cast, as in torch.nn.functional.linear.
    target, ignore_index, reduction, divisor: as in cross_entropy. weight_ce: (V), its class weights.
    chunk: the rows whose logits are held at a time. None takes a quarter of all rows. More chunks need less
    memory, and more time to add up the gradient of weight.
    accumulate: "float32" adds up the gradient of weight over the chunks in float32, in a tensor of its own.
    By default each sum is rounded to weight's dtype. The gradient of bias is always added in float32.
    upstream: the gradient of the loss that backward is expected to bring, as in cross_entropy. It is 1 by
    default, and if its size is not within 2**-64 to 2**64. forward makes the gradients for it, with torch's
    matrix products. Gradients of bfloat16 and float32 are multiplied in backward if another one comes, which
    rounds once more. Gradients of float16 would have underflowed: they are made again, and so are those of a
    second backward pass. Without upstream, gradients of float16 are made in backward, and with reduction
    "none" all are. With upstream, float16's backward waits for the device to see whether they have to be.

    Ignored rows take part in the matrix products. Inside torch.func's transforms all logits are held.
    Returns the loss as cross_entropy does.
    Raises TypeError (dtype), ValueError (shape, reduction, chunk), RuntimeError (device, driver, memory).
    """
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None or any_overrides(weight, target, bias, weight_ce):
        handed: Tensor = overridden(linear_cross_entropy, locals())
        return handed
    if not is_tensor(x):
        raise TypeError(f"x is {kind(x)}, expected a torch.Tensor")
    code = code_of("reduction", reduction, REDUCTIONS)
    _of_sum(divisor, upstream, reduction)
    check_chunks(chunk, accumulate)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    try:
        if _debug.enabled and hasattr(weight, "shape"):
            check_targets(ops, weight.shape[0], target, ignore_index)
        loss: Tensor = ops.linear_cross_entropy(
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
        )
    except FAILURES as error:
        given = {"x": x, "weight": weight, "target": target, "bias": bias, "weight_ce": weight_ce}
        raise ops.explained(error, **given) from None
    return loss
