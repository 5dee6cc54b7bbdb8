"""The gradients of gander's operators: an Autograd kernel for each, made from the table of operators.

An operator that has a gradient runs an autograd.Function, whose forward runs the operator below autograd, and
also demands the results that backward reads. So a graph that is recorded above autograd (torch.export,
dynamo) keeps the call as it was, and one that is recorded below it has what autograd demanded, and the
gradient operator. register_autograd cannot do this: its backward sees only what the caller asked for, and
torch.func's transforms refuse it.

Operators that have no gradient get an Autograd kernel too. Without one, torch would treat their results as
constants.
"""

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor, enable_grad, is_grad_enabled, zeros_like
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from .._table import (
    IF_SERVED,
    TORCH,
    arguments,
    demand,
    demanded_for_backward,
    differentiable,
    gradients_of,
    has_rows,
    operands,
    read,
    takes_dtypes,
    tensors,
    upstream,
)
from . import fast
from .registry import complete, overloads, registry, untraced
from .vmap import each_sample

_AFTER = torch._C._after_autograd_keyset
_below_autograd = torch._C._AutoDispatchBelowAutograd
_in_transform = torch._C._are_functorch_transforms_active

_NO_SECOND = "gander: second derivatives are not supported; use torch's operators"
_NO_FORWARD = "gander: forward-mode derivatives are not supported; use torch's operators"


def selector(names: Iterable[str], among: list[str]):
    """A function that takes a tuple with a value for each name in `among`, and returns those of `names`."""
    indices = [among.index(name) for name in names]
    if len(indices) == 1:
        return lambda values: (values[indices[0]],)
    return itemgetter(*indices)


def gradient_arguments(gradient_op: str, name: str, given: list[str]):
    """A function that returns the arguments of a gradient operator.

    It takes one tuple: the arguments `given`, then ctx.options of operator `name`. What is in neither has the
    value that is fixed in that operator.
    """
    among = [*given, *arguments(name)[len(tensors(name)) :]]
    fixed = {
        argument.name: bool(TORCH[name].fixed[argument.name])
        for argument in TORCH[gradient_op].arguments
        if argument.name not in among
    }
    pick = selector(arguments(gradient_op), [*among, *fixed])
    if not fixed:
        return pick
    values = tuple(fixed.values())
    return lambda given: pick(given + values)


def _sources(name: str, wanted: set[str], dtypes: dict) -> dict[str, str]:
    """For each argument whose gradient is wanted, the argument whose gradient is computed for it.

    That is another one if their gradients have the same values and can share a dtype.
    """
    sources = {argument: argument for argument in wanted}
    of = operands(TORCH[name].backward)
    for operand in of.values():
        if operand.twin and operand.gradient in wanted:
            twin = of[operand.twin].gradient
            if twin not in wanted or dtypes[twin] == dtypes[operand.gradient]:
                sources[operand.gradient] = twin
    return sources


def _choices(gradient_op: str, sources: dict[str, str], dtypes: dict) -> dict:
    """The dtypes that a gradient operator is asked for: those of the arguments that its results are for."""
    of, chosen = operands(gradient_op), {}
    for argument, source in sources.items():
        result = TORCH[gradient_op].results[gradients_of(gradient_op).index(source)]
        chosen[of[result].choice] = dtypes[argument]
    choices = [argument.name for argument in TORCH[gradient_op].arguments if argument.kind == "dtype"]
    return {choice: chosen.get(choice) for choice in choices}


