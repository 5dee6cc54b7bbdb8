"""The benchmark's code on tiny shapes. No test checks a time."""

import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import gander
import pytest
import torch
import typer
from gander_bench import (
    cases,
    costs,
    limit,
    load,
    losses,
    memory,
    models,
    plots,
    records,
    report,
    results,
    sections,
    timing,
)  # fmt: skip
from gander_bench.command import main
from gander_bench.stored import with_contestant
from typer.testing import CliRunner

SMALL = ["--shapes", "3x40,2x7", "--seconds", "0", "--dtypes", "float32"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    app = typer.Typer()
    app.command()(main)

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


OF_HEADS = cases.ROTARY | cases.QK_NORM


def inputs_of(op, dtype):
    """Of a few rows of an odd length, or tokens with four heads of queries and one of keys, of 8 columns."""
    torch.manual_seed(0)
    return cases.ALL[op].inputs(5, 40 if op in OF_HEADS else 33, dtype, "cpu")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("op", cases.COMPARED)
@pytest.mark.parametrize("name", ["torch", "gander"])
def test_providers_compute_the_operator(name, op, dtype):
    inputs = inputs_of(op, cases.DTYPES[dtype])
    results = cases.provider(name).operators[op](*inputs)()
    wanted = cases.COMPARED[op].reference(*cases.double(inputs))
    assert min(len(results), len(wanted)) >= cases.COMPARED[op].checked
    for got, want in zip(results, wanted, strict=False):
        assert got.shape == want.shape
        if not want.is_floating_point():
            assert torch.equal(got, want)
            continue
        assert got.dtype in (inputs[0].dtype, torch.float32)
        assert (got.double() - want).norm() <= sections.WRONG[cases.DTYPES[dtype]] * want.norm()


@pytest.mark.parametrize("op", cases.PARTS)
def test_parts_that_gander_alone_has(op):
    inputs = inputs_of(op, torch.float32)
    got = cases.provider("gander").operators[op](*inputs)()
    assert sections._distance(op, inputs, got, 5) < sections.WRONG[torch.float32]


@pytest.mark.parametrize("op", cases.COMPARED)
def test_formulas_for_torch_compile_compute_the_operator(op, monkeypatch):
    monkeypatch.setattr(cases, "_compile", lambda function: function)
    inputs = inputs_of(op, torch.float32)
    results = cases._torch_compile().operators[op](*inputs)()
    wanted = cases.COMPARED[op].reference(*cases.double(inputs))
    checked = len(wanted) if op in cases.NORMS | OF_HEADS else 1
    for got, want in zip(results[:checked], wanted[:checked], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in cases.ROTARY if op.endswith("backward")])
def test_rotary_backward_is_the_gradient_of_forward(op):
    dq, dk, *tables = cases.double(inputs_of(op, torch.float32))
    forward = cases.ROTARY[op.replace("backward", "forward")].reference
    call = cases._backward_of(lambda q, k: forward(q, k, *tables), (dq, dk), (dq, dk))
    for got, want in zip(call(), cases.ROTARY[op].reference(dq, dk, *tables), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["torch", "gander", "gander-apart"])
def test_gradients_of_normalized_heads_are_those_of_autograd(name):
    inputs = inputs_of("qk_norm_rotary_backward", torch.float64)
    want = cases._qk_norm_rotary_gradient(cases._qk_norm_rotary)(*inputs)()
    for got in (
        cases.QK_NORM["qk_norm_rotary_backward"].reference(*inputs),
        cases.provider(name).operators["qk_norm_rotary_backward"](*inputs)(),
    ):
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other)


def test_heads_are_those_of_models():
    for (m, n), heads in zip(sections.TOKENS, ((32, 8), (32, 8), (32, 8), (32, 4)), strict=True):
        q, k, cos, sin = cases.ROTARY["rotary_forward"].inputs(m, n, torch.bfloat16, "meta")
        assert (q.shape, k.shape) == tuple((m, h, 128) for h in heads)
        assert cos.shape == sin.shape == (m, 128)
    halves = cases.ROTARY["rotary_partial_forward"].inputs(4, 5120, torch.bfloat16, "meta")
    assert halves[2].shape == halves[3].shape == (4, 64)


