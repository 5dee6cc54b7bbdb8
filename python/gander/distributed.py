"""Cross-entropy, and statistics, of logits whose classes are divided among the ranks of a torch.distributed
group, and statistics of a head whose classes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ._functions.arguments import FAILURES, code_of, loss_options, overridden
from ._functions.linear_cross_entropy import check_chunks
from ._functions.linear_token_statistics import KEPT
from ._functions.named_tuples import check_outputs
from ._functions.probabilities import refuse_probabilities
from ._functions.token_statistics import STATISTICS, Statistic, TokenStatistics, named_statistics
from ._table import REDUCTIONS, Reduction
from ._torch import backend, sharded_token_statistics
from ._torch.dtensor import is_dtensor
from ._torch.refusals import refuse_gradients
from ._torch.sharded_cross_entropy import of_slices
from ._torch.slice_plan import chunks
from ._torch.tensors import stands_for_tensor, unusable
from ._words import check_flags

__all__ = ["cross_entropy", "linear_token_statistics", "token_statistics"]


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
    classes: int | None = None,
    label_smoothing: float = 0,  # not 0.0, which a graph with dynamic shapes would take for a variable
    z_loss: float = 0,
    scale: float = 1,
    softcap: float | None = None,
    temperature: float = 1,
) -> Tensor:
    """gander.cross_entropy of logits of which each rank of a group holds a slice of the classes.

    The slices lie in the order of the group's ranks. Targets count all classes. All ranks return the same
    loss.

    A call does one all-gather, of 12 bytes per row and rank (16 with a weight or label smoothing, twice that
    for float64) and 8 bytes more, and makes no float32 copy of the logits. Nothing waits for the device, so
    that a CUDA graph can capture the call. Backward does no communication: the gradient of the loss must be
    the same on all ranks. torch.compile(fullgraph=True) takes the call into its graph.

    Along with its numbers each rank sends a hash of its shape of rows, dtypes and options, and of the sizes
    of all slices as it takes them. Where hashes differ, the loss and the gradient of every
    row that is not ignored are NaN on all ranks. With gander.set_debug(True), on all ranks, another, small
    all-gather comes first, and all ranks raise a ValueError that names what differs. It waits for the device.
    Only there is seen that a rank has another number of rows, has float64, or has a weight where others have
    none: the backend may then fail or wait, because the all-gather has another size on each rank.

    What is wrong with a rank's own arguments it refuses before any communication. The other ranks then wait
    for it until torch's timeout. An x that contradicts sizes or classes is refused after the all-gather, so
    that no rank waits, and the loss of the other ranks is NaN.

    Args:
        x: (..., n), this rank's slice, of float16, bfloat16 or float32 (on the CPU also float64), any
            strides. Without sizes and classes, all ranks have the same n.
        target: x.shape[:-1], int32 or int64, the same on all ranks. A target that is not in any slice makes
            the loss and the gradient of its row NaN, and with "mean" those of all rows (see set_debug).
        group: A process group of torch.distributed, by default the whole world.
        weight: (n), the weights of this rank's classes, or None on all ranks.
        ignore_index: As in gander.cross_entropy.
        reduction: As in gander.cross_entropy.
        inplace_backward: Backward writes the gradient over x, which must not be used afterwards. Compiled
            graphs plan their own memory and ignore it.
        sizes: The n of each rank, for slices that differ in size. They may be 0.
        classes: How many there are in all slices, divided as torch.chunk divides them among the ranks: the
            first slices have ceil(classes / ranks), the next one has the rest, and those after it have none.
        label_smoothing: As in gander.cross_entropy. Not with weight.
        z_loss: As in gander.cross_entropy. Not with weight.
        scale: As in gander.cross_entropy.
        softcap: As in gander.cross_entropy.
        temperature: As in gander.cross_entropy.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or one value for each row with "none".

    Raises:
        TypeError: A dtype, or what is no tensor.
        ValueError: A shape, sizes, or the group.
        NotImplementedError: A nested or a sparse tensor.
        IndexError: A target, under set_debug(True).
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gander.distributed.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)
        >>> dist.destroy_process_group()
    """
    if any(map(stands_for_tensor, (x, target, weight))):
        handed: Tensor = overridden(cross_entropy, locals())
        return handed
    code = code_of("reduction", reduction, REDUCTIONS)
    options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    _check_tensors("cross_entropy", {"x": x, "target": target}, {"weight": weight})
    refuse_probabilities(backend, x, target)
    ignore_index = _ignore_index(ignore_index)
    ranks = _process_group(group)
    counts = _sizes(sizes, classes, x, ranks.size())
    refuse_gradients("cross_entropy", {"weight": weight})
    loss: Tensor = of_slices(x, target, weight, ranks, counts, ignore_index, code, options, inplace_backward)
    return loss


def token_statistics(
    logits: Tensor,
    index: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    sizes: Sequence[int] | None = None,
    classes: int | None = None,
    temperature: float = 1,  # not 1.0: see cross_entropy
    softcap: float | None = None,
    scale: float = 1,
    row_mask: Tensor | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    batch_invariant: bool = False,
    outputs: Sequence[Statistic] = ("log_prob", "entropy"),
) -> TokenStatistics:
    """gander.token_statistics of logits of which each rank of a group holds a slice of the tokens.

    The slices lie in the order of the group's ranks. The index counts all tokens. All ranks return the same
    statistics.

    A call does one all-gather. Per row and rank it has 16 bytes for log_prob and entropy, 32 with any other
    output (twice that for float64), and 8 bytes more. Nothing waits for the device, so that a CUDA graph
    can capture the call. Backward does no communication: the gradients of the statistics must be the same on
    all ranks. torch.compile(fullgraph=True) takes the call into its graph.

    As in cross_entropy, each rank sends a hash of its shape of rows, dtypes and options, and of the sizes of
    all slices as it takes them. Where hashes differ, the statistics and the gradient of each row that is not
    left out are NaN on all ranks, and predicted is -1. With gander.set_debug(True), on all ranks, all raise a
    ValueError that names what differs. Ranks with another number of rows, or other outputs, or float64 on
    some, send another number of bytes. Only set_debug sees that: elsewhere the backend may fail or wait. A
    row that some ranks leave out is NaN on the others. What a rank refuses, and when, is as in cross_entropy.

    Args:
        logits: (..., n), this rank's slice, of float16, bfloat16 or float32 (on the CPU also float64), any
            strides. Without sizes and classes, all ranks have the same n.
        index: logits.shape[:-1], uint8, int32 or int64, the same on all ranks. One that is not in any slice
            makes log_prob NaN, and the gradient of its row if log_prob takes part in it (see set_debug).
        group: A process group of torch.distributed, by default the whole world.
        sizes: The n of each rank, for slices that differ in size. They may be 0.
        classes: How many tokens there are in all slices, divided as torch.chunk divides them among the ranks:
            the first slices have ceil(classes / ranks), the next one has the rest, and those after it none.
        temperature: As in gander.token_statistics.
        softcap: As in gander.token_statistics.
        scale: As in gander.token_statistics.
        row_mask: As in gander.token_statistics, the same on all ranks.
        ignore_index: As in gander.token_statistics.
        inplace_backward: Backward writes the gradient over logits, which must not be used afterwards.
            Compiled graphs plan their own memory and ignore it.
        batch_invariant: As in softmax.
        outputs: The names of the statistics that are computed, the same on all ranks.

    Returns:
        A named tuple of the outputs, as gander.token_statistics. predicted counts all tokens.

    Raises:
        TypeError: A dtype, or what is no tensor.
        ValueError: A shape, sizes, outputs, or the group.
        NotImplementedError: A nested or a sparse tensor; a gradient of another statistic than log_prob and
            entropy, except in a graph of torch.compile, which cannot raise: there the gradient of its row is
            NaN.
        IndexError: An index, under set_debug(True).
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gander.distributed.token_statistics(torch.zeros(1, 4), torch.tensor([2]))
        TokenStatistics(log_prob=tensor([-1.3863]), entropy=tensor([1.3863]))
        >>> dist.destroy_process_group()
    """
    if any(map(stands_for_tensor, (logits, index, row_mask))):
        handed: TokenStatistics = overridden(token_statistics, locals())
        return handed
    names = check_outputs(outputs, STATISTICS)
    check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    options: dict[str, float] = loss_options(0.0, 0.0, scale, softcap, temperature)
    if batch_invariant:
        options["batch_invariant"] = True
    _check_tensors("token_statistics", {"logits": logits, "index": index}, {"row_mask": row_mask})
    ignore_index = _ignore_index(ignore_index)
    ranks = _process_group(group)
    counts = _sizes(sizes, classes, logits, ranks.size())
    results = sharded_token_statistics.of_slices(
        logits, index, row_mask, ranks, counts, ignore_index, names, options, inplace_backward
    )
    return named_statistics(names, results)


def linear_token_statistics(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    classes: int | None = None,
    allreduce_dgrad: bool = False,
    temperature: float = 1,  # not 1.0: see cross_entropy
    softcap: float | None = None,
    scale: float = 1,
    row_mask: Tensor | None = None,
    ignore_index: int = -100,
    batch_invariant: bool = False,
    keep: Literal["nothing", "logits"] = "nothing",
    chunk: int | None = None,
    outputs: Sequence[Statistic] = ("log_prob", "entropy"),
) -> TokenStatistics:
    """gander.linear_token_statistics of a weight of which each rank of a group holds a slice of the tokens.

    The slices lie in the order of the group's ranks: those of Megatron's ColumnParallelLinear. The index
    counts all tokens. All ranks have the same hidden states, and return the same statistics. A rank holds the
    logits of its slice of a chunk of rows, or of a tile as large.

    A call does one all-gather, as token_statistics does, for all rows: 16 bytes per row and rank for log_prob
    and entropy. Backward computes the logits again without communication. The gradients of weight and bias
    are those of this rank's slice. The gradient of hidden is this rank's part of a sum over all ranks. It is
    added up once, either by allreduce_dgrad, or by what made hidden: the backward of Megatron's
    copy_to_tensor_model_parallel_region does an all-reduce, that of gather_from_sequence_parallel_region,
    which gathers sharded sequences before the call, a reduce-scatter. Sequences that are not gathered are
    refused, because index has more rows than hidden.

    What ranks have to agree on, what they see if they do not, and what a rank refuses, is as in
    token_statistics, with allreduce_dgrad and whether there is a bias among the options. The gradient of
    hidden of a slice without classes is 0 even then. chunk and keep may differ. With allreduce_dgrad
    all ranks have to differentiate hidden, or none, and in backward ranks that do not agree may wait for each
    other. torch.compile(fullgraph=True) takes the call into its
    graph. Transforms of torch.func are refused.

    Args:
        hidden: (..., K), the same on all ranks, as in gander.linear_token_statistics.
        weight: (n, K), this rank's slice. Cast to hidden's dtype, but for float64. Without sizes and
            classes, all ranks have the same n.
        index: hidden.shape[:-1], as in token_statistics, the same on all ranks.
        bias: (n) or None, on all ranks alike. Cast to hidden's dtype, but for float64.
        group: A process group of torch.distributed, by default the whole world.
        sizes: The n of each rank, for slices that differ in size. They may be 0.
        classes: As in token_statistics.
        allreduce_dgrad: Backward adds up the gradient of hidden over the ranks, by one all-reduce in hidden's
            dtype. Megatron's linear layers have the same option. It has to be False where what made hidden
            adds it up.
        temperature: As in gander.token_statistics.
        softcap: As in gander.token_statistics.
        scale: As in gander.token_statistics.
        row_mask: As in gander.token_statistics, the same on all ranks.
        ignore_index: As in gander.token_statistics.
        batch_invariant: As in gander.linear_token_statistics.
        keep: As in gander.linear_token_statistics: "logits" keeps this rank's slice of them.
        chunk: As in gander.linear_token_statistics.
        outputs: The names of the statistics that are computed, the same on all ranks.

    Returns:
        What gander.token_statistics returns. predicted counts all tokens.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, sizes, an option, or the group.
        NotImplementedError: A nested or a sparse tensor; a transform of torch.func; a gradient of another
            statistic, as in token_statistics.
        IndexError: An index, under set_debug(True).
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, head, index = torch.ones(1, 3), torch.zeros(4, 3), torch.tensor([2])
        >>> gander.distributed.linear_token_statistics(hidden, head, index)
        TokenStatistics(log_prob=tensor([-1.3863]), entropy=tensor([1.3863]))
        >>> dist.destroy_process_group()
    """
    given = {"hidden": hidden, "weight": weight, "index": index, "bias": bias, "row_mask": row_mask}
    if any(map(stands_for_tensor, given.values())):
        handed: TokenStatistics = overridden(linear_token_statistics, locals())
        return handed
    names = check_outputs(outputs, STATISTICS)
    check_chunks(chunk, None)
    keeps = bool(code_of("keep", keep, KEPT))
    check_flags(allreduce_dgrad=allreduce_dgrad, batch_invariant=batch_invariant)
    options = loss_options(0.0, 0.0, scale, softcap, temperature)
    optional = {"bias": given.pop("bias"), "row_mask": given.pop("row_mask")}
    _check_tensors("linear_token_statistics", given, optional)
    ignore_index = _ignore_index(ignore_index)
    ranks = _process_group(group)
    counts = _sizes(sizes, classes, weight, ranks.size(), 0)
    try:
        results = backend.linear_token_statistics(
            hidden,
            weight,
            index,
            bias,
            row_mask,
            ignore_index,
            chunk,
            keeps,
            batch_invariant,
            options,
            names,
            ranks,
            counts,
            allreduce_dgrad,
        )
    except FAILURES as error:
        raise backend.explained(error, **given | optional) from None
    return named_statistics(names, results)


def _check_tensors(function, required, optional):
    """Refuses what is no plain tensor. The tensors are by argument; optional ones may be None."""
    for name, value in (required | optional).items():
        if value is None and name in optional:
            continue
        if is_dtensor(value):
            raise TypeError(
                f"{name} is a DTensor, expected this rank's slice; pass {name}.to_local(), or DTensors to "
                f"gander.{function}"
            )
        if error := unusable(name, value):
            raise error


def _ignore_index(value):
    value = _integer("ignore_index", value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"ignore_index is {value}, expected an integer of 64 bits")
    return value


def _is_integer(value):
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def _integer(name, value):
    """An argument as an int, or as the symbolic integer of a graph."""
    if not _is_integer(value):
        raise TypeError(f"{name} is {value!r}, expected an integer of 64 bits")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def _process_group(group):
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(
                "group is None, expected a default group of torch.distributed; call init_process_group first"
            )
    if not isinstance(group, dist.ProcessGroup):
        # What new_group returns where it makes none is a number.
        kind = ValueError if group == dist.GroupMember.NON_GROUP_MEMBER else TypeError
        raise kind(
            f"group is {group!r}, expected a torch.distributed.ProcessGroup of which this process is a "
            "member, or None"
        )
    return group


def _sizes(sizes, classes, x, ranks, dim=-1):
    """The number of classes of each rank, as this rank takes them. dim: that of the classes of x."""
    if sizes is not None and classes is not None:
        raise ValueError("sizes and classes are given, expected one of them: classes follow from sizes")
    if classes is not None:
        classes = _integer("classes", classes)
        if classes < 1:
            raise ValueError(f"classes is {classes}, expected 1 or more in all slices; skip the call")
        return chunks(classes, ranks)
    if sizes is None:
        return [x.shape[dim] if x.ndim else 1] * ranks
    expected = f"expected {ranks} integers, the number of classes of each rank of the group"
    if isinstance(sizes, (str, bytes, Tensor)) or not isinstance(sizes, Iterable):
        raise TypeError(f"sizes is {sizes!r}, {expected}")
    sizes = tuple(sizes)
    for size in sizes:
        if not _is_integer(size):
            raise TypeError(f"sizes is {sizes}, {expected}; {size!r} is none")
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"sizes is {sizes}, {expected}")
    if sum(sizes) < 1:
        raise ValueError(f"sizes is {sizes}, expected one class or more in all; skip the call")
    return [_integer("sizes", size) for size in sizes]