def backward(name: str, inputs: list[str]):
    """backward() of an operator's autograd.Function, whose apply takes `inputs`.

    It reads ctx.saved_tensors, in the order of TORCH[name].saved, and ctx.options, the arguments that are not
    tensors. If takes_dtypes(name), it also reads ctx.dtypes, those of the arguments differentiable(name).
    """
    gradient_op, results = TORCH[name].backward, TORCH[name].results
    typed, plans = takes_dtypes(name), {}
    of, heads, gradients_there = operands(gradient_op), upstream(gradient_op), gradients_of(gradient_op)
    single = len(gradients_there) == 1
    constant = [(index, result) for index, result in enumerate(results) if result not in heads]
    given = [(index, heads[result]) for index, result in enumerate(results) if result in heads]
    required = [(index, not of[argument].optional) for index, argument in given]
    absent = [argument for argument in heads.values() if argument not in dict(given).values()]
    types = [argument.type for argument in TORCH[gradient_op].arguments]
    algorithm = types.index("algorithm") if "algorithm" in types else None

    def plan(needs, dtypes):
        """How to compute the needed gradients."""
        wanted = {argument for argument, needed in zip(inputs, needs, strict=True) if needed}
        dtype_of = dict(zip(differentiable(name), dtypes, strict=True)) if typed else {}
        sources = _sources(name, wanted, dtype_of)
        choices = _choices(gradient_op, sources, dtype_of) if typed else {}
        demands = {
            demand(result): of[result].gradient in sources.values() for result in TORCH[gradient_op].on_demand
        }
        order = [*read(gradient_op), *dict(given).values(), *absent, *choices, *demands]
        plans[needs, dtypes] = (
            fast.operator(gradient_op),
            gradient_arguments(gradient_op, name, order),
            (*[None] * len(absent), *choices.values(), *demands.values()),
            [(inputs.index(argument), gradients_there.index(source)) for argument, source in sources.items()],
        )
        return plans[needs, dtypes]

    def backward(ctx, *gradients):
        for gradient in gradients:  # any() of a generator costs a tenth of this function's time
            if gradient is not None:
                break
        else:
            return (None,) * len(inputs)
        missing = len(results) - len(gradients)  # of results that the caller did not get
        if missing:
            gradients += (None,) * missing
        for index, result in constant:
            if gradients[index] is not None:
                raise NotImplementedError(f"gander: {result} of {name} has no gradient; detach it")
        key = ctx.needs_input_grad, ctx.dtypes if typed else None
        call, pick, constants, places = plans.get(key) or plan(*key)
        saved = ctx.saved_tensors
        heads = [
            # Every result with a gradient has the shape of the first tensor, the rows.
            zeros_like(saved[0]) if needed and gradients[index] is None else gradients[index]
            for index, needed in required
        ]
        arguments = pick((*saved, *heads, *constants, *ctx.options))
        # IF_SERVED: use forward's algorithm if it supports these rows in backward too, else "auto".
        if algorithm is not None and arguments[algorithm]:
            code = arguments[algorithm] | IF_SERVED
            arguments = (*arguments[:algorithm], code, *arguments[algorithm + 1 :])
        answer = call(*arguments)
        returned = [None] * len(inputs)
        for place, index in places:
            returned[place] = answer if single else answer[index]
        return tuple(returned)

    return backward


class Call:
    """One call of an operator on its way through an autograd.Function, whose apply takes it as first input.

    results: for each result of the operator, a tensor without elements if the caller did not ask for it.
    """

    __slots__ = ("keyset", "results")

    def __init__(self, keyset):
        self.keyset, self.results = keyset, ()


