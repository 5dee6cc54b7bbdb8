"""Every combination of the results that a call of an operator can ask for, and its arguments by name."""

import itertools

import torch
from gander._table import TORCH, arguments, demand, differentiable

# The operators with results that a call has to ask for.
ON_DEMAND = [name for name, operator in TORCH.items() if operator.on_demand]


def demands(name):
    """Every combination of an operator's needs_ arguments, as keywords. The last one asks for all results.

    Of many arguments, those that ask for none of them, for one, for all but one, and for all.
    """
    flags = [demand(result) for result in TORCH[name].on_demand]
    combinations = [*itertools.product((False, True), repeat=len(flags))]
    if len(flags) > 4:
        few = (0, 1, len(flags) - 1, len(flags))
        combinations = [values for values in combinations if sum(values) in few]
    return [dict(zip(flags, values, strict=True)) for values in combinations]


def every_demand(names=ON_DEMAND):
    """Operators and their needs_ arguments, for pytest.mark.parametrize with ids=shown."""
    return [(name, asked) for name in names for asked in demands(name)]


def shown(value):
    """What pytest calls an operator, or what it is asked for."""
    if not isinstance(value, dict):
        return value
    return "-".join(flag.removeprefix("needs_") for flag, asked in value.items() if asked) or "nothing"


def named(name, given, keywords=None):
    """All arguments of a call of an operator, by name."""
    schema = getattr(torch.ops.gander, name).default._schema
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | dict(zip(arguments(name), given, strict=False)) | (keywords or {})


def in_order(name, *given, **options):
    """All arguments of a call of an operator, by position."""
    values = named(name, given, options)
    assert values.keys() <= set(arguments(name))
    return tuple(values[argument] for argument in arguments(name))


def asked_for(name, asked):
    """For each result of an operator whether a call asks for it."""
    return [asked.get(demand(result), True) for result in TORCH[name].results]


def check_unwanted(name, asked, results, every):
    """Checks the results that a call does not ask for.

    They have no elements, and the dtype and the device that they have in `every`, the results of a call that
    asks for all. No two results share memory.
    """
    for wanted, result, full in zip(asked_for(name, asked), results, every, strict=True):
        assert (result.dtype, result.device) == (full.dtype, full.device)
        assert wanted or result.shape == (0,)
    storages = [result.untyped_storage()._cdata for result in results]
    assert len(set(storages)) == len(storages)


def calls_on_demand(x, weight, target):
    """For each operator with results on demand a call that can ask for all of them: arguments and options."""
    mean, rstd = torch.randn(6, device=x.device), torch.rand(6, device=x.device) + 0.5
    half, brain = torch.float16, torch.bfloat16
    norm = x, weight, weight.half(), x.half()
    heads, table = x[:, None], torch.rand(6, x.shape[-1] // 2, device=x.device)
    rotation = heads, torch.cat([heads, heads.cos()], 1), table, table.sin()
    dtypes = {"x_dtype": half, "residual_dtype": brain, "bias_dtype": half}
    return {
        "rmsnorm": (norm, {"out_dtype": half, "residual_dtype": brain}),
        "rmsnorm_bwd": ((x, weight, x.half(), x.cos(), rstd), dtypes),
        "l2norm": ((x,), {"eps": 0.5}),
        "token_statistics": ((x, target, target > 1), {"temperature": 0.5}),
        "soft_cross_entropy": ((x, x.abs(), weight.abs()), {"label_smoothing": 0.1}),
        "rotary": (rotation, {"interleaved": True}),
        "rotary_bwd": (rotation, {"interleaved": True}),
        "qk_norm_rotary": ((*rotation[:2], weight, weight.half(), *rotation[2:]), {"weight_offset": 1.0}),
        "qk_norm_rotary_bwd": (
            (*rotation[:2], weight, weight.half(), *rotation[2:], None, None, heads.sin(), rotation[1].sin()),
            {"round_products": True},
        ),
        # residual_out in another dtype than x would change y, which is the norm of what it holds.
        "layernorm": (norm, {"out_dtype": half, "residual_dtype": x.dtype}),
        "layernorm_bwd": ((x, weight, x.half(), x.cos(), mean, rstd), dtypes),
        "cross_entropy": ((x, target, weight.abs()), {}),
        "cross_entropy_fwd": ((x, target, weight.abs()), {"divisor": rstd[0], "upstream": rstd[1]}),
    }


def leaves(name, given):
    """The arguments of a call, of which those with a gradient require one."""
    return [
        value.clone().requires_grad_() if argument in differentiable(name) and value is not None else value
        for argument, value in zip(arguments(name), given, strict=False)
    ]
