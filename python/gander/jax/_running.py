"""Runs a call: under vmap as one call of more rows or as a loop, on a mesh where its rows lie."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax

from ._batching import folded, moved_back
from ._calls import Call
from ._sharding import on_mesh


@partial(jax.jit, static_argnums=0, inline=True)
def run(call: Call, *arrays: Any) -> tuple[Any, ...]:
    """The results of a call. It has to be compiled as a whole, also for eager calls: what runs operation by
    operation gathers sharded arrays."""
    return _batchable(call)(*arrays)


@cache
def _batchable(call: Call) -> Any:
    """The call as a function with a rule for vmap."""

    @jax.custom_batching.custom_vmap
    def function(*arrays: Any) -> tuple[Any, ...]:
        return on_mesh(call, *arrays)

    @function.def_vmap
    def rule(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        one = folded(call, size, batched, arrays)
        if one is not None:
            return moved_back(call, run(call, *one)), (True,) * len(call.results())

        def each(some: list[Any]) -> tuple[Any, ...]:
            rest = iter(some)
            return run(call, *(next(rest) if b else a for a, b in zip(arrays, batched, strict=True)))

        results = jax.lax.map(each, [a for a, b in zip(arrays, batched, strict=True) if b])
        return results, (True,) * len(results)

    return function
