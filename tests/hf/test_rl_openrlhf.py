"""gander.rl.openrlhf with the module of OpenRLHF that it changes, which runs without the packages that
OpenRLHF needs."""

import importlib
import importlib.metadata
import os
import sys
import types
from pathlib import Path

import gander.rl
import pytest
import torch

FOLDER = os.environ.get("GANDER_TEST_RL")
MODULE = "openrlhf.models.utils"
pytestmark = pytest.mark.skipif(
    FOLDER is None or not Path(FOLDER, "openrlhf").exists(),
    reason="GANDER_TEST_RL names a folder with OpenRLHF's files, which ./build.sh test hf sets; they are for "
    "Python 3.12 and older on x86_64",
)


@pytest.fixture(autouse=True)
def utils(monkeypatch):
    """OpenRLHF's folders as packages, without their __init__, of which some need DeepSpeed, Ray and vLLM."""
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])
    for name in "openrlhf", "openrlhf.models":
        package = types.ModuleType(name)
        package.__path__ = [str(Path(FOLDER, *name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    assert importlib.metadata.version("openrlhf") == gander.rl.CHECKED["openrlhf"]
    monkeypatch.setattr(torch, "compile", lambda f: f)  # of the entropy, when the module is imported
    utils = importlib.import_module(MODULE)
    yield utils
    del sys.modules[MODULE]


def of_logits(utils, dtype, temperature):
    """Log-probability, entropy, the gradient of both, and the logits, which are divided in place."""
    torch.manual_seed(0)
    leaf = torch.randn(3, 7, 50).bfloat16().to(dtype).requires_grad_()
    logits = leaf * 1
    log_prob = utils.log_probs_from_logits(logits, torch.randint(50, (3, 7)), temperature=temperature)
    results = log_prob, utils.compute_entropy(logits)
    upstream = [torch.randn(3, 7).to(result.dtype) for result in results]
    return [*results, *torch.autograd.grad(results, leaf, upstream), logits]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_like_openrlhf(dtype, temperature, utils, monkeypatch):
    made, original = [], gander.token_statistics
    monkeypatch.setattr(gander, "token_statistics", lambda *a, **o: made.append(o) or original(*a, **o))
    expected = of_logits(utils, torch.float64, temperature)
    theirs = of_logits(utils, dtype, temperature)
    assert not made
    with gander.rl.openrlhf() as swap:
        found = of_logits(utils, dtype, temperature)
    assert len(made) == 2
    assert set(swap.places) == {f"{MODULE}.log_probs_from_logits", f"{MODULE}.compute_entropy"}
    assert found[0].dtype == found[1].dtype == torch.float32
    assert torch.equal(found[-1], theirs[-1])
    most = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= most * other.norm()