@pytest.mark.parametrize("op", [op for op in cases.NORMS if op.endswith("backward")])
def test_gradients_of_norms_are_those_of_autograd(op):
    """The formulas against torch's autograd in float64."""
    torch.manual_seed(0)
    inputs = cases.double(cases.NORMS[op].inputs(5, 33, torch.float32, "cpu"))
    if op.startswith("layernorm"):
        prepare = cases._layernorm_gradient(cases._layernorm)
    else:
        prepare = cases._rmsnorm_residual_gradient(cases._rmsnorm_residual)
    for got, want in zip(cases.NORMS[op].reference(*inputs), prepare(*inputs)(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # the statistics are float32


def test_what_is_written_in_place_is_a_copy():
    torch.manual_seed(0)
    inputs = cases.NORMS["fused_add_rmsnorm"].inputs(3, 40, torch.float16, "cpu")
    before = [t.clone() for t in inputs]
    calls = {
        name: cases.provider(name).operators["fused_add_rmsnorm"](*inputs) for name in ("torch", "gander")
    }
    for call in calls.values():
        assert sections._distance("fused_add_rmsnorm", inputs, call(), 3) < sections.WRONG[torch.float16]
        assert sections._distance("fused_add_rmsnorm", inputs, call(), 3) > 0.1  # of the second call
        for _ in range(150):
            results = call()
        assert all(result.isfinite().all() for result in results)
    assert all(torch.equal(t, was) for t, was in zip(inputs, before, strict=True))


def test_each_result_that_has_rows_is_checked():
    inputs = cases.NORMS["rmsnorm_residual_forward"].inputs(4, 8, torch.float32, "cpu")
    y, h = cases.NORMS["rmsnorm_residual_forward"].reference(*inputs)
    nan = float("nan")
    for given, off in (
        *(((y, h), 0), ((y, 2 * h), 1), ((2 * y, h), 1)),
        *(((y, nan * h), nan), ((nan * y, h), nan)),
    ):
        assert sections._distance("rmsnorm_residual_forward", inputs, given, 4) == pytest.approx(
            off, abs=1e-4, nan_ok=True
        )
    with pytest.raises(ValueError, match="is longer than"):
        sections._distance("rmsnorm_residual_forward", inputs, (y,), 4)


def test_records_resume_and_report(command):
    first = command("cpu", *SMALL, "--providers", "torch,gander", "--out", "a.jsonl", "--shard", "1/2")
    assert first.exit_code == 0, first.output
    assert len(lines("a.jsonl")) == 6
    second = command("cpu", *SMALL, "--providers", "torch,gander", "--out", "a.jsonl", "--resume")
    assert second.exit_code == 0, second.output
    found = lines("a.jsonl")
    assert len(found) == len({records.key(record) for record in found}) == 2 * len(cases.OPERATORS)
    for record in found:
        assert set(record["results"]) == {"torch", "gander"}
        for result in record["results"].values():
            assert min(result[field] for field in ("us", report.IN_TURNS, report.NEW_MEMORY)) > 0
        assert {"device", "torch", "gander", "commit", "python"} <= set(record["environment"])
        assert record["date"] and record["versions"]["torch"] == cases.provider_version("torch")
    shown = command("--report", "a.jsonl")
    assert shown.exit_code == 0
    assert "RMSNorm backward" in shown.output and "3 x 40" in shown.output
    assert Path("a-cpu-float32.png").read_bytes().startswith(b"\x89PNG")


def test_resume_measures_points_that_lack_a_provider(command):
    one = [
        "cpu",
        "--shapes",
        "3x4",
        "--ops",
        "softmax_forward",
        "--dtypes",
        "float32",
        "--seconds",
        "0",
        "--out",
        "a",
    ]
    command(*one, "--providers", "torch")
    command(*one, "--providers", "torch,gander", "--resume")
    assert [set(record["results"]) for record in lines("a")] == [{"torch"}, {"torch", "gander"}]
    assert [set(r["results"]) for r in report.latest(records.read(Path("a")))] == [{"torch", "gander"}]


def test_tables_have_one_order():
    points = [
        {"section": "throughput", "op": op, "dtype": dtype, "m": 2, "n": n}
        for op in ("softmax_forward", "rmsnorm_backward")
        for dtype in ("bfloat16", "float32")
        for n in (8, 4)
    ]
    load = {"section": "load"}
    assert report.latest([*reversed(points), load]) == [load, *(points[i ^ 1] for i in range(len(points)))]


def test_results_name_the_newest_run():
    """The newest run is not always that of a table's last row."""
    new, old = (
        gpu_records()[0] | {"op": op, "date": date}
        for op, date in (("softmax_forward", "2026-02"), ("rmsnorm_forward", "2026-01"))
    )
    new["environment"] = new["environment"] | {"driver": "590.2"}
    assert "driver 590.2" in results.document({"a.jsonl": [old, new]}, "a command")


def test_no_time_left(command):
    result = command("cpu", *SMALL, "--providers", "gander", "--out", "a.jsonl", "--limit-seconds", "-1")
    assert result.exit_code == 0
    assert "unfinished" in result.output and lines("a.jsonl") == []


def test_failures_are_recorded_and_the_rest_goes_on(command, monkeypatch):
    def broken(*inputs):
        raise torch.OutOfMemoryError("no room")

    def wrong(x):
        return lambda: (torch.softmax(x, -1) + 1,)

    monkeypatch.setitem(cases.provider("torch").operators, "rmsnorm_forward", broken)
    monkeypatch.setitem(cases.provider("gander").operators, "softmax_forward", wrong)
    result = command("cpu", *SMALL, "--providers", "torch,gander", "--out", "a.jsonl")
    assert result.exit_code == 0, result.output
    for record in lines("a.jsonl"):
        if record["op"] == "rmsnorm_forward":
            assert record["results"]["torch"] == {"error": "OutOfMemoryError: no room"}
        elif record["op"] == "softmax_forward":
            assert "wrong result" in record["results"]["gander"]["error"]
        else:
            assert "us" in record["results"]["torch"]


def test_what_is_not_installed_is_left_out(command, monkeypatch):
    def missing():
        raise ImportError("No module named 'quack'")

    monkeypatch.setitem(cases._PROVIDERS, "quack", (missing, "quack-kernels"))
    result = command(
        "cpu", "--providers", "gander,quack", "--shapes", "2x3", "--ops", "softmax_forward", "--out", "a"
    )
    assert "quack is left out: ImportError" in result.output
    assert list(lines("a")[0]["results"]) == ["gander"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["everything"], "everything is not one of host, load"),
        (["cpu", "--providers", "apex"], "apex is not one of torch"),
        (["cpu", "--shapes", "3by4"], "is not of the form"),
        (["cpu", "--shapes", "0x4"], "is not of the form"),
        (["cpu", "--shard", "3/2", "--out", "kept.jsonl"], "is not of the form 1/4"),
        (["cpu", "--resume", "--out", "torn.jsonl"], "torn.jsonl, line 1: "),
        (["--results", "RESULTS.md"], "needs --report"),
        (["--report", "nowhere.jsonl"], "there is no file"),
        (["--compare", "nowhere.jsonl"], "there is no file"),
    ],
)
def test_bad_options_are_refused(command, arguments, expected):
    Path("kept.jsonl").write_text("{}\n")
    Path("torn.jsonl").write_text("{\n{}\n")
    result = command(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())
    assert Path("kept.jsonl").read_text() == "{}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_throughput_needs_a_gpu(command):
    result = command("throughput", "cpu")
    assert result.exit_code == 2
    assert "throughput need a GPU" in " ".join(result.output.replace("│", " ").split())


def test_algorithms_are_points_of_their_own():
    points = list(sections.algorithms(sections.Options(providers=("gander",), dtypes=("bfloat16",))))
    shapes = {(point.name["m"], point.name["n"]) for point in points}
    assert shapes == {*sections.PUBLISHED, *sections.TRAINING} and len(points) == 4 * len(shapes)
    _, *forced = gander.algorithms("softmax")  # the first is auto
    assert points[0].providers == ("gander", *(f"gander:{algorithm.name}" for algorithm in forced))
    inputs = cases.OPERATORS["rmsnorm_backward"].inputs(2, 8, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match='algorithm is "warp" on cpu'):
        cases.provider("gander:warp").operators["rmsnorm_backward"](*inputs)()


def test_table_of_algorithms():
    base = {
        "section": "algorithms",
        "op": "softmax_forward",
        "dtype": "bfloat16",
        "environment": {"device": "a", "torch": "b"},
        "date": "2026-01-01",
    }
    refusal = {"error": 'NotImplementedError: softmax_forward: algorithm "warp" holds ...'}
    results = {
        "gander": {"us": 10.2},
        "gander:warp": refusal,
        "gander:block": {"us": 10.0},
        "gander:register": {"error": "X"},
    }
    slow = results | {"gander": {"us": 10.4}}
    records = [
        base | {"m": 4, "n": 4096, "results": results, "taken": "register"},
        base | {"m": 4, "n": 8192, "results": slow, "taken": "block"},
    ]
    (table,) = report.algorithms_tables(records)
    assert table.columns == [
        "operator",
        "M x N",
        "auto",
        "warp",
        "block",
        "register",
        "auto / best",
        "at most",
        "auto takes",
    ]
    assert table.rows[0] == [
        "softmax forward",
        "4 x 4096",
        "10.2",
        "",
        "10.0",
        "failed",
        "1.020",
        "1.03 met",
        "register",
    ]
    assert table.rows[1][-3:] == ["1.040", "1.03 MISSED", "block"]


def test_what_batch_invariance_costs():
    options = sections.Options(providers=("torch",))
    points = list(sections.invariant(options))
    assert {p.name["op"] for p in points} == set(cases.BATCH_INVARIANT)
    assert {p.providers for p in points} == {("gander", "gander-batch-invariant")}
    base = gpu_records()[0] | {"section": "invariant", "m": 4}
    both = {"gander": timing_of(10.0), "gander-batch-invariant": timing_of(12.0)}
    (table,) = report.invariant_tables(
        [base | {"results": both}, base | {"m": 1, "results": {"gander": {"error": "X"}}}]
    )
    assert table.rows == [["softmax forward", "12.0 (1.20)", "-"]]


@pytest.mark.parametrize("op", cases.BATCH_INVARIANT)
def test_batch_invariant_operators(op):
    x = cases.ALL[op].inputs(7, 40, torch.float32, "cpu")
    got, want = (cases.provider(name).operators[op](*x)()[0] for name in ("gander-batch-invariant", "gander"))
    assert torch.equal(got, want)


def test_host_modes_differentiate():
    options = sections.Options(providers=("torch", "gander"))
    points = {(p.name["op"], p.name["mode"]) for p in sections.host(options)}
    assert points >= set(report.HOST_TARGETS)
    x, weight, target = torch.randn(4, 8), torch.ones(8), torch.randint(8, (4,))
    for name, leaves in (("softmax", 1), ("rmsnorm", 2), ("cross_entropy", 1)):
        function = cases.provider("gander").functions[name]
        make = [
            sections._host_call(function, name, mode, x, weight, target)
            for mode in ("forward", "with gradient")
        ]
        assert [call().requires_grad for call in make] == [False, True]
        both = sections._host_call(function, name, "forward and backward", x, weight, target)
        assert len(both()) == leaves


