"""token_statistics of tokens that are divided among ranks, from arguments whose kinds have been checked.

Each rank computes the statistics of its slice. It sends the numbers that the outputs need, at most seven of
each row, and the hash of a plan (slice_plan.py). From these all ranks compute the statistics of whole rows,
with torch's operators, and the state from which the operator computes the gradient of a slice.

With the sums r, e and q of a slice (kernels/cpu/tokenstatistics.go), and d = top - m from its maximum to that
of the row:

    r of the row = sum exp(-d) (1 + r) - 1
    e of the row = sum exp(-d) (e + d (1 + r))
    q of the row = sum exp(-2 d) (1 + q) - 1

The 1 is that of one of the slices with d = 0, which is left out instead of being subtracted.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # how functional collectives treat fake tensors
from torch import Tensor, no_grad

from .. import _debug
from .._table import TORCH, demand
from . import operators_gen
from .autograd import apply_with, once_differentiable, refuse_constant
from .eager import is_batched, is_traced, may_write
from .fakes import check_inputs
from .graph_operators import define
from .kernels import explained
from .refusals import refuse_outer_gradients, refuse_tangents
from .sharded_cross_entropy import batched, refuse_vmap
from .slice_plan import agreement, chunks, compare, new_part, received, remembered, write_hash
from .tensors import check_targets, has_no_values

_NAME = "token_statistics"
STATISTICS = TORCH[_NAME].results[:-1]  # log_prob and entropy, which have gradients, come first
_HEADS = 4  # statistics of floating-point numbers

# The numbers of a row that a rank sends, and the statistics that need them. The first ones are the state.
_NEEDED_BY = {
    "max": {*STATISTICS} - {"mean_logit"},
    "log_sum": {"log_prob", "entropy", "log_sum_sq_probs"},
    "depth": {"entropy"},
    "below": {"log_prob"},  # the logit at the index minus the maximum, or _ABSENT
    "squares": {"log_sum_sq_probs"},  # log1p(q)
    "mean": {"mean_logit"},  # the slice's share in the mean, which overflows later than a sum
    "column": {"is_top1", "predicted"},  # the bits of an integer: the maximum's column among all tokens
}
_STATE = ("max", "log_sum", "depth")
_ABSENT = 1.0  # no logit is above the maximum
_INF, _NAN = float("inf"), float("nan")
_OF_NO_TOKENS = {"max": -_INF, "log_sum": -_INF, "depth": 0, "below": _ABSENT, "squares": 0, "mean": 0}
OUTSIDE = -2  # the local index where no slice has the index
_DEEPEST = 1e4  # exp(-d) is 0 for a larger d, and its product with an infinite d is not NaN


class _Plan(NamedTuple):
    """What a rank knows of a call from its own arguments, as slice_plan.Plan."""

    sizes: tuple[int, ...]
    first: int
    ignore_index: int
    outputs: frozenset[str]
    numbers: tuple[str, ...]  # that a rank sends of each row
    text: str
    hash: int
    contradiction: str
    options: dict  # of the operators, without defaults


def plan_of(logits, index, row_mask, *given) -> _Plan:
    """Checks a rank's own arguments. given: the rank, the sizes, ignore_index, the outputs, and pairs of
    options and their values."""
    tensors = (None if t is None else (t.shape, t.dtype, t.device) for t in (logits, index, row_mask))
    return remembered((*tensors, *given), lambda: _made(logits, index, row_mask, *given))


def _made(logits, index, row_mask, rank, sizes, ignore_index, outputs, options) -> _Plan:
    _check(logits, index, row_mask)
    if outputs & _NEEDED_BY["column"] and sum(sizes) >= 2**31:
        raise NotImplementedError(
            f"sizes is {sizes}, expected fewer than 2^31 tokens in all with is_top1 or predicted; leave both "
            "out of outputs"
        )
    masked = "no row_mask" if row_mask is None else f"a row_mask of {row_mask.dtype}"
    text = (
        f"rows {tuple(index.shape)} of {logits.dtype}, an index of {index.dtype}, {masked}, ignore_index "
        f"{ignore_index}, outputs {' '.join(name for name in STATISTICS if name in outputs)}"
    )
    text += "".join(f", {name} {value}" for name, value in options)
    try:  # a rank without tokens would not see that a value is refused
        operators_gen.token_statistics(logits.new_empty(0, 1), index.new_empty(0), **dict(options))
    except RuntimeError as error:
        raise explained(error) from None
    first, number, contradiction = agreement("logits", logits, rank, sizes, text)
    numbers = tuple(name for name, statistics in _NEEDED_BY.items() if statistics & outputs)
    facts = text, number, contradiction, dict(options)
    return _Plan(sizes, first, ignore_index, outputs, numbers, *facts)


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


def counted(logits, index, row_mask, plan):
    """The index, as the operators take it; the same counted from this slice, where -1 and the number of the
    slice's tokens are other slices; and whether a row counts."""
    index = index.long().contiguous()
    kept = index != plan.ignore_index
    if row_mask is not None:
        kept &= row_mask != 0
    return index, (index - plan.first).clamp_(-1, logits.shape[-1]), kept


