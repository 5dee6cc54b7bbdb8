"""Gradients equal torch's, however PyTorch records, traces, transforms and replays a function."""

import functools

import gander
import pytest
import torch
import torch.nn.functional as F
from demands import demands, every_demand, named, shown
from gander._table import TORCH, demand
from gander._torch import cross_entropy as _cross_entropy
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

ops = torch.ops.gander
N = 33


def theirs_rmsnorm(x, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def their_norm(h, weight, bias, center):
    """torch's RMSNorm, or LayerNorm with center, with a bias."""
    if center:
        return F.layer_norm(h, h.shape[-1:], weight, bias, 1e-6)
    return theirs_rmsnorm(h, weight) + bias


def norm(mine, center, results):
    """gander's and torch's norm of a sum with a bias, both made from x and weight. `results` takes the norm,
    the sum and weight, and returns one tensor."""

    def gander_norm(x, weight, target):
        return results(*mine(x * 2, weight, weight.cos(), x.sin(), prenorm=True), weight)

    def torch_norm(x, weight, target):
        h = x * 2 + x.sin()
        return results(their_norm(h, weight, weight.cos(), center), h, weight)

    return gander_norm, torch_norm


def loss(reduction, weighted=False):
    """gander's and torch's cross-entropy, as functions of logits, a weight that scales them, and targets."""

    def mine(x, weight, target):
        classes = torch.linspace(0.5, 1.5, N) if weighted else None
        return gander.cross_entropy(x * weight, target, weight=classes, reduction=reduction)

    def theirs(x, weight, target):
        classes = torch.linspace(0.5, 1.5, N) if weighted else None
        return F.cross_entropy(x * weight, target, weight=classes, reduction=reduction)

    return mine, theirs


PAIRS = {
    "softmax": (
        lambda x, weight, target: gander.softmax(x * weight),
        lambda x, weight, target: F.softmax(x * weight, -1),
    ),
    "rmsnorm": (
        lambda x, weight, target: gander.rmsnorm(x * 2, weight, weight_offset=0.5),
        lambda x, weight, target: theirs_rmsnorm(x * 2, weight + 0.5),
    ),
    "rmsnorm without weight": (
        lambda x, weight, target: gander.rmsnorm(x * weight),
        lambda x, weight, target: theirs_rmsnorm(x * weight),
    ),
    "rmsnorm and its statistic": (
        lambda x, weight, target: ops.rmsnorm(x * 2, weight, needs_rstd=True)[0],
        lambda x, weight, target: theirs_rmsnorm(x * 2, weight),
    ),
    "rmsnorm with a bias": (
        lambda x, weight, target: gander.rmsnorm(x * 2, None, weight),
        lambda x, weight, target: their_norm(x * 2, None, weight, False),
    ),
    "rmsnorm and its sum": norm(gander.rmsnorm, False, lambda y, h, weight: (y + h).sin()),
    "layernorm and its sum": norm(gander.layernorm, True, lambda y, h, weight: (y + h).sin()),
    "only the sum": norm(gander.rmsnorm, False, lambda y, h, weight: h.sin() + weight),
    "only the norm": norm(gander.layernorm, True, lambda y, h, weight: y.sin() + weight),
    "layernorm": (
        lambda x, weight, target: gander.layernorm(x * 2, weight, weight.cos()),
        lambda x, weight, target: their_norm(x * 2, weight, weight.cos(), True),
    ),
    "layernorm with a residual": (
        lambda x, weight, target: gander.layernorm(x * 2, weight, None, x.sin()),
        lambda x, weight, target: their_norm(x * 2 + x.sin(), weight, None, True),
    ),
    "l2norm": (
        lambda x, weight, target: gander.l2norm(x * weight),
        lambda x, weight, target: F.normalize(x * weight, dim=-1),
    ),
    "logsumexp": (
        lambda x, weight, target: gander.logsumexp(x * weight),
        lambda x, weight, target: torch.logsumexp(x * weight, -1),
    ),
    "mean": loss("mean"),
    "weighted mean": loss("mean", True),
    "sum": loss("sum"),
    "none": loss("none"),
    "cross_entropy and its statistics": (
        lambda x, weight, target: ops.cross_entropy(x * weight, target, needs_lse=True)[0],
        lambda x, weight, target: F.cross_entropy(x * weight, target),
    ),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


@pytest.fixture
def inputs():
    return torch.randn(6, N), torch.rand(N) + 0.5, torch.tensor([0, 32, -100, 4, 4, 9])


def scalar(function):
    return lambda *inputs: function(*inputs).square().sum()


def gradients(function, inputs):
    """The gradients of a scalar with respect to x and weight."""
    x, weight, target = inputs
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    function(*leaves, target).backward()
    return leaves[0].grad, leaves[1].grad


def expected(pair, inputs):
    return gradients(scalar(pair[1]), inputs)


def check(got, want):
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def compiled(function, backend, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


# ---- Eager ----


def test_eager(pair, inputs):
    check(gradients(scalar(pair[0]), inputs), expected(pair, inputs))


def test_gradients_of_a_part_of_the_inputs(pair, inputs):
    x, weight, target = inputs
    for wanted in (0, 1):
        leaves = [x.clone(), weight.clone()]
        leaves[wanted].requires_grad_()
        got = torch.autograd.grad(scalar(pair[0])(*leaves, target), leaves[wanted])
        check(got, expected(pair, inputs)[wanted])


def test_backward_again(pair, inputs):
    """Gradients are accumulated over two graphs, and over a graph that is retained."""
    x, weight, target = inputs
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for _ in range(2):
        out = scalar(pair[0])(*leaves, target)
        out.backward(retain_graph=True)
    out.backward()
    check(tuple(leaf.grad for leaf in leaves), tuple(3 * g for g in expected(pair, inputs)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(pair, inputs, reentrant):
    def function(*inputs):
        return checkpoint(scalar(pair[0]), *inputs, use_reentrant=reentrant)

    check(gradients(function, inputs), expected(pair, inputs))


def test_hooks_on_saved_tensors(pair, inputs):
    """The hooks see all saved tensors, and backward uses the tensors that they return."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        got = gradients(scalar(pair[0]), inputs)
    check(got, expected(pair, inputs))
    with torch.autograd.graph.save_on_cpu():
        check(gradients(scalar(pair[0]), inputs), expected(pair, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_scaled_loss(dtype, one_pass, monkeypatch):
    """GradScaler's initial factor is 65536. No intermediate value of backward may underflow or overflow."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: one_pass)
    x, target = (torch.randn(64, 4096) * 3).to(dtype), torch.randint(4096, (64,))
    mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    (gander.cross_entropy(mine, target, one_pass=one_pass) * 65536.0).backward()
    (F.cross_entropy(theirs, target) * 65536.0).backward()
    torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# ---- torch.func ----


def test_func_grad(pair, inputs):
    check(torch.func.grad(scalar(pair[0]), argnums=(0, 1))(*inputs), expected(pair, inputs))


def test_func_vjp(pair, inputs):
    x, weight, target = inputs
    out, pull = torch.func.vjp(lambda x, weight: pair[0](x, weight, target), x, weight)
    check(pull(2 * out), expected(pair, inputs))


def test_func_jacrev(pair, inputs):
    got, want = (torch.func.jacrev(function, argnums=(0, 1))(*inputs) for function in pair)
    check(got, want)


def test_functional_call(pair, inputs):
    x, weight, target = inputs

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(N))

        def forward(self, x):
            return scalar(pair[0])(x, self.weight, target)

    module = Module()
    got = torch.func.grad(lambda p, x: torch.func.functional_call(module, p, (x,)))({"weight": weight}, x)
    check(got["weight"], expected(pair, inputs)[1])


@pytest.mark.parametrize("options", [{"inplace_backward": True}, {"one_pass": True}], ids=str)
def test_in_place_and_one_pass_are_for_eager_calls(inputs, options, monkeypatch):
    """Transforms and graphs ignore these options, and do not write over the logits."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    x, _, target = inputs
    before, want = x.clone(), torch.func.grad(F.cross_entropy)(x, target)

    def gradient(x):
        return torch.func.grad(lambda x: gander.cross_entropy(x, target, **options))(x)

    check(gradient(x), want)
    check(compiled(gradient, "aot_eager")(x), want)
    check(torch.vmap(gradient)(x[None]), want[None])
    leaf = x.clone().requires_grad_()
    compiled(lambda x: gander.cross_entropy(x, target, **options), "aot_eager")(leaf).backward()
    check((leaf.grad, leaf.detach(), x), (want, before, before))


@pytest.mark.parametrize("options", [{"inplace_backward": True}, {"one_pass": True}], ids=str)
@pytest.mark.parametrize("by_func", [False, True])
def test_batches_of_upstream_gradients(inputs, options, by_func, monkeypatch):
    """Regression test: with a gradient in place, is_grads_batched failed with a message of torch."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    x, _, target = inputs
    x.requires_grad_()
    upstream = torch.tensor([1.0, -2.0, 0.5])

    def jacobian(loss):
        if by_func:
            return torch.func.vmap(lambda v: torch.autograd.grad(loss, x, v, retain_graph=True)[0])(upstream)
        return torch.autograd.grad(loss, x, upstream, is_grads_batched=True, retain_graph=True)[0]

    loss = gander.cross_entropy(x * 2, target, reduction="sum", **options)
    expected = jacobian(F.cross_entropy(x * 2, target, reduction="sum"))
    check(jacobian(loss), expected)
    check(torch.autograd.grad(loss, x)[0], expected[0])


@pytest.mark.parametrize("one_pass", [False, True])
def test_the_caller_may_change_a_gradient(inputs, one_pass, monkeypatch):
    """Regression test: the gradient of the single pass was the saved tensor, whose change a later backward
    pass noticed."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    x, _, target = inputs
    leaf = x.clone().requires_grad_()
    loss = gander.cross_entropy(leaf, target, one_pass=one_pass)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    before = first.clone()
    first.mul_(2)
    loss.backward()
    assert torch.equal(leaf.grad, before)
    assert torch.equal(first, before * 2)


@pytest.mark.parametrize("function", ["softmax", "rmsnorm", "cross_entropy"])
def test_torch_ops_with_func(function, inputs):
    """Operators that are called through torch.ops, without gander's functions."""
    x, weight, target = inputs
    arguments = {"softmax": (x,), "rmsnorm": (x, weight), "cross_entropy": (x, target)}[function]
    theirs = {
        "softmax": lambda x: F.softmax(x, -1),
        "rmsnorm": theirs_rmsnorm,
        "cross_entropy": F.cross_entropy,
    }
    packet = getattr(ops, function)

    def op(*given):
        out = packet(*given)
        return out[0] if isinstance(out, tuple) else out

    check(torch.func.jacrev(op)(*arguments), torch.func.jacrev(theirs[function])(*arguments))
    out, pull = torch.func.vjp(lambda x: op(x, *arguments[1:]), x)
    check(pull(out), torch.func.vjp(lambda x: theirs[function](x, *arguments[1:]), x)[1](out))


# ---- torch.compile ----

BACKENDS = ("eager", "aot_eager")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(pair, inputs, backend, dynamic):
    function = compiled(scalar(pair[0]), backend, dynamic=dynamic)
    check(gradients(function, inputs), expected(pair, inputs))


def test_compiled_func(pair, inputs):
    """Regression test: the gradients were zero, with every backend, since dynamo traces the transforms."""
    backend = "aot_eager"
    function = compiled(lambda *inputs: torch.func.grad(scalar(pair[0]), argnums=(0, 1))(*inputs), backend)
    check(function(*inputs), expected(pair, inputs))

    def pulled(x, weight, target):
        out, pull = torch.func.vjp(lambda x, weight: pair[0](x, weight, target), x, weight)
        return pull(2 * out)

    check(compiled(pulled, backend)(*inputs), expected(pair, inputs))
    function = compiled(lambda *inputs: torch.func.jacrev(pair[0], argnums=(0, 1))(*inputs), backend)
    check(function(*inputs), torch.func.jacrev(pair[1], argnums=(0, 1))(*inputs))


def test_compiled_by_inductor(inputs):
    def model(which):
        softmax, rmsnorm, cross_entropy = (PAIRS[name][which] for name in ("softmax", "rmsnorm", "mean"))
        return lambda x, weight, target: cross_entropy(
            softmax(rmsnorm(x, weight, None), weight, None), weight, target
        )

    check(gradients(compiled(model(0), "inductor"), inputs), gradients(model(1), inputs))
    by_func = compiled(lambda *inputs: torch.func.grad(model(0), argnums=(0, 1))(*inputs), "inductor")
    check(by_func(*inputs), gradients(model(1), inputs))


def test_compiled_with_dynamic_rows(pair, inputs):
    """One graph, forward and backward, for every number of rows."""
    function = compiled(scalar(pair[0]), "aot_eager", dynamic=True)
    x, weight, target = inputs
    check(gradients(function, inputs), expected(pair, inputs))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 4):
            some = x[:rows].clone(), weight, target[:rows].clone()
            check(gradients(function, some), expected(pair, some))


def test_compiled_backward(pair, inputs):
    """Compiled autograd traces backward() itself."""
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        got = gradients(scalar(pair[0]), inputs)
    check(got, expected(pair, inputs))


# ---- Recorded graphs ----


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(N, N)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, N))
        self.register_buffer("target", torch.tensor([0, 32, -100, 4, 4, 9]))

    def forward(self, x):
        return self.function(self.linear(x), self.weight, self.target)


def operators_of(graph):
    """The operators of a graph, with the results that each asks for."""
    found = {}
    for node in graph.nodes:
        if not str(node.target).startswith("gander."):
            continue
        name = str(node.target).removeprefix("gander.").removesuffix(".default")
        given = named(name, node.args, node.kwargs)
        asked = shown({flag: given[flag] for flag in map(demand, TORCH[name].on_demand)})
        assert found.setdefault(name, asked) == asked
    return found


def check_trained(replayed, pair, x):
    """Compares the gradients of a recorded graph, in its own parameters, with those of torch's operators."""
    torch.manual_seed(1)
    model = Model(pair[1])
    parameters = dict(model.named_parameters())
    values = {name: p for name, p in replayed.named_parameters() if name in parameters}
    model.load_state_dict({name: p.detach() for name, p in values.items()}, strict=False)
    replayed(x).square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert values[name].grad is not None, f"{name} has no gradient"
        torch.testing.assert_close(values[name].grad, parameter.grad)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported(pair, request, strict, decomposed):
    """Regression test: the inputs of gander's operators got no gradient. The graph has the caller's operator,
    and no result that only backward needs."""
    torch.manual_seed(1)
    x = torch.randn(6, N)
    exported = torch.export.export(Model(pair[0]), (x,), strict=strict)
    if decomposed:
        exported = exported.run_decompositions()
    names = {
        **dict.fromkeys(("mean", "weighted mean", "sum", "none"), "cross_entropy"),
        "only the sum": "rmsnorm",
        "only the norm": "layernorm",
    }
    asked = {
        **dict.fromkeys(("rmsnorm and its sum", "layernorm and its sum"), "residual_out"),
        **dict.fromkeys(("only the sum", "only the norm"), "residual_out"),
        "rmsnorm and its statistic": "rstd",
        "cross_entropy and its statistics": "lse",
    }
    case = request.node.callspec.params["pair"]
    name = names.get(case, case.split()[0])
    assert operators_of(exported.graph) == {name: asked.get(case, "nothing")}
    check_trained(exported.module(), pair, x)


def test_exported_for_inference(inputs):
    """The graph's operators return nothing that only backward reads."""
    model = Model(lambda *inputs: model_of_all(*inputs))

    def model_of_all(x, weight, target):
        return gander.cross_entropy(gander.softmax(gander.rmsnorm(x, weight)), target)

    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            exported = torch.export.export(model, (inputs[0],)).run_decompositions()
        names = "rmsnorm", "softmax", "cross_entropy"
        assert operators_of(exported.graph) == dict.fromkeys(names, "nothing")
        with torch.no_grad():
            torch.testing.assert_close(exported.module()(inputs[0]), model(inputs[0]))


def test_exported_with_dynamic_rows(pair):
    torch.manual_seed(1)
    model = Model(lambda x, weight, target: pair[0](x, weight, target[: x.shape[0]]))
    rows = torch.export.Dim("rows", min=2, max=6)
    exported = torch.export.export(model, (torch.randn(6, N),), dynamic_shapes=({0: rows},))
    theirs = lambda x, weight, target: pair[1](x, weight, target[: x.shape[0]])  # noqa: E731
    check_trained(exported.module(), (None, theirs), torch.randn(4, N))


def test_dynamo_export(pair):
    torch.manual_seed(1)
    x = torch.randn(6, N)
    torch._dynamo.reset()
    model = Model(pair[0])
    graph, _ = torch._dynamo.export(model)(x)
    graph(x).square().sum().backward()
    theirs = Model(pair[1])
    theirs.load_state_dict(model.state_dict())
    theirs(x).square().sum().backward()
    for parameter in theirs.parameters():
        (same,) = (p for p in graph.parameters() if torch.equal(p, parameter))
        torch.testing.assert_close(same.grad, parameter.grad)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(pair, inputs, mode, leaves, pre_dispatch):
    x, weight, target = inputs
    x, weight = x.clone().requires_grad_(leaves), weight.clone().requires_grad_(leaves)
    graph = make_fx(scalar(pair[0]), tracing_mode=mode, pre_dispatch=pre_dispatch)(x, weight, target)
    check(gradients(graph, inputs), expected(pair, inputs))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jit_trace(pair, inputs):
    traced = torch.jit.trace(scalar(pair[0]), inputs, check_trace=False)
    check(gradients(traced, inputs), expected(pair, inputs))


# ---- Refusals of calls whose gradients would be silently wrong ----

FORWARD = "forward-mode derivatives are not supported; use torch's operators"
SECOND = "second derivatives are not supported; use torch's operators"


def dual(function, inputs, leaf=False):
    x, weight, target = inputs
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x.clone().requires_grad_(leaf), torch.ones_like(x))
        return function(x, weight, target)