def test_providers_measure_what_they_have(monkeypatch):
    monkeypatch.setitem(
        cases._PROVIDERS, "cudnn", (lambda: cases.Provider({}, {"rmsnorm_forward": None}), None)
    )
    monkeypatch.setattr(cases, "provider", functools.cache(cases.provider.__wrapped__))
    monkeypatch.setattr(sections, "provider", cases.provider)
    options = sections.Options(providers=("gander", "cudnn"))
    having = {(p.name["op"], p.providers) for p in sections.odd(options)}
    assert having == {
        (op, ("gander", "cudnn") if op == "rmsnorm_forward" else ("gander",)) for op in cases.OPERATORS
    }
    assert list(sections.odd(sections.Options(("cudnn",), operators=("softmax_forward",)))) == []
    assert {p.providers for p in sections.step(options)} == {
        ("gander", "gander-two-passes", "gander-upstream", "gander-remember")
    }
    assert {p.name["mode"] for p in sections.step(options)} == set(sections.STEPS) == set(report.STEP_TITLES)
    chunks = ("gander-1-chunks", "gander-2-chunks", "gander-8-chunks")
    linear = ("gander", *chunks, "gander-float32", "gander-outputs")
    assert {p.providers for p in sections.linear(options)} == {linear}
    assert {p.providers for p in sections.head(options)} == {("gander", "gander-kept")}
    assert {p.name["mode"] for p in sections.head(options)} == set(sections.HEADS)
    assert {p.providers for p in sections.sharded(options)} == {("gander-two-passes", "gander-sharded")}
    assert {p.name["op"] for p in sections.sharded(options)} == set(sections.SHARDED)
    assert {p.providers for p in sections.host(options)} == {("gander",)}
    both = sections.Options(providers=("torch.compile", "gander"))
    compiled = {"torch.compile", "gander.compile", "gander-one-pass.compile"}
    assert all(compiled < {*p.providers} for p in sections.step(both))
    assert {p.providers for p in sections.host(both)} == {("torch.compile", "gander", "gander.compile")}


def test_host_table_compares_what_is_compiled():
    results = {
        name: timing_of(us)
        for name, us in (("torch.compile", 20.0), ("gander.compile", 15.0), ("gander", 4.0))
    }
    (table,) = report.host_tables([gpu_records()[2] | {"results": results}])
    assert table.columns[-1] == "both compiled"
    assert [row[-1] for row in table.rows] == ["0.75"]


def test_points_of_norms():
    points = list(sections.norms(sections.Options(providers=("torch", "gander"), run=2)))
    assert {p.providers for p in points} == {("torch", "gander")}
    assert {p.name["op"] for p in points} == set(cases.NORMS)
    assert len({records.key(p.name) for p in points}) == len(points)
    assert all(p.name["section"] == "norms" and p.name["run"] == 2 for p in points)
    by_op = {op: [p.name for p in points if p.name["op"] == op] for op in cases.NORMS}
    served = by_op.pop("fused_add_rmsnorm")
    assert {p["dtype"] for p in served} == {"bfloat16", "float16"}
    assert {(p["m"], p["n"]) for p in served} == {
        (m, n) for m in (1, 8, 64, 512) for n in (4096, 5120, 7168, 16384)
    }
    for op, mine in by_op.items():
        assert {p["dtype"] for p in mine} == {"bfloat16", "float32"}
        lengths = {p["n"] for p in mine}
        assert lengths == set(sections.NORM_LENGTHS) - ({256} if op.endswith("backward") else set())
        for p in mine:
            share = models.share_of_limit(op, p["dtype"], p["m"], p["n"])
            assert p["m"] * p["n"] * models.BYTES[p["dtype"]] >= 64 << 20 and share is not None
    chosen = sections.Options(("gander",), ("layernorm_forward",), ("float16",), ((3, 40),))
    assert [p.name for p in sections.norms(chosen)] == [
        {"section": "norms", "op": "layernorm_forward", "dtype": "float16", "m": 3, "n": 40, "run": 1}
    ]


def measured_on_the_cpu(monkeypatch, operators):
    """Has sections of the GPU run on the CPU, with times that are not measured. Returns what the limit's
    kernels would move: the traffic, and the tensors of each call."""

    def on_the_cpu(operator):
        return replace(operator, inputs=lambda m, n, dtype, device: operator.inputs(m, n, dtype, "cpu"))

    def times(calls, seconds, least=10, together=None):
        for call in calls.values():
            call()
        return {name: timing.Timing(1.0 + i, 0.5, 9.0, least) for i, name in enumerate(calls)}

    times.pause_us = 40
    read = []
    for op, operator in operators.items():
        monkeypatch.setitem(sections.ALL, op, on_the_cpu(operator))
    monkeypatch.setattr(sections, "NEEDS_GPU", ())
    monkeypatch.setattr(sections, "_gpu_timer", lambda: times)
    monkeypatch.setattr(
        limit, "launches", lambda *arguments: read.append(arguments) or {"1 x 128": lambda: None}
    )
    return read


def test_points_of_rotary(command, monkeypatch):
    """The command from end to end. The limit moves all heads, and one table for the two that are read."""
    moved = measured_on_the_cpu(monkeypatch, OF_HEADS)
    chosen = ["--shapes", "3x40", "--dtypes", "bfloat16", "--providers", "torch,gander,gander-apart"]
    result = command("rotary", *chosen, "--out", "a")
    assert result.exit_code == 0, result.output
    found = lines("a")
    assert [record["op"] for record in found] == list(OF_HEADS)
    for record, (traffic, (tensor, *more)) in zip(found, moved, strict=True):
        table = 3 * (4 if "partial" in record["op"] else 8)
        assert traffic == ("rrw" if more else "rw") and tensor.numel() == 3 * 40 + table
        assert bool(more) == (record["op"] == "qk_norm_rotary_backward")
        assert ("gander-apart" in record["results"]) == (record["op"] in cases.QK_NORM)
        assert all(figures["off"] < 2e-2 and figures["us"] for figures in record["results"].values())
        us = record["results"]["torch"]["us"]
        bytes_moved = len(traffic) * 2 * tensor.numel()
        assert record["results"]["torch"]["tbps"] == round(bytes_moved / us / 1e6, 4)
    shown = command("--report", "a", "--no-plots")
    assert shown.exit_code == 0 and "Rotary embeddings: rotary of half of the columns" in shown.output
    points = list(sections.rotary(sections.Options(("torch", "gander"), run=2)))
    assert len(points) == len(OF_HEADS) * 2 * len(sections.TOKENS)
    assert len({records.key(point.name) for point in points}) == len(points)


def test_points_of_options(command, monkeypatch):
    """The command from end to end. The limit with a gradient reads two tensors."""
    operators = cases.OPTIONED | cases.PROBABILITIES
    moved = measured_on_the_cpu(monkeypatch, operators | cases.OPERATORS)
    chosen = ["options", "--shapes", "3x40", "--dtypes", "float32", "--providers", "torch,gander"]
    for resume in ([], ["--resume"]):
        result = command(*chosen, "--out", "a", *resume)
        assert result.exit_code == 0, result.output
    found = lines("a")
    assert [record["op"] for record in found] == list(operators)
    for record, (traffic, read) in zip(found, moved, strict=True):
        of_probabilities = record["op"] in cases.PROBABILITIES
        forward = "rr" if of_probabilities else "r"
        assert traffic == (forward if record["op"].endswith("forward") else "rrw") and len(read) in (1, 2)
        plain = () if of_probabilities else ("gander-plain",)
        assert set(record["results"]) == {"torch", "gander", *plain}
        assert all(figures["off"] < 1e-4 and figures["us"] for figures in record["results"].values())
    shown = command("--report", "a", "--no-plots")
    assert shown.exit_code == 0 and "cross-entropy with a z-loss, forward" in shown.output
    points = list(sections.loss_options(sections.Options(("gander",))))
    assert len(points) == len({records.key(point.name) for point in points}) == 12 * 2 * len(sections.LOSSES)
    assert {point.providers for point in points} == {("gander", "gander-plain"), ("gander",)}


