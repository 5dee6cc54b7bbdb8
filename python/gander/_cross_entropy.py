"""Three ways to compute cross-entropy's gradient: in backward in a separate pass, in backward over the logits
(in place), or in forward together with the loss (one pass).

The last two are for eager calls only. A compiled graph plans its own memory, and its backward cannot write to
its inputs, so it always uses the first. On CUDA, Inductor gets the gradient as a formula. It can fuse that
with what follows, and write it over the logits. It could do neither with a kernel of ours.
"""

import math
import threading

import torch
from torch import Tensor, no_grad
from torch._functorch import config as functorch_config
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy

from . import _fast
from ._gradients import (
    apply_of,
    call_below_autograd,
    forward,
    function,
    gradient_arguments,
    once_differentiable,
    selector,
)
from ._operators_gen import MEAN, NONE, TORCH
from ._schemas import arguments, complete, overloads, tensors, upstream
from ._sharding import rows_are_sharded

# CUDA logits of this many elements or more are read in one pass for the loss and its gradient. Fewer logits
# are still in L2 when backward reads them again, which costs less than the additional launch of the single
# pass. On the CPU backward always reads the logits.
ONE_PASS = 1 << 22

_NAME = "cross_entropy"
_ARGUMENTS, _SAVED = arguments(_NAME), TORCH[_NAME].saved

_below_versions = torch._C._AutoDispatchBelowADInplaceOrView


def _gradients(dx):
    """What backward returns for apply(keyset, x, ...): a gradient for each argument."""
    return None, dx, *[None] * (len(_ARGUMENTS) - 1)


_DLOSS = upstream("cross_entropy_bwd")["loss"]

_own_pass_arguments = gradient_arguments("cross_entropy_bwd", _NAME, [*_SAVED, _DLOSS])


def _backward_in_own_pass(saved, dloss, options):
    return _gradients(_fast.call("cross_entropy_bwd")(*_own_pass_arguments((*saved, dloss, *options))))


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


def _backward_in_place(ctx, dloss):
    if dloss is None:
        return _gradients(None)
    if is_batched(dloss):
        return _backward_in_own_pass(ctx.saved_tensors, dloss, ctx.options)
    x, *others = _in_place_arguments((*ctx.saved_tensors, dloss, *ctx.options))
    return _gradients(write_over("cross_entropy_bwd_", x, others, dloss))


def may_write_saved():
    """Whether autograd notices when a saved tensor is overwritten: not where hooks pack and unpack it."""
    return _fast.saved_tensors_hooks() is None


def write_over(name, x, others, dloss):
    """The gradient that an operator writes over x."""
    with no_grad():
        overloads[name](x, *others)
    return once_differentiable(x.detach(), x, dloss)


# ---- In one pass with the loss ----

_SAVED_WITH_DX, _LSE = [*_SAVED, "upstream", "dx"], _SAVED.index("lse")
_one_pass_arguments = gradient_arguments("cross_entropy_bwd_one_pass", _NAME, [*_SAVED_WITH_DX, _DLOSS])


def _logarithms(lse):
    """The statistics that other operators read, from those of the single pass.

    That has sums, or where the sign bit is set, minus the sum without the target, whose exponential is 1.
    """
    high, sums = lse[:-1].chunk(2)
    return torch.cat((high, torch.where(sums.signbit(), (-sums).log1p(), sums.log()), lse[-1:]))


