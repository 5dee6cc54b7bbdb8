"""bench/tune.py without a GPU: what it times, and that the library plans by the row it asks for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gander
import pytest

PATH = Path(__file__).parents[2] / "bench" / "tune.py"
spec = importlib.util.spec_from_file_location("tune", PATH)
tune = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tune)


@pytest.mark.parametrize(
    ("n", "itemsize", "mixed", "layout", "vectors"),
    [
        (1024, 2, False, "aligned", 128),
        (1001, 2, False, "same-offset", 126),
        (1, 4, False, "same-offset", 1),
        (1024, 2, True, "mixed-offsets", 129),
    ],
)
def test_lengths_are_counted_as_the_policy_counts_them(n, itemsize, mixed, layout, vectors):
    assert tune.layout_of(n, itemsize, mixed) == layout
    assert tune.vectors_of(n, itemsize, layout) == vectors


def test_rows_for_a_length():
    candidates = {
        "softmax_forward bfloat16 aligned": [
            {"row": "short", "over": 0, "up_to": 128},
            {"row": "long", "over": 128, "up_to": 512},
            {"row": "any", "over": 64, "up_to": 0},
        ]
    }
    key = "softmax_forward", "bfloat16", "aligned"
    found = [tune.rows_for(candidates, *key, vectors) for vectors in (64, 128, 129, 513)]
    assert found == [["short"], ["short", "any"], ["long", "any"], ["any"]]
    assert tune.rows_for(candidates, "softmax_forward", "float32", "aligned", 1) == []


def test_every_operator_is_one_of_the_benchmark_and_of_explain():
    from gander_bench.cases import ALL

    for name, explained in tune.OPERATORS.values():
        assert name in ALL
        if explained is None:
            continue
        text = gander.explain(explained, shape=(4096, 4096), dtype="bfloat16", device="h100")
        assert tune.policy_row(text).split()[0].startswith("auto")
    assert tune.policy_row("nothing\nof the kind") == ""


def test_the_library_plans_by_the_row_in_the_file(tmp_path):
    row = tmp_path / "row"
    script = """
import json, pathlib, sys, gander
answers = []
for row in json.loads(sys.argv[2]):
    pathlib.Path(sys.argv[1]).write_text(row)
    try:
        answers.append(gander.explain("softmax", shape=(4096, 4096), dtype="bfloat16", device="h100"))
    except NotImplementedError as error:
        answers.append(f"refused: {error}")
print(json.dumps(answers))
"""
    rows = ["", "auto - - - registers 512x8", "auto - - - registers 8x4"]
    command = [sys.executable, "-c", script, str(row), json.dumps(rows)]
    done = subprocess.run(
        command, env=os.environ | {"GANDER_TUNE": str(row)}, capture_output=True, text=True, check=True
    )
    usual, forced, refused = json.loads(done.stdout)
    assert usual == gander.explain("softmax", shape=(4096, 4096), dtype="bfloat16", device="h100")
    assert "softmax_forward_rows_bfloat16_512x8" in forced
    assert refused.startswith("refused: ")
    assert "cannot be served by auto - - - registers 8x4" in refused


def test_measurements_are_what_the_policy_reads(tmp_path, monkeypatch):
    from gander_bench import sections

    def timed(options, traffic, inputs, calls, results):
        for us, (row, call) in enumerate(calls.items(), 1):
            call()
            assert row_file.read_text() == row
            results[row] |= {"us": us, "low": us, "high": us}
        return {"limit": {"us": 0.5}}

    monkeypatch.setattr(sections, "_beside_the_limit", timed)
    row_file = tmp_path / "row"
    options = tune.arguments(["candidates.json", "h100", "out.jsonl"])
    rows = [{"row": "auto - - - registers 8x1", "over": 0, "up_to": 0}]
    for operator in tune.OPERATORS:
        candidates = {f"{operator} float32 aligned": rows}
        found = list(tune.measure(options, candidates, row_file, operator, "float32", 4, 64, where="cpu"))
        assert [(r["row"], r["us"], r["limit_us"]) for r in found] == [("", 1, 0.5), (rows[0]["row"], 2, 0.5)]
        for record in found:
            assert record["operator"] == operator
            assert record["layout"] == "aligned"
            assert (record["device"], record["m"], record["n"]) == ("h100", 4, 64)
    options.mixed_offsets = True
    found = list(tune.measure(options, {}, row_file, "softmax_backward", "float32", 4, 64, where="cpu"))
    assert [r["layout"] for r in found] == ["mixed-offsets"]
    assert row_file.read_text() == ""


def test_a_run_forces_the_rows_it_names(tmp_path, monkeypatch):
    candidates, out = tmp_path / "candidates.json", tmp_path / "out.jsonl"
    candidates.write_text("{}")
    somebodys = tmp_path / "row"
    somebodys.write_text("auto - - - registers 8x1")
    monkeypatch.setenv("GANDER_TUNE", str(somebodys))
    nothing = [str(candidates), "h100", str(out), "--shapes"]  # no shape: only the check of the row file
    assert tune.main(nothing) == 0
    assert out.read_text() == ""
    assert somebodys.read_text() == "auto - - - registers 8x1"
    with pytest.raises(RuntimeError, match="GANDER_TUNE must be set when Python starts"):
        tune.run(tune.arguments(nothing), tmp_path / "another row")  # too late for this process