def options_record(op, mine, m=8192):
    """gander's time over the limit's, of 10 us."""
    name = {"section": "options", "op": op, "m": m, "n": 128256}
    figures = {
        "gander": timing_of(10 * mine, ratio=1 / mine),
        "gander-plain": timing_of(8.0),
        "liger": timing_of(30.0),
    }
    return gpu_records()[0] | name | {"results": figures, "limit": timing_of(10.0)}


def test_what_options_of_a_loss_cost():
    forward = options_record("cross_entropy_softcap_forward", 1.2)
    both = options_record("cross_entropy_softcap_loss_gradient", 1.2)
    others = [
        options_record("cross_entropy_softcap_forward", 9, m=8),
        options_record("cross_entropy_options_forward", 9),
    ]
    (table,) = report.tables([forward, both, *others])
    assert table.columns[2:] == [
        "limit", "gander", "gander-plain", "liger", "over plain", "over the limit", "at most",
        "times the best other",
    ]  # fmt: skip
    figures = ["10.0", "12.0", "8.0", "30.0", "1.500", "1.200"]
    assert rows_of(table)["cross-entropy with a cap, forward", "8192 x 128256"] == [
        *figures, "1.3 met", "2.50",
    ]  # fmt: skip
    assert rows_of(table)["cross-entropy with a cap, loss + gradient", "8192 x 128256"][-2:] == [
        "1.05 MISSED", "2.50",
    ]  # fmt: skip
    found = results.checks([forward, both, *others])
    assert [(check.op, check.met()) for check in found] == [
        ("cross_entropy_softcap_forward", True),
        ("cross_entropy_softcap_loss_gradient", False),
    ]


def test_norms_resume_and_report(command, monkeypatch):
    """The command from end to end, with inputs on the CPU, and times that are not measured."""
    read = measured_on_the_cpu(monkeypatch, cases.NORMS)
    which = ["norms", "--shapes", "3x40", "--dtypes", "float16", "--providers", "torch,gander", "--out", "a"]
    for arguments in (["--run", 1, "--shard", "1/2"], ["--run", 1, "--resume"], ["--run", 2, "--resume"]):
        result = command(*which, *arguments)
        assert result.exit_code == 0, result.output
    found = lines("a")
    assert [record["run"] for record in found] == [1] * 6 + [2] * 6
    assert {record["op"] for record in found} == set(cases.NORMS)
    for record in found:
        assert set(record["results"]) == {"torch", "gander"}
        assert all(result["off"] < 3e-3 and result["us"] for result in record["results"].values())
        assert record["limit"]["kernel"] == "1 x 128" and record["pause_us"] == 40
    assert {(traffic, len(tensors)) for traffic, tensors in read} == {
        (operator.traffic, operator.traffic.count("r")) for operator in cases.NORMS.values()
    }
    # In those runs gander takes twice torch's time. From here on it takes as long, and so decides each point.
    again = [*which, "--run", 3, "--resume", "--missed", "--ops", "layernorm_forward,fused_add_rmsnorm"]

    def equal_times(calls, seconds, least=10, together=None):
        return dict.fromkeys(calls, timing.Timing(1.0, 0.5, 9.0, least))

    equal_times.pause_us = 40
    monkeypatch.setattr(sections, "_gpu_timer", lambda: equal_times)
    assert command(*again[:-1], "layernorm_forward").exit_code == 0
    assert [record["op"] for record in lines("a")[12:]] == ["layernorm_forward"]
    assert command(*again, "--run", 4).exit_code == 0
    assert [(record["op"], record["run"]) for record in lines("a")[13:]] == [("fused_add_rmsnorm", 4)]
    assert command(*again, "--run", 5).exit_code == 0 and len(lines("a")) == 14
    assert command(*again[:-2], "--run", 5).exit_code == 0 and command(*which, "--missed").exit_code != 0
    assert len(lines("a")) == 18  # the other four operators
    shown = command("--report", "a", "--no-plots")
    assert shown.exit_code == 0 and "Norms: LayerNorm backward (dx, dw, db)" in shown.output
    only = command(*which[:-2], "--ops", "layernorm_forward", "--out", "b")
    assert only.exit_code == 0 and [record["op"] for record in lines("b")] == ["layernorm_forward"]


def norms_records(op, m, *runs):
    """A record for each run: the times of gander, torch and the limit in us."""
    name = {"section": "norms", "op": op, "m": m}
    return [
        gpu_records()[0]
        | name
        | {"run": run, "limit": timing_of(limit_us, tbps=4.0)}
        | {
            "results": {
                "torch": timing_of(theirs, tbps=1.5),
                "gander": timing_of(mine, tbps=3.5, ratio=limit_us / mine),
                "quack": {"error": "X"},
            }
        }
        for run, (mine, theirs, limit_us) in enumerate(runs, 1)
    ]


def test_tables_of_norms():
    forward = norms_records(
        "layernorm_forward", 32768, (100.0, 200.0, 97.0), (99.0, 210.0, 97.0), (101, 1, 97)
    )
    served = norms_records("fused_add_rmsnorm", 8, (5.0, 9.0, 4.0))
    first, second = report.tables([*forward, *served])
    assert first.title.startswith("Norms: LayerNorm forward, TB/s, bfloat16")
    assert first.columns == [
        "M x N", "limit", "torch", "gander", "quack", "gander / limit", "times the best other",
    ]  # fmt: skip
    assert first.rows == [["32768 x 4096", "4.00", "1.50", "3.50", "failed", "0.970", "2.00"]]
    assert second.title.startswith("Norms: RMSNorm of x + residual, in place, us")
    assert second.rows == [["8 x 4096", "4.0", "9.0", "5.0", "failed", "0.800", "1.80"]]
    text = results.document({"a.jsonl": [*forward, *served]}, "a command")
    assert "| 32768 x 4096 | 4.00 | 1.50 | 3.50 | failed | 0.970 | 2.00 |" in text
    assert "| norms: LayerNorm forward | torch |" in text


@pytest.mark.parametrize(
    ("op", "m", "run", "missed"),
    [
        ("layernorm_forward", 32768, (100.0, 200.0, 96.0), []),
        ("layernorm_forward", 32768, (100.0, 200.0, 94.0), ["share of the limit, norms"]),
        ("layernorm_forward", 32768, (100.0, 97.0, 96.0), ["speed over the best other's, norms"]),
        ("rmsnorm_residual_backward", 32768, (100.0, 200.0, 89.0), ["share of the limit, norms"]),
        ("layernorm_backward", 32768, (100.0, 200.0, 89.0), []),
        ("fused_add_rmsnorm", 8, (5.0, 4.8, 1.0), []),
        ("fused_add_rmsnorm", 8, (5.0, 4.6, 1.0), ["speed over the best other's, norms"]),
    ],
)
def test_norms_are_judged_as_models_are(op, m, run, missed):
    few = results.checks(norms_records(op, m, run, run))
    assert [c.target for c in few if not c.met()] == missed
    assert all(c.point.endswith(", 2 of 3 runs") != c.met() for c in few)
    found = results.checks(norms_records(op, m, run, run, run))
    assert [check.target for check in found if not check.met()] == missed
    assert not any(check.point.endswith("runs") for check in found)
    assert models.is_undecided(norms_records(op, m, run)) == bool(missed)
    assert len(found) == (1 if op == "fused_add_rmsnorm" else 2)


@pytest.mark.parametrize(
    "name",
    [
        *("torch", "gander", "gander-two-passes", "gander-upstream", "gander-remember"),
        *("gander.compile", "gander-one-pass.compile"),
    ],
)
@pytest.mark.parametrize("mode", sections.STEPS)
def test_steps_give_the_gradient(name, mode):
    torch.manual_seed(0)
    x, target = torch.randn(5, 33, requires_grad=True), torch.randint(33, (5,))
    function = cases.provider(name).functions["cross_entropy"]
    call = sections._step_call(function, mode, x, target, told=name in sections._TOLD)
    assert call.factor == (65536 if mode == "scaled" else sections.STEPS[mode])
    for _ in range(2):  # the second call must not accumulate into the first one's gradient
        assert sections._step_distance(x, target, call(), call.factor) < 1e-5
    assert sections._step_distance(x, target, 1.1 * call(), call.factor) > 0.05