def _integers(numbers):
    """The bits of numbers as integers."""
    return numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)


def part_of(logits, index, local, kept, group, plan, chunks=None, name="logits"):
    """What the other ranks need of this one.

    chunks: pairs of rows, as a slice, and their logits, if those of all rows are not held. Then logits has
    their shape alone. name: of the argument that has the tokens.
    """
    if _debug.is_enabled:
        counts = index.masked_fill(~kept, plan.ignore_index)
        compare(logits, counts, group, plan, (name, "index or row_mask"))
        if not plan.contradiction:
            check_targets(sum(plan.sizes), index, plan.ignore_index, "index")
    rows, each = index.numel(), len(plan.numbers)
    mine = new_part(logits, each * rows)
    write_hash(mine, each * rows, plan)
    if not plan.contradiction:  # else all others see the hash, and read nothing else
        part = mine[: each * rows].view(each, rows)
        if chunks is None:
            _fill(part, logits, local, kept, plan)
        else:
            for of_chunk, held in chunks:
                _fill(part[:, of_chunk], held, local[of_chunk], kept[of_chunk], plan)
        # NaN for all, so that a rank which does not leave the row out gets NaN.
        part.masked_fill_(~kept.view(-1), _NAN)
    return mine


def _fill(part, logits, local, kept, plan):
    """Fills part, (numbers, rows), also for a slice without tokens."""
    if logits.shape[-1]:
        _write_part(part, logits, local, kept, plan)
        return
    for name, numbers in zip(plan.numbers, part, strict=True):
        if name == "column":
            _integers(numbers).fill_(torch.iinfo(_integers(numbers).dtype).max)
        else:
            numbers.fill_(_OF_NO_TOKENS[name])


def _write_part(part, logits, local, kept, plan):
    """Fills part, (numbers, rows)."""
    n, of = logits.shape[-1], dict(zip(plan.numbers, part, strict=True))
    # The column of the maximum is -1 in a row with a NaN or +inf, and tells it from one of -inf alone.
    asked = plan.outputs | ({"predicted"} if {"column", "log_sum"} & of.keys() else set())
    wanted = {demand(name): name in asked for name in STATISTICS if name != "is_top1"}
    results = operators_gen.token_statistics(logits, local, kept, **wanted, needs_state=True, **plan.options)
    *found, state = (result.view(-1) for result in results)
    found, state = dict(zip(STATISTICS, found, strict=True)), state.view(-1, len(_STATE))
    count = len([name for name in _STATE if name in of])
    part[:count] = state.T[:count]
    if "log_sum" in of:
        log_sum = state[:, 1]
        nothing = (state[:, 0] == -_INF) & (found["predicted"] >= 0)  # it adds nothing to its row
        of["log_sum"].masked_fill_(nothing, -_INF)
    if "depth" in of:
        of["depth"].masked_fill_(nothing, 0)
    if "below" in of:
        below = (found["log_prob"] + log_sum).clamp_(max=0).masked_fill_(nothing, -_INF)
        local = local.view(-1)
        of["below"].copy_(torch.where((local >= 0) & (local < n), below, _ABSENT))
    if "squares" in of:
        squares = found["log_sum_sq_probs"] + 2 * log_sum
        of["squares"].copy_(squares.clamp_(min=0).masked_fill_(nothing, 0))
    if "mean" in of:
        of["mean"].copy_(found["mean_logit"] * (n / sum(plan.sizes)))
    if "column" in of:
        column = found["predicted"]
        _integers(of["column"]).copy_(torch.where(column < 0, column, column + plan.first))