def jvp(function, x, weight, target):
    return torch.func.jvp(lambda x: function(x, weight, target), (x,), (x,))


def hessian(function, *inputs):
    return torch.func.hessian(scalar(function))(*inputs)


def twice(function, *inputs):
    return torch.func.grad(lambda *inputs: torch.func.grad(scalar(function))(*inputs).sum())(*inputs)


@pytest.mark.parametrize(
    ("transform", "message"),
    [(jvp, FORWARD), (hessian, FORWARD), (twice, SECOND)],
    ids=["jvp", "hessian", "grad of grad"],
)
class TestTransformsRefused:
    def test_eager(self, pair, inputs, transform, message):
        with pytest.raises(NotImplementedError, match=message):
            transform(pair[0], *inputs)

    def test_compiled(self, pair, inputs, transform, message):
        backend = "aot_eager"
        with pytest.raises(Exception, match=message):
            compiled(functools.partial(transform, pair[0]), backend)(*inputs)
        torch._dynamo.reset()
        if transform is twice:  # dynamo fails if this has a graph break
            message = f"False != True|{message}"
        with pytest.raises(Exception, match=message):
            torch.compile(functools.partial(transform, pair[0]), backend=backend)(*inputs)


def test_duals_are_refused(pair, inputs):
    for leaf in (False, True):
        with pytest.raises(NotImplementedError, match=FORWARD):
            dual(pair[0], inputs, leaf)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_compiled_duals_are_refused(inputs, backend):
    """Dual tensors that are arguments, and those made inside. Regression test: the tangent was lost."""
    function = compiled(lambda x, weight, target: gander.rmsnorm(x, weight), backend)
    for leaf in False, True:  # newer releases of torch refuse them
        with pytest.raises(Exception, match="jvp|silently drop the tangent|" + FORWARD):
            dual(function, inputs, leaf)

    def inside(x, weight, target):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(gander.rmsnorm(forward_ad.make_dual(x, x), weight)).tangent

    with pytest.raises(Exception, match=FORWARD):
        compiled(inside, backend)(*inputs)


