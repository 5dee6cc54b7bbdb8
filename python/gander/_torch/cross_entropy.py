"""Three ways to compute cross-entropy's gradient: in backward in a separate pass, in backward over the logits
(in place), or in forward together with the loss (one pass).

The second is for eager calls only. A compiled graph plans its own memory, and its backward cannot write to
its inputs. It uses the first, or on request, where it is for Inductor, the third: see inductor.py.
"""

import threading
from operator import itemgetter

import torch
from torch import no_grad

from .._table import MEAN, NONE, TORCH, arguments, tensors
from . import inductor, operators_gen
from .autograd import apply_in_place, apply_with, call_below_autograd, once_differentiable
from .dtensor import rows_are_sharded
from .eager import is_eager, is_plain, may_write
from .registry import overloads

# CUDA logits of this many elements or more are read in one pass for the loss and its gradient. Fewer logits
# are still in L2 when backward reads them again, which costs less than the additional launch of the single
# pass. On the CPU backward always reads the logits.
ONE_PASS = 1 << 22

_NAME = "cross_entropy"
_BWD_ONE_PASS = "cross_entropy_bwd_one_pass"
_ARGUMENTS, _one_pass_arguments = arguments(_NAME), itemgetter(*arguments(_BWD_ONE_PASS))
_REDUCTION = _ARGUMENTS.index("reduction")

# The arguments that are tensors, and the others, of the operators that compute the gradient.
_TAKEN = {
    name: (tensors(name), arguments(name)[len(tensors(name)) :])
    for name in ("cross_entropy_bwd", _BWD_ONE_PASS)
}


def loss_values(given):
    """The values of LOSS_OPTIONS, in that order. Defaults are constants of code: a graph with dynamic shapes
    would take numbers of a table for variables."""
    return (
        given.get("label_smoothing", 0.0),
        given.get("z_loss", 0.0),
        given.get("scale", 1.0),
        given.get("softcap", 0.0),
        given.get("temperature", 1.0),
    )


_below_versions = torch._C._AutoDispatchBelowADInplaceOrView


_first = threading.Lock()


def is_first_backward(ctx):
    """Whether no backward pass of this node has returned the gradient that forward made. Threads may share a
    graph."""
    with _first:
        returned = getattr(ctx, "returned", False)
        ctx.returned = True
        return not returned


# ---- In backward: in a separate pass, or in place ----


def keep(ctx, values, gradient_op="cross_entropy_bwd", inplace_backward=False):
    """Saves those of these values, by name, that an operator takes which computes the gradient."""
    named, options = _TAKEN[gradient_op]
    ctx.named = [name for name in named if name in values]
    ctx.save_for_backward(*(values[name] for name in ctx.named))
    ctx.set_materialize_grads(False)
    ctx.options = {name: values[name] for name in options if name in values}
    ctx.inplace_backward = inplace_backward and may_write(values["x"])


def kept(ctx, dloss):
    """The arguments of that operator, by name. An activation checkpoint lets a backward pass ask once."""
    given = dict(zip(ctx.named, ctx.saved_tensors, strict=True), dloss=dloss)
    given.update(ctx.options)
    return given


def gradient(ctx, given):
    """dx, from the arguments of cross_entropy_bwd."""
    x, dloss = given["x"], given["dloss"]
    if not (ctx.inplace_backward and is_plain(dloss)):
        return operators_gen.cross_entropy_bwd(**given)
    with no_grad():
        operators_gen.cross_entropy_bwd_(**given)
    return once_differentiable(x.detach(), x, dloss)


def gradient_of_kept(ctx, dloss):
    return gradient(ctx, kept(ctx, dloss))


# ---- In one pass with the loss ----


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
    given = kept(ctx, dloss)
    if not is_plain(dloss):
        del given["upstream"], given["dx"]
        given["lse"] = _logarithms(given["lse"])
        return operators_gen.cross_entropy_bwd(**given)
    if not is_first_backward(ctx):
        given["dx"] = torch.empty_like(given["dx"])
        integers = torch.int64 if dloss.dtype == torch.float64 else torch.int32
        given["upstream"] = dloss.view(integers).bitwise_not().view(dloss.dtype)  # never the bits of dloss
    with _below_versions():
        overloads[_BWD_ONE_PASS](*_one_pass_arguments(given))
    # The caller may change what it gets, and autograd would refuse a later backward pass as well.
    return once_differentiable(given["dx"].data, given["x"], dloss)


def _gradient_one_pass_in_graph(ctx, dloss):
    given = kept(ctx, dloss)
    with no_grad():
        dx = inductor.backward_in_graph(*_one_pass_arguments(given))
    return once_differentiable(dx, given["x"], dloss)


# ---- The choice ----


def _apply(title, compute, operator, gradient_op="cross_entropy_bwd", overload=None, **changed):
    """The apply of an autograd.Function that runs an operator for cross_entropy, with some arguments changed,
    and keeps what a gradient operator takes. compute(ctx, dloss): dx."""
    overload, names, results = overload or overloads[operator], arguments(operator), TORCH[operator].results

    def forward(ctx, keyset, *given):
        values = dict(zip(_ARGUMENTS, given, strict=True)) | changed
        answer = call_below_autograd(overload, keyset, [values[name] for name in names])
        values |= zip(results, answer, strict=True)
        keep(ctx, values, gradient_op)
        loss = values["loss"]
        return loss if values["reduction"] == given[_REDUCTION] else loss.sum()

    apply = apply_with(f"{_NAME}_{title}", forward, compute, [1], 1 + len(_ARGUMENTS))

    def run(keyset, *given):
        loss = apply(keyset, *given)
        return loss, loss.new_empty(0)  # nobody asks for lse: see choose

    return run


_in_place = apply_in_place(_NAME)
_in_one_pass = "cross_entropy_fwd_one_pass", _BWD_ONE_PASS
_one_pass = _apply("one_pass", _gradient_one_pass, *_in_one_pass)
_one_pass_in_graph = _apply(
    "one_pass_in_graph", _gradient_one_pass_in_graph, *_in_one_pass, inductor.forward_in_graph
)
# For DTensors with sharded rows: backward may only read statistics that are sharded like the rows.
_by_row = _apply(
    "by_row", gradient_of_kept, "cross_entropy_fwd", reduction=NONE, needs_lse=True, needs_dx=False
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
        if values["inplace_backward"] and may_write(x):
            return _in_place
        return _one_pass if takes_one_pass(x, reduction, one_pass) else two_passes
    asked = one_pass and takes_one_pass(x, reduction, one_pass)
    return _one_pass_in_graph if asked and inductor.may_keep_gradient(x) else two_passes
