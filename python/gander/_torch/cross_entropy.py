"""Three ways to compute cross-entropy's gradient: in backward in a separate pass, in backward over the logits
(in place), or in forward together with the loss (one pass).

The second is for eager calls only. A compiled graph plans its own memory, and its backward cannot write to
its inputs. It uses the first, or on request, where it is for Inductor, the third: see inductor.py.
"""

import threading

import torch
from torch import Tensor, no_grad
from torch.compiler import is_compiling
from torch.nn import Parameter

from .._table import MEAN, NONE, TORCH, arguments, tensors, upstream
from . import fast, inductor, operators_gen
from .autograd import (
    apply_with,
    call_below_autograd,
    forward,
    gradient_arguments,
    once_differentiable,
    selector,
    with_own_results,
)
from .dtensor import rows_are_sharded
from .registry import overloads

# CUDA logits of this many elements or more are read in one pass for the loss and its gradient. Fewer logits
# are still in L2 when backward reads them again, which costs less than the additional launch of the single
# pass. On the CPU backward always reads the logits.
ONE_PASS = 1 << 22

_NAME = "cross_entropy"
_ARGUMENTS = arguments(_NAME)
_SAVED = [saved.result or saved.argument for saved in TORCH[_NAME].saved]

_below_versions = torch._C._AutoDispatchBelowADInplaceOrView


_DLOSS = upstream("cross_entropy_bwd")["loss"]

_own_pass_arguments = gradient_arguments("cross_entropy_bwd", _NAME, [*_SAVED, _DLOSS])


def _gradient_in_own_pass(saved, dloss, options):
    return operators_gen.cross_entropy_bwd(*_own_pass_arguments((*saved, dloss, *options)))


def is_batched(dloss):
    """Whether dloss is batched (vmap, is_grads_batched). Then one tensor does not hold all gradients."""
    return torch._C._functorch.is_batchedtensor(dloss) or torch._C._functorch.is_legacy_batchedtensor(dloss)


def is_traced(dloss):
    """Whether a backward pass is recorded: by compiled autograd, make_fx or another mode. Or dloss is of a
    subclass. Then nothing may be written over what was saved."""
    return is_compiling() or not (is_batched(dloss) or is_eager(dloss))


_first = threading.Lock()


def is_first_backward(ctx):
    """Whether no backward pass of this node has returned the gradient that forward made. Threads may share a
    graph."""
    with _first:
        returned = getattr(ctx, "returned", False)
        ctx.returned = True
        return not returned


# ---- In place, over the logits ----

_in_place_arguments = gradient_arguments("cross_entropy_bwd_", _NAME, [*_SAVED, _DLOSS])


def _gradient_in_place(ctx, dloss):
    if is_batched(dloss):
        return _gradient_in_own_pass(ctx.saved_tensors, dloss, ctx.options)
    x, *others = _in_place_arguments((*ctx.saved_tensors, dloss, *ctx.options))
    named = dict(zip(arguments("cross_entropy_bwd_")[1:], others, strict=True))
    return write_over(x, **named)


def may_write_saved():
    """Whether autograd notices when a saved tensor is overwritten: not where hooks pack and unpack it."""
    return fast.saved_tensors_hooks() is None


def write_over(x, *, dloss, **arguments):
    """The gradient that cross_entropy_bwd_ writes over x."""
    with no_grad():
        operators_gen.cross_entropy_bwd_(x, dloss=dloss, **arguments)
    return once_differentiable(x.detach(), x, dloss)


def keep(ctx, x, target, lse, weight, ignore_index, reduction, inplace_backward=False):
    """Saves for `gradient` what it reads of a loss that other operators have computed from x."""
    ctx.save_for_backward(x, target, lse, weight)
    ctx.set_materialize_grads(False)
    ctx.options = {"ignore_index": ignore_index, "reduction": reduction}
    ctx.inplace_backward = inplace_backward and may_write_saved()


def gradient(ctx, dloss, **others):
    """dx of a loss for which `keep` has saved the tensors. others: what is passed in place of them."""
    x, *saved = ctx.saved_tensors
    given = dict(zip(("target", "lse", "weight"), saved, strict=True)) | ctx.options | others
    if ctx.inplace_backward and not is_batched(dloss):
        return write_over(x, dloss=dloss, **given)
    return operators_gen.cross_entropy_bwd(x, dloss=dloss, **given)


# ---- In one pass with the loss ----

_SAVED_WITH_DX, _LSE = [*_SAVED, "upstream", "dx"], _SAVED.index("lse")
_one_pass_arguments = gradient_arguments("cross_entropy_bwd_one_pass", _NAME, [*_SAVED_WITH_DX, _DLOSS])


def _logarithms(lse):
    """The statistics that other operators read, from those of the single pass.

    That has sums, or where the sign bit is set, minus the sum without the target, whose exponential is 1.
    """
    high, sums = lse[:-1].chunk(2)
    return torch.cat((high, torch.where(sums.signbit(), (-sums).log1p(), sums.log()), lse[-1:]))