@pytest.mark.parametrize("in_place", [False, True])
def test_second_derivatives_of_eager_gradients(pair, inputs, in_place):
    x, weight, target = inputs

    def loss_in_place(x, weight, target):
        return gander.cross_entropy(x * weight, target, inplace_backward=True)

    function = loss_in_place if in_place else pair[0]
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(scalar(function)(leaf, weight, target), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        dx.square().sum().backward()


@pytest.mark.parametrize("norm", [gander.rmsnorm, gander.layernorm])
@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("leaf", ["x", "residual"])
def test_second_derivatives_of_a_sum_that_is_not_returned(norm, how, leaf, inputs):
    """Backward reads the sum alone. Regression test: the second derivative was 0."""
    x, weight, _ = inputs
    given = {"x": x.clone(), "residual": x.sin()}
    given[leaf].requires_grad_()
    operator, dtype = getattr(ops, norm.__name__), how["dtype"]
    for function in (
        lambda: norm(given["x"], weight, residual=given["residual"], residual_dtype=dtype),
        lambda: operator(given["x"], weight, residual=given["residual"], residual_dtype=dtype)[0],
    ):
        y = function()
        assert isinstance(y, torch.Tensor)
        (gradient,) = torch.autograd.grad(y, given[leaf], x.cos(), create_graph=True)
        assert gradient.requires_grad
        with pytest.raises(NotImplementedError, match=SECOND):
            torch.autograd.grad(gradient.square().sum(), given[leaf], allow_unused=True)


def test_statistics_have_no_gradient(inputs):
    """Nor has a result that was not asked for a history."""
    x, weight, target = inputs
    leaf = x.clone().requires_grad_()
    calls = {"rmsnorm": (leaf, weight), "layernorm": (leaf, weight), "cross_entropy": (leaf, target)}
    for name, asked in every_demand(calls):
        results = dict(zip(TORCH[name].results, getattr(ops, name)(*calls[name], **asked), strict=True))
        out = results.pop(TORCH[name].results[0])
        for result, value in results.items():
            assert value.requires_grad == asked[demand(result)]
            if result == "residual_out" or not asked[demand(result)]:
                continue
            with pytest.raises(NotImplementedError, match=f"{result} of {name} has no gradient; detach it"):
                (out.sum() + value.sum()).backward(retain_graph=True)


@pytest.mark.parametrize(
    ("name", "asked"),
    every_demand(["cross_entropy_fwd"]) + [("cross_entropy_fwd_one_pass", {})],
    ids=shown,
)
def test_operators_without_a_gradient(inputs, name, asked):
    x, _, target = inputs
    out = getattr(ops, name)(x.clone().requires_grad_(), target, **asked)
    for result in out:
        with pytest.raises(
            NotImplementedError, match=f"{name} has no gradient; detach its inputs, or use cross_e"
        ):
            result.sum().backward(retain_graph=True)


def test_operators_that_write(inputs):
    x, _, target = inputs
    with pytest.raises(NotImplementedError, match=r"x requires one; detach it, or use torch\.no_grad"):
        ops.cross_entropy_fwd_dx_(x.clone().requires_grad_() * 1, target)
    loss, lse, _ = ops.cross_entropy_fwd(x, target, needs_lse=True)
    with pytest.raises(NotImplementedError, match="dloss requires one"):
        ops.cross_entropy_bwd_(x.clone(), target, None, dloss=loss.requires_grad_(), lse=lse, reduction=0)


def test_class_weights_have_no_gradient(inputs):
    x, weight, target = inputs
    for asked in demands("cross_entropy"):
        with pytest.raises(NotImplementedError, match=r"weight requires a gradient, but cross_\w+ has none"):
            ops.cross_entropy(x, target, weight=weight.clone().requires_grad_(), **asked)