def test_first_calls_in_this_process(monkeypatch):
    monkeypatch.setattr(load, "_NEW", (3, 5))
    figures = load.measure("gander")
    assert set(figures) == {"library", *load.FUNCTIONS}
    assert all(len(figures[name]["new"]) == 2 for name in load.FUNCTIONS)


def test_median_of_nested_figures():
    runs = [{"a": 1, "b": {"new": [1, 9]}}, {"a": 3, "b": {"new": [2, 8]}}, {"a": 2, "b": {"new": [3, 7]}}]
    assert sections._median(runs) == {"a": 2, "b": {"new": [2, 8]}}


def test_timings():
    assert timing.Timing.of([float(i) for i in range(11)]) == (5.0, 1.0, 9.0, 11)
    calls = []
    figures = timing.host_cost(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        lambda: None,
        seconds=0,
        least=3,
        batch=2,
    )
    assert figures["a"].repeats == figures["b"].repeats == 3
    assert calls[4:] == [
        "a",
        "a",
        "b",
        "b",
        "b",
        "b",
        "a",
        "a",
        "a",
        "a",
        "b",
        "b",
    ]  # in turns, after warming up


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    whole = {
        "section": "cpu",
        "op": "softmax_forward",
        "dtype": "float32",
        "m": 1,
        "n": 2,
        "results": {"torch": {}},
    }
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:30])
    store = records.Store(path, resume=True)
    assert store.has(whole, ["torch"]) and not store.has(whole | {"n": 3}, ["torch"])
    assert path.read_text() == json.dumps(whole) + "\n"


