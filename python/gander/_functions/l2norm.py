"""L2 normalization."""

from __future__ import annotations

from .._backend import BACKENDS, backend_of
from .._words import check_flags, number
from .arguments import FAILURES, A, overridden


def l2norm(x: A, eps: float = 1e-6, *, batch_invariant: bool = False) -> A:
    """L2 normalization over the last dimension, differentiable: rows of length 1.

    y = x / sqrt(sum(x^2) + eps), which is rounded once. It runs RMSNorm's kernels, without a weight.
    Everything is computed in float32 (float64 for float64). Gradient: dx = (dy - y * sum(dy * y)) /
    sqrt(sum(x^2) + eps), with y as it was before it was rounded.

    torch.nn.functional.normalize divides by max(sqrt(sum(x^2)), eps) instead.

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
            tensor on the CPU or a CUDA device, or an object with `__dlpack__`, for which the result is an
            array of the same library, without a gradient.
        eps: Added to the sum of squares. With 0 a row of zeros becomes NaN.
        batch_invariant: As in softmax.

    Returns:
        y, contiguous, with the shape and dtype of x.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or eps.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.l2norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """
    if type(eps) is not float:
        eps = number("eps", eps)
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(l2norm, locals())
    try:
        return ops.l2norm(x, eps=eps, batch_invariant=batch_invariant)[0]
    except FAILURES as error:
        raise ops.explained(error, x=x) from None
