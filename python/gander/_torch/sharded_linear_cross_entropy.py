"""linear_cross_entropy of a weight whose classes are sharded (sharded_heads.py).

For each chunk of rows the ranks gather the statistics of their slices, as sharded_cross_entropy does, before
the logits of the chunk are overwritten by their gradient. A graph has one all-gather for all chunks. The
targets and the number of chunks are the same on all ranks, and so is the sequence of collectives. Forward
keeps the log-sum-exps of whole rows, from which backward makes gradients again without communication.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._table import LOSS_OPTIONS, MEAN, NONE
from . import operators_gen
from .autograd import apply_with
from .cross_entropy import is_first_backward, loss_values
from .eager import is_batched, is_traced
from .graph_operators import define
from .linear_chunks import Products, is_same, new_gradient, once, rescale, to_make, weights_of_rows
from .sharded_cross_entropy import (
    combined,
    count,
    counted,
    gathered,
    part_of,
    refuse_beside_weight,
)
from .sharded_heads import Slices
from .slice_plan import Plan, gather_in_graph, new_part, plan_of, slice_of, write_hash
from .slice_smoothing import gradient as gradient_of_slice
from .tensors import has_no_values, statistic

# ---- The loss and its gradients ----

_TENSORS, _DIFFERENTIABLE = 7, (0, 1, 3)


class _Call(NamedTuple):
    """What a call has besides tensors with gradients."""

    weight_ce: Tensor | None  # of this rank's classes
    sizes: tuple[int, ...]
    ignore_index: int
    reduction: int
    group: ProcessGroup
    chunk: int
    wide: bool
    more: tuple[float, ...]  # the values of LOSS_OPTIONS

    def plan(self, logits, target) -> Plan:
        """What this rank knows of these rows. The hash that the ranks compare contains the reduction of the
        call. Each plan is for the losses of single rows."""
        options = self.ignore_index, self.reduction, self.more
        plan = plan_of(logits, target, self.weight_ce, self.group.rank(), self.sizes, *options)
        return plan._replace(reduction=NONE)


def _overwrite(logits, target, row_weights, lse, dloss, plan):
    """Writes the gradient of a chunk's logits over them. target: counted from this slice."""
    if not logits.shape[1]:
        return
    if row_weights is not None:  # a row without weight is ignored, whatever is in it
        target, dloss = target.masked_fill(row_weights == 0, plan.ignored), dloss * row_weights
    if plan.options.get("label_smoothing"):
        classes, more = sum(plan.sizes), loss_values(plan.options)
        gradient_of_slice(logits, target, lse, dloss, classes, plan.ignored, NONE, *more, over=True)
        return
    options = {"ignore_index": plan.ignored, "slice": True, "reduction": NONE, **plan.options, "weight": None}
    operators_gen.cross_entropy_bwd_(logits, target=target, lse=lse, dloss=dloss, **options)


def _of_chunk(values, part):
    """The values of a chunk's rows, of a tensor with one for each row, of one for all, or of None."""
    return values[part] if values is not None and values.ndim else values


def _compute(x, weight, target, bias, row_weights, divisor, upstream, call, needs):
    """The loss, the two parts of whole rows' log-sum-exps, and dx, dw and db as Products has them."""
    with torch.autocast(x.device.type, enabled=False):
        products = Products(x, weight, bias, needs, call.chunk, call.wide)
        none = x.new_empty(0, dtype=statistic(x.dtype))
        losses, statistics = [none], [none.view(2, 0)]
        plan = call.plan(x.new_empty(0, weight.shape[0]), target[:0])  # refuses, before any communication
        dloss = none.new_ones(()) if upstream is None else upstream
        dloss = dloss if divisor is None else dloss / divisor
        for part, logits in products.chunks():
            plan = call.plan(logits, target[part])
            labels, local = counted(target[part], plan)
            every = gathered(logits, labels, local, None, call.group, plan)
            if plan.contradiction:  # the other ranks wait for this one in each chunk
                continue
            loss, _, lse, _ = combined(every, labels, local, None, plan)
            if any(needs):
                _overwrite(logits, local, _of_chunk(row_weights, part), lse, dloss, plan)
                products.add(part, logits)
            losses.append(loss)
            statistics.append(lse[:-1].view(2, -1))
        if plan.contradiction:
            raise _contradiction(plan)
        loss = _of_rows(torch.cat(losses), row_weights, divisor, call)
        return loss, torch.cat(statistics, 1), *products.gradients()


def _contradiction(plan):
    return ValueError(plan.contradiction.replace("x has", "weight has", 1))


def _of_rows(loss, row_weights, divisor, call):
    """The loss, from those of the rows without class weights."""
    if row_weights is not None:
        loss = (loss * row_weights).masked_fill_(row_weights == 0, 0)
    if call.reduction != NONE:
        loss = loss.sum()
        loss = loss if divisor is None else loss / divisor
    return loss


