"""gander.rl.verl with the modules of verl that it changes, which run without the packages verl needs."""

import importlib
import importlib.metadata
import os
import sys
import types
from pathlib import Path

import gander.distributed
import gander.rl
import pytest
import torch

FOLDER = os.environ.get("GANDER_TEST_RL")
LAYERS, KERNEL = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
LOGITS = "verl.utils.torch_functional"
FUNCTIONS = ["logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking"]
pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="verl 0.9.1 is for Python 3.12 and older"),
    pytest.mark.skipif(
        FOLDER is None and sys.version_info < (3, 13),
        reason="GANDER_TEST_RL names a folder with verl's files, which ./build.sh test hf sets",
    ),
]


@pytest.fixture(autouse=True)
def verl(monkeypatch):
    """verl's folders as packages, without their __init__, of which some need Ray, Hydra and tensordict."""
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])
    for name in "verl", "verl.utils":
        package = types.ModuleType(name)
        package.__path__ = [str(Path(FOLDER, *name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "tensordict", types.ModuleType("tensordict"))
    sys.modules["tensordict"].TensorDict = dict  # a name in annotations
    assert importlib.metadata.version("verl") == gander.rl.CHECKED["verl"]
    yield
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        del sys.modules[name]


@pytest.fixture
def calls(monkeypatch):
    made, original = [], gander.linear_token_statistics

    def counted(*args, **options):
        made.append(options)
        return original(*args, **options)

    monkeypatch.setattr(gander, "linear_token_statistics", counted)
    return made


def operands(shape, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 24, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(50, shape)


def of_layer(shape, dtype=torch.float32, temperature=0.7, chunk_size=8, **options):
    """Log-probability, entropy and the gradients of both operands."""
    layers = importlib.import_module(LAYERS)
    hidden, weight, index = operands(shape, dtype)
    layer = layers.FusedLinearForPPO(chunk_size=chunk_size, **options)
    results = layer.forward(hidden, weight, input_ids=index.int(), temperature=temperature)
    upstream = [torch.randn(shape).to(result.dtype) for result in results]
    return [*results, *torch.autograd.grad(results, (hidden, weight), upstream)]


def assert_like(found, expected, most=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.requires_grad == other.requires_grad
        assert (one.double() - other.double()).norm() <= most * other.double().norm()


@pytest.mark.parametrize("backend", ["torch", "liger"])
@pytest.mark.parametrize("shape", [(21,), (3, 7)])
def test_layer(shape, backend, calls):
    expected = of_layer(shape)
    with gander.rl.verl():
        found = of_layer(shape, impl_backend=backend)
    assert [options["chunk"] for options in calls] == [8]
    assert_like(found, expected)
    assert [result.dtype for result in found] == [result.dtype for result in expected]


def test_layer_in_bfloat16(calls):
    """verl rounds the entropy to the dtype of the hidden states, gander does not."""
    wide = of_layer((3, 7))
    verls = of_layer((3, 7), torch.bfloat16)
    with gander.rl.verl():
        found = of_layer((3, 7), torch.bfloat16)
    assert len(calls) == 1
    assert_like(found, verls, 2e-2)
    assert found[1].dtype == torch.float32 and verls[1].dtype == torch.bfloat16
    assert wide[1].dtype == torch.float32


def test_an_entropy_that_is_only_logged(calls):
    gradients = []
    for swapped in False, True:
        swap = gander.rl.verl() if swapped else None
        hidden, weight, index = operands((3, 7))
        layer = importlib.import_module(LAYERS).FusedLinearForPPO()
        layer(hidden, weight, index)[0].sum().backward()
        gradients.append((hidden.grad, weight.grad))
        if swap is not None:
            swap.undo()
    assert len(calls) == 1
    assert_like(gradients[1], gradients[0])


@pytest.mark.parametrize("shape", [(21,), (3, 7)])
def test_linear_cross_entropy(shape, calls):
    """It flattens its results. Its own kernels are for a GPU, so the layer says what is expected."""
    flat = torch.Size([21])
    expected = of_layer(shape, chunk_size=512)
    with gander.rl.verl():
        hidden, weight, index = operands(shape)
        function = importlib.import_module(KERNEL).linear_cross_entropy
        results = function(hidden, weight, index, 0.7, "none", None)
        upstream = [torch.randn(shape).view(flat) for _ in results]
        found = [*results, *torch.autograd.grad(results, (hidden, weight), upstream)]
    assert len(calls) == 1
    assert_like(found, [*(result.view(flat) for result in expected[:2]), *expected[2:]])


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def test_what_stays_with_verl(calls, monkeypatch):
    """A loss that is a sum or a mean."""
    kernel, asked = importlib.import_module(KERNEL), []

    def original(*given):
        asked.append(given[4:])
        return given[:2]

    monkeypatch.setattr(kernel, "linear_cross_entropy", original)
    arguments, divided = operands((21,)), Group(2)
    with gander.rl.verl():
        kernel.linear_cross_entropy(*arguments, 1.0, "mean", divided)
        kernel.linear_cross_entropy(*arguments, 1.0, "sum")
        assert asked == [("mean", divided), ("sum", None)] and not calls
        kernel.linear_cross_entropy(*arguments, 1.0, "none", Group(1))
        assert len(calls) == 1


def test_a_divided_vocabulary(calls, monkeypatch):
    """Backward of verl does no communication: what made the hidden states adds up their gradient."""
    asked, divided = [], Group(2)

    def of_ranks(*given, **options):
        asked.append(options)
        return given[:2]

    monkeypatch.setattr(gander.distributed, "linear_token_statistics", of_ranks)
    kernels = Path(FOLDER, *KERNEL.split(".")[:-1], "kernels.py").read_text()
    backward = kernels[kernels.index("def efficient_entropy_backward(") :]
    assert "all_reduce" in kernels and "all_reduce" not in backward
    with gander.rl.verl():
        function = importlib.import_module(KERNEL).linear_cross_entropy
        function(*operands((21,)), 0.7, "none", divided)
    assert asked == [{"group": divided, "temperature": 0.7, "ignore_index": -(2**63)}] and not calls


def test_every_order(monkeypatch, calls):
    """Models import the function before the call or after it, and have made a layer before."""
    layers, kernel = importlib.import_module(LAYERS), importlib.import_module(KERNEL)
    original, forward = kernel.linear_cross_entropy, layers.FusedLinearForPPO.forward
    layer = layers.FusedLinearForPPO()
    before, after = types.ModuleType("verl.models_before"), types.ModuleType("verl.models_after")
    for module in before, after:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(f"from {KERNEL} import linear_cross_entropy", vars(before))
    swap = gander.rl.verl()
    assert set(swap.places) == {
        f"{LAYERS}.FusedLinearForPPO.forward",
        f"{KERNEL}.linear_cross_entropy",
        "verl.models_before.linear_cross_entropy",
        *(f"{LOGITS}.{name}" for name in FUNCTIONS),
    }
    exec(f"from {KERNEL} import linear_cross_entropy", vars(after))
    before.linear_cross_entropy(*operands((21,)))
    after.linear_cross_entropy(*operands((21,)))
    layer(*operands((21,)))
    assert len(calls) == 3
    swap.undo()
    assert (
        before.linear_cross_entropy is after.linear_cross_entropy is kernel.linear_cross_entropy is original
    )
    assert layers.FusedLinearForPPO.forward is forward


# ---- Logits ----


def of_logits(name, shape, dtype=torch.float32, **options):
    torch.manual_seed(0)
    logits = torch.randn(*shape, 50).bfloat16().to(dtype).requires_grad_()
    if name == "logprobs_from_logits":
        options["labels"] = torch.randint(50, shape)
    result = getattr(importlib.import_module(LOGITS), name)(logits, **options)
    return [result, *torch.autograd.grad(result, logits, torch.randn(shape).to(result.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(21,), (3, 7)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_logits(name, shape, dtype, monkeypatch):
    if name == FUNCTIONS[2] and len(shape) > 1:
        shape = (21,)  # it takes rows alone
    made, original = [], gander.token_statistics
    monkeypatch.setattr(gander, "token_statistics", lambda *a, **o: made.append(o) or original(*a, **o))
    exact = of_logits(name, shape, torch.float64) if name != FUNCTIONS[2] else of_logits(name, shape)
    theirs = of_logits(name, shape, dtype)
    assert not made
    with gander.rl.verl():
        found = of_logits(name, shape, dtype)
    assert len(made) == 1 and found[0].dtype == torch.float32
    assert_like(found, exact, 1e-5 if dtype == torch.float32 else 4e-3)
    assert_like(found, theirs, 1e-5 if dtype == torch.float32 else 2e-2)


def test_entropy_that_a_worker_compiles():
    with gander.rl.verl():
        function = importlib.import_module(LOGITS).entropy_from_logits
        expected = of_logits("entropy_from_logits", (21,))
        compiled = torch.compile(function, dynamic=True, backend="aot_eager", fullgraph=True)
        torch.manual_seed(0)
        logits = torch.randn(21, 50).bfloat16().float()
        torch.testing.assert_close(compiled(logits), expected[0].detach())
        assert compiled(logits[:5]).shape == (5,)
