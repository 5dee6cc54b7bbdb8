"""Operators outside of the table, which graphs hold: parts of what Python computes in eager calls."""

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from .autograd import AFTER, apply_of, below_autograd, call_below_autograd, function, refuse_tangents
from .registry import registry, untraced
from .vmap import each_sample


def define(schema: str, kernel, fake, keep=None, gradient=None, batched=None):
    """An operator outside of the table, which graphs hold: its overload.

    keep: takes a context, the arguments and the results, and saves what gradient(ctx, dloss) needs, which is
    the gradient of the first result for the first argument. Nothing else has a gradient.
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
        return results, (0,) * len(results)

    torch.library.register_vmap(f"gander::{name}", untraced(batched or for_each), lib=registry)

    def forward(ctx, keyset, *given):
        results = call_below_autograd(overload, keyset, given)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        keep(ctx, given, results)
        return results

    def backward(ctx, dloss, *others):
        return None, None if dloss is None else gradient(ctx, dloss), *[None] * (len(names) - 1)

    apply = apply_of(function(name, forward, backward))

    def autograd(keyset, *given):
        if forward_ad._current_level >= 0:
            refuse_tangents(value for value in given if isinstance(value, Tensor))
        if is_grad_enabled() and given[0].requires_grad:
            return apply(keyset, *given)
        with below_autograd():
            return overload.redispatch(keyset & AFTER, *given)

    if gradient is not None:
        registry.impl(name, untraced(autograd), "Autograd", with_keyset=True)
    return overload
