"""Cross-entropy of classes that are divided among ranks, from arguments whose kinds have been checked.

Each rank computes the loss and the log-sum-exp of its slice. Three numbers of each row go to all ranks, and
one more with class weights. sharded_cross_entropy_combine makes of them the loss and the log-sum-exp of whole
rows.

Each call does one all-gather, whatever the arguments and whatever earlier calls have seen. Otherwise the
ranks could disagree about which collective comes next. So a rank cannot ask the others for their sizes before
it computes. It takes them from its own arguments, and sends a hash of what it takes for granted along with
its numbers. A device that finds another hash among the gathered ones makes the loss and the gradient NaN.
"""

import hashlib
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # how functional collectives treat fake tensors
from torch import Tensor

from .. import _debug
from .._table import LOSS_OPTIONS, MEAN, NONE, REDUCTIONS
from . import operators_gen
from .autograd import apply_with
from .cross_entropy import gradient, keep, kept, loss_values
from .fakes import check_inputs
from .graph_operators import define
from .kernels import explained
from .refusals import refuse_gradients, refuse_outer_gradients, refuse_tangents
from .tensors import check_targets, has_no_values, statistic

# The options of a row's loss that slices have: all but the first, label smoothing.
OPTIONS = tuple(LOSS_OPTIONS)[1:]


def of_slices(
    x, target, weight, group, sizes, ignore_index, reduction, options, inplace_backward=False
) -> Tensor:
    """The loss, from arguments whose kinds have been checked. sizes: the number of classes of each rank.
    options: those of OPTIONS that are not their defaults."""
    if weight is not None and "z_loss" in options:
        raise NotImplementedError(
            f"z_loss is {options['z_loss']} with weight and classes of which each rank has a slice, "
            "expected 0; leave one of them out"
        )
    more = loss_values(options)[1:]
    if has_no_values(x):
        return _in_graph(x, target, weight, group, sizes, ignore_index, reduction, more)
    plan = plan_of(x, target, weight, group.rank(), tuple(sizes), ignore_index, reduction, more)
    refuse_tangents((x,))
    _refuse_vmap({"x": x, "target": target, "weight": weight})
    refuse_outer_gradients("distributed.cross_entropy", x)
    try:
        return _apply(x, target, weight, group, plan, bool(inplace_backward))
    except RuntimeError as error:
        raise explained(error) from None


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
    _check(x, target, weight, divisor)
    loss = of_slices(x, target, weight, group, sizes, ignore_index, reduction, options)
    return loss if divisor is None else loss / divisor


def slice_of(weight, sizes, rank, n):
    """This rank's class weights. An x with another number of classes, n, is refused after the all-gather, or
    the other ranks would wait."""
    return weight[sum(sizes[:rank]) :][:n] if n == sizes[rank] else weight.new_empty(n)


