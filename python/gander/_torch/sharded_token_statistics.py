"""token_statistics of tokens that are divided among ranks, from arguments whose kinds have been checked.

Each rank computes the statistics of its slice into what it sends: the numbers of each row that the outputs
need, four or eight, and the hash of a plan (slice_plan.py). From these sharded_token_statistics_combine
makes, on all ranks, the statistics of whole rows, and the state and the index from which the operator
computes the gradient of a slice. gander.h has their order.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, no_grad

from .. import _debug
from .._table import demand
from . import operators_gen
from .autograd import apply_with, once_differentiable, refuse_constant
from .eager import is_plain, may_write
from .fakes import check_inputs
from .graph_operators import define
from .kernels import explained
from .refusals import refuse_outer_gradients, refuse_tangents
from .sharded_cross_entropy import batched, refuse_vmap
from .slice_plan import (
    agreement,
    chunks,
    compare,
    gather,
    gather_in_graph,
    new_part,
    received,
    remembered,
    write_hash,
)
from .tensors import check_targets, has_no_values
from .token_statistics import HEADS, STATISTICS, maps_of

_NAME = "token_statistics"
_STATE = 3  # numbers of a row
OUTSIDE = -2  # the local index where no slice has the index, as in kernels.go
LEFT_OUT = -3  # the local index of a row that is left out, as in kernels.go


class _Plan(NamedTuple):
    """What a rank knows of a call from its own arguments, as slice_plan.Plan."""

    sizes: tuple[int, ...]
    first: int
    ignore_index: int
    outputs: frozenset[str]
    text: str
    hash: int
    contradiction: str
    options: dict  # of the operators, without defaults


def plan_of(logits, index, row_mask, *given) -> _Plan:
    """Checks a rank's own arguments. given: the rank, the sizes, ignore_index, the outputs, pairs of options
    and their values, and of other functions the name of what has the classes and what the ranks have to agree
    on besides."""
    tensors = (None if t is None else (t.shape, t.dtype, t.device) for t in (logits, index, row_mask))
    return remembered((*tensors, *given), lambda: _made(logits, index, row_mask, *given))


def _made(
    logits, index, row_mask, rank, sizes, ignore_index, outputs, options, name="logits", besides=""
) -> _Plan:
    _check(logits, index, row_mask)
    masked = "no row_mask" if row_mask is None else f"a row_mask of {row_mask.dtype}"
    text = (
        f"rows {tuple(index.shape)} of {logits.dtype}, an index of {index.dtype}, {masked}, ignore_index "
        f"{ignore_index}, outputs {' '.join(output for output in STATISTICS if output in outputs)}"
    )
    text += "".join(f", {option} {value}" for option, value in options) + besides
    try:  # a rank without tokens would not see that a value is refused
        operators_gen.token_statistics(logits.new_empty(0, 1), index.new_empty(0), **dict(options))
    except RuntimeError as error:
        raise explained(error) from None
    first, number, contradiction = agreement(name, logits, rank, sizes, text)
    return _Plan(sizes, first, ignore_index, outputs, text, number, contradiction, dict(options))


def _check(logits, index, row_mask):
    """Refuses what this rank can see."""
    if logits.ndim and logits.shape[-1] == 0:  # the operators refuse that
        logits = logits.new_empty((*logits.shape[:-1], 1))
    check_inputs("token_statistics", {"logits": logits, "index": index, "row_mask": row_mask})


# ---- Calls ----


def of_slices(
    logits, index, row_mask, group, sizes, ignore_index, outputs, options, inplace_backward=False
) -> tuple[Tensor, ...]:
    """The statistics, in the order of STATISTICS. Those that are not asked for have no elements.

    sizes: the number of tokens of each rank. outputs: the names of what is asked for. options: those of the
    operators that are not their defaults.
    """
    if has_no_values(logits):
        return _in_graph(logits, index, row_mask, group, sizes, ignore_index, outputs, options)
    more = frozenset(outputs), tuple(options.items())
    plan = plan_of(logits, index, row_mask, group.rank(), tuple(sizes), ignore_index, *more)
    refuse_tangents((logits,))
    refuse_vmap({"logits": logits, "index": index, "row_mask": row_mask}, "")
    refuse_outer_gradients("distributed.token_statistics", logits)
    try:
        return _apply(logits, index, row_mask, group, plan, bool(inplace_backward))
    except RuntimeError as error:
        raise explained(error) from None


def of_mesh(logits, index, row_mask, mesh, dim, tokens, *given) -> tuple[Tensor, ...]:
    """The statistics of this rank's part of a DTensor whose tokens are sharded on a dimension of a mesh.
    given: the rest of the arguments of of_slices."""
    sizes = chunks(tokens, mesh.size(dim))
    return of_slices(logits, index, row_mask, mesh.get_group(dim), sizes, *given)


# ---- The statistics of a slice, and of whole rows ----


def _is_narrow(outputs):
    return outputs <= {"log_prob", "entropy"}


def _each(outputs):
    """How many numbers of a row a rank sends."""
    return 4 if _is_narrow(outputs) else 8


def _places(part, shape):
    """The places of what is sent, by the names that the operator has for its outputs. part: (numbers, rows).
    shape: that of the rows."""
    places = {"state": part[:_STATE].view(*shape, _STATE), "log_prob": part[_STATE]}
    if len(part) > 4:
        predicted = part[6:].view(-1).view(torch.int64)[: part.shape[1]]
        places |= {"log_sum_sq_probs": part[4], "mean_logit": part[5], "predicted": predicted}
    return places


def part_of(logits, index, row_mask, group, plan, chunks=None, name="logits"):
    """What the other ranks need of this one.

    chunks: pairs of rows, as a slice, and their logits, if those of all rows are not held. Then logits has
    their shape alone. name: of the argument that has the tokens.
    """
    if _debug.is_enabled:
        kept = index if row_mask is None else index.masked_fill(row_mask == 0, plan.ignore_index)
        compare(logits, kept, group, plan, (name, "index or row_mask"))
        if not plan.contradiction:
            check_targets(sum(plan.sizes), index, plan.ignore_index, "index")
    each = _each(plan.outputs)
    numbers = each * index.numel()
    mine = new_part(logits, numbers)
    write_hash(mine, numbers, plan)
    if plan.contradiction:  # all others see the hash, and read nothing else
        return mine
    part = mine[:numbers].view(each, index.numel())
    if each == 8 and part.dtype == torch.float64:
        part[7] = 0  # not used, but the same bits are sent on each run
    places = _places(part, index.shape)
    for rows, held in [(..., logits)] if chunks is None else chunks:
        mask = None if row_mask is None else row_mask[rows]
        _fill({name: place[rows] for name, place in places.items()}, held, index[rows], mask, plan)
    return mine


def _fill(places, logits, index, row_mask, plan):
    """Writes what is sent of some rows, also for a slice without tokens."""
    tokens, first, options = sum(plan.sizes), plan.first, plan.options
    is_empty = not logits.shape[-1]
    if is_empty:  # see gander.h
        logits, first, options = logits.new_full((*index.shape, 1), -torch.inf), tokens, {}
    operators_gen.token_statistics_out(
        logits,
        index,
        row_mask,
        **places,
        ignore_index=plan.ignore_index,
        first=first,
        classes=tokens,
        **options,
    )
    if is_empty and "mean_logit" in places:
        places["mean_logit"].zero_()


def merged(every, index, row_mask, plan):
    """What all ranks have sent, as the statistics in the order of STATISTICS, their state, and the index for
    backward."""
    if plan.contradiction:
        raise ValueError(plan.contradiction)
    rows = index.numel()
    found = {name: every.new_empty(index.shape, dtype=_dtype(name, every)) for name in plan.outputs}
    state, local = every.new_empty(*index.shape, _STATE), torch.empty_like(index)
    if rows:
        operators_gen.sharded_token_statistics_combine(
            received(every, _each(plan.outputs), rows, plan),
            index.view(-1),
            None if row_mask is None else row_mask.reshape(-1),
            **{name: value.view(-1) for name, value in found.items()},
            state=state.view(-1, _STATE),
            local=local.view(-1),
            ignore_index=plan.ignore_index,
            first=plan.first,
            classes=sum(plan.sizes),
            narrow=_is_narrow(plan.outputs),
        )
    for name in STATISTICS:
        if name not in found:
            found[name] = every.new_empty(0, dtype=_dtype(name, every))
    return *(found[name] for name in STATISTICS), state, local


def _dtype(name, every):
    """The dtype of a statistic."""
    return {"is_top1": torch.bool, "predicted": torch.int64}.get(name, every.dtype)


def _forward(ctx, logits, index, row_mask, group, plan, inplace_backward):
    index = index.long().contiguous()
    every = gather(part_of(logits, index, row_mask, group, plan), group)
    *results, state, local = merged(every, index, row_mask, plan)
    _keep(ctx, logits, local, state, plan.options, inplace_backward and logits.numel())
    return tuple(results)


def _keep(ctx, logits, local, state, options, inplace_backward=False):
    ctx.save_for_backward(logits, local, state)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.inplace_backward = options, inplace_backward and may_write(logits)


def _gradient(ctx, dlog_prob, dentropy, *others):
    for name, value in zip(STATISTICS[2:HEADS], others, strict=True):
        if value is not None and value.numel():
            dentropy = refuse_constant(_NAME, name, value, dentropy)
    logits, local, state = ctx.saved_tensors
    if not logits.shape[-1]:
        return torch.zeros_like(logits)
    given, options = (logits, local, None, state, dlog_prob, dentropy), dict(ctx.options)
    options |= {"ignore_index": LEFT_OUT, "slice": True}
    upstream = [each for each in (dlog_prob, dentropy) if each is not None]
    if not (ctx.inplace_backward and all(map(is_plain, upstream))):
        return operators_gen.token_statistics_bwd(*given, **options)
    with no_grad():
        operators_gen.token_statistics_bwd_(*given, **options)
    return once_differentiable(logits.detach(), logits, *upstream)


_apply = apply_with("token_statistics_of_slices", _forward, _gradient, [0], 6, heads=HEADS)


# ---- In graphs ----
#
# As in sharded_cross_entropy.py.


def _in_graph(logits, index, row_mask, group, sizes, ignore_index, outputs, options):
    name = group.group_name
    asked = [statistic in outputs for statistic in STATISTICS]
    more = *asked, *maps_of(options), options.get("batch_invariant", False)
    given = index, row_mask, sizes, ignore_index, name, *more
    mine = _part_in_graph(logits.detach(), *given)
    every = gather_in_graph(mine, len(sizes), name)
    return _merged_in_graph(logits, every, *given)[: len(STATISTICS)]


DEFAULTS = {"scale": 1, "softcap": 0, "temperature": 1, "batch_invariant": False}


def outputs_of(more):
    return frozenset(name for name, asked in zip(STATISTICS, more, strict=False) if asked)


def options_of(more):
    given = zip(DEFAULTS, more[len(STATISTICS) :], strict=True)
    return {name: value for name, value in given if value != DEFAULTS[name]}


def _resolved(logits, index, row_mask, sizes, ignore_index, group, *more):
    group, options = dist.distributed_c10d._resolve_process_group(group), tuple(options_of(more).items())
    given = group.rank(), tuple(sizes), ignore_index, outputs_of(more), options
    return group, plan_of(logits, index, row_mask, *given)


def _part_kernel(logits, index, row_mask, *options):
    group, plan = _resolved(logits, index, row_mask, *options)
    return part_of(logits, index.long().contiguous(), row_mask, group, plan)


def part_fake(logits, index, row_mask, sizes, ignore_index, group, *more):
    _check(logits, index, row_mask)
    return new_part(logits, _each(outputs_of(more)) * index.numel())


def _merged_kernel(logits, every, index, row_mask, *options):
    """The statistics, and what backward reads."""
    _, plan = _resolved(logits, index, row_mask, *options)
    return merged(every, index.long().contiguous(), row_mask, plan)


def merged_fake(logits, every, index, row_mask, sizes, ignore_index, group, *more):
    shape, outputs = index.shape, outputs_of(more)
    results = (
        every.new_empty(shape if name in outputs else (0,), dtype=_dtype(name, every)) for name in STATISTICS
    )
    return *results, every.new_empty(*shape, _STATE), every.new_empty(shape, dtype=torch.int64)


def _keep_in_graph(ctx, given, results):
    logits, *_, state, local = given[0], *results
    _keep(ctx, logits, local, state, options_of(given[7:]))


def _refuse_batch(info, in_dims, *given):
    raise batched("index or row_mask" if in_dims[0] is None else "logits", "")


_NEEDS = ", ".join(f"bool {demand(name)}" for name in STATISTICS)
OPTIONS = f"SymInt[] sizes, SymInt ignore_index, str group, {_NEEDS}, "
OPTIONS += "float scale, float softcap, float temperature, bool batch_invariant"
_OPTIONS = f"Tensor index, Tensor? row_mask, {OPTIONS}"

_part_in_graph = define(
    f"token_statistics_part(Tensor logits, {_OPTIONS}) -> Tensor",
    _part_kernel,
    part_fake,
    batched=_refuse_batch,
)
_merged_in_graph = define(
    f"token_statistics_of_parts(Tensor logits, Tensor every, {_OPTIONS}) -> "
    f"({', '.join(f'Tensor {name}' for name in (*STATISTICS, 'state', 'local'))})",
    _merged_kernel,
    merged_fake,
    _keep_in_graph,
    _gradient,
    batched=_refuse_batch,
    heads=HEADS,
)
