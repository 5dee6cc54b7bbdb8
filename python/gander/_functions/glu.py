"""Gated linear units: swiglu and geglu, and the same of one tensor with both halves."""

from __future__ import annotations

from typing import Any, Literal

from .._backend import BACKENDS, backend_of
from .._words import check_flags
from .arguments import FAILURES, A, Array, code_of, overridden
from .norms import CastingMode, rounds

Approximation = Literal["none", "tanh"]

_APPROXIMATIONS: tuple[Approximation, ...] = ("none", "tanh")


def swiglu(
    gate: A, up: Array, *, casting_mode: CastingMode | None = None, inplace_backward: bool = False
) -> A:
    """SwiGLU, silu(gate) * up, differentiable in both.

    y = gate * sigmoid(gate) * up for each element: Shazeer, "GLU Variants Improve Transformer", 2020. It is
    computed in float32 (float64 for float64), and rounded once. Backward keeps gate and up alone. A result
    of less than 1e-37 times gate may be 0.

    Args:
        gate: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A
            torch tensor on the CPU or a CUDA device, or an object with `__dlpack__`, for which the result is
            an array of the same library, without a gradient.
        up: What the activation multiplies, of gate's shape and dtype.
        casting_mode: "llama" rounds silu(gate) to gate's dtype before it is multiplied. Then y has the bits
            that torch's two operators have where their sigmoid has them, and gradients are rounded likewise.
        inplace_backward: Backward writes the gradients over gate and up, which saves two tensors of their
            size. They must not be used afterwards: autograd refuses a backward pass that still needs them.
            Ignored inside torch.compile and torch.func, under hooks on saved tensors, where autograd does not
            see that they were written, and where one of them needs no gradient, is expanded, is a leaf or a
            view of one, or lies among the other's rows (silu_and_mul writes over both). Torch tensors only.

    Returns:
        y, contiguous, with the shape and dtype of gate.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.swiglu(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 3.0]))
        tensor([0.0000, 2.1932])
    """
    return _of_two(swiglu, gate, up, casting_mode, inplace_backward)


def geglu(
    gate: A,
    up: Array,
    approximate: Approximation = "none",
    *,
    casting_mode: CastingMode | None = None,
    inplace_backward: bool = False,
) -> A:
    """GEGLU, gelu(gate) * up, differentiable in both.

    y = gate * P(gate) * up for each element, where P is the normal distribution, or with approximate="tanh"
    (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) / 2: Hendrycks and Gimpel, "Gaussian Error Linear
    Units", 2016. It is computed in float32 (float64 for float64), and rounded once. Backward keeps gate and
    up alone.

    Args:
        gate: As in swiglu.
        up: As in swiglu.
        approximate: "none" or "tanh", as in torch.nn.functional.gelu.
        casting_mode: As in swiglu, of gelu(gate).
        inplace_backward: As in swiglu.

    Returns:
        y, contiguous, with the shape and dtype of gate.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, approximate or casting_mode.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.geglu(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 3.0]))
        tensor([0.0000, 2.5240])
    """
    tanh = bool(code_of("approximate", approximate, _APPROXIMATIONS))
    return _of_two(geglu, gate, up, casting_mode, inplace_backward, approximate, gelu=True, tanh=tanh)


def silu_and_mul(x: A, *, casting_mode: CastingMode | None = None, inplace_backward: bool = False) -> A:
    """swiglu of the two halves of each row, differentiable: silu(x[..., :N / 2]) * x[..., N / 2:].

    Args:
        x: (..., N), N even, else as swiglu's gate. The halves are not copied.
        casting_mode: As in swiglu.
        inplace_backward: As in swiglu: backward writes the gradient over x.

    Returns:
        y, contiguous, (..., N / 2), of x's dtype.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.silu_and_mul(torch.tensor([0.0, 1.0, 3.0, 3.0]))
        tensor([0.0000, 2.1932])
    """
    return _packed(silu_and_mul, x, casting_mode, inplace_backward)


def gelu_and_mul(x: A, *, casting_mode: CastingMode | None = None, inplace_backward: bool = False) -> A:
    """geglu of the two halves of each row, differentiable: gelu(x[..., :N / 2]) * x[..., N / 2:].

    Args:
        x: As in silu_and_mul.
        casting_mode: As in swiglu.
        inplace_backward: As in silu_and_mul.

    Returns:
        y, contiguous, (..., N / 2), of x's dtype.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.gelu_and_mul(torch.tensor([0.0, 1.0, 3.0, 3.0]))
        tensor([0.0000, 2.5240])
    """
    return _packed(gelu_and_mul, x, casting_mode, inplace_backward, gelu=True)


def gelu_tanh_and_mul(x: A, *, casting_mode: CastingMode | None = None, inplace_backward: bool = False) -> A:
    """gelu_and_mul with geglu's approximate="tanh".

    Args:
        x: As in silu_and_mul.
        casting_mode: As in swiglu.
        inplace_backward: As in silu_and_mul.

    Returns:
        y, contiguous, (..., N / 2), of x's dtype.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.gelu_tanh_and_mul(torch.tensor([0.0, 1.0, 3.0, 3.0]))
        tensor([0.0000, 2.5236])
    """
    return _packed(gelu_tanh_and_mul, x, casting_mode, inplace_backward, gelu=True, tanh=True)


def _of_two(
    function: Any,
    gate: A,
    up: Array,
    casting_mode: CastingMode | None,
    inplace_backward: bool,
    approximate: Approximation = "none",  # for overridden, which passes on what the caller gave
    gelu: bool = False,
    tanh: bool = False,
) -> A:
    round_activation = rounds(casting_mode)
    if type(inplace_backward) is not bool:
        check_flags(inplace_backward=inplace_backward)
    ops = BACKENDS.get(type(gate)) or backend_of(gate)
    if ops is None:
        return overridden(function, locals())
    try:
        return ops.glu(gate, up, gelu, tanh, round_activation, inplace_backward)
    except FAILURES as error:
        raise ops.explained(error, gate=gate, up=up) from None


def _packed(
    function: Any,
    x: A,
    casting_mode: CastingMode | None,
    inplace_backward: bool,
    gelu: bool = False,
    tanh: bool = False,
) -> A:
    round_activation = rounds(casting_mode)
    if type(inplace_backward) is not bool:
        check_flags(inplace_backward=inplace_backward)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(function, locals())
    try:
        return ops.packed_glu(x, gelu, tanh, round_activation, inplace_backward)
    except FAILURES as error:
        raise ops.explained(error, x=x) from None