def _again(x, weight, target, bias, row_weights, divisor, dloss, lse, call, needs):
    """dx, dw and db for another upstream gradient, from the log-sum-exps of whole rows."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        products = Products(x, weight, bias, needs, call.chunk, call.wide)
        dloss = dloss if divisor is None else dloss / divisor
        for part, logits in products.chunks():
            plan = call.plan(logits, target[part])
            _, local = counted(target[part], plan)
            statistics = torch.cat((lse[:, part].flatten(), lse.new_ones(1)))  # with a denominator
            weights, given = _of_chunk(row_weights, part), _of_chunk(dloss, part)
            _overwrite(logits, local, weights, statistics, given, plan)
            products.add(part, logits)
        return products.gradients()


def _forward(ctx, *inputs):
    *tensors, call = inputs
    needs = [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]
    ctx.call, ctx.made, ctx.returned = call, to_make(tensors[0], tensors[-1], call.reduction, needs), False
    loss, *kept = _compute(*tensors, call, ctx.made)
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)
    return loss


def _gradients(ctx, dloss):
    saved, needs = ctx.saved_tensors, [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]
    *inputs, upstream = saved[:_TENSORS]
    lse, *made = saved[_TENSORS:]
    if is_batched(dloss):
        raise NotImplementedError(
            "gander: linear_cross_entropy has no batched gradients; call backward for each"
        )
    keep = any(ctx.made) and not is_traced(dloss) and is_first_backward(ctx)
    if keep:
        made = [gradient.contiguous() for gradient in made]  # hooks on saved tensors may change strides
        if inputs[0].dtype == torch.float16:
            keep = ctx.returned = is_same(dloss, 1.0 if upstream is None else upstream)
        else:
            rescale([gradient for gradient, has in zip(made, ctx.made, strict=True) if has], dloss, upstream)
    if not keep:
        made = _again(*inputs, dloss, lse, ctx.call, needs)
    # autograd may add to what is returned. Through .data that does not increment the version of a saved
    # tensor, for which a later backward pass would be refused.
    return once([gradient.data for gradient in made], needs, [inputs[at] for at in _DIFFERENTIABLE], dloss)


_apply = apply_with("sharded_linear_cross_entropy", _forward, _gradients, _DIFFERENTIABLE, _TENSORS + 1)


# ---- In graphs ----
#
# One all-gather for all chunks, a functional collective. The operator before it computes what a rank sends,
# and the one after it the loss and the gradients, for which it multiplies x and weight again.


def _call_of(weight_ce, sizes, ignore_index, reduction, group, chunk, wide, *more):
    group = dist.distributed_c10d._resolve_process_group(group)
    return _Call(weight_ce, tuple(sizes), ignore_index, reduction, group, chunk, wide, more)


def _whole_plan(x, weight, target, call):
    """The plan of all rows, whose logits there are not at one time."""
    return call.plan(x.new_empty(()).expand(x.shape[0], weight.shape[0]), target)


def _part_kernel(x, weight, target, bias, *options):
    with torch.autocast(x.device.type, enabled=False):
        call = _call_of(*options)
        whole, smoothing = _whole_plan(x, weight, target, call), call.more[0]
        mine = new_part(x, count(None, smoothing) * x.shape[0])
        numbers = mine[: count(None, smoothing) * x.shape[0]].view(-1, x.shape[0])
        write_hash(mine, numbers.numel(), whole)
        for part, logits in Products(x, weight, bias, [False] * 3, call.chunk, call.wide).chunks():
            plan = call.plan(logits, target[part])
            each = part_of(logits, *counted(target[part], plan), None, call.group, plan)
            numbers[:, part] = each[: numbers.shape[0] * len(logits)].view(-1, len(logits))
        return mine


def _part_fake(x, weight, target, bias, weight_ce, sizes, ignore_index, reduction, group, chunk, wide, *more):
    return new_part(x, count(None, more[0]) * target.numel())


def _combined_kernel(x, weight, target, bias, row_weights, divisor, upstream, every, *options):
    """The loss, the two parts of whole rows' log-sum-exps, dx, dw and db."""
    *options, needs_dx, needs_dw, needs_db = options
    call, needs = _call_of(*options), [needs_dx, needs_dw, needs_db]
    plan = _whole_plan(x, weight, target, call)
    if plan.contradiction:
        raise _contradiction(plan)
    loss, _, lse, _ = combined(every, *counted(target, plan), None, plan)
    lse = lse[:-1].view(2, -1)
    made = [new_gradient(like, False) for like in (x, weight, x)]
    if any(needs):
        upstream = loss.new_ones(()) if upstream is None else upstream
        made = _again(x, weight, target, bias, row_weights, divisor, upstream, lse, call, needs)
    return _of_rows(loss, row_weights, divisor, call), lse.clone(), *made


def _combined_fake(x, weight, target, bias, row_weights, divisor, upstream, every, *options):
    shape = target.shape if options[3] == NONE else ()
    lse = every.new_empty(2, target.shape[0])
    bias = x if bias is None else bias
    return every.new_empty(shape), lse, *map(new_gradient, (x, weight, bias), options[-3:])


