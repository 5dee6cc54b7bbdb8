"""What PyTorch expects of an operator: gradients on every path, torch.compile, opcheck, versions, modes."""

import contextlib
import functools
import threading

import gander
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from demands import (
    ON_DEMAND,
    asked_for,
    calls_on_demand,
    check_unwanted,
    demands,
    every_demand,
    leaves,
    shown,
)
from gander._table import TORCH, demand, differentiable, operands
from test_ops import ce, rand, rms
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

ops = torch.ops.gander


@pytest.fixture
def data(device):
    x, weight = torch.randn(6, 33, device=device), torch.randn(33, device=device)
    return x, weight, torch.tensor([0, 32, -100, 4, 4, 9], device=device)


def model(x, weight, target):
    return gander.cross_entropy(gander.softmax(gander.rmsnorm(x, weight)) * 8, target)


def model_of_ops(x, weight, target):
    return ops.cross_entropy(ops.softmax(ops.rmsnorm(x, weight)[0]) * 8, target)[0]


def torch_model(x, weight, target):
    return F.cross_entropy(F.softmax(F.rms_norm(x, x.shape[-1:], weight, 1e-6), -1) * 8, target)


def gradients(function, x, weight, target):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(x, weight, target)
    return loss, *torch.autograd.grad(loss, (x, weight))


def calls(x, weight, target):
    """Calls of operators: the name, arguments and options. Others are in calls_on_demand.

    No argument requires a gradient if a result has none.
    """
    grad, grad_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rstd, saved = torch.rand(6, device=x.device), ops.cross_entropy(x, target, needs_lse=True)[1]
    rows, classes = torch.randn(6, device=x.device), weight.abs()
    state = torch.rand(6, 3, device=x.device)  # of statistics
    half, brain, halves = torch.float16, torch.bfloat16, torch.cat((x, x.sin()), -1)
    norms = [
        call
        for name in ("rmsnorm", "layernorm")
        for call in (
            (name, (grad, grad_weight), {"out_dtype": brain}),
            (name, (grad, None, grad_weight), {"out_dtype": half}),
            (name, (grad, grad_weight, None), {"out_dtype": half}),
            (name, (x, None, grad_weight, grad), {"residual_dtype": half}),
            (name, (x, weight, weight), {"needs_rstd": True}),
            (name, (x, weight), {"out_dtype": half, "needs_residual_out": True, "needs_rstd": True}),
        )
    ]
    return [
        *norms,
        ("softmax", (grad,), {}),
        ("softmax_bwd", (x, x.softmax(-1)), {"batch_invariant": True}),
        ("rmsnorm_bwd", (x, None, x, None, rstd), {}),
        ("rmsnorm_bwd", (x, weight, x, None, rstd), {"batch_invariant": True, "needs_dw": True}),
        (
            "rmsnorm_out",
            (x, weight, None, x.half(), x.half(), x.cos(), rstd.clone()),
            {"weight_offset": 0.5, "round_normalized": True},
        ),
        ("fused_add_rmsnorm_", (x.clone(), weight, x.half()), {}),
        ("layernorm_out", (x, weight, None, None, x.clone(), None, rstd.clone(), rstd.clone()), {}),
        ("cross_entropy", (grad, target, classes), {}),
        ("cross_entropy", (x, target, classes), {"divisor": rows[0], "reduction": 2, "needs_lse": True}),
        (
            "cross_entropy_fwd",
            (x, target),
            {"divisor": rows[0], "batch_invariant": True, "needs_lse": True},
        ),
        ("cross_entropy_fwd_dx_", (x.clone(), target), {}),
        ("cross_entropy_fwd_out", (x, target, classes, rows.clone(), None, x.clone()), {}),
        ("cross_entropy_fwd_one_pass", (x, target, classes), {}),
        ("cross_entropy_bwd", (x, target, classes, rows, rows), {"divisor": rows[0], "reduction": 0}),
        (
            "cross_entropy_bwd",
            (x, target + 9, classes, rows, rows),
            {"ignore_index": -91, "reduction": 0, "slice": True},
        ),
        ("cross_entropy_bwd_", (x.clone(), target, None, rows[0], saved), {}),
        (
            "cross_entropy_bwd_",
            (x.clone(), target - 9, None, rows[0], saved),
            {"ignore_index": -109, "slice": True},
        ),
        (
            "cross_entropy_bwd_one_pass",
            (x, target, None, rows[0], saved, None, rows[1], x.clone()),
            {},
        ),
        ("cross_entropy_bwd_out", (x, target, None, rows, rows, x.clone()), {}),
        (
            "masked_softmax",
            (grad, weight > 0),
            {"out_dtype": half, "scale": 0.5, "causal": True, "masked_zero": True},
        ),
        ("masked_softmax_bwd", (x, x.half(), weight), {"x_dtype": half, "scale": 2.0, "causal": True}),
        ("rescale_", (x.clone(), rows[0], rows[1]), {}),
        (
            "sharded_cross_entropy_combine",
            (
                torch.rand(2, 4, len(rows), device=x.device),
                target,
                *(rows.clone() for _ in range(3)),
                rows[0].clone(),
                rows.clone(),
            ),
            {"classes": 9, "mean": True, "weighted": True},
        ),
        ("glu", (grad, x.cos().requires_grad_()), {"gelu": True, "tanh": True}),
        ("glu", (grad, x.cos().requires_grad_()), {"inplace_backward": True}),
        ("glu_bwd", (x, x.cos(), x.sin()), {"round_activation": True}),
        ("glu_bwd_", (x.clone(), x.cos(), x.sin()), {}),
        ("rotary_", (x[:, None].clone(), None, *torch.rand(2, 6, 16, device=x.device)), {}),
        (
            "qk_norm_rotary_",
            (x[:, None].clone(), None, weight, None, *torch.rand(2, 6, 16, device=x.device)),
            {"round_normalized": True},
        ),
        ("packed_glu", (halves.clone().requires_grad_(),), {"gelu": True, "inplace_backward": True}),
        ("packed_glu_bwd", (halves, x), {}),
        ("packed_glu_bwd_", (halves.clone(), x), {"round_activation": True}),
        ("token_statistics", (grad, target), {"needs_log_prob": True, "softcap": 3.0}),
        (
            "token_statistics",
            (grad, target, target > 1),
            {"needs_entropy": True, "needs_predicted": True, "needs_is_top1": True, "inplace_backward": True},
        ),
        (
            "token_statistics_out",
            (x, target + 3, None, rows.clone(), rows.clone(), None, rows.clone(), None, target.clone(), None),
            {"first": 3, "classes": 90},
        ),
        (
            "sharded_token_statistics_combine",
            (
                torch.rand(2, 4, len(rows), device=x.device),
                target,
                target > 1,
                rows.clone(),
                rows.clone(),
                *[None] * 4,
                state.clone(),
                target.clone(),
            ),
            {"first": 1, "classes": 9, "narrow": True},
        ),
        ("token_statistics_bwd", (x, target, None, state, rows, rows.cos()), {}),
        ("token_statistics_bwd", (x, target, None, state, None, rows), {"softcap": 3.0}),
        ("token_statistics_bwd_", (x.clone(), target, None, state, rows), {}),
        ("soft_cross_entropy", (grad, x.abs()), {"softcap": 3.0}),
        ("soft_cross_entropy", (grad, x.abs(), weight), {"reduction": 0, "inplace_backward": True}),
        (
            "soft_cross_entropy_bwd",
            (x, x.abs().half(), weight, rows, state),
            {"reduction": 0, "label_smoothing": 0.1},
        ),
        ("soft_cross_entropy_bwd_", (x.clone(), x.abs(), None, rows[0], state), {}),
        ("l2norm", (grad,), {}),
        ("l2norm_bwd", (x, x.cos(), rows), {}),
        ("logsumexp", (grad,), {}),
        ("logsumexp_bwd", (x, rows, x.logsumexp(-1)), {}),
    ]


