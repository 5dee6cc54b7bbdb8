"""A call on arrays that are sharded over a mesh: each device computes the rows that it has.

Leading dimensions may be sharded. So may the heads of tokens. Everything else has to be whole on each device,
because rows are reduced whole. XLA would gather it without a word, so it is refused here. What sums over rows
(dw) is added up over the devices.

Axes of a mesh that are Auto are XLA's to divide. It asks a rule (custom_partitioning), and Shardy knows which
dimensions belong together. Axes that are Explicit stand in the types of the arrays, so that shard_map can be
called. Inside shard_map, arrays are those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._table import SHAPES, operands
from .._words import shown
from ._calls import Call, launch, shapes

Factors = tuple[str, ...]  # a name for each dimension that may be sharded, "" for others
Spec = tuple[Any, ...]  # for each dimension the axis of a mesh, several or None


def _factors(
    call: Call, given: Sequence[tuple], made: Sequence[tuple]
) -> tuple[list[Factors], list[Factors]]:
    """The factors of the arrays' dimensions and of the results': those with one name are sharded alike."""
    of, first = operands(call.name), given[0]
    in_heads = SHAPES[of[call.first].shape].layout == "heads"
    rows = [f"b{i}" for i in range(len(first) - (3 if in_heads else 1))]
    sizes = dict(zip(rows, first, strict=False))
    by_head = any(
        of[name].shape == "head_columns" and len(shape) == 2
        for name, shape in zip(call.given, given, strict=True)
    )
    if rows and not in_heads and (by_head or dict(call.options).get("causal")):
        rows[-1] = ""  # these rows have weights of their own, or are counted

    def factors(name: str, shape: tuple) -> Factors:
        rule, found = of[name].shape, [""] * len(shape)
        layout = SHAPES[rule].layout
        if layout == "heads":
            found = [*rows, "", "q" if rule == "heads" else "k", ""]
        elif layout in ("broadcast", "tables"):  # the last one or two dimensions are whole
            leading = max(len(shape) - (1 if layout == "broadcast" else 2), 0)
            start = len(first) - len(shape) if layout == "broadcast" else 0
            found[:leading] = [
                factor if factor and sizes[factor] == size else ""
                for factor, size in zip(rows[start:], shape[:leading], strict=False)
            ] or found[:leading]
        elif SHAPES[rule].forms[0].sizes.startswith("L") and len(shape) >= len(rows):
            start = 1 if layout == "parts" and len(shape) == len(first) else 0
            found[start : start + len(rows)] = rows
        return tuple(found)

    return (
        [factors(name, shape) for name, shape in zip(call.given, given, strict=True)],
        [factors(name, shape) for name, shape in zip(call.results(), made, strict=True)],
    )


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _plan(
    call: Call, given: Sequence[tuple], made: Sequence[tuple], specs: Sequence[Spec], how: str
) -> tuple[list[Spec], list[Spec], list[tuple[str, ...]]]:
    """How the arrays and the results are sharded, and for each result the axes over which it is summed.

    specs: how the arrays came. how: the function that gathers one. Without it nothing is refused.
    """
    inputs, outputs = _factors(call, given, made)
    axes: dict[str, Any] = {}
    for name, factors, spec in zip(call.given, inputs, specs, strict=True):
        for dimension, (factor, entry) in enumerate(zip(factors, spec, strict=False)):
            if entry is None:
                continue
            if not factor and how:
                raise NotImplementedError(_refusal(call, name, dimension, spec, how))
            axes.setdefault(factor, entry)
    axes[""] = None
    placed_in, placed_out = (
        [tuple(axes.get(factor) for factor in factors) for factors in side] for side in (inputs, outputs)
    )
    of, by_name = operands(call.name), dict(zip(call.given, inputs, strict=True))
    summed: list[tuple[str, ...]] = []
    for name, factors in zip(call.results(), outputs, strict=True):
        over = by_name.get(of[name].needs, ())
        over = over if any(over) else inputs[0]
        names = [axis for factor in over for axis in _axes(axes.get(factor))]
        summed.append(() if any(factors) else tuple(names))
    return placed_in, placed_out, summed


def _refusal(call: Call, name: str, dimension: int, spec: Spec, how: str) -> str:
    whole = tuple(None if i == dimension else axis for i, axis in enumerate(spec))
    return (
        f"gander: {call.operator}: dimension {dimension} of {name} is sharded over {shown(spec[dimension])}, "
        f"expected it whole on each device, because only rows are computed apart; pass {how}({name}, "
        f"jax.sharding.PartitionSpec{whole!r}), which gathers it"
    )


def _launch_and_sum(call: Call, summed: Sequence[tuple[str, ...]], arrays: Sequence[Any]) -> tuple[Any, ...]:
    results = launch(call, arrays)
    return tuple(jax.lax.psum(r, over) if over else r for r, over in zip(results, summed, strict=True))


def alike(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that inside shard_map vary over the same axes of the mesh, as a call of XLA needs them. The
    gradient of one that did not vary is then summed over those axes."""
    axes = [getattr(jax.typeof(array), "manual_axis_type", None) for array in arrays]
    if not any(kind is not None and kind.varying for kind in axes):
        return list(arrays)
    everywhere = frozenset().union(*(kind.varying for kind in axes))
    missing = [tuple(sorted(everywhere - kind.varying)) for kind in axes]
    return [
        jax.lax.pcast(array, names, to="varying") if names else array
        for array, names in zip(arrays, missing, strict=True)
    ]


