"""DTensor rules for gander's operators, from the table of operators.

Leading dimensions may be sharded, in the same way for all operands that have rows. The last dimension may be
sharded too in cross_entropy and token_statistics, which gander.distributed computes. An operand with an
element for each column (a weight) is replicated. Its gradient is a partial sum, and so is the sum of losses.
Heads of tokens may be sharded by sequences or by heads. Other placements are refused here, because DTensor
would gather the tensor without an error.

Importing DTensor takes about as long as importing the rest of torch, so the rules are registered when a
program imports it.
"""

import warnings

import torch

from .. import _imports
from .._table import (
    LOSS_OPTIONS,
    MEAN,
    NONE,
    SHAPES,
    TORCH,
    forms,
    has_rows,
    is_by_row,
    operands,
    reduction,
    wanted,
)
from . import dtensor
from .dtensor import dimensions_of_classes, is_dtensor, is_shard
from .registry import by_name, overloads
from .token_statistics import STATISTICS

_MEAN_OVER_SHARDS = (
    "reduction is 'mean' with sharded rows, expected 'sum': a mean over sharded rows would have another "
    "denominator on each rank; use reduction='sum' and divide by the weights of all ranks' rows that "
    "are not ignored, or with class probabilities by their number"
)

# Operators whose last dimension may be sharded: see their functions below.
_TAKE_SLICES = ("cross_entropy", "token_statistics")


