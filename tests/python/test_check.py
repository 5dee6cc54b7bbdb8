"""`python -m gander check` passes where all operators are right, and says which one is not."""

import inspect
import subprocess
import sys

import gander
import numpy
import pytest
import torch
from gander import check

FUNCTIONS = {  # public functions, and the operators that they serve
    "softmax": ["softmax", "softmax, masked"],
    "log_softmax": ["log_softmax, masked"],
    "rmsnorm": ["rmsnorm"],
    "l2norm": ["l2norm"],
    "layernorm": ["layernorm"],
    "swiglu": ["swiglu"],
    "geglu": ["geglu", "geglu, tanh"],
    "silu_and_mul": ["silu_and_mul"],
    "gelu_and_mul": ["gelu_and_mul"],
    "gelu_tanh_and_mul": ["gelu_tanh_and_mul"],
    "apply_rotary_emb": ["apply_rotary_emb"],
    "rotary": ["rotary"],
    "qk_norm_rotary": ["qk_norm_rotary"],
    "token_statistics": ["token_statistics", "entropy of tokens"],
    "logsumexp": ["logsumexp"],
    "cross_entropy": ["cross_entropy", "cross_entropy, mean", "soft cross_entropy"],
    "linear_cross_entropy": ["linear_cross_entropy"],
    "linear_token_statistics": ["linear_token_statistics"],
}
OPERATORS = [name for names in FUNCTIONS.values() for name in names]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(check, "SHAPES", ((3, 40),))


def replaced(monkeypatch, name, change):
    """Passes the results of one of gander's functions through another function."""
    function = getattr(gander, name)

    def changed(*given, **options):
        found = function(*given, **options)
        return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

    monkeypatch.setattr(gander, name, changed)


def checked(capsys, xp=torch):
    """The exit status, and by operator, device and dtype whether it is right."""
    status = check.main(xp)
    _, *lines, last = capsys.readouterr().out.splitlines()
    found = {(line[:34].strip(), *line[34:].split()[:2]): line.endswith(" ok") for line in lines}
    assert all(line.endswith((" ok", " FAILED")) for line in lines) and len(found) == len(lines)
    assert last == (
        "all comparisons are right"
        if status == 0
        else f"{list(found.values()).count(False)} comparisons FAILED"
    )
    return status, found


def failures(found):
    return sorted({name for (name, _, _), right in found.items() if not right})


def test_every_function_is_compared():
    """But those that run the operator of another: without a gradient, in place, or to write to `out`."""
    functions = {name: f for name in gander.__all__ if inspect.isfunction(f := getattr(gander, name))}
    first = {name: next(iter(inspect.signature(f).parameters), None) for name, f in functions.items()}
    computing = {name for name in first if first[name] in ("x", "gate", "q", "logits", "hidden")}
    others = {name for name in computing if name.endswith(("_fwd", "_bwd", "_out"))} | {"fused_add_rmsnorm"}
    assert computing - others == set(FUNCTIONS)


def test_all_is_right(device, capsys):
    status, found = checked(capsys)
    assert status == 0
    lines = [name + what for name in OPERATORS for what in ("", " gradient")]
    assert {key for key in found if key[1] == device} == {
        (line, device, dtype) for line in lines for dtype in check.DTYPES[device]
    }


def test_numpy_alone(capsys):
    status, found = checked(capsys, numpy)
    assert status == 0
    operators = [name for name in OPERATORS if not name.startswith("linear_")]
    dtypes = ("float32", "float16", "float64")
    assert set(found) == {(name, "cpu", dtype) for name in operators for dtype in dtypes}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_operator_fails(name, capsys, monkeypatch, small):
    replaced(monkeypatch, name, lambda y: 1.25 * y)
    status, found = checked(capsys)
    assert status == 1
    assert failures(found) == sorted(each + what for each in FUNCTIONS[name] for what in ("", " gradient"))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("linear_")])
def test_a_wrong_operator_fails_with_numpy_alone(name, capsys, monkeypatch, small):
    replaced(monkeypatch, name, lambda y: (1.25 * y).astype(y.dtype))
    status, found = checked(capsys, numpy)
    assert status == 1 and failures(found) == sorted(FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_gradient_fails(name, capsys, monkeypatch, small):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context, y):
            return y.clone()

        @staticmethod
        def backward(context, dy):
            return 1.25 * dy

    replaced(monkeypatch, name, Wrong.apply)
    status, found = checked(capsys)
    assert status == 1 and failures(found) == sorted(f"{each} gradient" for each in FUNCTIONS[name])


@pytest.mark.parametrize("dtype", check.BOUNDS)
def test_an_error_beyond_the_bound_of_one_dtype_fails(dtype, capsys, monkeypatch, small):
    def change(y):
        return y * (1 + 4 * check.BOUNDS[dtype]) if y.dtype == getattr(torch, dtype) else y

    replaced(monkeypatch, "rmsnorm", change)
    status, found = checked(capsys)
    assert status == 1
    assert {key for key, right in found.items() if not right} >= {("rmsnorm", "cpu", dtype)}
    assert all(key[2] == dtype for key, right in found.items() if not right)


def test_one_wrong_element_fails(capsys, monkeypatch, small):
    replaced(monkeypatch, "softmax", lambda y: y.index_fill(0, torch.tensor(1, device=y.device), torch.nan))
    status, found = checked(capsys)
    assert status == 1 and "softmax" in failures(found)


def test_a_result_of_another_shape_fails(capsys, monkeypatch, small):
    replaced(monkeypatch, "logsumexp", lambda y: y.unsqueeze(-1))
    assert check.main(torch) == 1
    said = capsys.readouterr().out
    assert "ValueError: the result has shape (3, 1), expected (3,) FAILED" in said


def test_an_operator_that_raises_fails_and_the_others_go_on(capsys, monkeypatch, small):
    def fails(*given, **options):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(gander, "rmsnorm", fails)
    assert check.main(torch) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no kernel for this device FAILED" in said
    assert said.index("no kernel") < said.index("layernorm")


@pytest.mark.parametrize("right", [True, False])
def test_the_command_has_an_exit_status(right):
    script = """
import runpy, sys, gander, gander.check
gander.check.SHAPES = ((3, 40),)
softmax, factor = gander.softmax, float(sys.argv.pop())
gander.softmax = lambda *given, **options: factor * softmax(*given, **options)
runpy.run_module("gander", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "check", "1" if right else "1.5"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == (0 if right else 1), done.stderr
    assert ("FAILED" in done.stdout) == (not right)