def test_a_line_that_is_no_record_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"m": 1}\n{"m"\n{"m": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: "):
        records.read(tmp_path / "a.jsonl")


def test_limit_kernels_compile():
    image = limit.compiled("sm_90")
    assert image.startswith(b"\x7fELF")
    assert {operator.traffic for operator in cases.ALL.values()} == set(limit.TRAFFICS)
    for traffic in limit.TRAFFICS:
        assert all(b"\0%s_%d\0" % (traffic.encode(), unroll) in image for unroll in limit._UNROLLS)


@pytest.mark.parametrize("op", cases.ALL)
def test_inputs_have_the_tensors_that_the_limit_reads(op):
    inputs = cases.ALL[op].inputs(3, 8, torch.float32, "cpu")
    assert sum(t.shape == inputs[0].shape for t in inputs) == cases.ALL[op].traffic.count("r")
    assert {i for i, t in enumerate(inputs) if t.shape[0] != 3} == set(cases.ALL[op].shared)


def timing_of(us, **more):
    return {"us": us, "low": us - 0.1, "high": us + 0.1} | more


def step_record():
    figures = {
        "torch": timing_of(30.0, ratio=0.5) | {"peak MiB": 600.0, "peak / logits": 3.0},
        "gander": timing_of(16.0, ratio=0.94) | {"peak MiB": 200.0, "peak / logits": 1.0},
        "gander-two-passes": timing_of(24.0) | {"peak MiB": 200.0, "peak / logits": 1.0},
        "liger": {"error": "E"},
    }
    name = {
        "section": "step",
        "op": "cross_entropy",
        "mode": "a quarter",
        "dtype": "bfloat16",
        "m": 8,
        "n": 9,
    }
    return gpu_records()[0] | name | {"results": figures, "limit": timing_of(15.0)}


def rows_of(table):
    return {tuple(row[:2]): row[2:] for row in table.rows}


def test_tables_of_steps():
    (table,) = report.tables([step_record()])
    assert rows_of(table) == {
        ("(loss / 4).backward()", "torch"): ["30.0", "0.500", "600", "3.00"],
        ("(loss / 4).backward()", "gander"): ["16.0", "0.940", "200", "1.00"],
        ("(loss / 4).backward()", "gander-two-passes"): ["24.0", "-", "200", "1.00"],
        ("(loss / 4).backward()", "liger"): ["failed"] * 4,
    }


def test_gradients_of_a_linear_loss():
    torch.manual_seed(0)
    inputs = losses.linear_inputs(7, 5, 11, torch.float32, "cpu")
    wanted = losses.linear_reference(*inputs)
    names = ["torch", "gander", *(n for n in cases.PROVIDERS if n.startswith("gander-") and "chunks" in n)]
    for name in [*names, "gander-float32", "gander-outputs"]:
        call = losses.linear_gradients(cases.provider(name).functions["linear_cross_entropy"], *inputs)
        for _ in range(2):
            for got, want in zip(call(), wanted, strict=True):
                assert got.dtype == torch.float32 and losses.off(got, want) < 1e-6
    assert losses.off(1.1 * wanted[0], wanted[0]) == pytest.approx(0.1)
    for again in False, True:
        dx, dw = losses.matmuls(*inputs[:2], again=again)()
        assert (dx.shape, dw.shape) == (inputs[0].shape, inputs[1].shape)
    (dx,) = losses.matmuls(*inputs[:2], trained=False)()
    assert dx.shape == inputs[0].shape


@pytest.mark.parametrize("mode", sections.HEADS)
@pytest.mark.parametrize("name", ["torch", "gander", "gander-kept"])
def test_gradients_of_a_head(name, mode):
    torch.manual_seed(0)
    how = sections.HEADS[mode]
    inputs = losses.linear_inputs(7, 5, 11, torch.float32, "cpu")
    wanted = losses.statistics_reference(*inputs, **how)
    function = cases.provider(name).functions["linear_token_statistics"]
    call = losses.statistics_gradients(function, *inputs, **how)
    for _ in range(2):
        made = call()
        assert len(made) == len(wanted) == 1 + how["trained"]
        assert all(losses.off(got, want) < 1e-6 for got, want in zip(made, wanted, strict=True))


def test_a_rank_alone():
    with losses.group("cpu") as ranks:
        assert ranks == losses.ranks() == 1
        assert losses.all_gather(5, "cpu")() is None
        x, target = losses.slice_inputs(5, 33, torch.float32, "cpu")
        for op, name in itertools.product(sections.SHARDED, ("gander-sharded", "gander-two-passes")):
            call, off = sections.sharded_call(op, cases.provider(name).functions, x, target)
            assert off < 1e-5 and call()[0].shape == x.shape
    assert not torch.distributed.is_initialized()


def linear_record():
    def figures(us, mib, dx, dw, ratio=0.5):
        return timing_of(us, ratio=ratio) | {"peak MiB": mib, "dx off": dx, "dw off": dw}

    name = {"section": "linear", "op": "linear_cross_entropy", "dtype": "bfloat16", "m": 8, "n": 9}
    measured = {
        "torch": figures(40.0, 900.0, 1e-3, 1e-3),
        "gander": figures(36.0, 90.0, 1e-3, 3e-3, 0.9),
        "gander-1-chunks": figures(30.0, 350.0, 1e-3, 1e-3, 0.99),
        "quack": figures(35.0, 300.0, 1e-3, 1e-3),
        "liger": {"error": "E"},
    }
    return gpu_records()[0] | name | {"results": measured, "limit": timing_of(32.4)}


def test_table_of_the_linear_loss():
    (table,) = report.tables([linear_record()])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["three matmuls alone"] == ["32", "-", "-", "-", "-"]
    assert rows["gander"] == ["36", "0.900", "90", "1.00e-03", "3.00e-03"]
    assert rows["liger"] == ["failed"] * 5


def test_targets_of_the_linear_loss():
    found = {check.target: check for check in results.checks([linear_record()])}
    assert found["gander: time over the matmuls'"].measured == pytest.approx(1 / 0.9)
    assert not found["gander: time over the matmuls'"].met()
    assert found["gander-1-chunks: time over the matmuls'"].met()
    assert found["gander-8-chunks: time over the matmuls'"].measured is None  # it was not run
    assert found["gander: error of dx over torch's"].met()
    assert not found["gander: error of dw over torch's"].met()
    # The faster one takes more than a third of the memory.
    quack = found["speed over quack's, in a third of its memory"]
    assert quack.measured == pytest.approx(35 / 36) and not quack.met()


def head_record(mode):
    def figures(us, kept, again, mib, dx, dw):
        return timing_of(us) | {
            "over kept": kept,
            "over again": again,
            "peak MiB": mib,
            "dx off": dx,
            "dw off": dw,
        }

    name = {"section": "head", "op": "linear_token_statistics", "dtype": "bfloat16", "m": 8, "n": 9}
    measured = {
        "torch": figures(60.0, 2.0, 1.5, 900.0, 1e-3, 1e-3),
        "gander": figures(42.0, 1.4, 1.05, 500.0, 1e-3, 1.2e-3),
        "gander-kept": figures(33.0, 1.1, 0.825, 700.0, 1e-3, 1e-3),
        "trl": {"error": "E"},
    }
    alone = {"kept": timing_of(30.0), "again": timing_of(40.0)}
    return gpu_records()[0] | name | {"mode": mode, "results": measured, "matmuls": alone}


def test_table_of_a_head():
    (table,) = report.tables([head_record("frozen")])
    assert "frozen, bfloat16, 8 x 9" in table.title
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["matmuls alone, logits again"] == ["40", "-", "-", "-", "-", "-"]
    assert rows["gander"] == ["42", "1.400", "1.050", "500", "1.00e-03", "1.20e-03"]
    assert rows["trl"] == ["failed"] * 6


def test_targets_of_a_head():
    found = {check.target: check for check in results.checks([head_record("trained")])}
    assert found["gander, trained: time over the matmuls', logits again"].met()
    assert not found["gander-kept, trained: time over the matmuls', logits kept"].met()
    assert found["gander, trained: error of dx over torch's"].met()
    assert not found["gander, trained: error of dw over torch's"].met()
    assert found["gander, trained: MiB beside the gradients"].met()
    found = {check.target: check for check in results.checks([head_record("frozen, log_prob")])}
    assert not found["gander, frozen, log_prob: time over the matmuls', logits kept"].met()


def test_slices_of_several_ranks():
    name = {"section": "sharded", "op": "token_statistics", "dtype": "bfloat16", "m": 8, "n": 9, "ranks": 2}
    measured = {"gander-sharded": timing_of(170.0) | {"peak MiB": 0.4}, "liger": {"error": "E"}}
    record = gpu_records()[0] | name | {"results": measured, "collective": timing_of(4.0)}
    record["limit"] = timing_of(100.0)
    (table,) = report.tables([record])
    assert "divided among 2 ranks" in table.title
    assert [row[2:] for row in table.rows] == [
        ["two reads and a write alone", "100", "-"],
        ["the all-gather alone", "4", "-"],
        ["gander-sharded", "170", "0"],
        ["liger", "failed", "failed"],
    ]
    (check,) = results.checks([record])
    assert check.measured == pytest.approx(1.1) and not check.met()
    record["limit"] = timing_of(110.0)
    assert results.checks([record])[0].met()
    del measured["gander-sharded"]
    assert not results.checks([record])[0].met()


def test_a_slice_beside_its_collective():
    name = {"section": "sharded", "op": "cross_entropy", "dtype": "bfloat16", "m": 8, "n": 9}
    measured = {"gander-two-passes": timing_of(100.0), "gander-sharded": timing_of(110.0)}
    record = gpu_records()[0] | name | {"results": measured, "collective": timing_of(4.0)}
    (table,) = report.tables([record])
    assert table.rows == [["bfloat16", "8 x 9", "100.0", "110.0", "4.0", "1.060"]]
    (check,) = results.checks([record])
    assert check.measured == pytest.approx(1.06) and not check.met()
    measured["gander-sharded"] = {"error": "E"}
    assert not results.checks([record])[0].met()
    assert report.tables([record])[0].rows[0][-1] == "-"


@pytest.mark.parametrize("way", ["upstream", "remember"])
@pytest.mark.parametrize("us, met", [(16.5, True), (17.0, False)])
def test_what_upstream_costs_is_checked(us, met, way):
    told = step_record()
    told["results"][f"gander-{way}"] = timing_of(us)
    checks = results.checks([step_record() | {"mode": "backward"}, told])
    found = [check for check in checks if check.target == f"time with {way} over the single pass"]
    assert [(check.measured, check.met()) for check in found] == [(us / 16, met)]
    assert "a quarter" in found[0].point


def test_providers_have_no_row_where_they_have_nothing():
    only = gpu_records()[0] | {"op": "rmsnorm_forward", "results": {"cudnn": {"us": 1.0, "tbps": 1.0}}}
    (table,) = report.tables([gpu_records()[0], only])
    assert [row[:2] for row in table.rows if row[1] in ("torch", "gander", "cudnn")] == [
        ["softmax forward", "torch"], ["softmax forward", "gander"], ["RMSNorm forward", "cudnn"],
    ]  # fmt: skip


def test_summary_of_all_points():
    fast = gpu_records()[0]
    slow = fast | {
        "n": 8192,
        "results": {"torch": {"us": 5.0}, "gander": {"us": 10.0}, "quack": {"error": "X"}},
    }
    failed = fast | {"n": 16384, "results": {"torch": {"error": "X"}, "gander": {"us": 1.0}}}
    (table,) = report.summary([fast, slow, failed, step_record()])
    assert rows_of(table) == {
        ("throughput: softmax forward", "torch"): ["1.00", "2", "0.50", "bfloat16, 32768 x 8192"],
        ("step: cross-entropy", "torch"): ["1.88", "1", "1.88", "bfloat16, a quarter, 8 x 9"],
    }
    assert report.summary([failed]) == []


def test_comparison_with_another_run():
    """Compares ratios to the limit, because the whole machine may have become slower. Only differences larger
    than the spread count."""

    def run(*gander, machine=1.0):
        base = gpu_records()[0]
        return [
            base | {"n": n, "results": {"gander": timing_of(us * machine)}, "limit": timing_of(9.0 * machine)}
            for n, us in enumerate(gander)
        ]

    (table,) = report.comparison(run(10.0, 10.2, 12.0, 8.0, 7.0, machine=2.0), run(10.0, 10.0, 10.0, 10.0))
    assert [row[4:] for row in table.rows] == [
        ["1.000", ""],
        ["0.980", ""],
        ["0.833", "SLOWER"],
        ["1.250", "faster"],
    ]
    assert "4 points" in table.note
    host = gpu_records()[2] | {"results": {"torch": timing_of(10.0), "gander": timing_of(5.0)}}
    (table,) = report.comparison([host], [host, gpu_records()[3]])
    assert table.rows == [["host: softmax", "forward", "2.000", "2.000", "1.000", ""]]
    assert report.comparison(gpu_records()[:1], [host]) == []


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra `demo`")
    few = gpu_records()[0] | {"section": "few", "m": 4}
    made = plots.draw([*gpu_records(), few, step_record()], tmp_path / "a.jsonl")
    assert [path.name for path in made] == [
        "a-throughput-bfloat16.png", "a-few-bfloat16.png", "a-host.png", "a-step.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def drawn(figure):
    """What the panels of a figure show: by title the axes' labels, and points by name."""
    return {
        axes.get_title(): (
            axes.get_xlabel(),
            axes.get_ylabel(),
            {
                line.get_label(): [
                    tuple(round(float(value), 3) for value in point) for point in line.get_xydata()
                ]
                for line in axes.lines
            },
        )
        for axes in figure.axes
    }


def test_the_picture_of_a_cpu_counts_bytes():
    """Regression test: microseconds over M, where the same M stood for tensors of different sizes."""
    pytest.importorskip("matplotlib", reason="pictures need the extra `demo`")
    record = cpu_record()  # 64 x 4096 float32: 1 MiB, and as much written
    found = [record, record | {"m": 4096, "n": 512, "results": {"gander": timing_of(20.0)}}]
    found.append(record | {"m": 1024, "results": {"gander": timing_of(100.0)}})
    ((_, title, panels),) = plots._pictures(found)
    assert title == "CPU, float32, 2 threads"
    figure = plots._figure(found, title, panels)
    (axes,) = figure.axes
    (across, up, lines) = drawn(figure)["RMSNorm forward"]
    assert (across, up) == ("size of a tensor, rows of 4096", "GB/s")
    assert lines["gander"] == [(2.0**20, round(2**21 / 10e3, 3)), (2.0**24, round(2**25 / 100e3, 3))]
    assert (2.0**23, round(2**24 / 20e3, 3)) in [point for points in lines.values() for point in points]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 MiB", "8 MiB"]
    assert [text.get_text() for text in axes.texts] == ["N = 512"]


def test_binary_sizes():
    sizes = [plots.binary_size(size) for size in (512, 1024, 3 << 19, 256 << 20, 1 << 31)]
    assert sizes == ["512 B", "1 KiB", "1.5 MiB", "256 MiB", "2 GiB"]


def test_pictures_for_a_notebook():
    pytest.importorskip("matplotlib", reason="pictures need the extra `demo`")
    ((across, up, lines),) = drawn(plots.throughput([cpu_record()], "a")).values()
    assert (across, up) == ("N", "GB/s") and lines["torch"] == [(4096.0, round(2**21 / 14e3, 3))]
    ((_, _, lines),) = drawn(plots.throughput([cpu_record()], "a", "low")).values()
    assert lines["torch"] == [(4096.0, round(2**21 / 13.9e3, 3))]
    ((across, up, lines),) = drawn(plots.cpu([cpu_record()], "a")).values()
    assert across == "size of a tensor, rows of 4096" and up == "GB/s" and {"torch", "gander"} <= set(lines)
    on_a_gpu = gpu_records()[0]
    ((across, up, lines),) = drawn(plots.throughput([on_a_gpu], "a")).values()
    assert (across, up) == ("N", "TB/s") and lines["torch"] == [(4096.0, round(2**29 / 20e6, 3))]
    loss = on_a_gpu | {"op": "cross_entropy", "results": {"gander": {"us": 2000.0, "peak MiB": 3.0}}}
    panels = drawn(plots.loss_costs([loss], "m", "a"))
    assert panels["cross-entropy: time"][:2] == ("tokens", "ms")
    assert panels["cross-entropy: time"][2]["gander"] == [(32768.0, 2.0)]
    assert panels["cross-entropy: peak memory"][1:] == ("MiB", {"gander": [(32768.0, 3.0)]})
    refused = on_a_gpu | {"n": 50257, "results": {"gander": {"ratio": 0.9}, "quack": {"error": "X"}}}
    (axes,) = plots.shares_of_limit([on_a_gpu, refused], "a").axes
    assert [text.get_text() for text in axes.texts] == ["refused"]
    assert sorted(round(bar.get_height(), 2) for bar in axes.patches)[-2:] == [0.9, 0.98]


def test_speeds_are_within_a_run():
    """The mean over the points, and the first run that has a contestant."""
    first = gpu_records()[0]
    second = first | {
        "m": 8192,
        "results": {"torch": {"us": 8.0, "low": 5.0}, "gander": {"us": 1.0, "low": 1}},
    }
    other = first | {"results": {"gander": {"us": 5.0}, "torch": {"us": 1.0}, "torch.compile": {"us": 15.0}}}
    table = report.speed_table([first, second], [other])
    assert table.columns == ["operator", "torch", "torch.compile"]
    assert table.rows == [["softmax forward", "4.00", "3.00"]]
    assert report.speed_table([second], figure="low").rows == [["softmax forward", "5.00"]]


def test_a_contestant_of_another_run():
    (here, _) = gpu_records()[:2]
    there = here | {"results": {"torch.compile": {"us": 15.0}}}
    (both,) = with_contestant([here], [there], "torch.compile")
    assert list(both["results"]) == ["torch", "gander", "torch.compile"]
    assert "torch.compile" not in here["results"]
    with pytest.raises(LookupError, match=r"the other run lacks torch\.compile"):
        with_contestant([here], [there | {"n": 8192}], "torch.compile")


def test_peak_memory_of_a_cpu():
    kept = torch.zeros(1 << 20)

    def call():
        first = kept + 1
        second = first + 1
        del first
        return second * 2

    call()
    scalars = memory.peak_bytes(call, "cpu") - 2 * kept.nbytes  # 1 and 2, as tensors
    assert 0 <= scalars < 100
    assert memory.peak_bytes(lambda: None, "cpu") == 0


@pytest.mark.parametrize(
    "op", ["cross_entropy", "linear_cross_entropy", "token_statistics", "linear_token_statistics"]
)
def test_costs_of_a_loss(op):
    how = dict(dtype="float32", device="cpu", seconds=0, hidden=8)
    found = costs.loss_costs(op, [(64, 1000), (64, 2000)], ("torch", "gander"), **how)
    assert [(r["op"], r["m"], r["n"]) for r in found] == [(op, 64, 1000), (op, 64, 2000)]
    for record in found:
        logits = 64 * record["n"] * 4 / 2**20
        results = record["results"]
        assert all(results[name]["us"] > 0 for name in ("torch", "gander"))
        assert results["torch"]["peak MiB"] >= round(2 * logits, 1) - 0.1
        assert results["gander"]["peak MiB"] < results["torch"]["peak MiB"]


def test_what_is_measured_without_a_file():
    options = sections.Options(("torch", "gander"), ("softmax_forward",), ("float32",), ((4, 64),), 0)
    (record,) = sections.measured(sections.cpu(options))
    assert record["environment"] == records.environment() and set(record["results"]) == {"torch", "gander"}
    (table,) = [report.off_table([record])]
    assert table.columns == ["operator", "torch", "gander"] and all(
        float(off) < 1e-6 for off in table.rows[0][1:]
    )

    def fails(providers):
        raise RuntimeError("no room")

    (record,) = sections.measured([sections.Point({"section": "cpu"}, ("torch",), lambda: fails(()))])
    assert record["results"] == {"torch": {"error": "RuntimeError: no room"}}


def test_who_is_installed(monkeypatch):
    versions, reasons = sections.installed(["torch", "gander"])
    assert list(versions) == ["torch", "gander"] and reasons == {}

    def missing():
        raise ImportError("no such package")

    monkeypatch.setitem(cases._PROVIDERS, "absent", (missing, None))
    assert sections.installed(["absent"]) == ({}, {"absent": "ImportError: no such package"})


def test_triton_loads_whole_vectors_of_aligned_rows_alone():
    pytest.importorskip("triton", reason="this environment has no Triton")
    from gander_bench.triton_loads import triton_loads

    assert set(triton_loads(50304)) == {"ld.global.v4.b32"}
    assert set(triton_loads(50257)) == {"ld.global.b16"}


def test_no_pictures_without_matplotlib(command, monkeypatch):
    Path("a.jsonl").write_text(json.dumps(gpu_records()[0]) + "\n")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command("--report", "a.jsonl", "--compare", "a.jsonl")
    assert result.exit_code == 0 and "nothing is drawn" in result.output
    assert "drawn" not in command("--report", "a.jsonl", "--no-plots").output


def gpu_records():
    environment = {
        "device": "NVIDIA H100",
        "driver": "580.1",
        "torch": "2.11",
        "python": "3.12",
        "commit": "0123456789ab",
    }
    base = {
        "environment": environment,
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.11", "quack": "1"},
    }
    results = {"torch": timing_of(20.0, tbps=1.5), "gander": timing_of(10.0, tbps=2.94, ratio=0.98)}
    throughput = {
        "section": "throughput",
        "op": "softmax_forward",
        "dtype": "bfloat16",
        "m": 32768,
        "n": 4096,
    }
    host = {"section": "host", "op": "softmax", "mode": "forward"}
    slow = {"torch": {"us": 10.0}, "gander": {"us": 13.0, "over torch": 1.3}}
    calls = {"first": 3.0, "new": [0.2, 0.4]}
    loads = {"library": 1.0, "import": 2.0, "megabytes": 6.8, **dict.fromkeys(load.FUNCTIONS, calls)}
    return [
        base | throughput | {"results": results, "limit": timing_of(9.8, tbps=3.0)},
        base
        | throughput
        | {"n": 262144, "m": 8192, "results": {"torch": {"error": "X"}, "gander": {"error": "Y"}}},
        base | host | {"results": slow},
        base | {"section": "load", "results": {"gander": loads, "torch": {"error": "Z"}}},
    ]


def test_results(command):
    few = gpu_records()[0] | {"section": "few", "m": 4, "n": 1 << 22}
    alone = few | {
        "m": 1,
        "n": 1 << 25,
        "results": {"gander": timing_of(30.0, ratio=0.8), "quack": {"error": "X"}},
    }
    Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*gpu_records(), few, alone]))
    Path("b.jsonl").write_text(json.dumps(cpu_record()) + "\n")
    Path("RESULTS.md").write_text("of yesterday")
    result = command("--no-plots", "--report", "a.jsonl", "--report", "b.jsonl", "--results", "RESULTS.md")
    assert result.exit_code == 0, result.output
    text = Path("RESULTS.md").read_text()
    for expected in (
        "./build.sh bench --no-plots --report a.jsonl --report b.jsonl --results RESULTS.md",
        "## NVIDIA H100, a.jsonl",
        "driver 580.1",
        "| softmax forward | gander | 2.94 (0.98) | - |",
        "| softmax forward | best other | 1.50 | - |",
        "| operator |  | 1 x 33554432 |",
        "| softmax forward | gander | 30.0 (1.25) |",
        "| softmax forward | gander | 10.0 (1.02) |",
        "| softmax forward | best other | 20.0 |",
        "| gander | load of the library | 1.00 | 20 met |",
        "## a processor, b.jsonl",
        "2 threads",
    ):
        assert expected in text
    assert "yesterday" not in text
    assert "gander / limit" in result.output and "failed" in result.output


