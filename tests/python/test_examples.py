"""The examples in Python, run by the command in the head of each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*arguments, **environment):
    command = sys.executable, *arguments
    environment = os.environ | environment
    return subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=300)


NEED_JAX = [f"training_step_{name}.py" for name in ("jax", "flax", "equinox")]  # the check `jax` runs these
SAID = {"same_bits.py": "of 100 rows on cpu have other bits: 0 by products of 16 rows,"}
HERE = [source for source in sorted(EXAMPLES.glob("*.py")) if source.name not in NEED_JAX]


@pytest.mark.parametrize("source", HERE, ids=lambda source: source.name)
def test_the_command_in_the_head(source):
    (arguments,) = re.findall(r"^    python (.*)$", source.read_text(), re.MULTILINE)
    done = run(*arguments.split(), OMP_WAIT_POLICY="passive")
    said = SAID.get(source.name, "\nstep 29: loss 0.")
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


# What an import of torch finds here is no module.
WITHOUT = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_path("training_step_numpy.py", run_name="__main__")
assert sys.modules["torch"] is None
"""


def test_numpy_s_needs_no_torch():
    done = run("-c", WITHOUT)
    assert done.returncode == 0 and "\nstep 29: loss 0." in done.stdout, done.stdout + done.stderr


def test_a_loss_that_does_not_fall_is_an_error():
    """Else the tests above could not fail."""
    text = (EXAMPLES / "training_step_numpy.py").read_text()
    assert " 30, 1.0 " in text
    done = run("-c", text.replace(" 30, 1.0 ", " 30, 0.0 "))
    assert done.returncode == 1 and done.stderr.startswith("wrong: the first loss is 2.302"), done.stderr


def test_other_bits_are_an_error():
    text = (EXAMPLES / "same_bits.py").read_text()
    assert "(logits, tokens, " in text
    done = run("-c", text.replace("(logits, tokens, ", "(logits / len(logits), tokens, "))
    assert done.returncode == 1 and done.stderr.startswith("wrong: the same rows"), done.stderr