def _backward_one_pass(ctx, dloss):
    """The first backward pass returns forward's dx, computed again in place if dloss is not the expected one.
    A later pass returns a new tensor with the same bits.

    dx is a saved tensor, so hooks on saved tensors see it: an activation checkpoint drops it like the others.
    Writing it does not increment its version, because autograd would then refuse a later backward pass.
    """
    if dloss is None:
        return _gradients(None)
    *others, upstream, dx = ctx.saved_tensors
    if is_traced(dloss) or is_batched(dloss):
        others[_LSE] = _logarithms(others[_LSE])
        return _backward_in_own_pass(others, dloss, ctx.options)
    if not is_first_backward(ctx):
        dx = torch.empty_like(dx)
        integers = torch.int64 if dloss.dtype == torch.float64 else torch.int32
        upstream = dloss.view(integers).bitwise_not().view(dloss.dtype)  # never the bits of dloss
    with _below_versions():
        overloads["cross_entropy_bwd_one_pass"](
            *_one_pass_arguments((*others, upstream, dx, dloss, *ctx.options))
        )
    # The caller may change what it gets, and autograd would refuse a later backward pass as well.
    return _gradients(once_differentiable(dx.data, others[0], dloss))


# ---- In a graph for Inductor ----


def _minus_one(log):
    """exp(log) - 1 for log <= 0, with the digits of a small log. It is a series there, because every element
    of the logits pays for it.
    """
    series = 1.0
    for divisor in (6, 5, 4, 3, 2):
        series = 1 + log / divisor * series
    return torch.where(log > -0.25, log * series, log.exp() - 1)


def formula(x, target, weight, dloss, lse, divisor, ignore_index, reduction, batch_invariant):
    """What cross_entropy_bwd computes, in torch's operators. lse is what cross_entropy_fwd returns: the rows'
    maxima, the logarithms of their sums, and the denominator of the mean.
    """
    classes, rows = x.shape[-1], target.numel()
    high, log_sum = (part.view(*target.shape, 1) for part in (lse[:rows], lse[rows : 2 * rows]))
    target = target.unsqueeze(-1)
    gradient = dloss.to(lse.dtype)
    if reduction == NONE and dloss.shape not in ((), (1,)):
        gradient = gradient.reshape(target.shape)
    if reduction == MEAN:
        gradient = gradient / lse[-1]
    if divisor is not None:
        gradient = gradient / divisor
    ignored = target.long() == ignore_index  # an int32 could be equal to the low bits alone
    if weight is not None:
        weight = weight.to(lse.dtype)[target.clamp(0, classes - 1)]
        ignored = ignored | (weight == 0)
        gradient = gradient * weight
    gradient = torch.where((target < 0) | (target >= classes), math.nan, gradient)
    log = (x.to(lse.dtype) - high) - log_sum
    at_target = torch.arange(classes, device=x.device) == target
    dx = gradient * torch.where(at_target, _minus_one(log), log.exp())
    return torch.where(ignored, 0, dx).to(x.dtype)


FUSED_ON = ("cuda",)  # measured there; on the CPU a compiled call keeps the bits of an eager one


def _is_for_inductor(x):
    """Whether the graph that is being traced is for Inductor, or torch's backend for debugging it."""
    traced = isinstance(x, FunctionalTensor) and getattr(functorch_config, "unlift_effect_tokens", False)
    return traced and x.device.type in FUSED_ON


_aten = torch.ops.aten
_VIEWS = {
    *(_aten.alias, _aten.detach, _aten.view, _aten._unsafe_view, _aten.reshape, _aten.t, _aten.transpose),
    *(_aten.permute, _aten.slice, _aten.select, _aten.squeeze, _aten.unsqueeze),
}
_CASTS = {_aten._to_copy, torch.ops.prims.convert_element_type}
_PRODUCTS = {_aten.mm, _aten.bmm}


def _is(node, overloads):
    return getattr(node.target, "overloadpacket", None) in overloads


def _is_exact(node):
    """Whether a node holds the numbers of its argument, all their digits included."""
    if not _is(node, _CASTS):
        return _is(node, _VIEWS)
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    return torch.promote_types(before, after) == after


def _source(node, steps):
    while _is(node, steps) and _is_exact(node):
        node = node.args[0]
    return node


def _fuses_products():
    """Whether Inductor may cast a matrix product before it rounds it."""
    from torch._inductor import config

    return config.max_autotune or config.max_autotune_gemm


