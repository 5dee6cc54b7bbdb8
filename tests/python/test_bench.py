"""The benchmark's machinery on tiny shapes: never how fast something is."""

import json
from pathlib import Path

import gander
import pytest
import torch
import typer
from gander import bench
from gander.bench import cases, limit, load, records, report, sections, timing
from typer.testing import CliRunner

SMALL = ["--shapes", "3x40,2x7", "--seconds", "0"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    app = typer.Typer()
    app.command()(bench.main)

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("op", cases.OPERATORS)
@pytest.mark.parametrize("name", ["torch", "gander"])
def test_providers_compute_the_operator(name, op, dtype):
    torch.manual_seed(0)
    inputs = cases.OPERATORS[op].inputs(5, 33, cases.DTYPES[dtype], "cpu")
    results = cases.provider(name).operators[op](*inputs)()
    for got, want in zip(results, cases.OPERATORS[op].reference(*cases.double(inputs)), strict=False):
        assert (got.double() - want).norm() <= sections._WRONG[cases.DTYPES[dtype]] * want.norm()


@pytest.mark.parametrize("op", cases.OPERATORS)
def test_formulas_for_torch_compile_compute_the_operator(op, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    torch.manual_seed(0)
    inputs = cases.OPERATORS[op].inputs(5, 33, torch.float32, "cpu")
    results = cases._torch_compile().operators[op](*inputs)()
    want = cases.OPERATORS[op].reference(*cases.double(inputs))[0]
    torch.testing.assert_close(results[0].double(), want, rtol=1e-4, atol=1e-6)


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
        assert all(result["us"] > 0 for result in record["results"].values())
        assert {"device", "torch", "gander", "commit", "python"} <= set(record["environment"])
        assert record["date"] and record["versions"]["torch"] == cases.provider_version("torch")
    shown = command("--report", "a.jsonl")
    assert shown.exit_code == 0
    assert "RMSNorm backward" in shown.output and "3 x 40" in shown.output


def test_resume_measures_points_that_lack_a_provider(command):
    command(
        "cpu", "--shapes", "3x4", "--ops", "softmax_forward", "--providers", "torch", "--out", "a", "--seconds", "0"
    )
    command(
        "cpu", "--shapes", "3x4", "--ops", "softmax_forward", "--providers", "torch,gander", "--out", "a", "--seconds",
        "0", "--resume",
    )  # fmt: skip
    assert [set(record["results"]) for record in lines("a")] == [{"torch"}, {"torch", "gander"}]
    assert [set(r["results"]) for r in report.latest(records.read(Path("a")))] == [{"torch", "gander"}]


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
    result = command("cpu", "--providers", "gander,quack", "--shapes", "2x3", "--ops", "softmax_forward", "--out", "a")
    assert "quack is left out: ImportError" in result.output
    assert list(lines("a")[0]["results"]) == ["gander"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["everything"], "everything is not one of host, load"),
        (["cpu", "--providers", "apex"], "apex is not one of torch"),
        (["cpu", "--shapes", "3by4"], "is not of the form"),
        (["cpu", "--shapes", "0x4"], "is not of the form"),
        (["cpu", "--shard", "3/2"], "is not of the form 1/4"),
        (["--readme", "README.md"], "needs --report"),
        (["--report", "nowhere.jsonl"], "there is no file"),
    ],
)
def test_bad_options_are_refused(command, arguments, expected):
    result = command(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_throughput_needs_a_gpu(command):
    assert command("throughput").exit_code == 2


def test_algorithms_are_points_of_their_own():
    points = list(sections.algorithms(sections.Options(providers=("gander",), dtypes=("bfloat16",))))
    shapes = {(point.name["m"], point.name["n"]) for point in points}
    assert shapes == {*sections.PUBLISHED, *sections.TRAINING} and len(points) == 4 * len(shapes)
    assert points[0].providers == ("gander", *(f"gander:{name}" for name in gander._library.ALGORITHMS[1:]))
    inputs = cases.OPERATORS["rmsnorm_backward"].inputs(2, 8, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match='algorithm is "warp" on cpu'):
        cases.provider("gander:warp").operators["rmsnorm_backward"](*inputs)()


def test_table_of_algorithms():
    base = {
        "section": "algorithms",
        "op": "softmax_forward",
        "dtype": "bfloat16",
        "environment": {"device": "a", "torch": "b"},
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


def test_host_modes_differentiate():
    options = sections.Options(providers=("torch", "gander"))
    points = {(p.name["op"], p.name["mode"]) for p in sections.host(options)}
    assert points >= set(report.HOST_TARGETS)
    x, weight, target = torch.randn(4, 8), torch.ones(8), torch.randint(8, (4,))
    for name, leaves in (("softmax", 1), ("rmsnorm", 2), ("cross_entropy", 1)):
        function = cases.provider("gander").functions[name]
        make = [sections._host_call(function, name, mode, x, weight, target) for mode in ("forward", "with gradient")]
        assert [call().requires_grad for call in make] == [False, True]
        both = sections._host_call(function, name, "forward and backward", x, weight, target)
        assert len(both()) == leaves


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
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, lambda: None, seconds=0, least=3, batch=2
    )
    assert figures["a"].repeats == figures["b"].repeats == 3
    assert calls[4:] == ["a", "a", "b", "b", "b", "b", "a", "a", "a", "a", "b", "b"]  # in turns, after warming up


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    whole = {"section": "cpu", "op": "softmax_forward", "dtype": "float32", "m": 1, "n": 2, "results": {"torch": {}}}
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:30])
    store = records.Store(path, resume=True)
    assert store.has(whole, ["torch"]) and not store.has(whole | {"n": 3}, ["torch"])
    assert path.read_text() == json.dumps(whole) + "\n"


