"""How cross-entropy's gradient is computed: in a pass of its own, in place of the logits, or along with the
loss.

The last two are for eager calls. A graph plans its own memory, and in backward it cannot write to its inputs,
so it always gets the first.
"""

import torch
from torch import Tensor, no_grad
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import _fast
from ._gradients import apply_of, below, forward, function, maker_arguments, once, picker
from ._operators_gen import REDUCTIONS, TORCH
from ._schemas import arguments, overloads, saved
from ._sharding import rows_are_sharded

# From this many elements of CUDA logits on, the loss and its gradient are computed in one pass. The logits of
# smaller ones are still in L2 when backward reads them again, and the additional launch of the single pass
# costs more than that. On the CPU backward reads the logits in any case.
ONE_PASS = 1 << 22

_NAME = "cross_entropy"
_ARGUMENTS, _SAVED = arguments(_NAME), saved(_NAME)
_NONE, _MEAN = REDUCTIONS.index("none"), REDUCTIONS.index("mean")

_below_versions = torch._C._AutoDispatchBelowADInplaceOrView


def _gradients(dx):
    """What backward returns for apply(keyset, x, ...)."""
    return None, dx, *[None] * (len(_ARGUMENTS) - 1)


_in_own_pass = maker_arguments("cross_entropy_bwd", _NAME, _SAVED)


def _backward_in_own_pass(saved, dloss, options):
    return _gradients(_fast.call("cross_entropy_bwd")(*_in_own_pass((*saved, dloss, *options))))


def _is_batched(dloss):
    """Whether dloss stands for a batch (vmap, is_grads_batched), whose gradients do not fit into one tensor."""
    return torch._C._functorch.is_batchedtensor(dloss) or torch._C._functorch.is_legacy_batchedtensor(dloss)


# ---- In place of the logits ----

_over_x = maker_arguments("cross_entropy_bwd_", _NAME, _SAVED)


def _backward_in_place(ctx, dloss):
    if dloss is None:
        return _gradients(None)
    if _is_batched(dloss):
        return _backward_in_own_pass(ctx.saved_tensors, dloss, ctx.options)
    x, *others = _over_x((*ctx.saved_tensors, dloss, *ctx.options))
    with no_grad():
        overloads["cross_entropy_bwd_"](x, *others)
    return _gradients(once(x.detach(), x, dloss))


# ---- Along with the loss ----

_over_dx = maker_arguments("cross_entropy_bwd_one_pass", _NAME, [*_SAVED, "dx"])


def _backward_one_pass(ctx, dloss):
    """Returns forward's dx, scaled in place by dloss, in the first backward pass, and a new tensor in any
    later one.

    dx is a saved tensor, so hooks on saved tensors see it: an activation checkpoint drops it like the others.
    Scaling it does not count as a new version, because autograd would then refuse a later backward pass.
    """
    if dloss is None:
        return _gradients(None)
    *others, dx = ctx.saved_tensors
    if getattr(ctx, "given_away", False) or is_compiling() or _is_batched(dloss):
        return _backward_in_own_pass(others, dloss, ctx.options)
    ctx.given_away = True
    with _below_versions():
        overloads["cross_entropy_bwd_one_pass"](*_over_dx((*others, dx, dloss, *ctx.options)))
    return _gradients(once(dx, others[0], dloss))


# ---- DTensors whose rows are sharded: backward may read only statistics that are sharded like the rows ----

_per_row = picker(arguments("cross_entropy_fwd_lse"), _ARGUMENTS)
_REDUCTION = arguments("cross_entropy_bwd").index("reduction")


def _forward_by_row(ctx, keyset, *given):
    values = dict(zip(_ARGUMENTS, given, strict=True))
    loss, values["lse"] = below(overloads["cross_entropy_fwd_lse"], keyset, _per_row(given))
    ctx.save_for_backward(*(values[name] for name in _SAVED))
    ctx.set_materialize_grads(False)
    ctx.options = given[_ARGUMENTS.index("weight") + 1 :]
    return loss if values["reduction"] == _NONE else loss.sum()


def _backward_by_row(ctx, dloss):
    if dloss is None:
        return _gradients(None)
    given = [*_in_own_pass((*ctx.saved_tensors, dloss, *ctx.options))]
    given[_REDUCTION] = _NONE
    return _gradients(overloads["cross_entropy_bwd"](*given))


# ---- The choice ----

_saving = TORCH[_NAME].saving
_in_place, _one_pass, _by_row = (
    apply_of(function(f"{_NAME}_{title}", *methods))
    for title, *methods in (
        ("in_place", forward(_NAME, _saving, _SAVED), _backward_in_place),
        ("one_pass", forward(_NAME, "cross_entropy_fwd_one_pass", [*_SAVED, "dx"]), _backward_one_pass),
        ("by_row", _forward_by_row, _backward_by_row),
    )
)


def _is_eager(x):
    return (
        type(x) in (Tensor, Parameter)
        and not is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _has_one_pass(x):
    return x.is_cuda


def choose(two_passes, given):
    """The apply of the autograd.Function for a call that needs a gradient. two_passes: the operator's own."""
    values = dict(zip(_ARGUMENTS, given, strict=True))
    x, one_pass = values["x"], values["one_pass"]
    if rows_are_sharded(x) and values["reduction"] != _MEAN:  # the operator's sharding rule refuses a mean
        return _by_row
    if not _is_eager(x):
        return two_passes
    if values["inplace_backward"]:
        return _in_place
    if one_pass is None:
        one_pass = x.numel() >= ONE_PASS
    if one_pass and values["reduction"] != _NONE and not values["batch_invariant"] and _has_one_pass(x):
        return _one_pass
    return two_passes
