"""Cross-entropy of logits whose classes are divided among the ranks of a torch.distributed group.

Each rank computes the loss and the log-sum-exp of its slice. Three numbers of each row go to all ranks, and
one more with class weights. sharded_cross_entropy_combine makes of them the loss and the log-sum-exp of whole
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import _debug
from ._functions.arguments import any_overrides, code_of, overridden
from ._table import MEAN, NONE, REDUCTIONS, Reduction
from ._torch import backend, operators_gen
from ._torch.autograd import (
    apply_of,
    function,
    refuse_gradients,
    refuse_outer_gradients,
    refuse_tangents,
)
from ._torch.cross_entropy import is_batched, may_write_saved, write_over
from ._torch.fakes import check_inputs
from ._torch.sharding import is_dtensor

__all__ = ["cross_entropy"]


def cross_entropy(
    x: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """gander.cross_entropy of logits of which each rank of a group holds a slice of the classes.

    The slices lie in the order of the group's ranks. Targets count all classes. All ranks return the same
    loss.
    x: (..., n), this rank's slice, of float16, bfloat16 or float32 (on the CPU also float64), any strides. n
    may differ between ranks, and may be 0.
    target: x.shape[:-1], int32 or int64, the same on all ranks. A target that is not in any slice makes the
    loss and the gradient of its row NaN, and with "mean" those of all rows (see set_debug).
    group: a process group of torch.distributed, by default the whole world.
    weight: (n), the weights of this rank's classes, or None on all ranks.
    ignore_index, reduction: as in gander.cross_entropy.
    inplace_backward: backward writes the gradient over x, which must not be used afterwards.
    sizes: the n of all ranks. By default the ranks exchange them in the first call with a group and a shape.
    A rank cannot see that only another rank's n is new. So pass sizes if slices differ in size and a group is
    used for several numbers of classes.

    A call does one all-gather, of 12 bytes per row and rank (16 with a weight, twice that for float64), and
    makes no float32 copy of the logits. Backward does no communication: the gradient of the loss must be the
    same on all ranks. The first call with a group and a shape also compares shapes, dtypes and options, which
    is another, small all-gather and waits for the device. Do it before a CUDA graph is captured.
    torch.compile breaks its graph at the call.
    Returns the loss, float32 (float64 for float64): a scalar, or one value for each row with "none".
    Raises TypeError (dtype), ValueError (shape, reduction, what differs between ranks), RuntimeError (device,
    driver, memory). What is wrong with a rank's own arguments it refuses before any communication. The other
    ranks then wait for it until torch's timeout.
    """
    if any_overrides(x, target, weight):
        traced: Tensor = overridden(cross_entropy, locals())
        return traced
    arguments = x, target, group, weight, ignore_index, reduction, inplace_backward, sizes
    loss: Tensor = _cross_entropy(*arguments)
    return loss


@torch.compiler.disable
def _cross_entropy(x, target, group, weight, ignore_index, reduction, inplace_backward, sizes):
    code = code_of("reduction", reduction, REDUCTIONS)
    for name, value in ("x", x), ("target", target), ("weight", weight):
        if is_dtensor(value):
            raise TypeError(
                f"{name} is a DTensor, expected this rank's slice; pass {name}.to_local(), or DTensors to "
                "gander.cross_entropy"
            )
        if not isinstance(value, Tensor) and (value is not None or name != "weight"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    refuse_gradients("cross_entropy", {"weight": weight})
    slices = _agreed(x, target, group, weight, ignore_index, code, sizes)
    return of_slices(x, target, weight, slices, ignore_index, code, inplace_backward)


def of_slices(x, target, weight, slices, ignore_index, reduction, inplace_backward=False) -> Tensor:
    """The loss, from arguments that have been checked."""
    if _debug.enabled:
        backend.check_targets(sum(slices.sizes), target, ignore_index)
    refuse_tangents((x,))
    refuse_outer_gradients("distributed.cross_entropy", x)
    try:
        return _apply(x, target, weight, slices, ignore_index, reduction, bool(inplace_backward))
    except RuntimeError as error:
        raise backend.explained(error) from None


def of_mesh(x, target, weight, divisor, mesh, dim, classes, ignore_index, reduction) -> Tensor:
    """The loss of this rank's part of a DTensor whose classes are sharded on a dimension of a mesh.

    weight: the weights of all classes. DTensor knows the shapes of all parts, so they are not compared.
    """
    refuse_gradients("cross_entropy", {"weight": weight, "divisor": divisor})
    group, ranks = mesh.get_group(dim), mesh.size(dim)
    size = -(-classes // ranks)  # as torch.chunk divides them
    sizes = tuple(min(size, max(0, classes - size * rank)) for rank in range(ranks))
    slices, n = Slices(group, dist.get_rank(group), sizes), x.shape[-1]
    if n != sizes[slices.rank]:
        raise ValueError(
            f"x has {n} of {classes} classes on rank {slices.rank}, expected {sizes[slices.rank]}, as "
            "distribute_tensor shards them; call gander.distributed.cross_entropy"
        )
    if weight is not None:
        if weight.shape != (classes,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({classes},)")
        weight = weight[slices.first :][:n]
    _check(x, target, weight, divisor)
    loss = of_slices(x, target, weight, slices, ignore_index, reduction)
    return loss if divisor is None else loss / divisor


# ---- What all ranks have to agree on ----


class Slices(NamedTuple):
    """The slices of all ranks."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]

    @property
    def first(self) -> int:
        return sum(self.sizes[: self.rank])


