"""The gradients of gander's operators: an Autograd kernel for each, made from the table of operators.

An operator that has a gradient runs an autograd.Function, whose forward runs the operator below autograd, and
also demands the results that backward reads. So a graph that is recorded above autograd (torch.export,
dynamo) keeps the call as it was, and one that is recorded below it has what autograd demanded, and the
gradient operator. register_autograd cannot do this: its backward sees only what the caller asked for, and
torch.func's transforms refuse it.

Operators that have no gradient get an Autograd kernel too. Without one, torch would treat their results as
constants.
"""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor, enable_grad, is_grad_enabled, no_grad, zeros_like
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
    operands,
    read,
    takes_dtypes,
    tensors,
    upstream,
)
from . import fast, missing_gradients
from .eager import are_apart, is_eager, is_of_leaf, is_plain, is_traced, may_write
from .refusals import refuse_gradients, refuse_tangents
from .registry import complete, overloads, registry, untraced

AFTER = torch._C._after_autograd_keyset
below_autograd = torch._C._AutoDispatchBelowAutograd
_in_transform = torch._C._are_functorch_transforms_active

_NO_SECOND = "gander: second derivatives are not supported; use torch's operators"


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
    of = {operand.gradient: operand for operand in operands(gradient_op).values() if operand.output}
    chosen = {of[source].choice: dtypes.get(argument) for argument, source in sources.items()}
    choices = [argument.name for argument in TORCH[gradient_op].arguments if argument.kind == "dtype"]
    return {choice: chosen.get(choice) for choice in choices}


def _written(name: str) -> list[str]:
    """The arguments that backward of an operator with inplace_backward writes over."""
    return [*TORCH[f"{TORCH[name].backward}_"].writes]


def _over_arguments(gradient_op: str):
    """A gradient operator that writes the gradients over the arguments that they are for. If the backward
    pass is recorded or batched, the gradients are new tensors."""
    names, results = arguments(gradient_op), TORCH[gradient_op].results
    fresh, in_place = fast.operator(gradient_op), fast.operator(f"{gradient_op}_")
    into = {output: names.index(argument) for argument, output in TORCH[f"{gradient_op}_"].writes.items()}
    heads = [names.index(argument) for argument in upstream(gradient_op).values()]
    count = len(tensors(gradient_op))

    def call(*given):
        present = [given[at] for at in heads if given[at] is not None]
        if not all(map(is_plain, present)):
            return fresh(*given)
        with no_grad():
            in_place(*given)
        sources = [tensor for tensor in given[:count] if tensor is not None]
        gradients = [once_differentiable(given[into[result]].detach(), *sources) for result in results]
        return gradients if len(gradients) > 1 else gradients[0]

    return call


def refuse_constant(name: str, result: str, upstream: Tensor, head: Tensor | None) -> Tensor:
    """Refuses a gradient of a result that has none: in eager calls by an error.

    A graph has gradients for all of its results, zeros for one that is not part of the loss. So there the
    gradients of rows become NaN if it was part. Returns what stands for `head`, an upstream gradient of the
    rows.
    """
    if not is_traced(upstream):
        raise NotImplementedError(f"gander: {result} of {name} has no gradient; detach it")
    refused = torch.where(upstream == 0, 0.0, float("nan")).to(upstream.dtype)
    return refused if head is None else head + refused