def test_plot_of_the_results(command):
    pytest.importorskip("matplotlib", reason="pictures need the extra `demo`")
    Path("a.jsonl").write_text(json.dumps(gpu_records()[0]) + "\n")
    pictures = []
    for _ in range(2):
        assert command("--no-plots", "--report", "a.jsonl", "--results", "RESULTS.md").exit_code == 0
        pictures.append(Path("throughput.svg").read_text())
    assert "<svg" in pictures[0] and pictures[0] == pictures[1]


def cpu_record():
    environment = {
        "device": "a processor",
        "threads": 2,
        "torch": "2.11",
        "python": "3.12",
        "commit": "0123456789ab",
    }
    name = {"section": "cpu", "op": "rmsnorm_forward", "dtype": "float32", "m": 64, "n": 4096}
    figures = {report.IN_TURNS: 1.0, report.NEW_MEMORY: 1.0}
    both = {"torch": timing_of(14.0, **figures), "gander": timing_of(10.0, **figures)}
    return gpu_records()[0] | name | {"environment": environment, "results": both}


def test_targets_that_are_missed():
    """Each kind of target, at a point that meets it and at one that does not. A failed measurement misses
    it."""
    fast, failed, host, loads = gpu_records()
    short = fast | {"n": 512, "results": {"gander": timing_of(10.0, ratio=0.96), "quack": timing_of(9.0)}}
    few = fast | {"section": "few", "m": 4, "n": 1 << 20}
    algorithms = fast | {"section": "algorithms"}
    auto = {"gander": timing_of(10.0), "gander:warp": timing_of(9.0), "gander:block": {"error": "X"}}
    records = [
        fast, failed, short, host, loads, cpu_record(),
        few | {"results": {"gander": timing_of(10.0), "quack": timing_of(13.0)}},
        few | {"n": 1 << 22, "results": {"gander": timing_of(10.0, ratio=0.5)}},
        step_record() | {"mode": "backward"},
        algorithms | {"results": auto},
        algorithms | {"n": 8192, "results": auto | {"gander:warp": timing_of(10.0)}},
    ]  # fmt: skip
    found = results.checks(records)
    assert {check.target for check in found if check.met()} == {
        "share of the limit, throughput",
        "speed over the best other's, throughput",
        "speed over the best other's, few",
        "library, MB",
        "load of the library, ms",
        "first call of a new shape, ms",
        "time of auto over the best",
    }
    assert {tuple(check.row()) for check in found if not check.met()} == {
        (
            "share of the limit, throughput",
            "softmax forward",
            "bfloat16, 8192 x 262144",
            "failed",
            "at least 0.97",
        ),
        (
            "speed over the best other's, throughput",
            "softmax forward",
            "bfloat16, 32768 x 512",
            "0.9",
            "at least 0.98",
        ),
        ("speed over quack's, geometric mean", "softmax forward", "bfloat16", "0.9", "at least 1.03"),
        ("speed over quack's", "softmax forward", "bfloat16, 4 x 1048576", "1.3", "at least 1.4"),
        ("times a plain copy", "softmax forward", "bfloat16, 4 x 4194304", "2", "at most 1.35"),
        ("speed over torch's", "cross-entropy", "bfloat16, backward, 8 x 9", "1.875", "at least 2"),
        ("host time over torch's", "softmax", "forward", "1.3", "at most 1"),
        (
            "time of auto over the best",
            "softmax forward",
            "bfloat16, 32768 x 4096",
            "1.111",
            "at most 1.03",
        ),
        ("speed over torch's, CPU", "RMSNorm forward", "float32, 64 x 4096", "1.4", "at least 1.5"),
    }


