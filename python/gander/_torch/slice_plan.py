"""What ranks that share the classes of rows have to agree on, and what they send.

Each call does one all-gather, whatever the arguments and whatever earlier calls have seen. Otherwise the
ranks could disagree about which collective comes next. So a rank cannot ask the others for their sizes before
it computes. It takes them from its own arguments, and sends a hash of what it takes for granted along with
its numbers. A device that finds another hash among the gathered ones takes NaN for the numbers, so that the
results and the gradient are NaN.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # how functional collectives treat fake tensors

from .._table import LOSS_OPTIONS, REDUCTIONS
from . import operators_gen
from .fakes import check_inputs
from .tensors import statistic


def slice_of(weight, sizes, rank, n):
    """This rank's class weights. An x with another number of classes, n, is refused after the all-gather, or
    the other ranks would wait."""
    return weight[sum(sizes[:rank]) :][:n] if n == sizes[rank] else weight.new_empty(n)


def chunks(classes, ranks):
    """The number of classes of each rank, as torch.chunk and DTensor divide them."""
    size = -(-classes // ranks)
    return [min(size, max(0, classes - size * rank)) for rank in range(ranks)]


def check(x, target, weight, divisor=None):
    """Refuses what this rank can see."""
    if x.ndim and x.shape[-1] == 0:  # the operators refuse that
        if weight is not None and weight.shape != (0,):
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (0,): x has no columns")
        x, weight = x.new_empty((*x.shape[:-1], 1)), None
    check_inputs("cross_entropy", {"x": x, "target": target, "weight": weight, "divisor": divisor})


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
    options: dict[str, float]  # those of LOSS_OPTIONS that are not their defaults


_plans: dict[tuple, Any] = {}  # of this rank's arguments alone: what is in it changes no collective
_MOST_PLANS = 1 << 12


def remembered(key: tuple, make: Callable[[], Any]) -> Any:
    """The plan of arguments with this key."""
    if plan := _plans.get(key):
        return plan
    plan = make()
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    return _plans.setdefault(key, plan)


def agreement(name, x, rank, sizes, text) -> tuple[int, int, str]:
    """Of a call of this rank: the class that its slice begins with, the hash, and the contradiction between
    x, the argument of this name, and the sizes, or "". text: what has to be the same besides the sizes."""
    n, contradiction = x.shape[-1], ""
    if n != sizes[rank]:
        contradiction = (
            f"{name} has {n} classes on rank {rank}, expected {sizes[rank]} by sizes or classes, which make "
            f"the slices {sizes}; pass what fits {name}"
        )
    elif not any(sizes):
        contradiction = (
            f"{name} has no classes on rank {rank}, expected as many on each rank without sizes and classes; "
            "pass one of them, or skip the call if no rank has classes"
        )
    facts = f"{text}, sizes {sizes}, {contradiction}"
    digest = hashlib.blake2b(facts.encode(), digest_size=8).digest()
    return sum(sizes[:rank]), int.from_bytes(digest, "little", signed=True), contradiction


def plan_of(x, target, weight, rank, sizes, ignore_index, reduction, more) -> Plan:
    """Checks a rank's own arguments."""
    tensors = (x, target) if weight is None else (x, target, weight)
    key = *((t.shape, t.dtype, t.device) for t in tensors), rank, sizes, ignore_index, reduction, more
    return remembered(key, lambda: _made(x, target, weight, *key[len(tensors) :]))


def _made(x, target, weight, rank, sizes, ignore_index, reduction, more) -> Plan:
    check(x, target, weight)
    weights = "no weight" if weight is None else f"weights of {weight.dtype}"
    text = (
        f"rows {tuple(target.shape)} of {x.dtype}, targets of {target.dtype}, {weights}, ignore_index "
        f"{ignore_index}, reduction {REDUCTIONS[reduction]}"
    )
    options = {
        name: value for name, value in zip(LOSS_OPTIONS, more, strict=True) if value != LOSS_OPTIONS[name]
    }
    text += "".join(f", {name} {value}" for name, value in options.items())
    if options:  # a rank without classes would not see that a value is refused
        operators_gen.cross_entropy_fwd(x.new_empty(0, 1), target.new_empty(0), **options)
    first, number, contradiction = agreement("x", x, rank, sizes, text)
    # Integers wrap around, so that ignore_index stays distinct.
    ignored = (ignore_index - first + 2**63) % 2**64 - 2**63
    return Plan(sizes, first, ignored, ignore_index, reduction, text, number, contradiction, options)


# ---- What a rank sends ----


def new_part(x, numbers):
    """What a rank sends, without values. The last elements are the hash, aligned to 8 bytes."""
    dtype = statistic(x.dtype)
    words = _words(dtype)
    return x.new_empty((numbers + words - 1) // words * words + words, dtype=dtype)


def write_hash(mine, numbers, plan):
    """Writes what follows the numbers of a rank."""
    words = _words(mine.dtype)
    _, padding, last = mine.split([numbers, mine.numel() - numbers - words, words])
    last.view(torch.int64).fill_(plan.hash)
    if padding.numel():
        padding.zero_()  # so that the same bits are sent on each run


def gather(mine, group):
    """What all ranks of a group send, one after the other."""
    every = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(every, mine, group=group)
    return every


def gather_in_graph(mine, ranks, group):
    """The same by a functional collective. group: its name."""
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(mine, ranks, group))


def received(every, each, rows, plan):
    """What the ranks have sent, (ranks, each, rows), with NaN for a rank of another hash."""
    every = every.view(len(plan.sizes), -1)
    differs = every[:, -_words(every.dtype) :].view(torch.int64) != plan.hash
    return torch.where(differs, float("nan"), every[:, : each * rows]).view(len(plan.sizes), each, rows)


def _words(dtype):
    """How many numbers of this dtype have as many bits as the hash."""
    return 8 // dtype.itemsize


_TEXT = 536  # bytes that describe a rank's arguments to the others, under set_debug


def compare(x, target, group, plan, names=("x", "target")):
    """Refuses, on all ranks, what differs between them. One all-gather, and a wait for the device. names: of
    the arguments x and target."""
    # A sum that depends on the order. Integers wrap around.
    odd = 2 * torch.arange(target.numel(), device=target.device) + 1
    checksum = int(((target.flatten().long() + 1) * odd).sum())
    mine = f"{plan.hash} {x.shape[-1]} {checksum} {plan.text}, sizes {plan.sizes}".encode()
    mine = torch.frombuffer(bytearray(mine[:_TEXT].ljust(_TEXT)), dtype=torch.uint8).to(x.device)
    every = gather(mine, group)
    rows = [bytes(row).decode(errors="replace").rstrip() for row in every.view(group.size(), -1).tolist()]
    hashes, counts, checksums, texts = zip(*(row.split(" ", 3) for row in rows), strict=True)
    counts = tuple(map(int, counts))
    if not any(counts):
        raise ValueError(
            f"{names[0]} has no classes on any rank, expected one class or more in all; skip the call"
        )
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
            f"{names[0]} has {counts} classes on the ranks of the group, expected the same sizes of all "
            f"slices on each of them: rank 0 takes {taken[0]}, rank {rank} {taken[1]}; pass sizes={counts}"
        )
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ValueError(
                f"{names[1]} of rank {rank} is another than that of rank 0, expected the same on all ranks "
                "of the group"
            )