def on_mesh(call: Call, *arrays: Any) -> tuple[Any, ...]:
    """The results of a call."""
    axes = jax.typeof(arrays[0]).sharding.mesh.axis_types
    if axes and all(kind == AxisType.Manual for kind in axes):
        return launch(call, arrays)
    specs = [tuple(jax.typeof(array).sharding.spec) for array in arrays]
    if any(entry is not None for spec in specs for entry in spec):
        return _explicit(call, arrays, specs)
    return tuple(_partitioned(call)(*arrays))


def _explicit(call: Call, arrays: Sequence[Any], specs: Sequence[Spec]) -> tuple[Any, ...]:
    """A call on arrays whose types say how they are sharded."""
    given = [tuple(array.shape) for array in arrays]
    made = [result.shape for result in shapes(call, arrays)]
    inputs, outputs, summed = _plan(call, given, made, specs, "jax.reshard")
    for name, came, expected in zip(call.given, specs, inputs, strict=True):
        if came != expected:
            raise NotImplementedError(
                f"gander: {call.operator}: {name} is sharded as {PartitionSpec(*came)!r}, expected "
                f"{PartitionSpec(*expected)!r} as {call.first}; pass jax.reshard({name}, ...)"
            )
    mesh = next(
        jax.typeof(array).sharding.mesh for array, spec in zip(arrays, specs, strict=True) if any(spec)
    )

    def local(*parts: Any) -> tuple[Any, ...]:
        return _launch_and_sum(call, summed, alike(parts))

    as_specs = [tuple(PartitionSpec(*spec) for spec in side) for side in (inputs, outputs)]
    return tuple(jax.shard_map(local, mesh=mesh, in_specs=as_specs[0], out_specs=as_specs[1])(*arrays))


def _spec_of(call: Call, name: str, sharding: Any, rank: int, how: str) -> Spec:
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec)
    if sharding is None or sharding.is_fully_replicated or not how:
        return (None,) * rank
    raise NotImplementedError(
        f"gander: {call.operator}: {name} is sharded over devices without a mesh, expected a NamedSharding; "
        "set a mesh with jax.set_mesh"
    )


@cache
def _partitioned(call: Call) -> Any:
    """The call as a function that XLA's partitioner knows how to divide."""

    @custom_partitioning
    def function(*arrays: Any) -> tuple[Any, ...]:
        return launch(call, arrays)

    def plan(arrays: Sequence[Any], results: Sequence[Any], how: str = "") -> Any:
        specs = [
            _spec_of(call, name, array.sharding, len(array.shape), how)
            for name, array in zip(call.given, arrays, strict=True)
        ]
        given, made = ([tuple(a.shape) for a in side] for side in (arrays, results))
        return _plan(call, given, made, specs, how)

    def placed(mesh: Any, specs: Sequence[Spec]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)

    def partition(mesh: Any, arrays: Any, results: Any) -> Any:
        inputs, outputs, summed = plan(arrays, results, "jax.lax.with_sharding_constraint")

        def local(*parts: Any) -> tuple[Any, ...]:
            return _launch_and_sum(call, summed, parts)

        return mesh, local, placed(mesh, outputs), placed(mesh, inputs)

    def infer(mesh: Any, arrays: Any, results: Any) -> Any:  # without Shardy. An error here would abort
        return placed(mesh, plan(arrays, results)[1])

    def rule(mesh: Any, arrays: Any, results: Any) -> SdyShardingRule:
        sides = _factors(call, [tuple(a.shape) for a in arrays], [tuple(r.shape) for r in results])
        names = (f"w{i}" for i in range(1 << 20))  # a whole dimension has nothing to do with any other
        named = [
            tuple(ArrayMapping(*(factor or next(names) for factor in factors)) for factors in side)
            for side in sides
        ]
        return SdyShardingRule(*named)

    function.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return function