_seen: WeakKeyDictionary[dist.ProcessGroup, dict] = WeakKeyDictionary()

_TEXT = 504  # bytes that describe a rank's arguments to the others


def _agreed(x, target, group, weight, ignore_index, reduction, sizes) -> Slices:
    """The slices of all ranks, after a comparison of all ranks' arguments in the first call of this kind."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group is {group}, expected a group of which this process is a member")
    group = group or dist.group.WORLD
    sizes = None if sizes is None else tuple(map(int, sizes))
    tensors = (x, target) if weight is None else (x, target, weight)
    key = *((t.shape, t.dtype, t.device) for t in tensors), ignore_index, reduction, sizes
    seen = _seen.setdefault(group, {})
    if key not in seen:
        _check(x, target, weight)
        if not -(2**63) <= ignore_index < 2**63:
            raise ValueError(f"ignore_index is {ignore_index}, expected an integer of 64 bits")
        n = x.shape[-1]
        if sizes is not None and (len(sizes) != ranks or min(sizes) < 0 or sizes[rank] != n):
            raise ValueError(
                f"sizes is {sizes}, expected {ranks} numbers, one for each rank of the group, and {n}, this "
                f"rank's number of classes, at {rank}"
            )
        weights = "no weight" if weight is None else f"weights of {weight.dtype}"
        text = (
            f"rows {tuple(target.shape)} of {x.dtype}, targets of {target.dtype}, {weights}, "
            f"ignore_index {ignore_index}, reduction {REDUCTIONS[reduction]}, sizes {sizes}"
        )
        seen[key] = Slices(group, rank, _compared(n, text, group, ranks, x.device))
    return seen[key]


def _check(x, target, weight, divisor=None):
    """Refuses what this rank can see."""
    if x.ndim and x.shape[-1] == 0:  # the operators refuse that
        if weight is not None and weight.shape != (0,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (0,): x has no columns")
        x, weight = x.new_empty((*x.shape[:-1], 1)), None
    check_inputs("cross_entropy", {"x": x, "target": target, "weight": weight, "divisor": divisor})


def _compared(n, text, group, ranks, device):
    """The numbers of classes of all ranks, whose texts must be the same."""
    mine = n.to_bytes(8, "little") + text.encode()[:_TEXT].ljust(_TEXT)
    mine = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    every = mine.new_empty(ranks * mine.numel())
    dist.all_gather_into_tensor(every, mine, group=group)
    every = [bytes(row) for row in every.view(ranks, -1).tolist()]
    texts = [row[8:].decode(errors="replace").rstrip() for row in every]
    for rank, theirs in enumerate(texts):
        if theirs != texts[0]:
            raise ValueError(
                f"rank 0 passes {texts[0]}, rank {rank} passes {theirs}; expected the same rows, targets and "
                "options on all ranks of the group"
            )
    sizes = tuple(int.from_bytes(row[:8], "little") for row in every)
    if not any(sizes):
        raise ValueError("x has no classes on any rank, expected one class or more in all; skip the call")
    return sizes


# ---- The loss and its gradient ----


def _forward(ctx, x, target, weight, slices, ignore_index, reduction, inplace_backward):
    n, rows, ranks = x.shape[-1], target.numel(), len(slices.sizes)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    target = target.long().contiguous()
    # Counted from this slice. Integers wrap around, so that ignore_index stays distinct.
    local = target - slices.first
    ignored = (ignore_index - slices.first + 2**63) % 2**64 - 2**63

    # What the operator that combines the slices takes of each: see gander.h.
    mine = x.new_empty(3 if weight is None else 4, rows, dtype=dtype)
    if n:
        operators_gen.cross_entropy_fwd_out(
            x, local, None, loss=mine[2], lse=mine[:2], dx=None, ignore_index=ignored
        )
        if weight is not None:
            column = local.clamp(0, n - 1)
            mine[3] = torch.where(column == local, weight[column], 0).view(-1)
    else:
        mine[:2], mine[2], mine[3:] = float("-inf"), float("nan"), 0
    every = mine.new_empty(ranks, *mine.shape)
    if rows:
        dist.all_gather_into_tensor(every.view(-1), mine.view(-1), group=slices.group)

    lse, weights = mine.new_empty(2 * rows + 1), None if weight is None else mine.new_empty(target.shape)
    loss = mine.new_empty(target.shape if reduction == NONE else ())
    if rows:
        losses = (loss.view(-1), None) if reduction == NONE else (None, loss)
        flat = None if weights is None else weights.view(-1)
        operators_gen.sharded_cross_entropy_combine(
            every,
            target.view(-1),
            max=lse[:rows],
            log_sum=lse[rows:-1],
            losses=losses[0],
            loss=losses[1],
            weights=flat,
            denominator=lse[-1:],
            classes=sum(slices.sizes),
            ignore_index=ignore_index,
            mean=reduction == MEAN,
            weighted=weight is not None,
        )
    else:
        loss.fill_(float("nan") if reduction == MEAN else 0)
    if weights is not None:
        local = local.masked_fill(weights == 0, ignored)  # backward ignores the row, whatever is in it
    ctx.save_for_backward(x, local, lse, weights)
    ctx.set_materialize_grads(False)
    ctx.options = {"ignore_index": ignored, "reduction": MEAN if reduction == MEAN else NONE, "slice": True}
    ctx.inplace_backward = inplace_backward and may_write_saved()
    return loss


def _backward(ctx, dloss):
    dx = None
    if dloss is not None:
        x, local, lse, weights = ctx.saved_tensors
        dloss = dloss if weights is None else dloss * weights
        arguments = {"target": local, "weight": None, "dloss": dloss, "lse": lse} | ctx.options
        if not x.numel():
            dx = torch.zeros_like(x)
        elif ctx.inplace_backward and not is_batched(dloss):
            dx = write_over(x, **arguments)
        else:
            dx = operators_gen.cross_entropy_bwd(x, **arguments)
    return dx, None, None, None, None, None, None


_apply: Any = apply_of(function("cross_entropy_of_slices", _forward, _backward))
