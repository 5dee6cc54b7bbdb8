"""RMSNorm of a sum, in place."""

from __future__ import annotations

from .._backend import BACKENDS, backend_of
from .._words import check_flags, number
from .arguments import FAILURES, Array, overridden
from .norms import epsilon, refuse_shape


def fused_add_rmsnorm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    *,
    batch_invariant: bool = False,
) -> None:
    """In place, as inference servers call it: residual becomes x + residual, and x its RMSNorm.

    The sum is rounded to residual's dtype, but the norm is that of the sum before.

    Args:
        x: (..., N), of float16, bfloat16 or float32 (on the CPU also float64). A torch tensor, or a writable
            array of NumPy or CuPy. One that requires a gradient is refused.
        residual: As x, of the same shape, and any of these dtypes.
        weight: As in rmsnorm.
        eps: As in rmsnorm.
        weight_offset: As in rmsnorm.
        batch_invariant: As in softmax.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As rmsnorm.

    Examples:
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> gander.fused_add_rmsnorm(x, residual, None, eps=0.0)
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    if eps is not None and type(eps) is not float:
        eps = number("eps", eps, "None or ")
    if type(weight_offset) is not float:
        weight_offset = number("weight_offset", weight_offset)
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(fused_add_rmsnorm, locals())
    try:
        if residual is None:
            raise TypeError("residual is None, expected a tensor, to which x is added; or call rmsnorm")
        ops.fused_add_rmsnorm_(
            x,
            weight,
            residual,
            eps=epsilon(x) if eps is None else eps,
            batch_invariant=batch_invariant,
            weight_offset=weight_offset,
        )
    except FAILURES as error:
        refuse_shape("fused_add_rmsnorm", weight)
        names = {"y": "x", "residual_out": "residual"}
        raise ops.explained(error, names, x=x, weight=weight, residual=residual) from None
