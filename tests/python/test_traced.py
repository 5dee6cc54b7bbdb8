"""Graphs of torch.fx and torch.jit, what subclasses of Tensor see, and what FlopCounterMode counts."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
import warnings

import gander
import gander.distributed
import gander.nn.functional as F
import pytest
import torch
import torch.nn.functional as theirs
from test_ops import rand
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import MaskedTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

M, N = 6, 8


@pytest.fixture
def given():
    """Arguments by the names that CALLS use."""
    target = torch.randint(N, (M,))
    x, dout = rand((M, N), torch.float32, "cpu"), rand((M, N), torch.float32, "cpu")
    loss, lse = gander.cross_entropy_fwd(x, target, return_lse=True)
    return {
        "x": x,
        "dout": dout,
        "weight": rand((N,), torch.float32, "cpu"),
        "target": target,
        "rstd": gander.rmsnorm_fwd(x, store_rstd=True)[2],
        "mean": x.mean(-1),
        "y": x.softmax(-1),
        "loss": torch.zeros_like(loss),
        "lse": lse,
        "out": torch.zeros_like(x),
        "head": rand((5, N), torch.float32, "cpu"),
        "few": target % 5,
        "q": rand((1, 1, M, N), torch.float32, "cpu"),
        "table": rand((M, N // 2), torch.float32, "cpu"),
    }


# A call of each public function that takes tensors.
CALLS = {
    "softmax": lambda x: gander.softmax(x),
    "softmax with options": lambda x, out: gander.softmax(x, dim=0, scale=0.5, mask=out > 0, masked="zero"),
    "softmax_fwd": lambda x: gander.softmax_fwd(x),
    "softmax_bwd": lambda dout, y: gander.softmax_bwd(dout, y),
    "log_softmax": lambda x: gander.log_softmax(x, 0),
    "logsumexp": lambda x: gander.logsumexp(x, (0, 1), keepdim=True),
    "rmsnorm": lambda x, weight: gander.rmsnorm(x, weight, eps=None),
    "rmsnorm with options": lambda x, weight: gander.rmsnorm(x, weight, residual=x, prenorm=True)[0],
    "rmsnorm_fwd": lambda x, weight: gander.rmsnorm_fwd(x, weight, store_rstd=True)[2],
    "rmsnorm_bwd": lambda x, weight, dout, rstd: gander.rmsnorm_bwd(x, weight, dout, rstd)[1],
    "swiglu": lambda x, dout: gander.swiglu(x, dout),
    "geglu": lambda x, dout: gander.geglu(x, dout, "tanh", casting_mode="llama"),
    "silu_and_mul": lambda x: gander.silu_and_mul(x),
    "gelu_and_mul": lambda x: gander.gelu_and_mul(x, casting_mode="llama"),
    "gelu_tanh_and_mul": lambda x: gander.gelu_tanh_and_mul(x),
    "l2norm": lambda x: gander.l2norm(x, 0.5),
    "rotary": lambda q, table: gander.rotary(q, None, table, table)[0],
    "apply_rotary_emb": lambda q, table: gander.apply_rotary_emb(q, table, table, True),
    "qk_norm_rotary": lambda q, weight, table: gander.qk_norm_rotary(
        q, None, weight, None, table, table, 1e-6
    )[0],
    "layernorm": lambda x, weight: gander.layernorm(x, weight, weight),
    "layernorm_fwd": lambda x, weight: gander.layernorm_fwd(x, weight, return_mean=True)[1],
    "layernorm_bwd": lambda x, weight, dout, rstd, mean: gander.layernorm_bwd(x, weight, dout, rstd, mean)[2],
    "cross_entropy": lambda x, target: gander.cross_entropy(x, target, reduction="sum", divisor=3.0),
    "cross_entropy with smoothed labels": lambda x, target: gander.cross_entropy(
        x, target, label_smoothing=0.5
    ),
    "cross_entropy_fwd": lambda x, target: gander.cross_entropy_fwd(x, target, return_dx=True)[1],
    "cross_entropy_bwd": lambda x, target, loss, lse: gander.cross_entropy_bwd(x, target, loss + 1, lse),
    "cross_entropy with probabilities": lambda x, y: gander.cross_entropy(x, y, temperature=0.5),
    "token_statistics": lambda x, target: gander.token_statistics(x, target, temperature=0.5).entropy,
    "linear_cross_entropy": lambda x, head, few: gander.linear_cross_entropy(x, head, few, chunk=2),
    "linear_token_statistics": lambda x, head, few: (
        gander.linear_token_statistics(x, head, few, chunk=2).entropy
    ),
    "F.softmax": lambda x: F.softmax(x, -1),
    "F.softmax without a dimension": lambda x: F.softmax(x),
    "F.log_softmax": lambda x: F.log_softmax(x, -1, dtype=torch.float64),
    "F.rms_norm": lambda x, weight: F.rms_norm(x, (N,), weight),
    "F.layer_norm": lambda x, weight: F.layer_norm(x, (N,), weight, weight),
    "F.cross_entropy": lambda x, target: F.cross_entropy(x, target, reduction="none"),
    "F.cross_entropy of torch": lambda x, target: F.cross_entropy(x, target, label_smoothing=0.5),
}
OF_A_HEAD = ("linear_cross_entropy", "linear_token_statistics")
WRITES = {
    "rotary": lambda q, table: gander.rotary(q, None, table, table, inplace=True),
    "apply_rotary_emb": lambda q, table: gander.apply_rotary_emb(q, table, table, inplace=True),
    "qk_norm_rotary": lambda q, table: gander.qk_norm_rotary(
        q, None, None, None, table, table, 1e-6, inplace=True
    ),
    "fused_add_rmsnorm": lambda x, out, weight: gander.fused_add_rmsnorm(x, out, weight),
    "cross_entropy_fwd_out": lambda x, target, loss, lse, out: gander.cross_entropy_fwd_out(
        x, target, None, loss, lse, out, None
    ),
    "cross_entropy_bwd_out": lambda x, target, loss, lse, out: gander.cross_entropy_bwd_out(
        x, target, loss + 1, lse, out
    ),
}


def arguments_of(call, given):
    return [given[name].clone() for name in inspect.signature(call).parameters]


def functions_of(graph):
    """The functions of gander that a graph calls, by name."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return [f"{t.__module__}.{t.__name__}" for t in targets if t.__module__.startswith("gander")]


