"""`gander_bench jax` on tiny shapes. No test checks a time."""

import json
from pathlib import Path

import jax
import pytest

pytest.importorskip("torch", reason="gander_bench measures torch's operators too")
import typer
from gander_bench import jax_command, jax_points, jax_programs, jax_timing, report, results
from typer.testing import CliRunner


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(jax_command.main)

    def run(*arguments):
        found = CliRunner().invoke(app, list(arguments))
        assert found.exit_code == 0, found.output
        return found.output

    def lines(path):
        return [json.loads(line) for line in (tmp_path / path).read_text().splitlines()]

    return run, lines


def test_the_command_from_end_to_end(command):
    run, lines = command
    chosen = ["--shapes", "64x128", "--seconds", "0", "--out", "a"]
    run(*chosen, "--shard", "1/2")
    assert len(lines("a")) == 4
    run(*chosen, "--resume")
    found = lines("a")
    assert {r["op"] for r in found} == set(jax_programs.PROGRAMS) and len(found) == 7
    on = "cpu" if jax.default_backend() == "cpu" else "cuda"
    for record in found:
        assert (record["section"], record["on"], record["m"], record["n"]) == ("jax", on, 64, 128)
        assert record["versions"].keys() == {"gander", "jax", "jaxlib"} and record["environment"]["commit"]
        assert all(figures["us"] > 0 < figures["first s"] for figures in record["results"].values())
        assert record["results"]["gander"]["off"] < 2e-2
        record["results"]["gander"]["us"] = record["results"]["xla"]["us"] / 9  # no test checks a time
    Path("a").write_text("".join(json.dumps(record) + "\n" for record in found))
    shown = run("--report", "a")
    assert "gander.jax beside XLA" in shown and "LayerNorm forward and backward" in shown
    assert "MISSED" not in shown


def test_results_that_disagree_are_no_time(command, monkeypatch):
    run, lines = command
    right = jax_programs.PROGRAMS["softmax_forward"]
    wrong = {**right.functions, "gander": lambda x: 1.1 * right.functions["xla"](x)}
    monkeypatch.setitem(jax_programs.PROGRAMS, "softmax_forward", right._replace(functions=wrong))
    run("--shapes", "3x40", "--ops", "softmax_forward", "--seconds", "0", "--out", "a")
    (record,) = lines("a")
    assert record["results"]["gander"]["error"].startswith("ArithmeticError: wrong result: 1.0e-01 off")
    assert record["results"]["xla"]["us"] > 0
    nan = jax.numpy.full((2, 3), jax.numpy.nan)
    assert not jax_programs.off((nan, nan * 0 + 1), (nan, nan)) < 1


def event(ts, dur, pid=1, tid=7):
    return {"ph": "X", "name": "a kernel", "pid": pid, "tid": tid, "ts": ts, "dur": dur}


def named(kind, name, pid, **tid):
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}, **tid}


def test_time_in_which_a_gpu_is_busy():
    """Each moment counts once: of streams alone, and without what the host does."""
    trace = [
        named("process_name", "/device:GPU:0", 1),
        named("process_name", "/host:CPU", 2),
        named("thread_name", "Stream #13(Compute)", 1, tid=7),
        named("thread_name", "XLA Modules", 1, tid=8),
        named("thread_name", "Stream", 2, tid=7),
        *(event(10.0, 5.0), event(30.0, 2.0), event(12.0, 1.0), event(14.0, 4.0)),
        *(event(0.0, 50.0, tid=8), event(0.0, 50.0, pid=2)),
        {},
    ]
    assert jax_timing.busy_us(trace) == 10.0
    with pytest.raises(RuntimeError, match="has no kernel"):
        jax_timing.busy_us(trace[:5])


def test_points_are_judged():
    base = {
        "section": "jax", "dtype": "bfloat16", "m": 8192, "on": "cuda", "date": "2026-01-01",
        "environment": {"device": "NVIDIA H100", "driver": "580.1", "torch": "2.11"},
        "versions": {"gander": "1", "jax": "0.11.2", "jaxlib": "0.11.2"},
    }  # fmt: skip

    def record(op, n, speed):
        figures = {"gander": {"us": 10.0, "first s": 0.5}, "xla": {"us": 10 * speed, "first s": 2.0}}
        return base | {"op": op, "n": n, "results": figures}

    records = [
        record("softmax_forward", 4096, 0.99),
        record("softmax_forward", 8192, 0.9),
        record("cross_entropy_mean_gradient", 128256, 1.4),
        record("cross_entropy_mean_gradient", 50257, 1.4),
        base | {"op": "rmsnorm_forward", "n": 64, "results": {"gander": {"error": "X"}, "xla": {"us": 9.0}}},
    ]
    (table,) = report.jax_tables(records)
    assert table.rows[0] == [
        "softmax forward", "8192 x 4096", "10.0", "9.9", "0.990", "0.98 met", "0.50", "2.00",
    ]  # fmt: skip
    assert [row[5] for row in table.rows] == ["0.98 met", "0.98 MISSED", "1.5 MISSED", "0.98 met", ""]
    missed = [(check.op, check.measured) for check in results.checks(records) if not check.met()]
    assert missed == [
        ("softmax_forward", 0.9),
        ("cross_entropy_mean_gradient", 1.4),
        ("rmsnorm_forward", None),
    ]


def test_a_fresh_process():
    """What the notebook shows: records of a process that has JAX alone."""
    ops = ["softmax_forward", "cross_entropy_mean_gradient"]
    made = jax_points.in_a_fresh_process(ops, ["float32"], [(8, 64)], seconds=0)
    assert [record["op"] for record in made] == ops
    assert all(figures["us"] > 0 for record in made for figures in record["results"].values())
    (table,) = report.jax_tables(made)
    assert "gander.jax beside XLA, us, float32" in table.markdown() and len(table.rows) == 2
    with pytest.raises(RuntimeError, match="ValueError: not enough values to unpack"):
        jax_points.in_a_fresh_process(ops, ["float32"], [(8,)], seconds=0)