def backward(name: str, inputs: list[str], in_place: bool = False):
    """backward() of an operator's autograd.Function, whose apply takes `inputs`.

    in_place: it writes the gradients over the arguments, if the gradients of all of them are wanted.

    It reads ctx.saved_tensors, in the order of TORCH[name].saved, and ctx.options, the arguments that are not
    tensors. If takes_dtypes(name), it also reads ctx.dtypes, those of the arguments differentiable(name).
    """
    gradient_op, results = TORCH[name].backward, TORCH[name].results
    typed, plans = takes_dtypes(name), {}
    of, heads, gradients_there = operands(gradient_op), upstream(gradient_op), gradients_of(gradient_op)
    single = len(gradients_there) == 1
    constant = [(index, result) for index, result in enumerate(results) if result not in heads]
    last = max(results.index(result) for result in heads)
    required = [(results.index(result), not of[argument].optional) for result, argument in heads.items()]
    partners = missing_gradients.partners(name, inputs)
    # Options of forward that callers cannot choose.
    fixed = {key: bool(value) for key, value in TORCH[name].fixed.items() if key in arguments(gradient_op)}
    types = [argument.type for argument in TORCH[gradient_op].arguments]
    algorithm = types.index("algorithm") if "algorithm" in types else None

    def plan(needs, dtypes):
        """How to compute the needed gradients."""
        wanted = {argument for argument, needed in zip(inputs, needs, strict=True) if needed}
        dtype_of = dict(zip(differentiable(name), dtypes, strict=True)) if typed else {}
        sources = _sources(name, wanted, dtype_of)
        choices = _choices(gradient_op, sources, dtype_of)
        demands = {
            demand(result): of[result].gradient in sources.values() for result in TORCH[gradient_op].on_demand
        }
        constants = choices | demands | fixed
        among = [*read(gradient_op), *heads.values(), *constants, *arguments(name)[len(tensors(name)) :]]
        over_arguments = in_place and wanted.issuperset(_written(name))
        plans[needs, dtypes] = (
            _over_arguments(gradient_op) if over_arguments else fast.operator(gradient_op),
            itemgetter(*map(among.index, arguments(gradient_op))),
            tuple(constants.values()),
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
                gradients = list(gradients)
                gradients[last] = refuse_constant(name, result, gradients[index], gradients[last])
        needs = ctx.needs_input_grad
        for index, (places, asked) in partners.items():
            wanted = gradients[index] is not None and ctx.options[asked]
            if not (wanted and any(needs[place] for place in places)):
                needs = tuple(need and place not in places for place, need in enumerate(needs))
                gradients = (*gradients[:index], None, *gradients[index + 1 :])
        key = needs, ctx.dtypes if typed else None
        call, pick, constants, places = plans.get(key) or plan(*key)
        saved = ctx.saved_tensors
        given = [
            # Every result with a gradient has the shape of the first tensor, the rows.
            zeros_like(saved[0]) if needed and gradients[index] is None else gradients[index]
            for index, needed in required
        ]
        arguments = pick((*saved, *given, *constants, *ctx.options))
        # IF_SERVED: use forward's algorithm if it supports these rows in backward too, else "auto".
        if algorithm is not None and arguments[algorithm]:
            code = arguments[algorithm] | IF_SERVED
            arguments = (*arguments[:algorithm], code, *arguments[algorithm + 1 :])
        answer = call(*arguments)
        returned = [None] * len(inputs)
        for place, index in places:
            returned[place] = answer if single else answer[index]
        return tuple(returned)

    return missing_gradients.of_each(name, inputs, backward)


def forward(name: str):
    """forward() of an operator's autograd.Function. Its apply takes a keyset and the operator's arguments."""
    overload, results, names, saved = overloads[name], TORCH[name].results, arguments(name), TORCH[name].saved
    first_option, typed = len(tensors(name)), differentiable(name) if takes_dtypes(name) else ()
    # What backward needs: the argument that asks for it, and the one with which it is needed, or "".
    demands = [
        (demand(result), argument)
        for result, argument in demanded_for_backward(name).items()
        if result in TORCH[name].on_demand
    ]

    def forward(ctx, keyset, *given):
        values = dict(zip(names, given, strict=True))
        for asks, argument in demands:
            values[asks] = values[asks] or not argument or values[argument] is not None
        answer = call_below_autograd(overload, keyset, values.values())
        values |= zip(results, (answer,) if len(results) == 1 else answer, strict=True)
        ctx.save_for_backward(
            *(
                values[result if result and (not argument or values[demand(result)]) else argument]
                for result, argument in saved
            )
        )
        ctx.set_materialize_grads(False)
        ctx.options = given[first_option:]
        if typed:
            ctx.dtypes = tuple(None if values[of] is None else values[of].dtype for of in typed)
        # A tensor that is saved and not returned has no history: a second derivative would take it for a
        # constant.
        return answer

    return forward


def _own(name: str, in_place: bool = False):
    """The apply of an operator's autograd.Function, whose inputs are a keyset and the arguments. A result
    that the caller did not ask for is a tensor without elements."""
    title = f"{name}_in_place" if in_place else name
    apply = apply_of(title, forward(name), backward(name, ["", *arguments(name)], in_place))
    results, names, asked = TORCH[name].results, arguments(name), TORCH[name].on_demand
    flags = [names.index(demand(result)) if result in asked else None for result in results]

    def run(keyset, *given):
        return tuple(
            result if flag is None or given[flag] else result.new_empty(0)
            for result, flag in zip(apply(keyset, *given), flags, strict=True)
        )

    return apply if len(flags) == 1 else run


def apply_in_place(name: str):
    """The apply of a call with inplace_backward, which may write over its arguments."""
    return _own(name, in_place=True)


def _choose_in_place(name: str):
    """A choice (see register) between an operator's own Function and that of apply_in_place.

    The latter is for eager calls only: a graph plans its own memory, and its backward cannot write to its
    inputs. A leaf is not written over, because an optimizer would take the gradient for its value. Neither
    are arguments that share memory.
    """
    apply, flag = apply_in_place(name), arguments(name).index("inplace_backward")
    places = [arguments(name).index(argument) for argument in _written(name)]

    def choose(own, given):
        if not given[flag]:
            return own
        written = [given[place] for place in places]
        for tensor in written:
            if not is_eager(tensor) or not may_write(tensor) or is_of_leaf(tensor):
                return own
        return apply if are_apart(written) else own

    return choose


def call_below_autograd(overload, keyset, given):
    """Calls an operator below autograd, from forward() of an autograd.Function.

    autograd disables gradients and tangents in forward(). They are enabled here if a transform of torch.func
    is active, because the call continues to the outer transforms, which need them.
    """
    if _in_transform():
        with enable_grad(), _set_fwd_grad_enabled(True), below_autograd():
            return overload.redispatch(keyset & AFTER, *given)
    with below_autograd():
        return overload.redispatch(keyset & AFTER, *given)


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


def apply_of(title: str, forward, backward):
    """The apply of such a Function, also inside torch.func's transforms, which accept it only on request."""
    apply = function(title, forward, backward).apply

    def call(*inputs):
        if _in_transform():
            with enable_single_level_autograd_function():
                return apply(*inputs)
        return apply(*inputs)

    return call


def apply_with(title: str, forward, gradient, places: Sequence[int], count: int, heads: int = 1):
    """The apply of a Function of `count` inputs of which the first `heads` results alone have a gradient.

    gradient(ctx, *upstream) takes the gradients of these results, None for one that backward does not bring.
    It returns the gradient of the input at the first of these places, or with more places one for each of
    them.
    """
    having = "the first result" if heads == 1 else f"the first {heads} results"

    def backward(ctx, *upstream):
        for other in upstream[heads:]:  # any() of a generator costs more
            if other is not None:
                raise NotImplementedError(
                    f"gander: only {having} of {title} has a gradient; detach the others"
                )
        returned = [None] * count
        for gradient_of_head in upstream[:heads]:
            if gradient_of_head is not None:
                break
        else:
            return tuple(returned)
        answer = gradient(ctx, *upstream[:heads])
        for place, value in zip(places, answer if len(places) > 1 else [answer], strict=True):
            returned[place] = value
        return tuple(returned)

    return apply_of(title, forward, backward)


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

    return apply_of(name, forward, backward)


def _same(ctx, gradient, *sources):
    return gradient.view_as(gradient)


def _refuse_second(ctx, *gradients):
    raise NotImplementedError(_NO_SECOND)


_once_differentiable = apply_of("once_differentiable", _same, _refuse_second)


def once_differentiable(gradient: Tensor, *sources: Tensor) -> Tensor:
    """A gradient that was computed from sources below autograd. Its own derivative raises an error."""
    return _once_differentiable(gradient, *sources) if is_grad_enabled() else gradient


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
        with below_autograd():
            return overload.redispatch(keyset & AFTER, *given)

    return kernel


def register(choices: dict, substitutes: dict) -> None:
    """Registers the Autograd kernels.

    choices: by operator, a function that chooses the apply of the autograd.Function for a call that needs a
    gradient. It takes the apply of the operator's own Function, and all arguments of the call. Others with
    inplace_backward have one that follows from the table.
    substitutes: by operator, a function of a call's arguments that returns its result, or None to go on.
    """
    for name in TORCH:
        choose = choices.get(name)
        if choose is None and "inplace_backward" in arguments(name):
            choose = _choose_in_place(name)
        registry.impl(
            name,
            untraced(_kernel(name, choose, substitutes.get(name))),
            "Autograd",
            with_keyset=True,
        )


def fast_functions() -> dict:
    """The autograd.Functions of the fast path (fast.py), by operator. Their apply takes the arguments that
    have a gradient and returns the operator's results. fast.py sets their forward."""
    return {
        name: function(name, None, backward(name, differentiable(name)))
        for name, operator in TORCH.items()
        if operator.backward
    }