def merged(every, index, local, kept, plan):
    """What all ranks have sent, as the statistics in the order of STATISTICS, their state, and the index for
    backward."""
    if plan.contradiction:
        raise ValueError(plan.contradiction)
    rows = received(every, len(plan.numbers), index.numel(), plan).unbind(1)
    of, found, state = dict(zip(plan.numbers, rows, strict=True)), {}, every.new_empty(0)
    if "max" in of:
        high = of["max"].amax(0)
        has_max, distance = of["max"] == high, high - of["max"]
    if "log_sum" in of:
        deep = distance.clamp(max=_DEEPEST)
        factor, ties, others = deep.neg().exp(), has_max.sum(0) - 1, of["log_sum"].expm1()
        sums = factor * (1 + others)
        others = torch.where(has_max, others, sums).sum(0) + ties
        others.masked_fill_(high == -_INF, _NAN)
        log_sum, depth = others.log1p(), torch.zeros_like(others)
        if "depth" in of:
            depth = (sums * (of["depth"] + deep)).sum(0) / (1 + others)
            found["entropy"] = log_sum + depth
        if "below" in of:
            absent = of["below"] > 0
            below = torch.where(absent, 0, of["below"] - distance).sum(0)
            outside = absent.all(0)
            found["log_prob"] = (below - log_sum).masked_fill_(outside, _NAN)
            local = local.masked_fill(outside.view(local.shape), OUTSIDE)
        if "squares" in of:
            squares = of["squares"].expm1()
            squares = torch.where(has_max, squares, factor.square() * (1 + squares)).sum(0) + ties
            found["log_sum_sq_probs"] = squares.log1p() - 2 * log_sum
        state = torch.stack((high, log_sum, depth), -1).view(*index.shape, len(_STATE))
    if "mean" in of:
        found["mean_logit"] = of["mean"].sum(0)
    if "column" in of:
        columns = _integers(of["column"])
        none = torch.iinfo(columns.dtype).max  # also where a rank's hash differs
        column = torch.where(has_max | (columns < 0), columns, none).amin(0).long()
        column.masked_fill_(column == none, -1)
        found["is_top1"] = (column == index.view(-1)) & (column >= 0)
        found["predicted"] = column
    left_out = ~kept.view(-1)
    for name, value in found.items():
        value.masked_fill_(left_out, -1 if name == "predicted" else 0)
    results = (
        found[name].view(index.shape)
        if name in plan.outputs
        else every.new_empty(0, dtype=_dtype(name, every))
        for name in STATISTICS
    )
    return *results, state, local


def of_parts(logits, every, index, row_mask, plan):
    """The statistics, and what backward reads: the state, the index counted from this slice, and which rows
    count. Of the logits the shape is read."""
    of_rows = counted(logits, index, row_mask, plan)
    return *merged(every, *of_rows, plan), of_rows[-1]


def _dtype(name, every):
    """The dtype of a statistic."""
    return {"is_top1": torch.bool, "predicted": torch.int64}.get(name, every.dtype)


def _forward(ctx, logits, index, row_mask, group, plan, inplace_backward):
    index, local, kept = counted(logits, index, row_mask, plan)
    mine = part_of(logits, index, local, kept, group, plan)
    every = mine.new_empty(len(plan.sizes) * mine.numel())
    dist.all_gather_into_tensor(every, mine, group=group)
    *results, state, local = merged(every, index, local, kept, plan)
    _keep(ctx, logits, local, kept, state, plan.options, inplace_backward and logits.numel())
    return tuple(results)