def forward(name: str, saving: str | None = None, kept: Iterable[str] = (), overload=None):
    """forward() of an operator's autograd.Function. Its apply takes a Call and the operator's arguments.

    saving: an operator that runs in its place, with the same first arguments and results. kept: what backward
    then reads. overload: what is called for it, with the same schema.
    """
    saving = saving or name
    overload, results = overload or overloads[saving], TORCH[saving].results
    names, count, first_option = arguments(name), len(TORCH[saving].arguments), len(tensors(name))
    saved = [(saved.result, saved.argument) for saved in TORCH[name].saved]
    if kept:
        saved = [(key, "") if key in results else ("", key) for key in kept]
    saved = [
        (results.index(result) if result else None, names.index(argument) if argument else None)
        for result, argument in saved
    ]
    # For each result: the argument that asks for it; whether backward needs it, and with which argument.
    demands = [
        (
            names.index(demand(result)) if result in TORCH[name].on_demand else None,
            result in demanded_for_backward(name),
            names.index(argument) if (argument := demanded_for_backward(name).get(result)) else None,
            has_rows(operands(name)[result]),
        )
        for result in TORCH[name].results
    ]
    single = len(results) == 1
    typed = [names.index(argument) for argument in differentiable(name)] if takes_dtypes(name) else ()

    def forward(ctx, call, *given):
        asked, tracked, computed = [*given[:count]], 1, [True] * len(results)
        for index, (flag, needed, argument, rows) in enumerate(demands):
            if flag is None:
                continue
            needed = needed and (argument is None or given[argument] is not None)
            if saving == name:
                asked[flag] = computed[index] = needed or given[flag]
            if given[flag] or (needed and rows):
                tracked = index + 1
        answer = call_below_autograd(overload, call.keyset, asked)
        if single:
            answer = (answer,)
        ctx.save_for_backward(
            *(
                answer[result]
                if result is not None and (argument is None or computed[result])
                else given[argument]
                for result, argument in saved
            )
        )
        ctx.set_materialize_grads(False)
        ctx.options = given[first_option:]
        if typed:
            ctx.dtypes = tuple(None if given[i] is None else given[i].dtype for i in typed)
        call.results = [
            None if flag is None or given[flag] else answer[index].new_empty(0)
            for index, (flag, *_) in enumerate(demands)
        ]
        returned = tuple(answer[i] if computed[i] else None for i in range(tracked))
        return returned[0] if tracked == 1 else returned

    return forward


def _own(name: str):
    """The apply of an operator's autograd.Function, whose inputs are a keyset and the arguments."""
    return apply_to_call(function(name, forward(name), backward(name, ["", *arguments(name)])))


def apply_to_call(function: type[_SingleLevelFunction]):
    """function.apply, of which the first input is a keyset in place of a Call. Returns all of the operator's
    results."""
    apply = apply_of(function)

    def run(keyset, *given):
        call = Call(keyset)
        tracked = apply(call, *given)
        if len(call.results) < 2:
            return tracked
        if isinstance(tracked, Tensor):
            tracked = (tracked,)
        return tuple(
            tracked[index] if nothing is None else nothing for index, nothing in enumerate(call.results)
        )

    return run


def call_below_autograd(overload, keyset, given):
    """Calls an operator below autograd, from forward() of an autograd.Function.

    autograd disables gradients and tangents in forward(). They are enabled here if a transform of torch.func
    is active, because the call continues to the outer transforms, which need them.
    """
    if _in_transform():
        with enable_grad(), _set_fwd_grad_enabled(True), _below_autograd():
            return overload.redispatch(keyset & _AFTER, *given)
    with _below_autograd():
        return overload.redispatch(keyset & _AFTER, *given)


def function(title: str, forward, backward) -> type[_SingleLevelFunction]:
    """An autograd.Function without the Python part of apply, which supports torch.func's transforms.

    That part is not needed: the dispatcher passes our operators to each transform, which then uses the
    function at its own level.
    """
    title = "Gander" + "".join(word.capitalize() for word in title.split("_"))
    methods = {
        "forward": forward and staticmethod(untraced(forward)),
        "backward": staticmethod(untraced(backward)),
        # Compiled autograd calls this one.
        "_compiled_autograd_key": staticmethod(Function._compiled_autograd_key),
    }
    made = type(_SingleLevelFunction)(title, (_SingleLevelFunction,), methods | {"__module__": __name__})
    made._backward_cls.apply = backward  # torch's own looks for it in each call, which costs host time
    return made


def apply_of(function: type[_SingleLevelFunction]):
    """function.apply, also inside torch.func's transforms, which accept such functions only on request."""
    apply = function.apply

    def call(*inputs):
        if _in_transform():
            with enable_single_level_autograd_function():
                return apply(*inputs)
        return apply(*inputs)

    return call


def refuse_outer_gradients(what, x):
    """For a function that is applied without the dispatcher, so at the innermost level of torch.func alone.

    Others, and autograd outside of all, would take its result for a constant.
    """
    if not _in_transform() or not is_grad_enabled():
        return
    functorch = torch._C._functorch
    if functorch.maybe_get_level(x) == functorch.maybe_current_level():
        x = functorch.get_unwrapped(x)
    while True:
        if x.requires_grad:
            raise NotImplementedError(
                f"gander: {what} has a gradient for the innermost transform of torch.func only; "
                "differentiate there, or detach x"
            )
        if not functorch.is_functorch_wrapped_tensor(x):
            return
        x = functorch.get_unwrapped(x)