def _keep_for_backward(x):
    """Makes the graph save the logits that forward reads, or the product that they are a cast of. False if it
    can't.

    Inductor would compute them anew where that is cheap, and does not round 16-bit numbers that it computes.
    They would then not be the logits whose log-sum-exp is subtracted: see RATIONALE.md.
    """
    mode = get_proxy_mode()
    if mode is None:  # nothing is recorded
        return True
    known = get_proxy_slot(torch._from_functional_tensor(x.elem), mode.tracer, None)
    if known is None:
        return False
    node = _source(known.proxy.node, _VIEWS)
    product = _source(node, _VIEWS | _CASTS)
    if product.op == "placeholder" or (_is(product, _PRODUCTS) and not _fuses_products()):
        node = product  # it is in memory, rounded, when it is cast
    if node.meta.get("recompute") not in (None, CheckpointPolicy.MUST_SAVE):  # an activation checkpoint
        return False
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return True


def gradient_for_inductor(given):
    """The gradient in a graph for Inductor, otherwise None."""
    x, target, _, _, lse, *_ = given
    if not _is_for_inductor(x):
        return None
    if lse.dim() != 1 or lse.shape[0] != 2 * target.numel() + 1:  # one number for each row
        return None
    if not _keep_for_backward(x):
        return None
    with no_grad():
        dx = formula(*complete("cross_entropy_bwd", given))
    return once_differentiable(dx, *(operand for operand in given if isinstance(operand, Tensor)))


# ---- DTensors with sharded rows: backward may only read statistics that are sharded like the rows ----

_per_row_arguments = selector(arguments("cross_entropy_fwd_lse"), _ARGUMENTS)
_REDUCTION = arguments("cross_entropy_bwd").index("reduction")


def _forward_by_row(ctx, keyset, *given):
    values = dict(zip(_ARGUMENTS, given, strict=True))
    overload = overloads["cross_entropy_fwd_lse"]
    loss, values["lse"] = call_below_autograd(overload, keyset, _per_row_arguments(given))
    ctx.save_for_backward(*(values[name] for name in _SAVED))
    ctx.set_materialize_grads(False)
    ctx.options = given[len(tensors(_NAME)) :]
    return loss if values["reduction"] == NONE else loss.sum()


def _backward_by_row(ctx, dloss):
    if dloss is None:
        return _gradients(None)
    given = [*_own_pass_arguments((*ctx.saved_tensors, dloss, *ctx.options))]
    given[_REDUCTION] = NONE
    return _gradients(overloads["cross_entropy_bwd"](*given))


# ---- The choice ----

_saving = TORCH[_NAME].saving
_in_place, _one_pass, _by_row = (
    apply_of(function(f"{_NAME}_{title}", *methods))
    for title, *methods in (
        ("in_place", forward(_NAME, _saving, _SAVED), _backward_in_place),
        ("one_pass", forward(_NAME, "cross_entropy_fwd_one_pass", _SAVED_WITH_DX), _backward_one_pass),
        ("by_row", _forward_by_row, _backward_by_row),
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
    """Whether an eager call with a gradient makes it together with the loss. one_pass: what was asked for."""
    wanted = x.numel() >= ONE_PASS if one_pass is None else one_pass
    return wanted and reduction != NONE and _has_one_pass(x)


def choose(two_passes, given):
    """The apply of the autograd.Function for a call that needs a gradient.

    two_passes: the apply that computes the gradient in a separate pass.
    """
    values = dict(zip(_ARGUMENTS, given, strict=True))
    x = values["x"]
    if rows_are_sharded(x) and values["reduction"] != MEAN:  # the sharding rule refuses a mean
        return _by_row
    if not is_eager(x):
        return two_passes
    if values["inplace_backward"] and may_write_saved():
        return _in_place
    single = takes_one_pass(x, values["reduction"], values["one_pass"]) and not values["batch_invariant"]
    return _one_pass if single else two_passes