def _rule(name, given):
    """The placements that an operator supports on one dimension of the mesh.

    Returns pairs: the placements of the results, and those of the arguments.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    operator, of = TORCH[name], operands(name)
    specs = by_name(name, given)
    inputs = {argument: spec for argument, spec in specs.items() if argument in of and spec is not None}
    computed = wanted(name, specs)
    first = next(iter(inputs.values())).shape
    leading = len(first) - 1

    def layout(argument):
        return SHAPES[of[argument].shape].layout

    by_head = any(  # an operand has the second last dimension of the first operand
        "H" in form.sizes and len(form.sizes) == spec.ndim
        for argument, spec in inputs.items()
        for form in SHAPES[of[argument].shape].forms
    )

    def refuse(what):
        raise NotImplementedError(f"gander: {name}: {what}")

    if operator.writes:  # DTensor assumes that an operator whose name ends in "_" returns its first argument
        refuse("a DTensor cannot be written over; use the operator that returns its results")
    if layout(next(iter(inputs))) == "heads":
        return _of_heads(name, specs, inputs, computed, refuse)

    def sums_rows(result):
        """Whether a result is one number for all rows."""
        return is_by_row(result) and forms(name, result, specs)[0].sizes == ""

    def dims_before(argument):
        """How many dimensions of the first operand come before those of this one."""
        return leading + 1 - inputs[argument].ndim if layout(argument) == "broadcast" else 0

    # One tensor has the statistics of all rows. It cannot be split like them.
    packed = [
        argument
        for argument, spec in inputs.items()
        if layout(argument) == "parts" and spec.shape != first[:-1]
    ]
    shards, splits_rows = [], False
    for argument, spec in inputs.items():
        used = [placement for placement in spec.placements if is_shard(placement)]
        if not used:
            continue
        found, by_row = f"{argument} has placements {spec.placements}, expected", spec.ndim == leading
        splits_rows |= has_rows(of[argument])
        if not is_by_row(of[argument]):
            refuse(f"{found} Replicate: it has no element for each row; redistribute it")
        if argument in packed:
            refuse(f"{found} Replicate: the statistics of all rows are in one tensor; redistribute it")
        before = dims_before(argument)
        if by_head and any(placement.dim == leading - 1 for placement in used):
            refuse(f"{found} Replicate of the heads, which have weights of their own; redistribute it")
        if any(placement.dim + before >= leading for placement in used) or not (
            by_row or layout(argument) in ("rows", "broadcast") or of[argument].shape == "row_states"
        ):
            hint = "; sharded classes need torch.no_grad, not inference_mode" * (name in _TAKE_SLICES)
            refuse(
                f"{found} Shard of a leading dimension, because rows are reduced whole; redistribute it{hint}"
            )
        if before:
            used = [Shard(placement.dim + before) for placement in used]
        if specs.get("causal") and any(placement.dim == leading - 1 for placement in used):
            refuse(
                f"{found} whole matrices of the last two dimensions with causal, which counts their rows; "
                "redistribute it, or pass a mask"
            )
        shards += [placement for placement in used if placement not in shards]
    if shards and reduction(name, specs) == "mean":  # backward of one may divide by its rows, too
        refuse(_MEAN_OVER_SHARDS)
    if shards and operator.packed and any(layout(result) == "parts" for result in computed):
        refuse(
            "the statistics of all rows are returned in one tensor, which cannot be sharded; redistribute x, "
            "or use an operator that returns one for each row"
        )

    if packed and splits_rows:
        refuse(
            f"{packed[0]} has the statistics of all rows in one tensor, which cannot be sharded like the "
            "rows; redistribute those, or use an operator that returns statistics for each row"
        )
    if packed:
        shards = []  # of an upstream gradient

    def placed(operand, shard, ndim=None):
        if layout(operand.name) == "broadcast":
            dim = shard.dim - dims_before(operand.name)
            return Shard(dim) if dim >= 0 and inputs[operand.name].shape[dim] != 1 else Replicate()
        if operand.output and (sums_rows(operand) or not is_by_row(operand)):
            return Partial("sum")
        if not is_by_row(operand) or (ndim is not None and ndim < leading):  # for all rows
            return Replicate()
        return shard

    def placements(shard):
        sharded = {argument: placed(of[argument], shard, spec.ndim) for argument, spec in inputs.items()}
        made = [
            placed(of[result], shard) if result in computed else Replicate() for result in operator.results
        ]
        return made, [sharded.get(argument) for argument in specs]

    replicated = (
        [Replicate() for _ in operator.results],
        [Replicate() if argument in inputs else None for argument in specs],
    )
    return [replicated, *map(placements, shards)]


def _of_heads(name, specs, inputs, computed, refuse):
    """_rule for an operator of the heads of tokens, whose positions count from a sequence's first token."""
    from torch.distributed.tensor import Partial, Replicate

    of, first = operands(name), next(iter(inputs.values()))
    heads = first.ndim - 2

    def is_heads(operand):
        return SHAPES[operand.shape].layout == "heads"

    def placed(operand, shard, shape=None):
        """Where an operand lies beside heads with this placement. shape: that of an input."""
        if is_heads(operand):
            return shard
        if operand.shape == "columns":  # a weight, or its gradient
            return Partial("sum") if operand.output else Replicate()
        tables = SHAPES[operand.shape].layout == "tables"
        if shard.dim == heads or (tables and (len(shape) == 2 or shape[shard.dim] == 1)):
            return Replicate()
        return shard

    shards = []
    for argument, spec in inputs.items():
        used = [placement for placement in spec.placements if is_shard(placement)]
        found = f"{argument} has placements {spec.placements}, expected"
        if not used:
            continue
        if not is_heads(of[argument]):
            beside = [placement for placement in first.placements if is_shard(placement)]
            weight = of[argument].shape == "columns"
            if any(weight or placement not in beside or placement.dim >= heads - 1 for placement in used):
                refuse(f"{found} Replicate, or those of the sequences; redistribute it")
            continue
        if any(placement.dim not in (*range(heads - 1), heads) for placement in used):
            refuse(
                f"{found} Shard of sequences or of heads, because a position counts from the first token; "
                "redistribute it"
            )
        shards += [placement for placement in used if placement not in shards]
    if any(shard.dim < heads - 1 for shard in shards) and "offsets" in inputs and heads > 2:
        refuse("offsets is one for each sequence of several dimensions, which cannot be sharded like them")

    def placements(shard):
        sharded = {argument: placed(of[argument], shard, spec.shape) for argument, spec in inputs.items()}
        made = [
            placed(of[result], shard) if result in computed else Replicate() for result in TORCH[name].results
        ]
        return made, [sharded.get(argument) for argument in specs]

    replicated = (
        [Replicate() for _ in TORCH[name].results],
        [Replicate() if argument in inputs else None for argument in specs],
    )
    return [replicated, *map(placements, shards)]


# ---- Sharded classes ----


def _dimension_of_slices(x):
    """The dimension of the mesh on which the classes of logits are sharded, or None for other logits, and
    those that the rule refuses."""
    if not is_dtensor(x):
        return None
    on = dimensions_of_classes(x)
    return on[0] if len(on) == 1 and not any(placement.is_partial() for placement in x.placements) else None


def _placed_by_row(value, x, placements):
    """A result with an element for each row of a DTensor, from this rank's part of it."""
    whole = {"shape": x.shape[:-1], "stride": torch.empty(x.shape[:-1], device="meta").stride()}
    return dtensor.DTensor.from_local(value, x.device_mesh, placements, run_check=False, **whole)


