"""Cross-entropy of classes that are divided among ranks, from arguments whose kinds have been checked.

Each rank computes the loss and the log-sum-exp of its slice. Three numbers of each row go to all ranks, and
one more with class weights or label smoothing (slice_smoothing.py), along with the hash of a plan
(slice_plan.py). sharded_cross_entropy_combine makes of them the loss and the log-sum-exp of whole rows.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _debug
from .._table import LOSS_OPTIONS, MEAN, NONE
from . import operators_gen, slice_smoothing
from .autograd import apply_with
from .cross_entropy import gradient, keep, kept, loss_values
from .eager import is_batched
from .graph_operators import define
from .kernels import explained
from .refusals import refuse_gradients, refuse_outer_gradients, refuse_tangents
from .slice_plan import (
    check,
    chunks,
    compare,
    gather,
    gather_in_graph,
    new_part,
    plan_of,
    received,
    slice_of,
    write_hash,
)
from .tensors import check_targets, has_no_values

_OF_LOGITS = ("scale", "softcap", "temperature")  # options that map logits


def of_slices(
    x, target, weight, group, sizes, ignore_index, reduction, options, inplace_backward=False
) -> Tensor:
    """The loss, from arguments whose kinds have been checked. sizes: the number of classes of each rank.
    options: those of LOSS_OPTIONS that are not their defaults."""
    refuse_beside_weight("weight", weight, options)
    more = loss_values(options)
    if has_no_values(x):
        return _in_graph(x, target, weight, group, sizes, ignore_index, reduction, more)
    plan = plan_of(x, target, weight, group.rank(), tuple(sizes), ignore_index, reduction, more)
    refuse_tangents((x,))
    refuse_vmap({"x": x, "target": target, "weight": weight})
    refuse_outer_gradients("distributed.cross_entropy", x)
    try:
        return _apply(x, target, weight, group, plan, bool(inplace_backward))
    except RuntimeError as error:
        raise explained(error) from None


def refuse_beside_weight(name, weight, options):
    """Refuses options that slices do not have with class weights, by the name of their argument."""
    for option in ("label_smoothing", "z_loss"):
        if weight is not None and option in options:
            raise NotImplementedError(
                f"{option} is {options[option]} with {name} and classes of which each rank has a slice, "
                "expected 0; leave one of them out"
            )


def of_mesh(x, target, weight, divisor, mesh, dim, classes, ignore_index, reduction, options) -> Tensor:
    """The loss of this rank's part of a DTensor whose classes are sharded on a dimension of a mesh.

    weight: the weights of all classes.
    """
    refuse_gradients("cross_entropy", {"weight": weight, "divisor": divisor})
    group, sizes, n = mesh.get_group(dim), chunks(classes, mesh.size(dim)), x.shape[-1]
    rank = group.rank()
    if weight is not None:
        if weight.shape != (classes,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({classes},)")
        weight = slice_of(weight, sizes, rank, n)
    check(x, target, weight, divisor)
    loss = of_slices(x, target, weight, group, sizes, ignore_index, reduction, options)
    return loss if divisor is None else loss / divisor


_BY_ROW = ", with reduction='none'"


def refuse_vmap(given, how=_BY_ROW):
    """how: what else the call needs that replaces a batched one."""
    functorch = torch._C._functorch
    for name, tensor in given.items():
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                raise batched(name, how)
            tensor = functorch.get_unwrapped(tensor)


def batched(name, how=_BY_ROW):
    return NotImplementedError(
        f"{name} is batched by torch.func.vmap, expected a plain tensor: a collective cannot be batched; "
        f"pass all rows in one call{how}"
    )


# ---- The loss and its gradient ----


def counted(target, plan):
    """The targets, as the operators take them, and the same counted from this slice."""
    target = target.long().contiguous()
    return target, target - plan.first


def part_of(x, target, local, weight, group, plan):
    """What the other ranks need of this one: what the operator that combines the slices takes of each (see
    gander.h), and the hash."""
    if _debug.is_enabled:
        compare(x, target, group, plan)
        if not plan.contradiction:
            check_targets(sum(plan.sizes), target, plan.ignore_index)
    n, rows, smoothing = x.shape[-1], target.numel(), plan.options.get("label_smoothing", 0.0)
    each = count(weight, smoothing)
    mine = new_part(x, each * rows)
    write_hash(mine, each * rows, plan)
    if plan.contradiction:  # all others see the hash, and read nothing else
        return mine
    part = mine[: each * rows].view(each, rows)
    mapped = {name: value for name, value in plan.options.items() if name in _OF_LOGITS}
    if n and smoothing:
        slice_smoothing.write_part(part, x, local, plan.ignored, **mapped)
    elif n:
        operators_gen.cross_entropy_fwd_out(
            x, local, None, loss=part[2], lse=part[:2], ignore_index=plan.ignored, **mapped
        )
        if weight is not None:
            column = local.clamp(0, n - 1)
            part[3] = torch.where(column == local, weight[column], 0).view(-1)
    else:
        part[:2], part[2], part[3:] = float("-inf"), float("nan"), 0
    return mine


def gathered(x, target, local, weight, group, plan):
    """What all ranks have sent."""
    return gather(part_of(x, target, local, weight, group, plan), group)


def count(weight, smoothing):
    """How many numbers of a row a rank sends."""
    return 4 if weight is not None or smoothing else 3


def combined(every, target, local, weight, plan):
    """The loss, and what backward reads: the targets counted from this slice, the log-sum-exps of whole rows,
    and the weights of the targets or None."""
    if plan.contradiction:
        raise ValueError(plan.contradiction)
    rows, smoothing = target.numel(), plan.options.get("label_smoothing", 0.0)
    parts = received(every, count(weight, smoothing), rows, plan)
    lse, weights = every.new_empty(2 * rows + 1), None if weight is None else every.new_empty(target.shape)
    loss = every.new_empty(target.shape if plan.reduction == NONE else ())
    if rows:
        losses = (loss.view(-1), None) if plan.reduction == NONE else (None, loss)
        operators_gen.sharded_cross_entropy_combine(
            parts[:, :3].contiguous() if smoothing else parts,
            target.view(-1),
            max=lse[:rows],
            log_sum=lse[rows:-1],
            losses=losses[0],
            loss=losses[1],
            weights=None if weights is None else weights.view(-1),
            denominator=lse[-1:],
            classes=sum(plan.sizes),
            ignore_index=plan.ignore_index,
            mean=plan.reduction == MEAN,
            weighted=weight is not None,
        )
        more = torch.zeros_like(lse[:rows])
        if factor := plan.options.get("z_loss"):
            more += (lse[:rows] + lse[rows:-1]).square_().mul_(factor)  # of whole rows
        if smoothing:
            loss *= 1 - smoothing
            whole, own = lse[:-1].view(2, rows), parts[:, 3]
            more += slice_smoothing.sums(parts[:, :3], own, whole, plan.sizes) * (smoothing / sum(plan.sizes))
        if factor or smoothing:
            more.masked_fill_(target.view(-1) == plan.ignore_index, 0)
            if plan.reduction == NONE:
                loss += more.view(target.shape)
            else:
                loss += more.sum() / lse[-1] if plan.reduction == MEAN else more.sum()
    else:
        loss.fill_(float("nan") if plan.reduction == MEAN else 0)
    if weights is not None:
        local = local.masked_fill(weights == 0, plan.ignored)  # backward ignores the row, whatever is in it
    return loss, local, lse, weights


def _forward(ctx, x, target, weight, group, plan, inplace_backward):
    target, local = counted(target, plan)
    every = gathered(x, target, local, weight, group, plan)
    loss, local, lse, weights = combined(every, target, local, weight, plan)
    _keep(
        ctx,
        x,
        local,
        lse,
        weights,
        plan.ignored,
        plan.reduction,
        plan.options,
        sum(plan.sizes),
        inplace_backward and x.numel(),
    )
    return loss


def _keep(ctx, x, local, lse, weights, ignored, reduction, options, classes, inplace_backward=False):
    values = {"x": x, "target": local, "lse": lse, "weight": weights, "ignore_index": ignored, "slice": True}
    values |= options | {"reduction": MEAN if reduction == MEAN else NONE}
    keep(ctx, values, inplace_backward=inplace_backward)
    ctx.classes = classes


def _gradient(ctx, dloss):
    given = kept(ctx, dloss)
    weights, given["weight"] = given["weight"], None  # of the rows
    if weights is not None:
        given["dloss"] = dloss * weights
    if not given["x"].shape[-1]:
        return torch.zeros_like(given["x"])
    if not given.get("label_smoothing"):
        return gradient(ctx, given)
    options = ctx.classes, given["ignore_index"], given["reduction"], *loss_values(given)
    over = ctx.inplace_backward and not is_batched(dloss)
    tensors = (given[name] for name in ("x", "target", "lse", "dloss"))
    return slice_smoothing.gradient_once(*tensors, *options, over=over)


_apply = apply_with("cross_entropy_of_slices", _forward, _gradient, [0], 6)


# ---- In graphs ----
#
# The all-gather is a functional collective, whose order among others Inductor keeps. The operator before it
# computes what a rank sends. The one after it has the gradient, so it takes x, which it does not read.
# A graph may not know where this slice begins, so ignored rows have a target of their own.


def _in_graph(x, target, weight, group, sizes, ignore_index, reduction, more):
    name = group.group_name
    options = target, weight, sizes, ignore_index, reduction, name, *more
    mine = _part_in_graph(x.detach(), *options)
    every = gather_in_graph(mine, len(sizes), name)
    return _combined_in_graph(x, every, *options)[0]


def _resolved(x, target, weight, sizes, ignore_index, reduction, group, *more):
    group = dist.distributed_c10d._resolve_process_group(group)
    return group, plan_of(x, target, weight, group.rank(), tuple(sizes), ignore_index, reduction, more)


def _part_kernel(x, target, weight, *options):
    group, plan = _resolved(x, target, weight, *options)
    return part_of(x, *counted(target, plan), weight, group, plan)


def _part_fake(x, target, weight, sizes, ignore_index, reduction, group, *more):
    check(x, target, weight)
    return new_part(x, count(weight, more[0]) * target.numel())


def _refuse_batch(info, in_dims, *given):
    raise batched("target or weight" if in_dims[0] is None else "x")


def _combined_kernel(x, every, target, weight, *options):
    """The loss, and what backward reads. Weights that there are not have no elements."""
    _, plan = _resolved(x, target, weight, *options)
    loss, local, lse, weights = combined(every, *counted(target, plan), weight, plan)
    local = torch.where(local == plan.ignored, slice_smoothing.IGNORED, local.clamp(-1, x.shape[-1]))
    return loss, local, lse, every.new_empty(0) if weights is None else weights


def _combined_fake(x, every, target, weight, sizes, ignore_index, reduction, *_):
    shape = target.shape
    return (
        every.new_empty(shape if reduction == NONE else ()),
        every.new_empty(shape, dtype=torch.int64),
        every.new_empty(2 * target.numel() + 1),
        every.new_empty(0 if weight is None else shape),
    )


def _keep_in_graph(ctx, given, results):
    x, _, _, weight, sizes, _, reduction, _, *more = given
    _, local, lse, weights = results
    options = dict(zip(LOSS_OPTIONS, more, strict=True))
    _keep(
        ctx,
        x,
        local,
        lse,
        None if weight is None else weights,
        slice_smoothing.IGNORED,
        reduction,
        options,
        sum(sizes),
    )


_OPTIONS = "Tensor target, Tensor? weight, SymInt[] sizes, SymInt ignore_index, int reduction, str group, "
_OPTIONS += ", ".join(f"float {name}" for name in LOSS_OPTIONS)

_part_in_graph = define(
    f"cross_entropy_part(Tensor x, {_OPTIONS}) -> Tensor", _part_kernel, _part_fake, batched=_refuse_batch
)
_combined_in_graph = define(
    f"cross_entropy_of_parts(Tensor x, Tensor every, {_OPTIONS}) -> "
    "(Tensor loss, Tensor local, Tensor lse, Tensor weights)",
    _combined_kernel,
    _combined_fake,
    _keep_in_graph,
    _gradient,
    batched=_refuse_batch,
)