@pytest.mark.parametrize(
    "op, dtype, m, n, share",
    [
        ("softmax_forward", "bfloat16", 32768, 1024, 0.97),
        ("softmax_forward", "bfloat16", 32768, 512, 0.95),
        ("cross_entropy_forward", "float32", 32768, 1024, 0.94),
        ("cross_entropy_forward", "bfloat16", 32768, 4096, 0.97),
        ("rmsnorm_backward", "float32", 32768, 1024, 0.90),
        ("rmsnorm_backward", "float32", 32768, 2048, 0.95),
    ],
)
def test_target_by_size(op, dtype, m, n, share):
    record = {
        "section": "odd",
        "op": op,
        "dtype": dtype,
        "m": m,
        "n": n,
        "results": {"gander": {"ratio": share}},
    }
    (check,) = results.checks([record])
    assert check.met() and check.at_least == share


def test_reason_of_an_error_is_one_line():
    assert sections.reason(ValueError("no\nmore")) == "ValueError: no"
    introduced = RuntimeError("backend='inductor' raised:\n\n  no C++ compiler\nmore")
    assert sections.reason(introduced) == "RuntimeError: backend='inductor' raised: no C++ compiler"
    assert sections.reason(KeyError()) == "KeyError: "


def test_committed_results_are_what_their_files_say():
    root = Path(__file__).resolve().parents[2]
    text = (root / "bench/RESULTS.md").read_text()
    command = next(line.strip() for line in text.splitlines() if line.startswith("    ./build.sh bench"))
    words = command.split()
    files = [root / words[i + 1] for i, word in enumerate(words) if word == "--report"]
    made = results.document({file.name: records.read(file) for file in files}, command)
    assert made == text, f"run {command} and commit what it wrote"
