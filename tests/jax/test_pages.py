"""The page about JAX, the examples of the functions' documentation, and the example that trains."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import gander
import gander.jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))
from pages import NEED_JAX, name_of, run, sections  # noqa: E402
from test_examples import NEED_JAX as EXAMPLES  # noqa: E402

FUNCTIONS = [name for name in gander.jax.__all__ if callable(getattr(gander.jax, name))]


@pytest.mark.parametrize("page", NEED_JAX, ids=name_of)
def test_page(page):
    run(page, "cpu")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_documentation_is_whole(name):
    item = getattr(gander.jax, name)
    found = sections(item)
    arguments = re.findall(r"^    (\w+): ", found["Args"], re.MULTILINE)
    assert arguments == [*inspect.signature(item).parameters]
    assert {"Returns", "Raises", "Examples"} <= set(found)
    assert item.__module__ == "gander.jax"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_of_functions(name):
    names = {"gander": gander, "jnp": jnp}
    for test in doctest.DocTestFinder(recurse=False).find(getattr(gander.jax, name), name, globs=names):
        assert test.examples
        assert not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize("name", EXAMPLES)
def test_training(name):
    """A step with gander's norm and loss inside one jit, to the loss curve of JAX's own operations."""
    done = subprocess.run([sys.executable, name], cwd=ROOT / "examples", capture_output=True, text=True)
    assert done.returncode == 0 and "\nstep 29: loss 0." in done.stdout, done.stdout + done.stderr


def test_a_curve_that_differs_is_an_error():
    text = (ROOT / "examples/training_step_jax.py").read_text()
    assert "+ 1e-6" in text
    changed = text.replace("+ 1e-6", "+ 1.0")
    done = subprocess.run([sys.executable, "-c", changed], capture_output=True, text=True)
    assert done.returncode == 1 and "expected pairs that agree" in done.stderr, done.stderr