def _refusal(name):
    """The apply of an operator that has no gradient. Differentiating its results raises an error."""
    message = _NO_SECOND
    if not any(gradients_of(name)):
        public = next(
            other for other, of in TORCH.items() if of.backward and of.operator == TORCH[name].operator
        )
        message = f"gander: {name} has no gradient; detach its inputs, or use {public}"

    def forward(ctx, keyset, *given):
        return call_below_autograd(overloads[name], keyset, given)

    def backward(ctx, *gradients):
        raise NotImplementedError(message)

    return apply_of(function(name, forward, backward))


def _same(ctx, gradient, *sources):
    return gradient.view_as(gradient)


def _refuse_second(ctx, *gradients):
    raise NotImplementedError(_NO_SECOND)


_once_differentiable = apply_of(function("once_differentiable", _same, _refuse_second))


def once_differentiable(gradient: Tensor, *sources: Tensor) -> Tensor:
    """A gradient that was computed from sources below autograd. Its own derivative raises an error."""
    return _once_differentiable(gradient, *sources) if is_grad_enabled() else gradient


def refuse_tangents(given) -> None:
    """Raises an error if one of these tensors or None has a tangent of forward mode."""
    for tensor in given:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(_NO_FORWARD)


def refuse_gradients(name, given) -> None:
    """Raises an error if one of these tensors or None, by argument, requires a gradient."""
    for argument, tensor in given.items():
        if tensor is not None and tensor.requires_grad and is_grad_enabled():
            raise NotImplementedError(
                f"gander: {argument} requires a gradient, but {name} has none for it, expected a constant; "
                "detach it"
            )


def _kernel(name, choose, instead):
    """An operator's Autograd kernel."""
    operator, overload, count = TORCH[name], overloads[name], len(tensors(name))
    own = None
    if operator.backward:
        own = _own(name)
    elif not operator.writes:
        own = _refusal(name)

    def with_gradient(keyset, given):
        for argument, tensor in zip(tensors(name), given, strict=False):
            if tensor is None or not tensor.requires_grad:
                continue
            if operator.writes:
                raise NotImplementedError(
                    f"gander: {name} expected no gradient, and {argument} requires one; detach it, or use "
                    "torch.no_grad()"
                )
            if operator.backward and argument not in differentiable(name):
                refuse_gradients(name, {argument: tensor})
        return (own if choose is None else choose(own, given))(keyset, *given)

    def kernel(keyset, *given):
        if forward_ad._current_level >= 0:
            refuse_tangents(given[:count])
        if instead is not None and (answer := instead(given)) is not None:
            return answer
        if is_grad_enabled():
            for tensor in given[:count]:
                if tensor is not None and tensor.requires_grad:
                    return with_gradient(keyset, complete(name, given))
        with _below_autograd():
            return overload.redispatch(keyset & _AFTER, *given)

    return kernel


def register(choices: dict, substitutes: dict) -> None:
    """Registers the Autograd kernels.

    choices: by operator, a function that chooses the apply of the autograd.Function for a call that needs a
    gradient. It takes the apply of the operator's own Function, and all arguments of the call.
    substitutes: by operator, a function of a call's arguments that returns its result, or None to go on.
    """
    for name in TORCH:
        registry.impl(
            name,
            untraced(_kernel(name, choices.get(name), substitutes.get(name))),
            "Autograd",
            with_keyset=True,
        )


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
        with _below_autograd():
            return overload.redispatch(keyset & _AFTER, *given)

    if gradient is not None:
        registry.impl(name, untraced(autograd), "Autograd", with_keyset=True)
    return overload


def fast_functions() -> dict:
    """The autograd.Functions of the fast path (fast.py), by operator. Their apply takes the arguments that
    have a gradient and returns the operator's results. fast.py sets their forward."""
    return {
        name: function(name, None, backward(name, differentiable(name)))
        for name, operator in TORCH.items()
        if operator.backward
    }
