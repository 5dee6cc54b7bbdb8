"""Operators that write over an argument: autograd's versions, inference tensors, and views that are lazily
negated."""

import torch
from torch import Tensor

from .._table import TORCH, arguments
from .registry import overloads, registry, untraced


def refuse_inference(name, tensor) -> None:
    """Refuses to write over an inference tensor where torch does."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"gander: {name} is an inference tensor, expected a normal one, because it is written outside of "
            f"inference mode; pass {name}.clone(), or call under torch.inference_mode()"
        )


def _increments_version(name):
    """A kernel that increments the versions of the written tensors, as autograd expects. torch does not see
    that our kernels write. As torch's operators, it refuses inference tensors, which have no version."""
    overload, after = overloads[name], torch._C._after_ADInplaceOrView_keyset
    positions = {arguments(name).index(argument): argument for argument in TORCH[name].writes}

    def kernel(keyset, *given):
        written = {at: given[at] for at in positions if at < len(given) and given[at] is not None}
        for at, tensor in written.items():
            refuse_inference(positions[at], tensor)
        torch.autograd.graph.increment_version([*written.values()])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & after, *given)

    return kernel


def _refuses_negated(name):
    """A kernel for calls with negated views, such as the imaginary part of a conjugate. torch's own for all
    operators passes copies, and expects each that is written among the results."""
    overload = overloads[name]
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Negative)
    positions = {arguments(name).index(argument): argument for argument in TORCH[name].writes}

    def kernel(keyset, *given):
        for at, argument in positions.items():
            if at < len(given) and given[at] is not None and given[at].is_neg():
                raise RuntimeError(
                    f"gander: {argument} is a negated view, expected a tensor that can be written; pass "
                    f"{argument}.resolve_neg()"
                )
        given = (value.resolve_neg() if isinstance(value, Tensor) else value for value in given)
        return overload.redispatch(keyset & after, *given)

    return kernel


for _name, _operator in TORCH.items():
    if _operator.writes:
        registry.impl(_name, untraced(_increments_version(_name)), "ADInplaceOrView", with_keyset=True)
        registry.impl(_name, untraced(_refuses_negated(_name)), "Negative", with_keyset=True)
