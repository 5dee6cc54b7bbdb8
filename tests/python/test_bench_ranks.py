"""The benchmark under torchrun, with classes divided among processes. No test checks a time."""

import json

import pytest
import torch
import typer
from gander_bench import cases, losses, records, sections, timing
from gander_bench.command import main
from ranks import on_all, pools  # noqa: F401
from typer.testing import CliRunner

INPUTS = 5, 20000, torch.float32, "cpu"


def _gradients():
    from torch.distributed.tensor.parallel import loss_parallel

    with losses.group("cpu") as ranks, loss_parallel():
        assert ranks == losses.ranks() == 2
        x, target = losses.slice_inputs(*INPUTS)
        assert target.min() < x.shape[1] <= target.max() < 2 * x.shape[1]
        for name, ops in {"gander-sharded": (*sections.SHARDED,), "torch": ("cross_entropy",)}.items():
            functions = cases.provider(name).functions
            for op in ops:
                call, off = sections.sharded_call(op, functions, x, target)
                assert off < 1e-5, (op, name)
                assert torch.equal(call()[0], call()[0])
        assert sections.sharded_call("cross_entropy", {"sharded_cross_entropy": alone}, x, target)[1] > 0.1
        assert losses.furthest(torch.distributed.get_rank(), "cpu") == 1


def alone(x, target):
    """The loss of a rank that hears nothing of the others' classes."""
    column = target - torch.distributed.get_rank() * x.shape[1]
    inside = (column >= 0) & (column < x.shape[1])
    own = x.gather(1, column.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    return (x.logsumexp(1) - torch.where(inside, own, 0)).mean()


def test_gradients_of_two_ranks():
    on_all(2, _gradients)


def _points():
    options = sections.Options(providers=("torch", "gander", "gander-sharded"))
    points = [*sections.sharded(options)]
    assert {(p.name["op"], p.providers) for p in points} == {
        ("cross_entropy", ("gander-two-passes", "gander-sharded", "torch")),
        ("token_statistics", ("gander-two-passes", "gander-sharded")),
    }
    assert {(p.name["ranks"], p.name["n"]) for p in points} == {(2, n // 2) for _, n in sections.DIVIDED}


def test_points_of_two_ranks():
    on_all(2, _points)


def _failures():
    def wrong(name):
        raise ArithmeticError("wrong result")

    def out_of_memory(name):
        raise torch.OutOfMemoryError("of one rank")

    assert sections.each_result(["a"], wrong) == {"a": {"error": "ArithmeticError: wrong result"}}
    with pytest.raises(torch.OutOfMemoryError):
        sections.each_result(["a"], out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        sections.figures_of(sections.Point({}, ("a",), lambda: out_of_memory("a")))


def test_a_rank_does_not_go_on_by_itself():
    on_all(2, _failures)


@pytest.fixture
def under_torchrun(monkeypatch, tmp_path):
    """Runs the command as one of two ranks, without a GPU, on points that measure nothing."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(main)
    name = {"section": "sharded", "op": "cross_entropy", "dtype": "bfloat16", "m": 8, "n": 9, "ranks": 2}
    point = sections.Point(name, ("gander",), lambda: {"results": {}})
    monkeypatch.setitem(sections.SECTIONS, "sharded", lambda options: [point])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(sections, "context_is_lost", lambda: False)
    monkeypatch.setattr(
        records, "environment", lambda: dict.fromkeys(("gander", "commit", "device", "torch"), "")
    )

    def run(rank, *arguments, **environment):
        here = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "RANK": str(rank)}
        for name, value in (here | environment).items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        return CliRunner().invoke(app, [*arguments, "--providers", "gander"])

    return run


def test_the_first_rank_keeps_the_record(under_torchrun, tmp_path):
    for rank in 1, 0:
        assert not any(tmp_path.iterdir())
        result = under_torchrun(rank, "sharded", "--out", "a", "--no-plots")
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "a").read_text())["op"] == "cross_entropy"


@pytest.mark.parametrize(
    "arguments",
    [
        ["throughput"],
        [],
        *(["sharded", *o] for o in (["--resume"], ["--limit-seconds", "9"], ["--shard", "1/2"])),
    ],
)
def test_ranks_measure_the_same_points(under_torchrun, arguments):
    result = under_torchrun(1, *arguments)
    assert result.exit_code == 2 and "under torchrun" in result.output


def test_ranks_write_no_report(under_torchrun, tmp_path):
    result = under_torchrun(1, "--report", "a", "--results", "b")
    assert result.exit_code == 2 and not any(tmp_path.iterdir())


def test_other_launchers_variables_say_nothing(under_torchrun, tmp_path):
    """Some set RANK and WORLD_SIZE for jobs of a single process, too."""
    result = under_torchrun(1, "sharded", "--out", "a", "--no-plots", TORCHELASTIC_RUN_ID="")
    assert result.exit_code == 0 and (tmp_path / "a").exists()


def test_rounds_of_ranks(monkeypatch):
    """As many on each rank, and each call after the collective."""

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 0.001

    for name, stand_in in {
        "Event": Event,
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    timer, order = object.__new__(timing.GPUTimer), []
    timer._flush = torch.empty(1)
    found = timer({"a": lambda: order.append("a")}, seconds=0, together=lambda: order.append("together"))
    assert found["a"].repeats == timing._ROUNDS_TOGETHER
    assert order[-2 * timing._ROUNDS_TOGETHER :] == ["together", "a"] * timing._ROUNDS_TOGETHER