def _again_kernel(x, weight, target, bias, row_weights, divisor, dloss, lse, *options):
    *options, needs_dx, needs_dw, needs_db = options
    needs = [needs_dx, needs_dw, needs_db]
    return _again(x, weight, target, bias, row_weights, divisor, dloss, lse, _call_of(*options), needs)


def _again_fake(x, weight, target, bias, *others):
    return (*map(new_gradient, (x, weight, x if bias is None else bias), others[-3:]),)


def _keep_in_graph(ctx, given, results):
    tensors, (_, *options) = given[:_TENSORS], given[_TENSORS:]
    *ctx.options, needs_dx, needs_dw, needs_db = options
    ctx.made = [needs_dx, needs_dw, needs_db]
    ctx.save_for_backward(*tensors, *results[1:])


def _gradients_in_graph(ctx, dloss):
    (*inputs, upstream), (lse, *made) = ctx.saved_tensors[:_TENSORS], ctx.saved_tensors[_TENSORS:]
    needs = [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]
    with torch.no_grad():
        if all(has or not need for has, need in zip(ctx.made, needs, strict=True)):
            factor = dloss if upstream is None else dloss / upstream
            made = [(each.to(factor.dtype) * factor).to(each.dtype) for each in made]
        else:
            made = _again_in_graph(*inputs, dloss, lse, *ctx.options, *needs)
    return once(made, needs, [inputs[at] for at in _DIFFERENTIABLE], dloss)


def _refuse_batch(info, in_dims, *given):
    raise NotImplementedError(
        "gander: linear_cross_entropy of a DTensor cannot be batched by torch.func.vmap"
    )


_OPTIONS = "Tensor? weight_ce, SymInt[] sizes, SymInt ignore_index, int reduction, str group, SymInt chunk, "
_OPTIONS += ", ".join(("bool wide", *(f"float {name}" for name in LOSS_OPTIONS)))
_OF_ROWS = "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? row_weights, Tensor? divisor, "
_NEEDS = "bool needs_dx, bool needs_dw, bool needs_db"

_part_in_graph = define(
    f"linear_cross_entropy_part(Tensor x, Tensor weight, Tensor target, Tensor? bias, {_OPTIONS}) -> Tensor",
    _part_kernel,
    _part_fake,
    batched=_refuse_batch,
)
_again_in_graph = define(
    f"linear_cross_entropy_bwd_of_slice({_OF_ROWS}Tensor dloss, Tensor lse, {_OPTIONS}, {_NEEDS}) -> "
    "(Tensor, Tensor, Tensor)",
    _again_kernel,
    _again_fake,
    batched=_refuse_batch,
)
_combined_in_graph = define(
    f"linear_cross_entropy_of_parts({_OF_ROWS}Tensor? upstream, Tensor every, {_OPTIONS}, {_NEEDS}) -> "
    "(Tensor loss, Tensor lse, Tensor dx, Tensor dw, Tensor db)",
    _combined_kernel,
    _combined_fake,
    _keep_in_graph,
    _gradients_in_graph,
    _DIFFERENTIABLE,
    batched=_refuse_batch,
)


def _in_graph(given, call, group):
    x, weight, target, bias, *_, upstream = given
    options = *call[:4], group, *call[5:7], *call.more
    mine = _part_in_graph(*(None if t is None else t.detach() for t in (x, weight, target, bias)), *options)
    every = gather_in_graph(mine, len(call.sizes), group)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    made = to_make(x, upstream, call.reduction, needs, compiling=True)
    return _combined_in_graph(*given, every, *options, *made)[0]


# ---- Calls ----


def loss(slices: Slices, tensors, ignore_index, reduction, chunk, wide, more) -> Tensor:
    """The loss, from this rank's parts of the arguments, whose kinds have been checked. tensors: x, weight,
    target, bias, weight_ce, divisor, upstream. more: the options of the loss that are not their defaults."""
    x, weight, target, bias, weight_ce, divisor, upstream = tensors
    refuse_beside_weight("weight_ce", weight_ce, more)
    row_weights = None
    if weight_ce is not None or reduction == MEAN:
        row_weights = weights_of_rows(target, weight_ce, sum(slices.sizes), ignore_index, x.dtype)
        divisor = row_weights.sum() if reduction == MEAN else divisor
    if weight_ce is None:
        row_weights = None
    else:
        weight_ce = slice_of(weight_ce, slices.sizes, slices.mesh.get_local_rank(), weight.shape[0])
    options = weight_ce, slices.sizes, ignore_index, reduction, slices.group, chunk, wide
    call = _Call(*options, loss_values(more))
    given = x, weight, target, bias, row_weights, divisor, upstream
    if has_no_values(x):
        return _in_graph(given, call, slices.group.group_name)
    if torch.is_grad_enabled():
        return _apply(*given, call)
    return _compute(*given, call, [False] * 3)[0]
