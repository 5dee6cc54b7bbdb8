"""linear_token_statistics of a weight whose tokens are divided among ranks, from arguments that were checked.

Each rank multiplies all rows with its tokens, a chunk of rows at a time, and keeps what it sends of each row,
not the logits. One all-gather has all rows. Backward makes the logits again, as on one device, and does no
communication: the gradient of x is a partial sum, which is added up over the ranks only on request.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .autograd import apply_with
from .eager import is_batched
from .graph_operators import define
from .head_statistics import DIFFERENTIABLE, gradient, keep_slice
from .linear_chunks import chunks_of
from .refusals import refuse_transforms
from .sharded_token_statistics import (
    LEFT_OUT,
    OPTIONS,
    OUTSIDE,
    merged,
    merged_fake,
    options_of,
    outputs_of,
    part_fake,
    part_of,
    plan_of,
)
from .slice_plan import gather, gather_in_graph
from .tensors import has_no_values
from .token_statistics import HEADS, STATISTICS, maps_of

_FUNCTION = "distributed.linear_token_statistics"


class _Call(NamedTuple):
    """What a call has besides tensors."""

    allreduce_dgrad: bool
    chunk: int
    keeps: bool  # the logits
    sizes: tuple[int, ...]
    ignore_index: int
    group: ProcessGroup | str  # in a graph its name
    outputs: frozenset[str]
    options: dict[str, Any]  # without defaults

    def plan(self, x, weight, index, bias, row_mask):
        """What has the shape of all logits, and what this rank knows of the call."""
        logits = x.new_empty(()).expand(x.shape[0], weight.shape[0])
        options = self.outputs, tuple(self.options.items())
        besides = f", hidden of {x.shape[1]} columns, {'no' if bias is None else 'a'} bias, "
        besides += f"allreduce_dgrad {self.allreduce_dgrad}"
        given = self.group.rank(), self.sizes, self.ignore_index, *options, "weight", besides
        return logits, plan_of(logits, index, row_mask, *given)


# ---- The statistics, and their gradient ----


def _part(x, weight, index, bias, row_mask, call):
    """What the other ranks need of this one, and the logits of all rows, or no elements."""
    with torch.autocast(x.device.type, enabled=False):  # an operator may run under it
        logits, plan = call.plan(x, weight, index, bias, row_mask)
        held = x.new_empty(x.shape[0] if call.keeps else min(call.chunk, x.shape[0]), weight.shape[0])
        chunks = chunks_of(x, weight, bias, held)
        mine = part_of(logits, index.long(), row_mask, call.group, plan, chunks, "weight")
        return mine, held if call.keeps else x.new_empty(0)


def _whole(x, weight, index, bias, row_mask, every, call):
    """The statistics, and what backward reads: the state, and the index counted from this slice."""
    _, plan = call.plan(x, weight, index, bias, row_mask)
    return merged(every, index.long(), row_mask, plan)


def _forward(ctx, *given):
    *tensors, call = given
    x, weight, _, bias, _ = tensors
    mine, logits = _part(*given)
    *results, state, local = _whole(*tensors, gather(mine, call.group), call)
    _keep(ctx, (x, weight, local, bias, None, state, logits), call, call.group.group_name)
    return tuple(results)


def _keep(ctx, tensors, call, group):
    sum_over = partial(_sum_over, group) if call.allreduce_dgrad else None
    keep_slice(ctx, tensors, call.chunk, call.outputs, call.options, LEFT_OUT, OUTSIDE, sum_over)


def _sum_over(group, dx, is_eager):
    """The sum of the ranks' gradients of x. group: its name."""
    if not is_eager and not torch.compiler.is_compiling() and is_batched(dx):
        raise NotImplementedError(
            f"gander: {_FUNCTION} with allreduce_dgrad has no batched gradients; call backward for each"
        )
    if is_eager:
        dist.all_reduce(dx, group=dist.distributed_c10d._resolve_process_group(group))
        return dx
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(dx, "sum", group))