def chunks(classes, ranks):
    """The number of classes of each rank, as torch.chunk and DTensor divide them."""
    size = -(-classes // ranks)
    return [min(size, max(0, classes - size * rank)) for rank in range(ranks)]


def _check(x, target, weight, divisor=None):
    """Refuses what this rank can see."""
    if x.ndim and x.shape[-1] == 0:  # the operators refuse that
        if weight is not None and weight.shape != (0,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (0,): x has no columns")
        x, weight = x.new_empty((*x.shape[:-1], 1)), None
    check_inputs("cross_entropy", {"x": x, "target": target, "weight": weight, "divisor": divisor})


def _refuse_vmap(given):
    functorch = torch._C._functorch
    for name, tensor in given.items():
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                raise _batched(name)
            tensor = functorch.get_unwrapped(tensor)


def _batched(name):
    return NotImplementedError(
        f"{name} is batched by torch.func.vmap, expected a plain tensor: a collective cannot be batched; "
        "pass all rows in one call, with reduction='none'"
    )


# ---- What all ranks have to agree on ----


class Plan(NamedTuple):
    """What a rank knows of a call from its own arguments."""

    sizes: tuple[int, ...]
    first: int  # the class that this rank's slice begins with
    ignored: int  # ignore_index, counted from there
    ignore_index: int
    reduction: int
    text: str  # what has to be the same on all ranks besides the sizes
    hash: int  # of both, 64 bits
    contradiction: str  # between x and the sizes, or ""
    options: dict[str, float]  # those of OPTIONS that are not their defaults


_plans: dict[tuple, Plan] = {}  # of this rank's arguments alone: what is in it changes no collective
_MOST_PLANS = 1 << 12


def plan_of(x, target, weight, rank, sizes, ignore_index, reduction, more) -> Plan:
    """Checks a rank's own arguments."""
    tensors = (x, target) if weight is None else (x, target, weight)
    key = *((t.shape, t.dtype, t.device) for t in tensors), rank, sizes, ignore_index, reduction, more
    if plan := _plans.get(key):
        return plan
    _check(x, target, weight)
    weights = "no weight" if weight is None else f"weights of {weight.dtype}"
    text = (
        f"rows {tuple(target.shape)} of {x.dtype}, targets of {target.dtype}, {weights}, ignore_index "
        f"{ignore_index}, reduction {REDUCTIONS[reduction]}"
    )
    options = {name: value for name, value in zip(OPTIONS, more, strict=True) if value != LOSS_OPTIONS[name]}
    text += "".join(f", {name} {value}" for name, value in options.items())
    if options:  # a rank without classes would not see that a value is refused
        operators_gen.cross_entropy_fwd(x.new_empty(0, 1), target.new_empty(0), **options)
    n, first, contradiction = x.shape[-1], sum(sizes[:rank]), ""
    if n != sizes[rank]:
        contradiction = (
            f"x has {n} classes on rank {rank}, expected {sizes[rank]} by sizes or classes, which make the "
            f"slices {sizes}; pass what fits x"
        )
    elif not any(sizes):
        contradiction = (
            f"x has no classes on rank {rank}, expected as many on each rank without sizes and classes; pass "
            "one of them, or skip the call if no rank has classes"
        )
    facts = f"{text}, sizes {sizes}, {contradiction}"
    digest = hashlib.blake2b(facts.encode(), digest_size=8).digest()
    # Integers wrap around, so that ignore_index stays distinct.
    ignored = (ignore_index - first + 2**63) % 2**64 - 2**63
    number = int.from_bytes(digest, "little", signed=True)
    plan = Plan(sizes, first, ignored, ignore_index, reduction, text, number, contradiction, options)
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    return _plans.setdefault(key, plan)


_TEXT = 536  # bytes that describe a rank's arguments to the others, under set_debug


def _compare(x, target, group, plan):
    """Refuses, on all ranks, what differs between them. One all-gather, and a wait for the device."""
    # A sum that depends on the order. Integers wrap around.
    odd = 2 * torch.arange(target.numel(), device=target.device) + 1
    checksum = int(((target.flatten().long() + 1) * odd).sum())
    mine = f"{plan.hash} {x.shape[-1]} {checksum} {plan.text}, sizes {plan.sizes}".encode()
    mine = torch.frombuffer(bytearray(mine[:_TEXT].ljust(_TEXT)), dtype=torch.uint8).to(x.device)
    every = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(every, mine, group=group)
    rows = [bytes(row).decode(errors="replace").rstrip() for row in every.view(group.size(), -1).tolist()]
    hashes, counts, checksums, texts = zip(*(row.split(" ", 3) for row in rows), strict=True)
    counts = tuple(map(int, counts))
    if not any(counts):
        raise ValueError("x has no classes on any rank, expected one class or more in all; skip the call")
    for rank, (text, value) in enumerate(zip(texts, hashes, strict=True)):
        if value == hashes[0]:
            continue
        if text.partition(", sizes ")[0] != texts[0].partition(", sizes ")[0]:
            raise ValueError(
                f"rank 0 passes {texts[0]}, rank {rank} passes {text}; expected the same rows, targets and "
                "options on all ranks of the group"
            )
        taken = [text.partition(", sizes ")[2] for text in (texts[0], text)]
        raise ValueError(
            f"x has {counts} classes on the ranks of the group, expected the same sizes of all slices "
            f"on each of them: rank 0 takes {taken[0]}, rank {rank} {taken[1]}; pass sizes={counts}"
        )
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ValueError(
                f"target of rank {rank} is another than that of rank 0, expected the same targets on all "
                "ranks of the group"
            )


# ---- The loss and its gradient ----


def counted(target, plan):
    """The targets, as the operators take them, and the same counted from this slice."""
    target = target.long().contiguous()
    return target, target - plan.first


def _part(x, target, local, weight, group, plan):
    """What the other ranks need of this one: what the operator that combines the slices takes of each (see
    gander.h), and the hash."""
    if _debug.is_enabled:
        _compare(x, target, group, plan)
        if not plan.contradiction:
            check_targets(sum(plan.sizes), target, plan.ignore_index)
    n, rows, each = x.shape[-1], target.numel(), 3 + (weight is not None)
    mine = _new_part(x, target, weight)
    words = _words(mine.dtype)
    part, padding, last = mine.split([each * rows, mine.numel() - each * rows - words, words])
    last.view(torch.int64).fill_(plan.hash)
    if plan.contradiction:  # all others see the hash, and read nothing else
        return mine
    part = part.view(each, rows)
    if padding.numel():
        padding.zero_()  # so that the same bits are sent on each run
    if n:
        mapped = {name: value for name, value in plan.options.items() if name != "z_loss"}
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
    mine = _part(x, target, local, weight, group, plan)
    every = mine.new_empty(len(plan.sizes) * mine.numel())
    dist.all_gather_into_tensor(every, mine, group=group)
    return every


def _words(dtype):
    """How many numbers of this dtype have as many bits as the hash."""
    return 8 // dtype.itemsize


def _new_part(x, target, weight):
    """What a rank sends, without values. The last elements are the hash, aligned to 8 bytes."""
    dtype = statistic(x.dtype)
    words, numbers = _words(dtype), (3 + (weight is not None)) * target.numel()
    return x.new_empty((numbers + words - 1) // words * words + words, dtype=dtype)


def combined(every, target, local, weight, plan):
    """The loss, and what backward reads: the targets counted from this slice, the log-sum-exps of whole rows,
    and the weights of the targets or None."""
    if plan.contradiction:
        raise ValueError(plan.contradiction)
    rows, ranks, each = target.numel(), len(plan.sizes), 3 + (weight is not None)
    every = every.view(ranks, -1)
    # With NaN in the place of one rank's numbers the loss and the log-sum-exp are NaN.
    differs = every[:, -_words(every.dtype) :].view(torch.int64) != plan.hash
    parts = torch.where(differs, float("nan"), every[:, : each * rows]).view(ranks, each, rows)
    lse, weights = every.new_empty(2 * rows + 1), None if weight is None else every.new_empty(target.shape)
    loss = every.new_empty(target.shape if plan.reduction == NONE else ())
    if rows:
        losses = (loss.view(-1), None) if plan.reduction == NONE else (None, loss)
        operators_gen.sharded_cross_entropy_combine(
            parts,
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
        if factor := plan.options.get("z_loss"):
            squares = (lse[:rows] + lse[rows:-1]).square_().mul_(factor)  # of whole rows
            squares.masked_fill_(target.view(-1) == plan.ignore_index, 0)
            if plan.reduction == NONE:
                loss += squares.view(target.shape)
            else:
                loss += squares.sum() / lse[-1] if plan.reduction == MEAN else squares.sum()
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
        inplace_backward and x.numel(),
    )
    return loss


def _keep(ctx, x, local, lse, weights, ignored, reduction, options, inplace_backward=False):
    values = {"x": x, "target": local, "lse": lse, "weight": weights, "ignore_index": ignored, "slice": True}
    values |= options | {"reduction": MEAN if reduction == MEAN else NONE}
    keep(ctx, values, inplace_backward=inplace_backward)


def _gradient(ctx, dloss):
    given = kept(ctx, dloss)
    weights, given["weight"] = given["weight"], None  # of the rows
    if weights is not None:
        given["dloss"] = dloss * weights
    return gradient(ctx, given) if given["x"].shape[-1] else torch.zeros_like(given["x"])


_apply = apply_with("cross_entropy_of_slices", _forward, _gradient, [0], 6)


# ---- In graphs ----
#
# The all-gather is a functional collective, whose order among others Inductor keeps. The operator before it
# computes what a rank sends. The one after it has the gradient, so it takes x, which it does not read.

_IGNORED = -(2**63)  # the local target of an ignored row. A graph may not know where this slice begins.


def _in_graph(x, target, weight, group, sizes, ignore_index, reduction, more):
    collectives, name = torch.ops._c10d_functional, group.group_name
    options = target, weight, sizes, ignore_index, reduction, name, *more
    mine = _part_in_graph(x.detach(), *options)
    every = collectives.wait_tensor(collectives.all_gather_into_tensor(mine, len(sizes), name))
    return _combined_in_graph(x, every, *options)[0]


def _resolved(x, target, weight, sizes, ignore_index, reduction, group, *more):
    group = dist.distributed_c10d._resolve_process_group(group)
    return group, plan_of(x, target, weight, group.rank(), tuple(sizes), ignore_index, reduction, more)


def _part_kernel(x, target, weight, *options):
    group, plan = _resolved(x, target, weight, *options)
    return _part(x, *counted(target, plan), weight, group, plan)


def _part_fake(x, target, weight, *options):
    _check(x, target, weight)
    return _new_part(x, target, weight)


def _refuse_batch(info, in_dims, *given):
    raise _batched("target or weight" if in_dims[0] is None else "x")


def _combined_kernel(x, every, target, weight, *options):
    """The loss, and what backward reads. Weights that there are not have no elements."""
    _, plan = _resolved(x, target, weight, *options)
    loss, local, lse, weights = combined(every, *counted(target, plan), weight, plan)
    local = torch.where(local == plan.ignored, _IGNORED, local.clamp(-1, x.shape[-1]))
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
    x, _, _, weight, _, _, reduction, _, *more = given
    _, local, lse, weights = results
    options = dict(zip(OPTIONS, more, strict=True))
    _keep(ctx, x, local, lse, None if weight is None else weights, _IGNORED, reduction, options)


_OPTIONS = "Tensor target, Tensor? weight, SymInt[] sizes, SymInt ignore_index, int reduction, str group, "
_OPTIONS += ", ".join(f"float {name}" for name in OPTIONS)

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
