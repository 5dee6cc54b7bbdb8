"""Inference tensors are written inside of inference mode alone, as by torch's operators."""

import gander
import pytest
import torch
import valid
from gander._table import TORCH
from gander._torch import fast

M, N = 3, 8


def tensors():
    """What the calls below read and write, by name."""
    x = torch.randn(M, N)
    return {
        "x": x,
        "residual": torch.randn(M, N),
        "weight": torch.rand(N),
        "out": torch.zeros(M, N),
        "target": torch.randint(N, (M,)),
        "loss": torch.zeros(M),
        "lse": torch.logsumexp(x, -1),
        "logit": torch.randn(M),
    }


# By name: what is written, and the call.
CALLS = {
    "fused_add_rmsnorm": (
        ["x", "residual"],
        lambda t: gander.fused_add_rmsnorm(t["x"], t["residual"], t["weight"]),
    ),
    "rmsnorm": (["out"], lambda t: gander.rmsnorm(t["x"], t["weight"], out=t["out"])),
    "rmsnorm with a sum": (
        ["out"],
        lambda t: gander.rmsnorm(t["x"], t["weight"], residual=t["residual"], prenorm=True, out=t["out"]),
    ),
    "rmsnorm over x": (["x"], lambda t: gander.rmsnorm(t["x"], t["weight"], out=t["x"])),
    "rmsnorm_fwd": (["out"], lambda t: gander.rmsnorm_fwd(t["x"], store_rstd=True, out=t["out"])),
    "layernorm": (["out"], lambda t: gander.layernorm(t["x"], t["weight"], out=t["out"])),
    "layernorm_fwd": (["out"], lambda t: gander.layernorm_fwd(t["x"], None, return_rstd=True, out=t["out"])),
    "cross_entropy_fwd": (
        ["x"],
        lambda t: gander.cross_entropy_fwd(t["x"], t["target"], return_dx=True, inplace_backward=True),
    ),
    "cross_entropy_bwd": (
        ["x"],
        lambda t: gander.cross_entropy_bwd(t["x"], t["target"], t["logit"], t["lse"], inplace_backward=True),
    ),
    "cross_entropy_fwd_out": (
        ["loss", "lse", "out"],
        lambda t: gander.cross_entropy_fwd_out(
            t["x"], t["target"], None, t["loss"], t["lse"], t["out"], None
        ),
    ),
    "cross_entropy_fwd_out with logits": (
        ["loss", "lse"],
        lambda t: gander.cross_entropy_fwd_out(
            t["x"], t["target"], t["logit"], t["loss"], t["lse"], None, None
        ),
    ),
    "cross_entropy_bwd_out": (
        ["out"],
        lambda t: gander.cross_entropy_bwd_out(t["x"], t["target"], t["logit"], t["lse"], t["out"]),
    ),
}
WRITTEN = [(name, written) for name, (all_written, _) in CALLS.items() for written in all_written]


@pytest.fixture(params=["fast path", "dispatcher"])
def path(request):
    if request.param == "fast path":
        if fast.status() is not True:
            pytest.skip(f"the fast path is off: {fast.status()}")
        yield
        return
    with torch.device("cpu"):  # a mode, which only the dispatcher serves
        yield


@pytest.mark.parametrize(("name", "written"), WRITTEN)
def test_inference_tensors_are_refused(name, written, path):
    given = tensors()
    CALLS[name][1](tensors())  # the first call of an operator compares the fast path with the dispatcher
    with torch.inference_mode():
        given[written] = given[written].clone()
    before = {key: (tensor.clone(), tensor) for key, tensor in given.items()}
    versions = {key: tensor._version for key, tensor in given.items() if key != written}
    argument = {"out": "dx"}.get(written, written) if name.startswith("cross_entropy") else written
    argument = "out" if name == "rmsnorm over x" else argument
    with pytest.raises(RuntimeError, match=rf"\b{argument} is an inference tensor, .*{argument}\.clone"):
        CALLS[name][1](given)
    for key, (copy, tensor) in before.items():
        assert torch.equal(copy, tensor), f"{key} was written"
    assert versions == {key: given[key]._version for key in versions}
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        given[written].add_(1)  # torch's operators


@pytest.mark.parametrize(("name", "written"), WRITTEN)
def test_inference_tensors_are_written_in_inference_mode(name, written, path):
    given = tensors()
    want = {key: tensor.clone() for key, tensor in given.items()}
    CALLS[name][1](want)
    with torch.inference_mode():
        given[written] = given[written].clone()
        CALLS[name][1](given)
    for key, tensor in want.items():
        assert torch.equal(given[key], tensor)


def test_every_operator_that_writes_refuses_inference_tensors():
    """Through the dispatcher, by the table: the first of the tensors that an operator writes."""
    for name, operator in TORCH.items():
        if not operator.writes:
            continue
        given = [*valid.call(name).values()]
        names = [argument.name for argument in operator.arguments]
        for written in operator.writes:
            at = names.index(written)
            if given[at] is None:
                continue
            with torch.inference_mode():
                changed = [*given]
                changed[at] = given[at].clone()
            with pytest.raises(RuntimeError, match=f"gander: {written} is an inference tensor"):
                getattr(torch.ops.gander, name)(*changed)


def test_inference_tensors_may_be_read():
    with torch.inference_mode():
        given = tensors()
    out = torch.zeros(M, N)
    gander.rmsnorm(given["x"], given["weight"], out=out)
    assert torch.equal(out, gander.rmsnorm(given["x"], given["weight"]))


def test_compiled_functions_write_in_inference_mode():
    def function(x, residual):
        gander.fused_add_rmsnorm(x, residual, None)
        return gander.rmsnorm(x, out=torch.empty_like(x))

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    with torch.inference_mode():
        given = torch.randn(M, N), torch.randn(M, N)
        got, want = ([tensor.clone() for tensor in given] for _ in range(2))
        torch.testing.assert_close(compiled(*got), function(*want))
        torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="inference"):
        compiled(*got)
    torch.testing.assert_close(got, want)
