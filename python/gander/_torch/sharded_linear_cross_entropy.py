"""linear_cross_entropy of a weight whose classes are sharded: the head of a column-parallel model, a DTensor.

Each rank multiplies all rows with its classes, so dx of a rank is a partial sum. For each chunk of rows the
ranks gather the statistics of their slices, as sharded_cross_entropy does, before the logits of the chunk are
overwritten by their gradient. The targets and the number of chunks are the same on all ranks, and so is the
sequence of collectives. Forward keeps the log-sum-exps of whole rows, from which backward makes gradients
again without communication.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.jit import is_tracing

from .._table import MEAN, NONE
from . import operators_gen
from .autograd import apply_with
from .cross_entropy import is_first_backward, loss_values
from .dtensor import is_dtensor
from .eager import is_batched, is_traced
from .linear_chunks import Products, is_same, once, rescale, to_make, weights_of_rows
from .sharded_cross_entropy import combined, counted, gathered, refuse_beside_weight
from .slice_plan import Plan, chunks, plan_of, slice_of
from .slice_smoothing import gradient as gradient_of_slice
from .tensors import has_no_values, statistic

# ---- The parts of a rank ----


class Slices(NamedTuple):
    """The ranks that share the classes."""

    mesh: DeviceMesh
    group: ProcessGroup
    sizes: tuple[int, ...]  # the number of classes of each rank

    def whole(self, loss: Tensor) -> DTensor:
        """The loss, which is the same on all ranks."""
        return DTensor.from_local(loss, self.mesh, [Replicate()], run_check=False)


def parts(x, weight, target, bias, weight_ce, divisor, upstream):
    """The ranks, and this rank's part of each argument. Refuses other placements."""
    mesh, by_class, replicated = weight.device_mesh, (Shard(0),), (Replicate(),)
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"weight is on {mesh}, expected a mesh of one dimension, over which its classes are sharded; "
            "distribute it on a slice of the mesh"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"weight is on {mesh}, expected a mesh of which this process is a member")
    _check_placements("weight", weight, weight, by_class)
    for name, value, placements in ("x", x, replicated), ("bias", bias, by_class):
        if value is not None and not is_dtensor(value):
            placement = "Replicate()" if placements == replicated else "Shard(0)"
            raise TypeError(
                f"{name} is a plain tensor, expected a DTensor with placements {placements} like weight; "
                f"pass DTensor.from_local({name}, mesh, [{placement}])"
            )
        _check_placements(name, value, weight, placements)
    others = {"target": target, "weight_ce": weight_ce, "divisor": divisor, "upstream": upstream}
    for name, value in others.items():  # a plain tensor is the same on all ranks
        _check_placements(name, value, weight, replicated)
    _refuse_graphs(x)
    return (
        Slices(mesh, mesh.get_group(), tuple(chunks(weight.shape[0], mesh.size()))),
        x.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        _local(target),
        _local(bias),
        *map(_local, list(others.values())[1:]),
    )


def _check_placements(name, value, weight, expected):
    if not is_dtensor(value):
        return
    if value.device_mesh != weight.device_mesh:
        raise ValueError(
            f"{name} is on {value.device_mesh}, expected {weight.device_mesh}, the mesh of weight; "
            "distribute it there"
        )
    # A strided shard is another class, and equal to none of these.
    if (*value.placements,) != expected or type(value.placements[0]) is not type(expected[0]):
        raise NotImplementedError(
            f"{name} has placements {value.placements}, expected {expected} with a weight whose classes are "
            "sharded; redistribute it"
        )


def _local(value):
    return value.to_local() if is_dtensor(value) else value


def _refuse_graphs(x):
    if torch._C._are_functorch_transforms_active():
        found, instead = "inside a transform of torch.func", "outside of it"
    elif has_no_values(x) or has_no_values(x.to_local()) or is_tracing():
        found, instead = "in a graph", "outside of torch.compile"
    else:
        return
    raise NotImplementedError(
        f"weight is a DTensor {found}, expected an eager call, because the ranks gather statistics for each "
        f"chunk; call linear_cross_entropy {instead}, or use cross_entropy of the logits"
    )


# ---- The loss and its gradients ----

_TENSORS, _DIFFERENTIABLE = 7, (0, 1, 3)


class _Call(NamedTuple):
    """What a call has besides tensors with gradients."""

    slices: Slices
    weight_ce: Tensor | None  # of this rank's classes
    ignore_index: int
    reduction: int
    chunk: int
    wide: bool
    more: tuple[float, ...]  # the values of LOSS_OPTIONS

    def plan(self, logits, target) -> Plan:
        """What this rank knows of a chunk. The hash that the ranks compare contains the reduction of the
        call. Each chunk has the losses of its rows."""
        group, sizes = self.slices.group, self.slices.sizes
        options = self.ignore_index, self.reduction, self.more
        plan = plan_of(logits, target, self.weight_ce, group.rank(), sizes, *options)
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
    """The loss, the log-sum-exps of whole rows by chunk, and dx, dw and db as Products has them."""
    with torch.autocast(x.device.type, enabled=False):
        products = Products(x, weight, bias, needs, call.chunk, call.wide)
        none = x.new_empty(0, dtype=statistic(x.dtype))
        losses, statistics = [none], [none]
        plan = call.plan(x.new_empty(0, weight.shape[0]), target[:0])  # refuses, before any communication
        dloss = none.new_ones(()) if upstream is None else upstream
        dloss = dloss if divisor is None else dloss / divisor
        for part, logits in products.chunks():
            plan = call.plan(logits, target[part])
            labels, local = counted(target[part], plan)
            every = gathered(logits, labels, local, None, call.slices.group, plan)
            if plan.contradiction:  # the other ranks wait for this one in each chunk
                continue
            loss, _, lse, _ = combined(every, labels, local, None, plan)
            if any(needs):
                _overwrite(logits, local, _of_chunk(row_weights, part), lse, dloss, plan)
                products.add(part, logits)
            losses.append(loss)
            statistics.append(lse)
        if plan.contradiction:
            raise ValueError(plan.contradiction.replace("x has", "weight has", 1))
        loss = torch.cat(losses)
        if row_weights is not None:
            loss = (loss * row_weights).masked_fill_(row_weights == 0, 0)
        if call.reduction != NONE:
            loss = loss.sum()
            loss = loss if divisor is None else loss / divisor
        return loss, torch.cat(statistics), *products.gradients()


def _again(x, weight, target, bias, row_weights, divisor, dloss, lse, call, needs):
    """dx, dw and db for another upstream gradient, from the log-sum-exps of whole rows."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        products = Products(x, weight, bias, needs, call.chunk, call.wide)
        dloss = dloss if divisor is None else dloss / divisor
        for index, (part, logits) in enumerate(products.chunks()):
            plan = call.plan(logits, target[part])
            _, local = counted(target[part], plan)
            # Those of a chunk of m rows have 2 m + 1 elements.
            statistics = lse[2 * part.start + index : 2 * part.stop + index + 1]
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


def loss(slices, tensors, ignore_index, reduction, chunk, wide, more) -> Tensor:
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
        weight_ce = slice_of(weight_ce, slices.sizes, slices.group.rank(), weight.shape[0])
    call = _Call(slices, weight_ce, ignore_index, reduction, chunk, wide, loss_values(more))
    given = x, weight, target, bias, row_weights, divisor, upstream
    if torch.is_grad_enabled():
        return _apply(*given, call)
    return _compute(*given, call, [False] * 3)[0]
