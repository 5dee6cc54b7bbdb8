"""Operators outside of the table, which graphs hold: parts of what Python computes in eager calls."""

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from .autograd import AFTER, apply_with, below_autograd, call_below_autograd
from .refusals import refuse_tangents
from .registry import registry, untraced
from .vmap import each_sample


def define(schema: str, kernel, fake, keep=None, gradient=None, differentiable=(0,), batched=None, heads=1):
    """An operator outside of the table, which graphs hold: its overload.

    keep: takes a context, the arguments and the results, and saves what gradient(ctx, dloss) needs, which is
    the gradient of the first result for the argument at the position `differentiable`, or with more positions
    one for each. Nothing else has a gradient.
    heads: so many of the first results have a gradient, each of which `gradient` takes.
    batched: the vmap rule, by default a call for each sample.
    """
    name = schema.partition("(")[0]
    registry.define(schema)
    overload = getattr(torch.ops.gander, name).default
    registry.impl(name, untraced(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gander::{name}", untraced(fake), lib=registry)
    names = [argument.name for argument in overload._schema.arguments]

    def for_each(info, in_dims, *given):
        values, dims = dict(zip(names, given, strict=True)), dict(zip(names, in_dims, strict=True))
        results = each_sample(overload, values, dims, info.batch_size)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    torch.library.register_vmap(f"gander::{name}", untraced(batched or for_each), lib=registry)
    if gradient is None:
        return overload

    def forward(ctx, *inputs):
        *given, keyset = inputs
        results = call_below_autograd(overload, keyset, given)
        ctx.mark_non_differentiable(*results[heads:])
        ctx.set_materialize_grads(False)
        keep(ctx, given, results)
        return results

    apply = apply_with(name, forward, gradient, differentiable, len(names) + 1, heads)

    def autograd(keyset, *given):
        if forward_ad._current_level >= 0:
            refuse_tangents(value for value in given if isinstance(value, Tensor))
        if is_grad_enabled() and any(given[i] is not None and given[i].requires_grad for i in differentiable):
            return apply(*given, keyset)
        with below_autograd():
            return overload.redispatch(keyset & AFTER, *given)

    registry.impl(name, untraced(autograd), "Autograd", with_keyset=True)
    return overload