UTILITIES = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


def opcheck(name, given, options, utilities=UTILITIES):
    results = torch.library.opcheck(getattr(ops, name).default, given, options, test_utils=utilities)
    assert results == dict.fromkeys(utilities, "SUCCESS")


def test_opcheck_of_every_op(data):
    names = {
        name.removeprefix("gander::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("gander::")
    }
    x, _, target = data
    every = calls(*data)
    # A graph would differentiate the log-sum-exp too, whose gradient is refused.
    for leaf, predicts in (x, False), (x.detach(), True):
        given = leaf, leaf.cos(), target % 6, *[None] * 4, -100, 1, 4, True, 0.1, 0.01, 1.5, 3.0, 2.0
        every.append(("linear_cross_entropy", (*given, True, True, False, predicts), {}))
    given = x, x.cos(), target % 6, None, target % 2 == 0
    maps = 1.5, 3.0, 2.0
    # Log-probability, entropy, whether the largest, the class that is, and the state; with the logits.
    wanted = True, True, False, False, True, True, True
    for keeps in False, True:
        every.append(("linear_token_statistics", (*given, -100, 4, keeps, False, False, *maps, *wanted), {}))
        logits = x.detach().sin()[:, :6].contiguous() if keeps else x.new_empty(0)
        rows = x.detach()[:, 0].contiguous()
        state = torch.rand(len(rows), 3, device=x.device)
        every.append(
            (
                "linear_token_statistics_bwd",
                (*(t if t is None else t.detach() for t in given), state, logits, rows, rows.cos())
                + (-100, 2, False, *maps, True, True, False),
                {},
            )
        )
    every += [
        (f"_{name}_in_graph", given, options)
        for name, given, options in every
        if name in ("cross_entropy_fwd_one_pass", "cross_entropy_bwd_one_pass")
    ]
    every += [
        ("cross_entropy_with_lse_partial", (x, x.detach().cos(), target, None, -100, 1), {}),
        ("cross_entropy_with_target_logit", (x.detach(), target, x.detach()[..., 0], None, -100), {}),
    ]
    classes = data[1].detach().abs()
    every += [
        ("cross_entropy_outputs", (x, target, *more, *kinds), {})
        for more, kinds in (
            ((None, None, -100, 1, 0.0, 0.01, 1.0, 0.0, 1.0), (False, False, True)),
            ((classes, classes[0], -100, 2, 0.1, 0.0, 1.5, 3.0, 2.0), (False, False, True)),
            ((classes, None, -100, 0, 0.0, 0.0, 1.0, 0.0, 1.0), (True, False, False)),
        )
    ]
    # test_distributed.py has process groups.
    of_groups = {
        f"{loss}_{name}"
        for loss in ("cross_entropy", "linear_cross_entropy")
        for name in ("part", "of_parts", "bwd_of_slice")
    }
    of_groups |= {
        f"{statistics}_{name}"
        for statistics in ("token_statistics", "linear_token_statistics")
        for name in ("part", "of_parts")
    }
    assert names - of_groups == {name for name, _, _ in every} | set(ON_DEMAND)
    for call in every:
        opcheck(*call)


def without_statistics(name, every):
    """Those calls that ask for no statistic, which has no gradient. A graph that is recorded with a gradient
    would ask for it."""
    of = operands(name)
    rows = {result for result in TORCH[name].on_demand if of[result].shape in ("rows", "other_heads")}
    return [asked for asked in every if rows.issuperset(wanted_of(name, asked))]


def wanted_of(name, asked):
    """The results on demand that a call asks for."""
    return [result for result in TORCH[name].on_demand if asked[demand(result)]]


@pytest.mark.parametrize(("name", "asked"), every_demand(), ids=shown)
def test_opcheck_of_every_demand(data, name, asked):
    given, options = calls_on_demand(*data)[name]
    opcheck(name, given, options | asked)
    if differentiable(name):  # the last utility differentiates all results
        utilities = UTILITIES if without_statistics(name, [asked]) else UTILITIES[:-1]
        opcheck(name, leaves(name, given), options | asked, utilities)


def in_fakes(call):
    def run(*given, **options):
        with FakeTensorMode() as mode:
            fake = lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a  # noqa: E731
            return call(*map(fake, given), **{name: fake(value) for name, value in options.items()})

    return run


@pytest.mark.parametrize("name", ON_DEMAND)
def test_results_that_are_not_asked_for(data, name):
    """On every path they have no elements, and the others are what they are if all are asked for."""
    torch._dynamo.reset()
    given, options = calls_on_demand(*data)[name]
    packet, every = getattr(ops, name), demands(name)

    def call(*given, op=packet, every=every, **options):
        return [op(*given, **options, **asked) for asked in every]

    def compiled(*given, backend="aot_eager", every=every):
        run = functools.partial(call, every=every)
        return torch.compile(run, backend=backend, fullgraph=True)(*given, **options)

    want = packet(*given, **options, **every[-1])
    trained, some = leaves(name, given), without_statistics(name, every)
    paths = {
        "dispatcher": (every, call(*given, **options)),
        "fast path": (every, call(*given, op=packet.default, **options)),
        "with a gradient": (every, call(*trained, **options)),
        "fast path with a gradient": (every, call(*trained, op=packet.default, **options)),
        "aot_eager": (every, compiled(*given)),
        "inductor": (every, compiled(*given, backend="inductor")),
        "aot_eager with a gradient": (some, compiled(*trained, every=some)),
    }
    for path, calls in paths.items():
        for asked, results in zip(*calls, strict=True):
            check_unwanted(name, asked, results, want)
            for wanted, got, expected in zip(asked_for(name, asked), results, want, strict=True):
                if wanted:
                    torch.testing.assert_close(got, expected, msg=lambda text, path=path: f"{path}: {text}")
    fakes = in_fakes(call)(*given, **options)
    metas = call(*map(meta, given), **{name: meta(value) for name, value in options.items()})
    for asked, *both in zip(every, fakes, metas, strict=True):
        for results, all_results in zip(both, (fakes[-1], metas[-1]), strict=True):
            check_unwanted(name, asked, results, all_results)
            for wanted, got, expected in zip(asked_for(name, asked), results, want, strict=True):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape if wanted else (0,))