def test_limit_kernels_compile():
    assert limit.compiled("sm_90").startswith(b"\x7fELF")


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
    results = {"torch": {"us": 20.0, "tbps": 1.5}, "gander": {"us": 10.0, "tbps": 2.94, "ratio": 0.98}}
    throughput = {"section": "throughput", "op": "softmax_forward", "dtype": "bfloat16", "m": 32768, "n": 4096}
    host = {"section": "host", "op": "softmax", "mode": "forward"}
    slow = {"torch": {"us": 10.0}, "gander": {"us": 13.0, "over torch": 1.3}}
    calls = {"first": 3.0, "new": [0.2, 0.4]}
    loads = {"library": 1.0, "import": 2.0, "megabytes": 6.8, **dict.fromkeys(load.FUNCTIONS, calls)}
    return [
        base | throughput | {"results": results, "limit": {"us": 9.8, "tbps": 3.0}},
        base | throughput | {"n": 262144, "m": 8192, "results": {"torch": {"error": "X"}, "gander": {"error": "Y"}}},
        base | host | {"results": slow},
        base | {"section": "load", "results": {"gander": loads, "torch": {"error": "Z"}}},
    ]


def test_readme_table(command):
    Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in gpu_records()))
    Path("README.md").write_text(f"before\n{report.BEGIN}\nof yesterday\n{report.END}\nafter\n")
    result = command("--report", "a.jsonl", "--readme", "README.md")
    assert result.exit_code == 0, result.output
    text = Path("README.md").read_text()
    assert text.startswith("before\n") and text.endswith(f"{report.END}\nafter\n") and "yesterday" not in text
    for expected in (
        "NVIDIA H100, driver 580.1",
        "| softmax forward | gander | 2.94 (0.98) | - |",
        "| softmax forward | best other | 1.50 | - |",
        "1.2 MISSED",
        "| gander | load of the library | 1.00 | 20 met |",
    ):
        assert expected in text
    assert "gander / limit" in result.output and "failed" in result.output


def test_readme_needs_markers_and_a_gpu(command):
    Path("a.jsonl").write_text(json.dumps(gpu_records()[0]) + "\n")
    Path("README.md").write_text("nothing here\n")
    assert command("--report", "a.jsonl", "--readme", "README.md").exit_code == 2
    assert Path("README.md").read_text() == "nothing here\n"
    with pytest.raises(ValueError, match="no measurement on a GPU"):
        report.readme([gpu_records()[0] | {"environment": {"device": "a processor"}}], "a.jsonl")