def _gradient_one_pass(ctx, dloss):
    """The first backward pass gets forward's dx, computed again in place if dloss is not the expected one.
    A later pass gets a new tensor with the same bits.

    dx is a saved tensor, so hooks on saved tensors see it: an activation checkpoint drops it like the others.
    Writing it does not increment its version, because autograd would then refuse a later backward pass.
    """
    *others, upstream, dx = ctx.saved_tensors
    if is_traced(dloss) or is_batched(dloss):
        others[_LSE] = _logarithms(others[_LSE])
        return _gradient_in_own_pass(others, dloss, ctx.options)
    if not is_first_backward(ctx):
        dx = torch.empty_like(dx)
        integers = torch.int64 if dloss.dtype == torch.float64 else torch.int32
        upstream = dloss.view(integers).bitwise_not().view(dloss.dtype)  # never the bits of dloss
    with _below_versions():
        overloads["cross_entropy_bwd_one_pass"](
            *_one_pass_arguments((*others, upstream, dx, dloss, *ctx.options))
        )
    # The caller may change what it gets, and autograd would refuse a later backward pass as well.
    return once_differentiable(dx.data, others[0], dloss)


def _gradient_one_pass_in_graph(ctx, dloss):
    saved = ctx.saved_tensors
    with no_grad():
        dx = inductor.backward_in_graph(*_one_pass_arguments((*saved, dloss, *ctx.options)))
    return once_differentiable(dx, saved[0], dloss)


# ---- DTensors with sharded rows: backward may only read statistics that are sharded like the rows ----

_PER_ROW = "cross_entropy_fwd"
_per_row_arguments = selector(arguments(_PER_ROW)[:-2], _ARGUMENTS)  # without needs_lse and needs_dx
_REDUCTION = arguments("cross_entropy_bwd").index("reduction")


def _forward_by_row(ctx, keyset, *given):
    values = dict(zip(_ARGUMENTS, given, strict=True))
    asked = (*_per_row_arguments(given), True, False)
    loss, values["lse"], _ = call_below_autograd(overloads[_PER_ROW], keyset, asked)
    ctx.save_for_backward(*(values[name] for name in _SAVED))
    ctx.set_materialize_grads(False)
    ctx.options = given[len(tensors(_NAME)) :]
    return loss if values["reduction"] == NONE else loss.sum(), values["lse"]


def _gradient_by_row(ctx, dloss):
    given = [*_own_pass_arguments((*ctx.saved_tensors, dloss, *ctx.options))]
    given[_REDUCTION] = NONE
    return overloads["cross_entropy_bwd"](*given)


# ---- The choice ----

_saving_dx = "cross_entropy_fwd_one_pass"
_forward_in_graph = forward(_NAME, _saving_dx, _SAVED_WITH_DX, inductor.forward_in_graph)
_in_place, _one_pass, _one_pass_in_graph, _by_row = (
    with_own_results(_NAME, apply_with(f"{_NAME}_{title}", run, compute, [1], 1 + len(_ARGUMENTS)))
    for title, run, compute in (
        ("in_place", forward(_NAME), _gradient_in_place),
        ("one_pass", forward(_NAME, _saving_dx, _SAVED_WITH_DX), _gradient_one_pass),
        ("one_pass_in_graph", _forward_in_graph, _gradient_one_pass_in_graph),
        ("by_row", _forward_by_row, _gradient_by_row),
    )
)


def is_eager(x):
    return (
        type(x) in (Tensor, Parameter)
        and not is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _has_one_pass(x):
    return x.is_cuda


def takes_one_pass(x, reduction, one_pass=None):
    """Whether a call with a gradient makes it together with the loss. one_pass: what was asked for."""
    wanted = x.numel() >= ONE_PASS if one_pass is None else one_pass
    return wanted and reduction != NONE and _has_one_pass(x)


def choose(two_passes, given):
    """The apply of the autograd.Function for a call that needs a gradient.

    two_passes: the apply that computes the gradient in a separate pass.
    """
    values = dict(zip(_ARGUMENTS, given, strict=True))
    x, reduction = values["x"], values["reduction"]
    if values["needs_lse"]:  # in the form that the separate pass reads
        return two_passes
    if rows_are_sharded(x) and reduction != MEAN:  # the sharding rule refuses a mean
        return _by_row
    one_pass = False if values["batch_invariant"] else values["one_pass"]
    if is_eager(x):
        if values["inplace_backward"] and may_write_saved():
            return _in_place
        return _one_pass if takes_one_pass(x, reduction, one_pass) else two_passes
    asked = one_pass and takes_one_pass(x, reduction, one_pass)
    return _one_pass_in_graph if asked and inductor.may_keep_gradient(x) else two_passes