@pytest.mark.parametrize("function", [model, model_of_ops])
def test_gradients(data, function):
    got, expected = gradients(function, *data), gradients(torch_model, *data)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("function", "backend"), [(model, "inductor"), (model, "aot_eager"), (model_of_ops, "aot_eager")]
)
def test_compile_fullgraph(data, function, backend):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = gradients(function, *data)
    for a, b in zip(gradients(compiled, *data), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*data), expected[0])
    if backend != "inductor":  # inductor would compile once more
        with torch.inference_mode():
            torch.testing.assert_close(compiled(*data), expected[0])


def test_compile_of_the_functions_without_gradient(data):
    x, weight, target = data

    def everything(x, weight, target):
        y = gander.softmax_fwd(x)
        out, residual, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)
        loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
        return (
            y,
            gander.softmax_bwd(x, y),
            out,
            residual,
            *gander.rmsnorm_bwd(x, weight, out, rstd)[:2],
            loss,
            dx,
            gander.cross_entropy_bwd(x, target, loss, lse),
        )

    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x, weight, target), everything(x, weight, target), strict=True):
        assert torch.equal(a, b)


def test_compile_of_in_place_gradients(data):
    x, _, target = data
    _, expected = gander.cross_entropy_fwd(x, target, return_dx=True)

    def over_input(x):
        return gander.cross_entropy_fwd(x, target, return_dx=True, inplace_backward=True)[1]

    y = x.clone()
    assert torch.equal(torch.compile(over_input, fullgraph=True)(y), expected)
    assert torch.equal(y, expected)

    def loss(x):
        return gander.cross_entropy(x, target, reduction="sum", inplace_backward=True)

    leaf = x.clone().requires_grad_()
    torch.compile(loss, fullgraph=True)(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_compile_keeps_one_graph_for_other_row_counts(data):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    x, weight, target = data
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for rows in (6, 4, 5):
            inputs = x[:rows].clone(), weight, target[:rows].clone()
            torch.testing.assert_close(compiled(*inputs), model(*inputs))


NUMBERS = {
    "divisor": lambda x, target, s: gander.cross_entropy(x, target, reduction="sum", divisor=s),
    "upstream": lambda x, target, s: gander.cross_entropy(x, target, upstream=s),
    "linear, divisor": lambda x, target, s: gander.linear_cross_entropy(
        x, x.detach(), target % x.shape[0], reduction="sum", divisor=s
    ),
    "linear, upstream": lambda x, target, s: gander.linear_cross_entropy(
        x, x.detach(), target % x.shape[0], upstream=s
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("numbers", [(0.5, 3.25, 0.1, 7.75, 2.0), (4096, 4097, 3, 5000)], ids=str)
def test_compile_keeps_one_graph_for_other_numbers(name, numbers, device):
    """The first number is a constant of its graph. The graph of the second serves all others."""
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(NUMBERS[name], fullgraph=True, backend=count)
    x = torch.randn(6, 33, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    for number in numbers:
        got, want = compiled(x, target, number), NUMBERS[name](x, target, number)
        torch.testing.assert_close(got, want)
        gradients = (torch.autograd.grad(loss * number, x)[0] for loss in (got, want))
        torch.testing.assert_close(*gradients)
        if number == numbers[1]:
            frames = count.frame_count
    assert count.frame_count == frames


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_full_graph_computes(name, device):
    torch._dynamo.reset()

    def loss(x, target):
        return NUMBERS[name](x, target, (target > 2).sum().item())

    x = torch.randn(6, 33, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, target)
    want = loss(x, target)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


# Of rows of x, as many of target, and more rows of x.
UNKNOWN_SIZES = {
    "residual": lambda x, target, other: gander.rmsnorm(x, residual=other),
    "residual of LayerNorm": lambda x, target, other: gander.layernorm(x, residual=other),
    "linear": lambda x, target, other: gander.linear_cross_entropy(other, x.new_ones(33, 33), target),
    "a softmax over rows": lambda x, target, other: gander.nn.functional.softmax(x, 0) * x,
}


@pytest.mark.parametrize("name", UNKNOWN_SIZES)
def test_sizes_that_a_full_graph_computes(name, device):
    torch._dynamo.reset()

    def call(x, target, least):
        return UNKNOWN_SIZES[name](x[target > 2], target[target > 2], x[target > least]).sum()

    x = torch.randn(6, 33, device=device, requires_grad=True)
    target = torch.arange(6, device=device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, want = compiled(x, target, 2), call(x, target, 2)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))
        if "softmax" not in name:
            with pytest.raises(RuntimeError, match=r"Eq\(|has shape"):
                compiled(x, target, 1)


@pytest.mark.parametrize(
    ("name", "function"),
    {
        "scale": lambda x: gander.softmax(x, scale=x.shape[-1] ** -0.5),
        "eps": lambda x: gander.layernorm(x, eps=0.1 * x.shape[0]),
        "weight_offset": lambda x: gander.rmsnorm(x, x[0], weight_offset=x.shape[0]),
    }.items(),
)
def test_exports_refuse_constants_that_would_depend_on_a_size(name, function):
    """They would stay what they are in the export."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x, dynamic = torch.randn(6, 7), torch.export.Dim.DYNAMIC
    with pytest.raises(NotImplementedError, match=f"{name} is .*, expected a number that does not depend on"):
        torch.export.export(Module(), (x,), dynamic_shapes={"x": {0: dynamic, 1: dynamic}}, strict=False)
    x = x.clone()  # without marks
    torch.testing.assert_close(torch.export.export(Module(), (x,)).module()(x), function(x))


def test_refusals_of_a_full_graph_say_what_is_wrong():
    torch._dynamo.reset()
    x, w = torch.randn(4, 8), torch.ones(7)
    for call, message in (
        (lambda: gander.rmsnorm(x, w), r"weight has shape \(7,\)"),
        (lambda: gander.cross_entropy(x, torch.zeros(5, dtype=torch.long)), r"target has shape \(5,\)"),
        (lambda: gander.rmsnorm(x, out=torch.empty(4, 8, dtype=torch.int32)), "y has dtype int32"),
    ):
        with pytest.raises((TorchRuntimeError, Unsupported), match=message):
            torch.compile(call, fullgraph=True, backend="eager")()


def test_no_gradient_if_none_is_needed(data):
    x, weight, target = data
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not model(leaf, weight, target).requires_grad
    with torch.inference_mode():
        assert model(leaf, weight, target).is_inference()
    assert not model(x, weight, target).requires_grad
    # The results of functions without a gradient do not require one.
    assert not gander.softmax_fwd(leaf).requires_grad
    assert not gander.rmsnorm_fwd(leaf, weight)[0].requires_grad
    assert not gander.cross_entropy_fwd(leaf, target).requires_grad


def test_gradients_of_one_input_only(data):
    x, weight, _ = data
    dout = torch.randn_like(x)
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    dx, dw = torch.autograd.grad(gander.rmsnorm(leaf, leaf_weight), (leaf, leaf_weight), dout)
    assert torch.equal(torch.autograd.grad(gander.rmsnorm(x, leaf_weight), leaf_weight, dout)[0], dw)
    alone = torch.autograd.grad(gander.rmsnorm(leaf, weight), leaf, dout)[0]
    torch.testing.assert_close(alone, dx)  # not equal, because on CUDA another kernel computes it


def test_backward_twice_with_retain_graph(data):
    x, weight, target = data
    leaf = x.clone().requires_grad_()
    loss = model(leaf, weight, target)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * first)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("hooked", [False, True])
def test_one_pass_of_cross_entropy(data, reduction, hooked, monkeypatch):
    """The default for large CUDA tensors, here on both devices, with any upstream gradient and a second
    backward."""
    from gander._torch import cross_entropy as _cross_entropy

    x, _, target = data
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    for upstream in (1.0, 0.25, 1.0):
        leaf, other, kept = x.clone().requires_grad_(), x.clone().requires_grad_(), []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        )
        with hooks if hooked else contextlib.nullcontext():
            loss = gander.cross_entropy(leaf, target, reduction=reduction, one_pass=True)
        assert "OnePass" in type(loss.grad_fn).__name__
        expected = gander.cross_entropy(other, target, reduction=reduction, one_pass=False)
        torch.testing.assert_close(loss, expected)
        assert [tuple(t.shape) for t in kept] == ([(6, 33), (6,), (13,), (6, 33)] if hooked else [])
        (loss * upstream).backward(retain_graph=True)
        (expected * upstream).backward(retain_graph=True)
        torch.testing.assert_close(leaf.grad, other.grad)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(leaf.grad, other.grad)


def test_one_pass_saves_everything_through_the_hooks(data, monkeypatch):
    """A checkpoint drops saved tensors, so the gradient must be a saved tensor."""
    from gander._torch import cross_entropy as _cross_entropy

    x, _, target = data
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = checkpoint(lambda x: gander.cross_entropy(x * 2, target, one_pass=True), leaf, use_reentrant=False)
    assert "OnePass" in type(loss.grad_fn).__name__
    held = [value for value in vars(loss.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert not held
    loss.backward()
    gander.cross_entropy(other * 2, target).backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("one_pass", [None, True, False])
def test_one_pass_is_the_callers_choice(data, one_pass):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, _, target = (t.to(device) for t in data)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = gander.cross_entropy(leaf, target, one_pass=one_pass)
    # Small tensors use two passes by default, and CPU tensors always.
    assert ("OnePass" in type(loss.grad_fn).__name__) == bool(one_pass and device == "cuda")
    loss.backward()
    gander.cross_entropy(other, target).backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_saved_tensors(data):
    """Each op saves exactly these tensors for backward, and keeps no other references."""
    x, weight, target = data
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    kept = []

    def sizes(function):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
        ):
            function()
        return sorted(kept)

    assert sizes(lambda: gander.softmax(leaf)) == [(6, 33)]
    assert sizes(lambda: gander.rmsnorm(leaf, leaf_weight)) == [(6,), (6, 33), (33,)]
    assert sizes(lambda: gander.cross_entropy(leaf, target)) == [(6,), (6, 33), (13,)]
    assert sizes(lambda: gander.cross_entropy(leaf, target, reduction="none")) == [(6,), (6, 33), (13,)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight, target: gander.softmax(x),
        lambda x, weight, target: gander.rmsnorm(x, weight),
        lambda x, weight, target: gander.cross_entropy(x, target),
    ],
    ids=["softmax", "rmsnorm", "cross_entropy"],
)
class TestRefusals:
    def test_a_saved_tensor_that_was_changed(self, data, function):
        x, weight, target = data
        leaf = x.clone().requires_grad_()
        hidden = leaf * 1
        out = function(hidden, weight, target)
        with torch.no_grad():
            (out if out.ndim == 2 and out.grad_fn.name().startswith("GanderSoftmax") else hidden).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_second_derivatives(self, data, function):
        x, weight, target = data
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, weight, target).sum(), leaf, create_graph=True)
        with pytest.raises(
            NotImplementedError, match="second derivatives are not supported; use torch's operators"
        ):
            dx.square().sum().backward()

    def test_create_graph_leaves_other_gradients_differentiable(self, data, function):
        x, weight, target = data
        leaf, scale = x.clone().requires_grad_(), torch.ones((), device=x.device, requires_grad=True)
        (dscale,) = torch.autograd.grad(
            function(leaf, weight, target).sum() * scale**3, scale, create_graph=True
        )
        (second,) = torch.autograd.grad(dscale, scale)
        torch.testing.assert_close(second, 2 * dscale)

    def test_forward_mode(self, data, function):
        x, weight, target = data
        with pytest.raises(NotImplementedError, match="forward-mode derivatives are not supported"):
            torch.func.jvp(lambda x: function(x, weight, target), (x,), (x,))


def test_in_place_gradient(data):
    x, _, target = data
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    expected = torch.autograd.grad(gander.cross_entropy(logits, target), logits)[0]
    loss = gander.cross_entropy(logits, target, inplace_backward=True)
    version = logits._version
    loss.backward(retain_graph=True)
    assert logits._version > version
    assert torch.equal(logits.detach(), expected)
    assert torch.equal(leaf.grad, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_gradient_is_seen_by_other_users_of_the_logits(data):
    """Other libraries silently corrupted gradients here: logits.exp() saves its output, and square() its
    input."""
    x, _, target = data
    logits = x.clone().requires_grad_() * 1
    total = gander.cross_entropy(logits, target, inplace_backward=True)
    penalty = logits.square().sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_autocast_follows_torch(device):
    x32, target = rand((6, 33), torch.float32, device), torch.randint(33, (6,), device=device)
    weight = torch.randn(33, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = x32.to(dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            pairs = [
                (gander.softmax(x), F.softmax(x, -1)),
                (ops.softmax(x), F.softmax(x, -1)),
                (gander.rmsnorm(x, weight), rms(x, weight)),
                (gander.cross_entropy(x, target), ce(x, target)),
            ]
            for got, expected in pairs:
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got, expected)
            leaf = x.clone().requires_grad_()
            loss = model(leaf, weight, target)
        (dx,) = torch.autograd.grad(loss, leaf)
        assert dx.dtype == dtype
        assert loss.dtype == torch.float32


def test_autocast_rule_of_softmax_on_cuda():
    """Calls the rule itself, so that it is tested without a GPU too."""
    from gander._torch import autocast

    op = ops.softmax.default
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCUDA")
    kernel = autocast._to_float32("softmax")
    assert kernel(torch.ones(2, 3, dtype=torch.float16)).dtype == torch.float32
    assert kernel(torch.ones(2, 3, dtype=torch.bfloat16), 0, True).dtype == torch.float32
    assert kernel(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_meta_tensors():
    x = torch.empty(4, 5, 6, device="meta", dtype=torch.bfloat16)
    target = torch.empty(4, 5, device="meta", dtype=torch.long)
    assert gander.softmax(x).shape == (4, 5, 6)
    out, _, rstd = gander.rmsnorm_fwd(x, out_dtype=torch.float16, store_rstd=True)
    assert (out.dtype, rstd.dtype, rstd.shape) == (torch.float16, torch.float32, (4, 5))
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    assert (loss.shape, lse.shape, dx.shape) == ((4, 5), (4, 5), (4, 5, 6))
    assert gander.cross_entropy(x, target).shape == ()


def meta(tensor):
    """An argument without data. Unlike .to("meta"), this keeps the strides of any tensor."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def refused(x, weight, target):
    """Calls that no kernel supports: an operator, its tensors and its options."""
    rstd, lse = torch.rand(6), torch.rand(6)
    saved = torch.rand(13)
    none = {"reduction": 0}
    return {
        "x: integers": (ops.softmax, (x.int(),), {}),
        "x: no rows": (ops.softmax, (x[0, 0],), {}),
        "x: empty rows": (ops.softmax, (x[:, :0],), {}),
        "y: another dtype": (ops.softmax_bwd, (x, x.half()), {}),
        "y: another shape": (ops.softmax_bwd, (x, x[1:]), {}),
        "y: as many elements": (ops.softmax_bwd, (x, x.view(9, 22)), {}),
        "weight: another length": (ops.rmsnorm, (x, weight[1:]), {}),
        "weight: two dimensions": (ops.rmsnorm, (x, weight[None]), {}),
        "weight: double": (ops.rmsnorm, (x, weight.double()), {}),
        "weight: not double": (ops.rmsnorm, (x.double(), weight), {}),
        "out_dtype: integers": (ops.rmsnorm, (x, weight), {"out_dtype": torch.int8}),
        "out_dtype: double": (ops.rmsnorm, (x, weight), {"out_dtype": torch.float64}),
        "dout: another shape": (ops.rmsnorm_bwd, (x, weight, x[1:], None, rstd), {"needs_dw": True}),
        "rstd: another length": (ops.rmsnorm_bwd, (x, weight, x, None, rstd[1:]), {"needs_dw": True}),
        "rstd: half": (ops.rmsnorm_bwd, (x, weight, x, None, rstd.half()), {}),
        "dw: no weight": (ops.rmsnorm_bwd, (x, None, x, None, rstd), {"needs_dw": True}),
        "target: another length": (ops.cross_entropy, (x, target[1:]), {}),
        "target: another shape": (ops.cross_entropy, (x, target.view(2, 3)), {}),
        "target: floats": (ops.cross_entropy, (x, target.float()), {}),
        "target: short": (ops.cross_entropy_fwd, (x, target.short()), {"needs_lse": True}),
        "class weights: another length": (ops.cross_entropy, (x, target, weight[1:]), {}),
        "reduction": (ops.cross_entropy, (x, target), {"reduction": 3}),
        "algorithm": (ops.softmax, (x,), {"algorithm": 99}),
        "negative algorithm": (ops.softmax, (x,), {"algorithm": -1}),
        "algorithm: 0 in its lower 32 bits": (ops.softmax, (x,), {"algorithm": 1 << 32}),
        "reduction: 1 in its lower 32 bits": (
            ops.cross_entropy,
            (x, target),
            {"reduction": -(1 << 32) + 1},
        ),
        "dloss: another length": (ops.cross_entropy_bwd, (x, target, None, rstd[1:], lse), none),
        "lse: another length": (ops.cross_entropy_bwd, (x, target, None, rstd, lse[1:]), none),
        "lse: without the mean's denominator": (ops.cross_entropy_bwd, (x, target, None, rstd[0], lse), {}),
        "lse: half": (ops.cross_entropy_bwd, (x, target, None, rstd[0], saved.half()), {}),
        "dloss: for each row": (
            ops.cross_entropy_bwd_one_pass,
            (x, target, None, rstd, saved, None, None, x * 1),
            {},
        ),
        "x: rows that are one": (ops.cross_entropy_fwd_dx_, (x[:1].expand(6, 33), target), {}),
        "x: columns that share memory": (
            ops.cross_entropy_fwd_dx_,
            (x.as_strided((6, 33), (1, 5)), target),
            {},
        ),
        "dx: another dtype": (
            ops.cross_entropy_bwd_one_pass,
            (x, target, None, rstd[0], saved, None, None, x.half()),
            {},
        ),
    }


CASES = refused(torch.ones(6, 33), torch.ones(33), torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize("case", CASES)
def test_fakes_refuse_what_kernels_refuse(case):
    """Regression test: meta and fake tensors of wrong shapes and of integer dtypes were accepted."""
    op, given, options = CASES[case]
    op = functools.partial(op, **options)
    with pytest.raises(RuntimeError) as kernels:
        op(*given)
    kind = type(gander._torch.kernels.explained(kernels.value))
    name = case.partition(":")[0].removeprefix("negative ").removeprefix("class ").removesuffix("s")
    with pytest.raises(kind) as metas:
        op(*map(meta, given))
    with pytest.raises(kind):
        in_fakes(op)(*given)
    for error in (kernels, metas):
        assert {"out_dtype": "y"}.get(name, name) in str(error.value)
        assert "expected" in str(error.value)
    assert str(metas.value).partition(":")[0] == str(kernels.value).partition(":")[0]  # the operator


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_fakes_of_gradients_without_a_weight(norm):
    """Regression test: the gradient of a norm without a weight could not be traced."""
    op, x, rstd = getattr(ops, f"{norm}_bwd"), torch.randn(6, 33), torch.rand(6)
    statistics = (rstd, rstd) if norm == "layernorm" else (rstd,)
    given = x, None, x.cos(), None, *statistics
    results = in_fakes(op)(*given, needs_db=True)
    assert [tuple(t.shape) for t in results] == [(6, 33), (0,), (0,), (33,)]


def test_fakes_refuse_mixed_devices(data):
    """Regression test: a CPU tensor with a meta weight gave uninitialized memory."""
    x, weight, target = (t.cpu() for t in data)
    y, _, rstd = ops.rmsnorm(x, weight, needs_rstd=True)
    for op, given, options in (
        (ops.rmsnorm, (x, weight), {}),
        (ops.rmsnorm_bwd, (x, weight, y, x, rstd), {"needs_dw": True}),
        (ops.softmax_bwd, (x, y), {}),
        (ops.cross_entropy, (x, target), {}),
        (ops.cross_entropy_fwd, (x, target, weight), {"needs_lse": True}),
    ):
        op(*given, **options)
        for moved in range(1, len(given)):
            mixed = [meta(a) if i == moved else a for i, a in enumerate(given)]
            with pytest.raises(RuntimeError, match="is on meta, expected cpu as "):
                op(*mixed, **options)
        with pytest.raises(RuntimeError, match="is on cpu, expected meta as "):
            op(meta(given[0]), *given[1:], **options)
    for call in (
        lambda: gander.rmsnorm(x, meta(weight)),
        lambda: gander.softmax_bwd(x, meta(x)),
        lambda: gander.cross_entropy(x, meta(target)),
        lambda: gander.cross_entropy(x, target, weight=meta(weight)),
    ):
        with pytest.raises(RuntimeError, match="is on meta, expected cpu"):
            call()


def test_fakes_refuse_float64_on_cuda():
    with FakeTensorMode():
        with pytest.raises(NotImplementedError, match="x has dtype float64 on cuda:0, expected float16"):
            gander.softmax(torch.ones(2, 3, dtype=torch.float64, device="cuda"))
        assert gander.softmax(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64
        with pytest.raises(RuntimeError, match="weight is on cpu, expected cuda:0"):
            gander.rmsnorm(torch.ones(2, 3, device="cuda"), torch.ones(3))


def test_fakes_accept_unbacked_sizes():
    """Conditions on unbacked sizes become assertions in the graph."""

    class Picked(torch.nn.Module):
        def forward(self, x, mask, target, weight):
            rows = x[mask]
            return gander.cross_entropy(gander.rmsnorm(rows, weight), target[mask], reduction="sum")

    x, target, weight = torch.randn(6, 33), torch.randint(33, (6,)), torch.rand(33)
    masks = torch.tensor([[True, False, True, True, False, False], [True] * 6, [False] * 5 + [True]])
    exported = torch.export.export(Picked(), (x, masks[0], target, weight))
    for mask in masks:
        expected = F.cross_entropy(rms(x, weight)[mask], target[mask], reduction="sum")
        torch.testing.assert_close(exported.module()(x, mask, target, weight), expected)


def test_views_that_torch_resolves_lazily(device):
    """A negative view is resolved before a kernel gets it. A copy-on-write clone stays shared."""
    x = torch.randn(4, 6, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(gander.softmax(x), F.softmax(x, -1))
    original = torch.randn(4, 6, device=device)
    lazy = torch._lazy_clone(original)
    gander.softmax(lazy)
    assert torch._C._is_cow_tensor(lazy)
    gander.cross_entropy_fwd(
        lazy, torch.zeros(4, dtype=torch.long, device=device), return_dx=True, inplace_backward=True
    )
    assert not torch.equal(lazy, original)


def test_threads(device):
    """Calls from many threads at once give the same bits as a single call. Each thread gets its own
    message."""
    x, weight = rand((64, 1003), torch.float32, device), rand((1003,), torch.float32, device)
    target = torch.randint(1003, (64,), device=device)
    expected = gradients(model, x, weight, target)
    failures = []

    def work(number):
        try:
            for _ in range(20):
                got = gradients(model, x, weight, target)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
                with pytest.raises(ValueError, match=f"weight has shape \\({number + 1},\\)"):
                    gander.rmsnorm(x, weight[: number + 1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("device", ["cpu"])
def test_thread_count_of_torch_is_respected(data):
    before = torch.get_num_threads()
    expected = model(*data)
    try:
        torch.set_num_threads(1)
        assert torch.equal(model(*data), expected)
        assert "up to 1 threads" in gander.explain("softmax", data[0])
    finally:
        torch.set_num_threads(before)


def test_memory_is_returned(device):
    """No handle is leaked, by calls that succeed and by calls that fail."""
    if device == "cuda":
        pytest.skip("tests/gpu watches torch.cuda.memory_allocated")
    import resource

    x, weight = torch.randn(256, 4096), torch.randn(4096)
    target, bad = torch.randint(4096, (256,)), torch.zeros(3, dtype=torch.long)

    def rounds(count):
        for _ in range(count):
            gradients(model, x, weight, target)
            with pytest.raises(ValueError, match="target has shape"):
                gander.cross_entropy_fwd(x, bad, return_dx=True)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(5)
    assert rounds(30) - before < 40_000, "KiB over 30 rounds; one leaked operand a round makes 120000"
