"""What is replaced is proven by running it: unknown classes, near misses, and what is not touched."""

import importlib.metadata
import re

import gander.hf
import models
import pytest
import torch
import transformers
from torch import nn

N = 96


class Norm(nn.Module):
    """The base of those below: no class of transformers, and no name that says what it computes."""

    def __init__(self, n=N, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.epsilon = eps

    def normalized(self, x):
        h = x.float()
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Twice(Norm):
    def forward(self, x):
        return self.weight * self.normalized(x).to(x.dtype)


class Once(Norm):
    def forward(self, x):
        return (self.weight * self.normalized(x)).to(x.dtype)


class Offset(Norm):
    def forward(self, x):
        return (self.normalized(x) * (1 + self.weight.float())).type_as(x)


class UnweightedNorm(Norm):
    def __init__(self):
        super().__init__()
        del self.weight

    def forward(self, x):
        return self.normalized(x).to(x.dtype)


class ToTheWeight(Norm):
    """T5's: the result has the dtype of a 16-bit weight."""

    def forward(self, x):
        y = self.normalized(x)
        return self.weight * (y.to(self.weight.dtype) if self.weight.dtype != torch.float32 else y)


class EpsilonOutside(Norm):
    def forward(self, x):
        h = x.float()
        return self.weight * (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)).to(x.dtype)


class NoEpsilon(Norm):
    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)


class In16Bits(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Grouped(Norm):
    def forward(self, x):
        groups = self.normalized(x.unflatten(-1, (2, -1)))
        return self.weight * groups.flatten(-2).to(x.dtype)


class Gated(Norm):
    def forward(self, x, gate):
        return self.weight * self.normalized(x).to(x.dtype) * gate


class Pair(Norm):
    def forward(self, x):
        return self.normalized(x), x


class Statistic(Norm):
    def forward(self, x):
        return self.normalized(x)[..., :1]


class BiasedNorm(Twice):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(N))


class Heads(Norm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, N))

    def forward(self, x):
        return self.weight * self.normalized(x).to(x.dtype)