def token_statistics_of_slices(given):
    """token_statistics' results for logits whose tokens are sharded on one dimension of the mesh, or None for
    any other logits.

    On that dimension the results are replicated. On others they are placed like the rows.
    """
    logits = given[0]
    on = _dimension_of_slices(logits)
    if on is None:
        return None
    from torch.distributed.tensor import Replicate

    from . import sharded_token_statistics

    name = "token_statistics"
    mine, values, rows = logits.to_local(), by_name(name, given), [*logits.placements]
    rows[on] = Replicate()
    if values["needs_state"]:
        raise NotImplementedError(
            f"gander: {name}: needs_state is set with logits whose tokens are sharded, expected False: "
            "backward takes the state of whole rows; redistribute logits"
        )
    index, row_mask = (_rows_of(name, "logits", logits, of, values[of], rows) for of in ("index", "row_mask"))
    neutral = sharded_token_statistics.DEFAULTS
    options = {option: values[option] for option in neutral if values[option] != neutral[option]}
    outputs = [result for result in STATISTICS if values[f"needs_{result}"]]
    results = sharded_token_statistics.of_mesh(
        mine,
        index,
        row_mask,
        logits.device_mesh,
        on,
        logits.shape[-1],
        values["ignore_index"],
        outputs,
        options,
    )
    return *(
        _placed_by_row(value, logits, rows) if values[f"needs_{result}"] else value
        for result, value in zip(STATISTICS, results, strict=True)
    ), mine.new_empty(0)


def cross_entropy_of_slices(given):
    """cross_entropy's results for logits whose classes are sharded on one dimension of the mesh, or None for
    any other x.

    On that dimension the loss is replicated. On others it is placed like the rows, or a partial sum over
    them. The statistics are a tensor without elements.
    """
    x = given[0]
    on = _dimension_of_slices(x)
    if on is None:
        return None
    from torch.distributed.tensor import Partial, Replicate

    from . import sharded_cross_entropy

    mine = x.to_local()
    values = by_name("cross_entropy", given)
    is_mean, is_none = values["reduction"] == MEAN, values["reduction"] == NONE
    mesh, rows = x.device_mesh, [*x.placements]
    rows[on] = Replicate()
    sharded = any(map(is_shard, rows))
    if sharded and is_mean:
        raise NotImplementedError(f"gander: cross_entropy: {_MEAN_OVER_SHARDS}")
    if values["needs_lse"]:
        raise NotImplementedError(
            "gander: cross_entropy: needs_lse is set with x whose classes are sharded, expected False: "
            "backward takes statistics of whole rows; redistribute x"
        )
    target = _rows_of("cross_entropy", "x", x, "target", values["target"], rows)
    if values["divisor"] is not None and is_mean:
        raise ValueError(
            "gander: cross_entropy: divisor is given with reduction 'mean', expected 'sum' or 'none', which "
            "it divides"
        )
    loss_options = {name: values[name] for name, neutral in LOSS_OPTIONS.items() if values[name] != neutral}
    weight, divisor = (
        _local("cross_entropy", "x", name, values[name], mesh, [Replicate()] * mesh.ndim)
        for name in ("weight", "divisor")
    )
    options = values["ignore_index"], values["reduction"]
    loss = sharded_cross_entropy.of_mesh(
        mine, target, weight, divisor, mesh, on, x.shape[-1], *options, loss_options
    )
    lse = loss.new_empty(0)
    if is_none:
        return _placed_by_row(loss, x, rows), lse
    placements = [Partial("sum") if is_shard(placement) else placement for placement in rows]
    return dtensor.DTensor.from_local(loss, mesh, placements, run_check=False), lse


def _rows_of(operator, first, x, name, value, placements):
    """This rank's part of an operand with an element for each row of x, which is the operand `first`."""
    if is_dtensor(value) and value.shape != x.shape[:-1]:  # which the parts of some ranks may not show
        raise ValueError(
            f"gander: {operator}: {name} has shape {tuple(value.shape)}, expected {tuple(x.shape[:-1])}, "
            f"the leading dimensions of {first}"
        )
    return _local(operator, first, name, value, x.device_mesh, placements)


def _local(operator, first, name, value, mesh, placements):
    """This rank's part of an operand. A plain tensor already is that part."""
    if not is_dtensor(value):
        return value
    if value.device_mesh != mesh:
        raise ValueError(
            f"gander: {operator}: {name} is on {value.device_mesh}, expected {mesh}, the mesh of {first}; "
            "distribute it there"
        )
    if [*value.placements] != placements:
        raise NotImplementedError(
            f"gander: {operator}: {name} has placements {value.placements}, expected {tuple(placements)} "
            "with these logits; redistribute it"
        )
    return value.to_local()


def _register() -> None:
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.experimental import register_sharding

        for name, overload in overloads.items():
            register_sharding(overload)(lambda *given, name=name: _rule(name, given))
        dtensor.DTensor = DTensor
    except Exception as error:  # a failure here must not make the import of DTensor fail
        warnings.warn(f"gander: its operators do not take DTensors: {error}", RuntimeWarning, stacklevel=2)


_imports.after_import("torch.distributed.tensor", _register)