def public_name(name):
    name = name.split(" ")[0]
    return f"gander.nn.functional.{name[2:]}" if name.startswith("F.") else f"gander.{name}"


@pytest.fixture(params=["traced", "copied", "pickled", "saved", "recompiled"])
def keep(request):
    def saved(module):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def recompiled(module):
        module.recompile()
        return module

    return {
        "traced": lambda module: module,
        "copied": copy.deepcopy,
        "pickled": lambda module: pickle.loads(pickle.dumps(module)),
        "saved": saved,
        "recompiled": recompiled,
    }[request.param]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", CALLS)
def test_graphs_hold_public_functions(name, given):
    call = CALLS[name]
    module = torch.fx.symbolic_trace(call)
    assert functions_of(module.graph) == [public_name(name)]
    kept = pickle.loads(pickle.dumps(module))
    assert functions_of(kept.graph) == [public_name(name)]
    inputs = arguments_of(call, given)
    want = call(*inputs)
    for graph in module, kept:
        torch.testing.assert_close(graph(*inputs), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", WRITES)
def test_graphs_keep_functions_that_write(name, given):
    """Nothing uses their results. torch.fx must not drop them for that."""
    call = WRITES[name]
    module = torch.fx.symbolic_trace(call)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert functions_of(module.graph) == [public_name(name)]
    got, want = arguments_of(call, given), arguments_of(call, given)
    module(*got)
    call(*want)
    assert any(not torch.equal(a, b) for a, b in zip(want, arguments_of(call, given), strict=True))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_every_public_function_is_traced():
    """Those that have no tensors as arguments are named here."""
    others = {"algorithms", "explain", "get_include", "info", "set_debug", "warmup"}
    public = {name for name in gander.__all__ if inspect.isfunction(getattr(gander, name))}
    assert public - others == {name.split(" ")[0] for name in [*CALLS, *WRITES] if not name.startswith("F.")}
    assert {f"F.{name}" for name in F.__all__} <= {name.split(" ")[0] for name in CALLS}


def test_public_functions_are_found_by_their_public_names():
    for module in gander, F, gander.distributed:
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                assert function.__module__ == module.__name__
                assert pickle.loads(pickle.dumps(function)) is function
                assert f"{module.__name__} {name}".encode() in pickle.dumps(function, protocol=0).replace(
                    b"\n", b" "
                )


@pytest.mark.parametrize("name", gander.distributed.__all__)
def test_distributed_functions_are_traced(name):
    weight = [torch.ones(2, N)] * (name in OF_A_HEAD)
    function = getattr(gander.distributed, name)
    graph = torch.fx.symbolic_trace(lambda x, target: function(x, *weight, target)).graph
    assert functions_of(graph) == [f"gander.distributed.{name}"]


class Model(nn.Module):
    """One of each module, and functions, with torch's modules or gander's."""

    def __init__(self, kinds, functions):
        super().__init__()
        self.functions = functions
        self.inner = nn.Linear(N, N)
        self.rms, self.layer = kinds.RMSNorm(N), kinds.LayerNorm((2, N // 2))
        self.softmax, self.log_softmax = kinds.Softmax(-1), kinds.LogSoftmax(1)
        self.loss = kinds.CrossEntropyLoss(torch.linspace(0.5, 1, N))
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x, target):
        h = self.rms(self.inner(x))
        h = self.layer(h.unflatten(-1, (2, N // 2))).flatten(-2)
        h = self.softmax(h) * h + self.log_softmax(h)
        h = self.functions.rms_norm(h, (N,), self.rms.weight, 1e-5)
        return self.loss(h, target) + self.loss(h.view(2, N, -1), target[: M // 2 * 2].view(2, -1) % N)


class Losses(nn.Module):
    """What torch does not have."""

    def __init__(self):
        super().__init__()
        self.norm = gander.nn.QuackRMSNorm(N)
        self.head = gander.nn.LinearCrossEntropy(N, 5, bias=True, reduction="sum")
        self.loss = gander.nn.CrossEntropyLoss(reduction="sum", remember=True)

    def forward(self, x, target):
        h = self.norm(x)
        return (
            self.head(h, target % 5) + self.loss(h, target, divisor=4.0) + self.loss(h[0], target[0], None, 2)
        )


def gradients(module, *inputs):
    module.zero_grad()
    module(*inputs).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def test_traced_models_train(given, keep):
    x, target = given["x"], given["target"]
    model, other = Model(gander.nn, F), Model(nn, theirs)
    module = keep(torch.fx.symbolic_trace(model))
    names = set(functions_of(module.graph))
    functions = ("rms_norm", "layer_norm", "softmax", "log_softmax", "cross_entropy")
    assert names == {f"gander.nn.functional.{name}" for name in functions}
    torch.testing.assert_close(module(x, target), other(x, target))
    got, want = gradients(module, x, target), gradients(other, x, target)
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want)


def test_traced_losses_train(given, keep):
    x, target, model = given["x"], given["target"], Losses()
    want = gradients(model, x, target)
    module = keep(torch.fx.symbolic_trace(model))
    names = {
        "gander.nn.functional.rms_norm",
        "gander.linear_cross_entropy",
        "gander.cross_entropy",
    }
    assert set(functions_of(module.graph)) == names
    torch.testing.assert_close(gradients(module, x, target), want)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_graphs_refuse_what_modules_refuse(kind, given):
    """The shape is checked when the graph runs."""
    module = getattr(gander.nn, kind)(N)
    graph = torch.fx.symbolic_trace(module)
    torch.testing.assert_close(graph(given["x"]), module(given["x"]))
    for wrong in given["x"][:, 1:], given["x"][0, 0]:
        for call in module, graph:
            with pytest.raises((RuntimeError, ValueError)):
                call(wrong)


def test_a_graph_may_have_weights_alone_as_inputs(given):
    """x is a plain tensor, so the operator is recorded."""
    x = given["x"]
    graph = torch.fx.symbolic_trace(lambda weight: gander.rmsnorm(x, weight) + gander.layernorm(x, weight))
    want = gander.rmsnorm(x, given["weight"]) + gander.layernorm(x, given["weight"])
    torch.testing.assert_close(graph(given["weight"]), want)
    assert sum("gander" in str(node.target) for node in graph.graph.nodes) == 2


def test_a_pickled_graph_imports_gander(given, tmp_path):
    """Also in a process that has not."""
    path = tmp_path / "graph.pt"
    torch.save(torch.fx.symbolic_trace(CALLS["rmsnorm"]), path)
    program = (
        "import torch; graph = torch.load({!r}, weights_only=False); "
        "print(graph(torch.ones(2, 4), torch.ones(4)).sum().item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program.format(str(path))], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) == pytest.approx(8, abs=1e-4)


# ---- What subclasses and modes see ----


class Plain(torch.Tensor):
    """A subclass with torch's default."""


class Logged(torch.Tensor):
    log: list = []  # noqa: RUF012 - a list of the class

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.log.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper:
    """Not a tensor, and handles torch's functions."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def unwrapped(value):
            return value.tensor if isinstance(value, cls) else value

        args = [unwrapped(value) for value in args]
        result = function(*args, **{name: unwrapped(value) for name, value in (kwargs or {}).items()})
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)


WITHOUT_OPTIONS = [name for name in CALLS if name != "softmax with options" and "of torch" not in name]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_subclasses_get_public_functions(name, given):
    call, inputs = CALLS[name], arguments_of(CALLS[name], given)
    want = call(*inputs)
    got = call(inputs[0].as_subclass(Plain), *inputs[1:])
    assert type(got) is Plain and type(want) is torch.Tensor
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want)

    got = call(Wrapper(inputs[0]), *inputs[1:])
    assert type(got) is Wrapper
    torch.testing.assert_close(got.tensor, want)

    Logged.log.clear()
    assert type(call(inputs[0].as_subclass(Logged), *inputs[1:])) is Logged
    if not name.startswith("F."):
        assert getattr(gander, name.split(" ")[0]) in Logged.log


def test_a_mode_sees_operators_of_plain_tensors_and_functions_of_subclasses(given):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        gander.softmax(given["x"])
        assert torch.ops.gander.softmax.default in seen and gander.softmax not in seen
        seen.clear()
        assert type(gander.softmax(given["x"].as_subclass(Plain))) is Plain
        assert gander.softmax in seen


def test_masked_tensors(given):
    """MaskedTensor has softmax of its own, and does not know our functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = MaskedTensor(given["x"], given["x"] > 0)
        torch.testing.assert_close(
            F.softmax(x, -1).get_data().nan_to_num(), theirs.softmax(x, -1).get_data().nan_to_num()
        )
        for call in (gander.softmax, gander.nn.Softmax(-1)):
            with pytest.raises(TypeError, match=r"no implementation found|unsupported operand|MaskedTensor"):
                call(x)


def _subclass(x):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("AOTAutograd of torch 2.11 runs operators of libraries in a mode that refuses subclasses")
    return x.as_subclass(Plain)


@pytest.mark.parametrize("make", [lambda x: x, _subclass], ids=["plain", "subclass"])
@pytest.mark.parametrize("name", ["softmax", "rmsnorm", "layernorm", "cross_entropy", *OF_A_HEAD])
def test_compiled_functions_take_subclasses(name, make, given):
    call = CALLS[name]
    inputs = arguments_of(call, given)
    inputs[0] = make(inputs[0])
    torch.compiler.reset()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    assert type(got) is type(inputs[0])
    torch.testing.assert_close(got, call(*inputs))


# ---- torch.jit ----

JITTED = [name for name in CALLS if "without a dimension" not in name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JITTED)
@pytest.mark.parametrize("grad", [False, True], ids=["without gradient", "with gradient"])
def test_jit_traces_functions(name, grad, given):
    """torch.jit.trace compares its graph with that of a second call, without gradients."""
    call = CALLS[name]
    inputs = arguments_of(call, given)
    grad &= not name.endswith(("_bwd", "_fwd"))
    for tensor in inputs[:2] if name in OF_A_HEAD else inputs[:1]:
        tensor.requires_grad_(grad)
    traced = torch.jit.trace(call, inputs)
    torch.testing.assert_close(traced(*inputs), call(*inputs))
    if grad:
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        got = torch.autograd.grad(traced(*inputs).square().sum(), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(call(*inputs).square().sum(), leaves))


@pytest.mark.filterwarnings("ignore")
def test_jit_traces_leave_sizes_open():
    """A graph that kept the sizes of its first call would give later results the wrong shape, silently."""
    shape, weight = (5, 6), torch.randn(7, 6)
    calls = {
        "layer_norm": (lambda x: F.layer_norm(x, shape), ((2, 3, 5, 6), (3, 2, 5, 6))),
        "rms_norm": (lambda x: F.rms_norm(x, shape), ((4, 5, 6), (2, 5, 6))),
        "linear_cross_entropy": (
            lambda x: gander.linear_cross_entropy(x, weight, x[..., 0].long() % 7, reduction="none"),
            ((4, 5, 6), (5, 4, 6)),
        ),
        "lse_partial": (
            lambda x: gander.cross_entropy(x, x[:, 0].long() % 6, x[:, :1] + 3, reduction="none"),
            ((20, 6), (9, 6)),
        ),
        "target_logit": (
            lambda x: gander.cross_entropy_fwd(x, x[:, 0].long() % 6, x[:, 0].contiguous()),
            ((20, 6), (9, 6)),
        ),
    }
    for name, (call, (first, later)) in calls.items():
        traced = torch.jit.trace(call, torch.randn(first))
        x = torch.randn(later)
        assert traced(x).shape == call(x).shape, name
        torch.testing.assert_close(traced(x), call(x), msg=name)


@pytest.mark.filterwarnings("ignore")
def test_jit_traces_models(given):
    model, inputs = Model(gander.nn, F), (given["x"], given["target"])
    traced = torch.jit.trace(model, inputs)
    torch.testing.assert_close(gradients(traced, *inputs), gradients(model, *inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_jit_traces_the_linear_loss(reduction, given):
    head = gander.nn.LinearCrossEntropy(N, 5, bias=True, reduction=reduction)
    traced = torch.jit.trace(head, (given["x"], given["few"]))
    x, target = given["x"][:4], given["few"][:4]
    torch.testing.assert_close(traced(x, target), head(x, target))
    got = torch.autograd.grad(traced(x, target).sum(), [*traced.parameters()])
    torch.testing.assert_close(got, torch.autograd.grad(head(x, target).sum(), [*head.parameters()]))


@pytest.mark.filterwarnings("ignore")
def test_jit_compiles_torchs_modules_in_place_of_ours(given):
    class Scripted(nn.Module):
        def __init__(self, kinds):
            super().__init__()
            self.rms, self.layer = kinds.RMSNorm(N), kinds.LayerNorm((2, N // 2), bias=False)
            self.softmax, self.log_softmax = kinds.Softmax(-1), kinds.LogSoftmax(1)
            self.loss = kinds.CrossEntropyLoss(ignore_index=3, reduction="sum")

        def forward(self, x: torch.Tensor, target: torch.Tensor):
            h = self.layer(self.rms(x).unflatten(-1, [2, 4])).flatten(-2)
            return self.loss(self.softmax(h) * h + self.log_softmax(h), target)

    model = Scripted(gander.nn)
    weight = model.rms.weight
    want = model(given["x"], given["target"])
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(given["x"], given["target"]), want)
    want.backward()
    expected, weight.grad = weight.grad, None
    scripted(given["x"], given["target"]).backward()
    torch.testing.assert_close(scripted.rms.weight.grad, expected)
    assert weight.grad is not None  # shared


@pytest.mark.filterwarnings("ignore")
def test_jit_does_not_replace_subclasses_with_a_forward_of_their_own(given):
    class Doubled(gander.nn.RMSNorm):
        def forward(self, x):
            return x * 2

    torch.testing.assert_close(torch.jit.script(Doubled(N))(given["x"]), given["x"] * 2)
    quack = gander.nn.QuackRMSNorm(N)
    torch.testing.assert_close(torch.jit.script(quack)(given["x"]), quack(given["x"]))


# ---- FlopCounterMode ----

PRODUCT = 2 * 4 * 8 * 10


def flops(step):
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def linear_loss(x, weight, target, **options):
    return theirs.cross_entropy(theirs.linear(x, weight), target, **options)


def checkpointed(call):
    return lambda *inputs: torch.utils.checkpoint.checkpoint(call, *inputs, use_reentrant=False)


@pytest.fixture
def linear():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    return x, weight, torch.zeros(4, dtype=torch.long)


def test_flops_are_those_of_the_products(linear):
    x, weight, target = linear
    loss = gander.linear_cross_entropy
    assert flops(lambda: loss(*linear).backward()) == flops(lambda: linear_loss(*linear).backward())
    assert flops(lambda: loss(*linear).backward()) == 3 * PRODUCT == 1920
    with torch.no_grad():
        assert flops(lambda: loss(*linear)) == PRODUCT
    assert flops(lambda: loss(x, weight.detach(), target).backward()) == 2 * PRODUCT
    assert flops(lambda: loss(x.detach(), weight, target, chunk=3).backward()) == 2 * PRODUCT
    # backward computes the logits again.
    assert flops(lambda: loss(*linear, reduction="none").sum().backward()) == 4 * PRODUCT
    assert flops(lambda: gander.softmax(x)) == 0


def test_flops_of_statistics(linear):
    hidden, weight, index = linear

    def total(*given, **options):
        return flops(lambda: sum(gander.linear_token_statistics(*given, **options)).sum().backward())

    assert total(*linear) == 4 * PRODUCT
    assert total(*linear, keep="logits") == 3 * PRODUCT
    assert total(hidden, weight.detach(), index, chunk=3) == 3 * PRODUCT
    assert total(hidden, weight.detach(), index, chunk=3, outputs=("log_prob",)) == 2 * PRODUCT


def test_flops_of_checkpoints(linear):
    """Forward makes the gradients, twice: backward has no product."""
    assert flops(lambda: checkpointed(linear_loss)(*linear).backward()) == 4 * PRODUCT
    assert flops(lambda: checkpointed(gander.linear_cross_entropy)(*linear).backward()) == 6 * PRODUCT


def test_flops_of_compiled_functions(linear):
    """torch.compile runs eagerly under the counter. Inductor counts its nodes by the same formula."""
    from torch._inductor.fx_utils import count_flops_fx

    compiled = torch.compile(gander.linear_cross_entropy)
    compiled(*linear).backward()
    assert flops(lambda: compiled(*linear).backward()) == 3 * PRODUCT
    graph = make_fx(lambda *given: gander.linear_cross_entropy(*given), tracing_mode="fake")(*linear).graph
    nodes = [node for node in graph.nodes if node.target is torch.ops.gander.linear_cross_entropy.default]
    assert [count_flops_fx(node) for node in nodes] == [3 * PRODUCT]


def test_flops_are_counted_when_the_counter_is_imported_first():
    program = """
import torch
{}
x, weight = (torch.ones(size, 8, requires_grad=True) for size in (4, 10))
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    gander.linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.long)).backward()
print(counter.get_total_flops())
"""
    imports = "import torch.utils.flop_counter", "import gander"
    for order in imports, imports[::-1]:
        run = subprocess.run(
            [sys.executable, "-c", program.format("\n".join(order))],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.stdout.strip() == "1920", run.stderr[-2000:]
