"""The demo trains a small model with torch's operators and with gander's, and reports failures."""

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
import typer
from gander_bench import __main__ as main
from gander_bench import demo, timing
from gander_bench.demo import checks, training
from rich.console import Console
from typer.testing import CliRunner

TINY = replace(training.CPU, width=32, layers=1, heads=2, context=16, batch=2, steps=6, agreement=1e-4)


@pytest.fixture
def console():
    return Console(width=140, record=True, force_terminal=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(checks.SHAPES, "cpu", ((3, 40),))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    text = training.corpus(0.1)
    monkeypatch.setattr(training, "corpus", lambda: text)


@pytest.fixture
def training_alone(monkeypatch):
    monkeypatch.setattr(checks, "check", lambda *arguments: [])
    monkeypatch.setattr(training, "plot", lambda *arguments: None)


def run(console, path, config=TINY):
    demo.demonstrate(console, "cpu", config, 0, path, compile=False, seconds=0)


def test_trains_with_both_and_draws(console, tmp_path):
    run(console, tmp_path / "demo.png")
    said = console.export_text()
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for expected in (
        "This machine",
        "softmax backward",
        "Largest difference between the curves",
        "gander step 6/6",
    ):
        assert expected in said
    assert "FAILED" not in said


def test_loss_curves_that_differ_fail(console, tmp_path, monkeypatch, training_alone):
    softmax = training.GANDER.softmax
    monkeypatch.setattr(training, "GANDER", replace(training.GANDER, softmax=lambda x: softmax(x * 1.5)))
    with pytest.raises(typer.Exit) as stop:
        run(console, tmp_path / "demo.png")
    assert stop.value.exit_code == 1
    assert "FAILED: the loss curves differ by" in console.export_text()


def test_loss_curves_with_nan_fail(console, tmp_path, monkeypatch, training_alone):
    monkeypatch.setattr(
        training, "GANDER", replace(training.GANDER, rmsnorm=lambda x, weight: x * float("nan"))
    )
    with pytest.raises(typer.Exit):
        run(console, tmp_path / "demo.png")


@pytest.mark.parametrize("step", [1, 3])
def test_loss_curves_that_become_nan_fail(console, tmp_path, monkeypatch, training_alone, step):
    right = training.difference

    def difference(runs):
        found = right(runs)
        found[step:] = [float("nan")] * (len(found) - step)
        return found

    monkeypatch.setattr(training, "difference", difference)
    with pytest.raises(typer.Exit):
        run(console, tmp_path / "demo.png")
    assert f"nan at step {step}" in console.export_text()


def test_errors_of_nan():
    ones, nan = torch.ones(2), torch.full((2,), float("nan"))
    for results in ((nan, ones), (ones, nan), (nan, nan)):
        assert math.isnan(checks.error_of(results, (ones.double(), ones.double()))[0])
    with pytest.raises(ValueError, match="empty"):
        checks.error_of((), (ones.double(),))


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_operator_is_reported(console, monkeypatch, factor):
    right = checks.cases.provider

    def provider(name):
        found = right(name)
        if name != "gander":
            return found
        wrong = found.operators | {"softmax_forward": lambda x: lambda: (torch.softmax(x, -1) * factor,)}
        return replace(found, operators=wrong)

    monkeypatch.setattr(checks.cases, "provider", provider)
    (failure,) = checks.check(console, "cpu", compile=False, seconds=0)
    assert failure.startswith("softmax_forward at 3 x 40")


def test_a_missing_compiler_is_reported(console, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert checks.check(console, "cpu", compile=True, seconds=0) == []
    assert "it needs a C++ compiler" in console.export_text()


def test_the_seed_decides_parameters_and_batches():
    def losses(seed):
        config = replace(TINY, steps=2)
        return training.train(training.TORCH, config, training.corpus(), "cpu", seed, lambda run: None).losses

    assert losses(3) == losses(3) != losses(4)


def test_attention_does_not_look_ahead():
    torch.manual_seed(0)
    model = training.Model(training.GANDER, TINY)
    tokens = torch.randint(256, (1, TINY.context))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for each in (tokens, changed):
        model(each, tokens)
    torch.testing.assert_close(seen[0][:, :-1], seen[1][:, :-1], rtol=0, atol=0)
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--device=tpu", "tpu is not available"),
        ("--output=none/demo.png", "none/demo.png cannot be written"),
        ("--output=demo.txt", "demo.txt cannot be written"),
        ("--output=demo", "demo cannot be written"),
        ("--steps=0", "greater than or equal to 1"),
        ("--seconds=-1", "greater than or equal to 0"),
    ],
)
def test_wrong_options_are_refused_at_once(option, said, monkeypatch):
    monkeypatch.delattr(demo, "demonstrate")
    app = typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, [option])
    assert result.exit_code == 2
    assert said in result.output


def test_without_torch_one_sentence_says_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(SystemExit, match=r"^gander_bench demo needs torch, which is not installed"):
        main._run("demo", "demo", [])