class Wide(nn.Module):
    """An RMSNorm by its structure alone: the name does not say so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
        self.eps = 1e-6

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


SERVED = {
    Twice: "rounded before the weight",
    Once: "rounded once",
    Offset: "times 1 + weight",
    UnweightedNorm: "without a weight",
    ToTheWeight: "rounded before the weight",
    Wide: "rounded before the weight",
}
REASONS = {
    EpsilonOutside: "none of the known forms",
    NoEpsilon: "none of the known forms",
    In16Bits: "none of the known forms",
    Grouped: "none of the known forms",
    Gated: "missing 1 required positional argument: 'gate'",
    Pair: "returns tuple, not a tensor",
    Statistic: r"it returns \(",
    BiasedNorm: "more than a weight: bias",
    Heads: r"its weight has shape \(4, 96\), expected one dimension",
}
DTYPES = torch.bfloat16, torch.float16, torch.float32


def applied(module):
    model = nn.ModuleDict({"it": module})
    return gander.hf.apply(model, loss=None), module


@pytest.mark.parametrize("cls", SERVED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_norms_are_served_in_all_dtypes(cls, dtype, weight_dtype):
    module = cls().to(weight_dtype)
    if cls is not UnweightedNorm:
        with torch.no_grad():
            module.weight.uniform_(-1, 1)
    x = torch.randn(7, 5, N).to(dtype)
    x[0] *= 1e-3
    expected = module(x)
    report, _ = applied(module)
    assert [e.detail.split(", ")[-1].endswith(SERVED[cls]) for e in report.replaced] == [True]
    y = module(x)
    assert y.dtype == expected.dtype and y.shape == x.shape
    near = (y.double() - expected).abs() <= 1e-5 * expected.abs().double()
    assert near.double().mean() >= 0.99
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-6)  # a bit of bfloat16
    assert near.all() or torch.float32 not in (dtype, y.dtype) or weight_dtype != dtype


def test_epsilon_is_read_when_it_is_used():
    report, module = applied(Twice())
    x = torch.full((1, N), 1e-3)
    first = module(x)
    module.epsilon = 1.0
    assert report.replaced and module(x).abs().max() < first.abs().max() / 100


@pytest.mark.parametrize("cls", REASONS)
def test_near_misses_are_left_and_named(cls):
    report, module = applied(cls())
    (entry,) = report.left
    assert not report.replaced and type(module) is cls
    assert (entry.kind, entry.module, entry.names) == ("norm", cls.__name__, ("it",))
    assert re.search(REASONS[cls], entry.detail), entry.detail


def test_neither_parameters_nor_hooks_are_touched():
    module = Twice()
    called = []
    module.register_forward_hook(lambda *_: called.append(1))
    module.register_forward_pre_hook(lambda *_: called.append(1))
    weight, version = module.weight, module.weight._version
    state = torch.get_rng_state()
    report, _ = applied(module)
    assert report.replaced and not called and module.weight is weight and weight._version == version
    assert torch.equal(torch.get_rng_state(), state)
    module(torch.randn(2, N))
    assert len(called) == 2


@pytest.mark.parametrize("where", ["meta", "default device", "default dtype", "no_grad", "autocast"])
def test_where_apply_is_called_does_not_matter(where):
    model = models.model("Qwen3")
    expected = str(gander.hf.apply(model))
    if where == "meta":
        model = model.to("meta")
        assert str(gander.hf.apply(model)) == expected
    elif where == "default device":
        with torch.device("meta"):
            assert str(gander.hf.apply(model)) == expected
    elif where == "default dtype":
        torch.set_default_dtype(torch.float64)
        try:
            assert str(gander.hf.apply(model)) == expected
        finally:
            torch.set_default_dtype(torch.float32)
    elif where == "no_grad":
        with torch.inference_mode():
            assert str(gander.hf.apply(model)) == expected
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert str(gander.hf.apply(model)) == expected
    assert torch.get_default_dtype() == torch.float32


def test_a_forward_of_the_instance_is_left():
    module = Twice()
    module.forward = lambda x: x
    report, _ = applied(module)
    assert "its forward is not that of its class, but" in report.left[0].detail
    assert type(module) is Twice


class MLP(nn.Module):
    def __init__(self, act=None, bias=True, size=200):
        super().__init__()
        self.a, self.b = nn.Linear(N, size, bias), nn.Linear(N, size, bias)
        self.c, self.act = nn.Linear(size, N, bias), act or nn.SiLU()

    def forward(self, x):
        return self.c(self.b(x) * self.act(self.a(x)))


class Packed(MLP):
    """Up comes first."""

    def __init__(self, act=None):
        super().__init__(act)
        self.a, self.b = nn.Linear(N, 400), None

    def forward(self, x):
        up, gate = self.a(x).chunk(2, -1)
        return self.c(torch.mul(self.act(gate), up))


class Ungated(MLP):
    def forward(self, x):
        return self.c(self.act(self.a(x)))


class Dropped(MLP):
    def forward(self, x):
        return self.c(nn.functional.dropout(self.act(self.a(x)), 0.1, self.training) * self.b(x))


class Clamped(MLP):
    def forward(self, x):
        return self.c(self.act(self.a(x)).clamp(max=1) * self.b(x))


class TwiceUsed(MLP):
    def forward(self, x):
        gate = self.act(self.a(x))
        return self.c(gate * self.b(x) + gate)


class OfDecoder(MLP):
    def __init__(self):
        super().__init__()
        self.inner = MLP()


@pytest.mark.parametrize("cls", [MLP, Packed])
@pytest.mark.parametrize(
    "act, name",
    [
        (nn.SiLU(), "swiglu"),
        (transformers.activations.ACT2FN["silu"], "swiglu"),
        (nn.GELU(), "geglu"),
        (transformers.activations.ACT2FN["gelu"], "geglu"),
        (nn.GELU("tanh"), "geglu, tanh"),
        (transformers.activations.ACT2FN["gelu_pytorch_tanh"], "geglu, tanh"),
    ],
)
def test_gated_mlps(cls, act, name):
    module = cls(act)
    x = torch.randn(3, N, requires_grad=True)
    expected = module(x)
    report, _ = applied(module)
    assert [(e.kind, e.detail) for e in report.replaced] == [("mlp", name)]
    y = module(x)
    torch.testing.assert_close(y, expected)
    a, b = (torch.autograd.grad(z.sin().sum(), [x, *module.parameters()]) for z in (expected, y))
    torch.testing.assert_close(a, b)
    assert (module.double()(x.double()).float() - expected).abs().max() < 1e-5
    applied(module)


@pytest.mark.parametrize(
    "module, reason",
    [
        (Ungated(), "its activation is not multiplied by a second projection"),
        (Dropped(), "its activation is not multiplied by a second projection"),
        (Clamped(), "its activation is not multiplied by a second projection"),
        (TwiceUsed(), "its activation is not multiplied by a second projection"),
        (OfDecoder(), "its child inner, MLP, is no linear layer"),
        (nn.Sequential(nn.Linear(8, 8), nn.SiLU()), "its activation is not multiplied"),
        (nn.Sequential(nn.SiLU()), "it has neither linear layers nor parameters"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_mlps_are_left_and_named(module, reason):
    x = torch.randn(3, N if hasattr(module, "act") else 8)
    expected = module.eval()(x)
    report, _ = applied(module)
    (entry,) = [e for e in report.left if e.names == ("it",)]
    assert reason in entry.detail
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("act", [nn.ReLU(), transformers.activations.ACT2FN["gelu_new"], nn.GELU()])
def test_other_activations_are_no_candidates(act):
    report, _ = applied(MLP(act))
    assert bool(report.replaced) == isinstance(act, nn.GELU) and not report.left


def test_a_shared_activation_is_replaced_for_all_or_none():
    act = nn.SiLU()
    model = nn.ModuleList([MLP(act), MLP(act)])
    assert [len(e.names) for e in gander.hf.apply(model, loss=None).replaced] == [2]
    model.append(Ungated(act))
    report = gander.hf.apply(model, loss=None)
    assert (
        not report.replaced
        and type(act) is nn.SiLU
        and {n for e in report.left for n in e.names} == {"0", "1", "2"}
    )


def test_a_pending_activation_is_a_tensor_for_all_else():
    """A branch that was not tried, such as dropout in training, computes what it did."""
    mlp = MLP()
    gate, up = torch.randn(2, 3, 200)
    expected = nn.functional.silu(gate)
    applied(mlp)
    torch.testing.assert_close(torch.sin(mlp.act(gate)), expected.sin())
    torch.testing.assert_close(torch.cat([mlp.act(gate), up]), torch.cat([expected, up]))
    torch.testing.assert_close(mlp.act(gate).clamp(max=1), expected.clamp(max=1))
    torch.testing.assert_close(mlp.act(gate) * 2, expected * 2)
    torch.testing.assert_close(2 * mlp.act(gate), expected * 2)
    torch.testing.assert_close(mlp.act(gate) * up[:1], expected * up[:1])
    torch.testing.assert_close(mlp.act(gate) * up.double(), expected * up.double())
    torch.testing.assert_close(mlp.act(gate) * mlp.act(up), expected * nn.functional.silu(up))
    assert mlp.act(gate).shape == gate.shape
    with pytest.raises(AttributeError, match="no_such_attribute"):
        print(mlp.act(gate).no_such_attribute)


def test_versions(monkeypatch):
    checked = gander.hf.CHECKED["transformers"]
    real, versions = importlib.metadata.version, {}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    model = models.model("Llama")
    versions["transformers"] = "4.57.1"
    how = r"pip install 'gander-kernels\[hf\]'"
    with pytest.raises(
        ImportError, match=rf"^transformers is 4\.57\.1, expected {checked[0]} or newer: {how}$"
    ):
        gander.hf.apply(model)
    versions["transformers"] = "9.0.0"
    (note,) = gander.hf.apply(model).notes
    assert note == f"transformers 9.0.0 is newer than {checked[1]}, the newest that was checked"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    needs = rf"^gander\.hf needs transformers, which is not installed: {how}$"
    with pytest.raises(ImportError, match=needs), gander.hf.patched():
        pass


def test_the_newest_versions_that_are_named_are_those_of_the_lock_file():
    for package, (_, newest) in gander.hf.CHECKED.items():
        assert importlib.metadata.version(package) == newest, package