def _keep(ctx, logits, local, kept, state, options, inplace_backward=False):
    ctx.save_for_backward(logits, local, kept, state)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.inplace_backward = options, inplace_backward and may_write(logits)


def _gradient(ctx, dlog_prob, dentropy, *others):
    for name, value in zip(STATISTICS[2:_HEADS], others, strict=True):
        if value is not None and value.numel():
            dentropy = refuse_constant(_NAME, name, value, dentropy)
    logits, local, kept, state = ctx.saved_tensors
    if not logits.shape[-1]:
        return torch.zeros_like(logits)
    if not state.shape[-1]:  # mean_logit alone: what is left is 0 or NaN of each row
        refused = dentropy.masked_fill(~kept, 0).to(logits.dtype)
        return refused.unsqueeze(-1).expand_as(logits).contiguous()
    if dlog_prob is not None:
        dlog_prob = dlog_prob.masked_fill(local == OUTSIDE, _NAN)
    given, options = (logits, local, kept, state, dlog_prob, dentropy), {**ctx.options, "slice": True}
    upstream = [each for each in (dlog_prob, dentropy) if each is not None]
    if not ctx.inplace_backward or any(is_batched(each) or is_traced(each) for each in upstream):
        return operators_gen.token_statistics_bwd(*given, **options)
    with no_grad():
        operators_gen.token_statistics_bwd_(*given, **options)
    return once_differentiable(logits.detach(), logits, *upstream)


_apply = apply_with("token_statistics_of_slices", _forward, _gradient, [0], 6, heads=_HEADS)


# ---- In graphs ----
#
# As in sharded_cross_entropy.py.


def _in_graph(logits, index, row_mask, group, sizes, ignore_index, outputs, options):
    collectives, name = torch.ops._c10d_functional, group.group_name
    more = (  # defaults are constants of code: see loss_values
        *[statistic in outputs for statistic in STATISTICS],
        options.get("scale", 1.0),
        options.get("softcap", 0.0),
        options.get("temperature", 1.0),
        options.get("batch_invariant", False),
    )
    given = index, row_mask, sizes, ignore_index, name, *more
    mine = _part_in_graph(logits.detach(), *given)
    every = collectives.wait_tensor(collectives.all_gather_into_tensor(mine, len(sizes), name))
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
    return part_of(logits, *counted(logits, index, row_mask, plan), group, plan)


def part_fake(logits, index, row_mask, sizes, ignore_index, group, *more):
    _check(logits, index, row_mask)
    each = sum(1 for statistics in _NEEDED_BY.values() if statistics & outputs_of(more))
    return new_part(logits, each * index.numel())


def _merged_kernel(logits, every, index, row_mask, *options):
    _, plan = _resolved(logits, index, row_mask, *options)
    return of_parts(logits, every, index, row_mask, plan)


def merged_fake(logits, every, index, row_mask, sizes, ignore_index, group, *more):
    shape, outputs = index.shape, outputs_of(more)
    results = (
        every.new_empty(shape if name in outputs else (0,), dtype=_dtype(name, every)) for name in STATISTICS
    )
    state = (*shape, len(_STATE)) if outputs & _NEEDED_BY["log_sum"] else (0,)
    rows = (every.new_empty(shape, dtype=dtype) for dtype in (torch.int64, torch.bool))
    return *results, every.new_empty(state), *rows


def _keep_in_graph(ctx, given, results):
    logits, *_, state, local, kept = given[0], *results
    _keep(ctx, logits, local, kept, state, options_of(given[7:]))


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
    f"({', '.join(f'Tensor {name}' for name in (*STATISTICS, 'state', 'local', 'kept'))})",
    _merged_kernel,
    merged_fake,
    _keep_in_graph,
    _gradient,
    batched=_refuse_batch,
    heads=_HEADS,
)
