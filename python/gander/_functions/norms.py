"""What RMSNorm and LayerNorm share."""

from __future__ import annotations

from typing import Any, Literal

from .._backend import Backend
from .._words import shown
from .arguments import code_of

CastingMode = Literal["llama"]

# An exception in a local variable keeps the caller's tensors alive, until Python looks for cycles: its
# traceback holds the frame, and the frame holds it. So functions raise exceptions where they make them.


def epsilon(x: Any) -> float:
    """What eps=None means in torch: the machine epsilon of the dtype that it computes in."""
    return 2.0**-52 if x.dtype.itemsize == 8 else 2.0**-23


def rounds(casting_mode: Any) -> bool:
    """The operators' options round_normalized and round_activation."""
    return casting_mode is not None and not code_of("casting_mode", casting_mode, ("llama",), "None or ")


def refuse_shape(name: str, weight: Any) -> None:
    """Refuses torch's normalized_shape in place of a norm's weight."""
    if not isinstance(weight, (int, tuple, list)):
        return
    raise TypeError(
        f"weight is {shown(weight)}, expected a tensor or None; unlike torch's, {name}(x, weight) has no "
        "normalized_shape: it normalizes the last dimension"
    ) from None


def explained(
    ops: Backend,
    error: Exception,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    out: Any,
    weight_offset: float = 0,
) -> Exception:
    """The exception to raise for an error of a norm's forward pass."""
    names = {"y": "out_dtype" if out is None else "out", "residual_out": "residual_dtype"}
    try:
        stands_in = weight is None and not weight_offset and _for_each_head(x, bias)  # see weight_for
    except Exception:  # what has no shape, like a nested tensor, is refused by its own name
        stands_in = False
    if stands_in:
        names["weight"] = "bias"
    return ops.explained(error, names, x=x, weight=weight, bias=bias, residual=residual, out=out)


def _for_each_head(x: Any, bias: Any) -> bool:
    """Whether bias has the last two dimensions of x."""
    return len(bias.shape) == 2 and bias.shape == x.shape[-2:]


def weight_for(ops: Backend, x: Any, bias: Any, weight_offset: float = 0) -> Any:
    """The weight to pass to a norm without one. A bias for each head needs a weight for each head."""
    return ops.ones_like(bias) if not weight_offset and _for_each_head(x, bias) else None


def plan_sum(
    ops: Backend, x: Any, residual: Any, residual_dtype: Any, prenorm: bool, *, layer: bool = False
) -> tuple[Any, bool]:
    """The dtype of residual_out, None for the operator's default, and whether the operator makes it. One of
    residual and residual_dtype is given."""
    if residual_dtype is None:
        if layer or not prenorm:  # that of x + residual in torch: rmsnorm's gradient needs digits of both
            wide = ops.differs(x, residual.dtype)
            residual_dtype = ops.dtype("float32", "residual_dtype") if wide else x.dtype
        return residual_dtype, bool(prenorm)
    residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
    if residual is not None and ops.differs(x, residual.dtype):
        rounds = residual_dtype != ops.dtype("float32", "residual_dtype")
    else:
        rounds = ops.differs(x, residual_dtype)
    wide = ops.dtype("float64", "residual_dtype")
    refused = (residual_dtype == wide) == ops.differs(x, wide)  # by the operator, if it is to make it
    # layernorm's y is that of the sum in residual_dtype, also where nobody asks for the sum.
    return residual_dtype, bool(
        refused or (layer and rounds) or (prenorm and (residual is not None or rounds))
    )


def out_of_sum(ops: Backend, x: Any, residual: Any, residual_dtype: Any) -> Any:
    """A new array for residual_out of a norm that writes to `out`."""
    return ops.empty(x, tuple(x.shape), residual_dtype or (x if residual is None else residual).dtype)


def out_of_statistic(ops: Backend, x: Any) -> Any:
    """A new array for mean or rstd."""
    wide = ops.dtype("float64" if x.dtype.itemsize == 8 else "float32", "out_dtype")
    return ops.empty(x, tuple(x.shape[:-1]), wide)
