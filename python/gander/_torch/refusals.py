"""Refusals of gradients that a function does not have."""

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.jit import is_tracing

_in_transform = torch._C._are_functorch_transforms_active
_NO_FORWARD = "gander: forward-mode derivatives are not supported; use torch's operators"


def refuse_tangents(given) -> None:
    """Raises an error if one of these tensors or None has a tangent of forward mode."""
    for tensor in given:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(_NO_FORWARD)


def refuse_gradients(name, given) -> None:
    """Raises an error if one of these tensors or None, by argument, requires a gradient."""
    for argument, tensor in given.items():
        if tensor is not None and tensor.requires_grad and is_grad_enabled():
            raise NotImplementedError(
                f"gander: {argument} requires a gradient, but {name} has none for it, expected a constant; "
                "detach it"
            )


def refuse_outer_gradients(what, x):
    """For a function that is applied without the dispatcher, so at the innermost level of torch.func alone.

    Others, and autograd outside of all, would take its result for a constant.
    """
    if not _in_transform() or not is_grad_enabled():
        return
    functorch = torch._C._functorch
    if functorch.maybe_get_level(x) == functorch.maybe_current_level():
        x = functorch.get_unwrapped(x)
    while not x.requires_grad and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    if x.requires_grad:
        raise NotImplementedError(
            f"gander: {what} has a gradient for the innermost transform of torch.func only; "
            "differentiate there, or detach x"
        )


def refuse_transforms(what, function):
    """what: why the function, of this name, cannot run in one."""
    if _in_transform() or is_tracing():
        raise NotImplementedError(
            f"{what} inside a transform of torch.func or torch.jit.trace, expected an eager call or "
            f"torch.compile; call {function} outside of it"
        )
