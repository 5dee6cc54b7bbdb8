"""Fake tensors know the table's rules alone: they never ask the library, and work where it does not."""

import os
import pathlib
import signal
import subprocess
import sys

import gander
import pytest
import torch
import valid
from gander._native import library
from gander._table import TORCH
from torch._subclasses import FakeTensorMode


def fake(mode, values):
    return [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values.values()]


def described(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(r.shape, r.dtype, r.device, r.stride()) for r in results if r is not None]


@pytest.mark.parametrize("name", TORCH)
def test_results_are_as_those_of_kernels(name):
    operator = getattr(torch.ops.gander, name)
    with FakeTensorMode() as mode:
        got = operator(*fake(mode, valid.call(name)))
    assert described(got) == described(operator(*valid.call(name).values()))


def in_a_forked_child():
    """Runs the fake kernel of every operator, also with a wrong shape, and public functions."""
    with pytest.raises(RuntimeError, match="spawn or forkserver"):
        gander.softmax(torch.ones(2, 3))
    library.load = None  # a call fails
    with FakeTensorMode() as mode:
        for name in TORCH:
            operator, values = getattr(torch.ops.gander, name), valid.call(name)
            operator(*fake(mode, values))
            first = next(iter(values))
            with pytest.raises(ValueError, match=f"^{TORCH[name].operator}: {first} has shape"):
                operator(*fake(mode, values | {first: values[first][..., :0]}))
        x, weight, target = torch.ones(2, 3), torch.ones(3), torch.zeros(2, dtype=torch.long)
        x.requires_grad_()
        y = gander.rmsnorm(x, weight, residual=x)
        loss = gander.cross_entropy(gander.layernorm(y, weight), target)
        assert torch.autograd.grad(loss, x)[0].shape == gander.softmax(x).shape == (2, 3)
        with pytest.raises(
            ValueError, match=r"weight has shape \(2,\), expected \(3,\): one for each column"
        ):
            gander.rmsnorm(x, weight[:2])


def test_in_a_forked_child_of_a_process_that_has_used_the_library():
    """Servers start by fork. The parent is a new process: torch refuses backward in a child of one that has
    run it."""
    here = [str(pathlib.Path(__file__).parent), *map(os.path.abspath, filter(None, sys.path))]
    run = subprocess.run(
        [sys.executable, "-c", "import test_fakes; test_fakes.fork()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(here)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]


def fork():
    gander.softmax(torch.ones(2, 3))
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(120)  # ends the child if it hangs
        try:
            in_a_forked_child()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