_apply = apply_with(
    "linear_token_statistics_of_slices",
    _forward,
    lambda ctx, *upstream: gradient(ctx, *upstream, eager=True),
    DIFFERENTIABLE,
    6,
    heads=HEADS,
)


# ---- In graphs ----
#
# As in sharded_cross_entropy.py.


def _in_graph(tensors, call):
    group = call.group.group_name
    options = (
        *call[:5],
        group,
        *(name in call.outputs for name in STATISTICS),
        *maps_of(call.options),
        call.options.get("batch_invariant", False),
    )
    mine, logits = _part_in_graph(*(None if t is None else t.detach() for t in tensors), *options)
    every = gather_in_graph(mine, len(call.sizes), group)
    return _results_in_graph(*tensors, logits, every, *options)[: len(STATISTICS)]


def _call_of(allreduce_dgrad, chunk, keeps, sizes, ignore_index, group, *more):
    options = options_of(more)
    return _Call(allreduce_dgrad, chunk, keeps, tuple(sizes), ignore_index, group, outputs_of(more), options)


def _resolved(*options):
    call = _call_of(*options)
    return call._replace(group=dist.distributed_c10d._resolve_process_group(call.group))


def _part_kernel(x, weight, index, bias, row_mask, *options):
    return _part(x, weight, index, bias, row_mask, _resolved(*options))


def _part_fake(x, weight, index, bias, row_mask, allreduce_dgrad, chunk, keeps, *more):
    logits = x.new_empty(x.shape[0], weight.shape[0])
    return part_fake(logits, index, row_mask, *more), logits if keeps else x.new_empty(0)


def _results_kernel(x, weight, index, bias, row_mask, logits, every, *options):
    return _whole(x, weight, index, bias, row_mask, every, _resolved(*options))


def _results_fake(x, weight, index, bias, row_mask, logits, every, allreduce_dgrad, chunk, keeps, *more):
    return merged_fake(x, every, index, row_mask, *more)


def _keep_in_graph(ctx, given, results):
    x, weight, _, bias, _, logits, _, *options = given
    *_, state, local = results
    call = _call_of(*options)
    _keep(ctx, (x, weight, local, bias, None, state, logits), call, call.group)


def _refuse_batch(info, in_dims, *given):
    raise NotImplementedError(f"gander: {_FUNCTION} cannot be batched by torch.func.vmap")


_OPERANDS = "Tensor x, Tensor weight, Tensor index, Tensor? bias, Tensor? row_mask, "
_OPTIONS = f"bool allreduce_dgrad, SymInt chunk, bool keeps_logits, {OPTIONS}"

_part_in_graph = define(
    f"linear_token_statistics_part({_OPERANDS}{_OPTIONS}) -> (Tensor part, Tensor logits)",
    _part_kernel,
    _part_fake,
    batched=_refuse_batch,
)
_results_in_graph = define(
    f"linear_token_statistics_of_parts({_OPERANDS}Tensor logits, Tensor every, {_OPTIONS}) -> "
    f"({', '.join(f'Tensor {name}' for name in (*STATISTICS, 'state', 'local'))})",
    _results_kernel,
    _results_fake,
    _keep_in_graph,
    gradient,
    DIFFERENTIABLE,
    batched=_refuse_batch,
    heads=HEADS,
)


# ---- Calls ----


def of_slices(tensors, allreduce_dgrad, chunk, keeps, sizes, ignore_index, group, outputs, options):
    """The statistics, in the order of STATISTICS. Those that are not asked for have no elements.

    tensors: x, weight, index, bias, row_mask, of which x has two dimensions. sizes: the number of tokens of
    each rank. outputs: the names of what is asked for. options: those that are not their defaults.
    """
    refuse_transforms("classes are divided among ranks", _FUNCTION)
    call = _Call(
        allreduce_dgrad, chunk, keeps, tuple(sizes), ignore_index, group, frozenset(outputs), options
    )
    return _in_graph(tensors, call) if has_no_values(tensors[0]) else _apply(*tensors, call)
