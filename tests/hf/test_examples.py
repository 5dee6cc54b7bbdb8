"""The examples with Hugging Face's packages. Each trains as it does without gander."""

import ast
import contextlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import gander.hf
import gander.rl
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "huggingface"
FUNCTIONS = ("rmsnorm", "rotary", "swiglu", "cross_entropy", "linear_cross_entropy")
TOLERANCE = 2e-4  # relative, after 30 steps in float32

# What each calls while it trains. SFTTrainer has a loss of its own.
CALLS = {
    "loop": {"rmsnorm", "rotary", "swiglu", "linear_cross_entropy"},
    "trainer": {"rmsnorm", "rotary", "swiglu", "cross_entropy"},
    "sft": {"rmsnorm", "rotary", "swiglu"},
}

# Runs an example in each process of torchrun, with gander or without it, and keeps its losses.
DRIVER = """
import json, os, runpy, sys
import gander.hf
example, how, folder = sys.argv[1:]
sys.argv = [example]
if how == "without":
    gander.hf.apply = lambda *given, **options: "without gander"
losses = runpy.run_path(example, run_name="__main__")["losses"]
with open(f"{folder}/{how}-{os.environ['RANK']}", "w") as file:
    json.dump(losses, file)
sys.stdout.flush()
os._exit(0)  # torch's threads for gloo can abort an interpreter that ends (pytorch#179291)
"""


def documentation(name):
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))


def run(name, monkeypatch, arguments=()):
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    return runpy.run_path(str(path), run_name="__main__")


def assert_same_curve(found, expected):
    assert len(found) == len(expected) == 30 and expected[-1] < 0.9 * expected[0]
    assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("name", CALLS)
def test_it_trains_as_without_gander(name, monkeypatch, capsys):
    assert f"\n    python {name}.py\n" in documentation(name)
    calls, applied = set(), False
    for function in FUNCTIONS:
        original = getattr(gander, function)

        def counted(*args, function=function, original=original, **options):
            if applied:  # not while apply tries what there is
                calls.add(function)
            return original(*args, **options)

        monkeypatch.setattr(gander, function, counted)
    apply = gander.hf.apply

    def apply_and_count(*args, **options):
        nonlocal applied
        report = apply(*args, **options)
        applied = True
        return report

    with monkeypatch.context() as patch:
        patch.setattr(gander.hf, "apply", apply_and_count)
        found = run(name, patch)
    assert calls == CALLS[name]
    assert not found["report"].left and str(found["report"]) in capsys.readouterr().out
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(gander.hf, "apply", lambda *args, **options: "without gander")
        expected = run(name, patch)
    assert not calls
    assert_same_curve(found["losses"], expected["losses"])


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="gander.rl needs TRL 1.16, which is for Python 3.11 and newer"
)
def test_grpo_trains_as_without_gander(monkeypatch, capsys):
    """The rewards are those of samples, so they are the same as long as rounding changes no sample."""
    assert "\n    python grpo.py\n" in documentation("grpo")
    calls, original = [], gander.linear_token_statistics

    def counted(*args, **options):
        calls.append(options)
        return original(*args, **options)

    monkeypatch.setattr(gander, "linear_token_statistics", counted)
    found = run("grpo", monkeypatch)["rewards"]
    assert len(calls) >= len(found) == 15 and "ChunkedLogProbFunction" in capsys.readouterr().out
    calls.clear()
    monkeypatch.setattr(gander.hf, "apply", lambda *args, **options: "without gander")
    monkeypatch.setattr(gander.rl, "trl", contextlib.nullcontext)
    expected = run("grpo", monkeypatch)["rewards"]
    assert not calls and found[:5] == pytest.approx(expected[:5], rel=TOLERANCE)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(SystemExit, match="wrong: the reward was "):
        run("grpo", monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_a_loss_that_does_not_fall_is_an_error(name, monkeypatch):
    """Else the examples' own check could not fail."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    monkeypatch.setattr(gander.hf, "apply", lambda *args, **options: "without gander")
    with pytest.raises(SystemExit, match="wrong: the loss was "):
        run(name, monkeypatch)


def test_a_model_is_named_by_an_argument(monkeypatch, tmp_path):
    import models

    models.model("Llama", torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(SystemExit, match="wrong: the loss was "):
        run("loop", monkeypatch, [str(tmp_path)])


def test_fsdp2_in_two_processes(tmp_path):
    assert "\n    torchrun --standalone --nproc-per-node 2 fsdp.py\n" in documentation("fsdp")
    (tmp_path / "driver.py").write_text(DRIVER)
    losses, environment = {}, os.environ | {"OMP_NUM_THREADS": "1"}
    for how in "with", "without":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(tmp_path / "driver.py"), str(EXAMPLES / "fsdp.py"), how, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("linear_cross_entropy, in the head" in done.stdout) == (how == "with")
        ranks = [json.loads((tmp_path / f"{how}-{rank}").read_text()) for rank in range(2)]
        assert ranks[0] == ranks[1]
        losses[how] = ranks[0]
    assert_same_curve(losses["with"], losses["without"])
