"""The benchmark's grid of models, and how its points are judged. No test checks a time."""

import pytest
import torch
from gander_bench import cases, models, report, results, sections


def test_the_grid_has_the_shapes_of_models():
    grid = list(models.cases())
    assert len(grid) == len(set(grid))
    shapes = {(c.m, c.n) for c in grid if c.op == "rmsnorm_forward" and c.dtype == "bfloat16"}
    assert {(1, 5120), (512, 18432), (24576, 11008), (262144, 80)} <= shapes
    assert not {n for _, n in shapes} & set(models.VOCABULARIES)
    backward = {(c.m, c.n) for c in grid if c.op == "cross_entropy_loss_gradient"}
    assert {m for m, _ in backward} == set(models.TRAINING) and (24576, 262208) in backward
    assert {c.weight for c in grid if c.op.startswith("rmsnorm") and c.dtype == "bfloat16"} == {
        None,
        "float32",
    }
    assert {c.weight for c in grid if c.dtype == "float32" or c.op.startswith("softmax")} == {None}
    assert {c.n for c in grid if c.dtype == "float16"} == set(models.FEW_LENGTHS)
    assert {c[:1] + c[2:4] for c in grid} >= models.COMPILED and len(models.COMPILED) == 10


def test_a_part_of_the_grid():
    chosen = list(models.cases(["softmax_forward"], ["float16"], [(3, 40)]))
    assert chosen == [models.Case("softmax_forward", "float16", 3, 40, None)]
    assert {c.n for c in models.cases(["softmax_forward"], ["float32"])} == set(models.FEW_LENGTHS)


def test_points_name_their_weights_and_their_run():
    shapes = ((8192, 4096), (8192, 4099))
    options = sections.Options(
        ("torch", "torch.compile", "gander"), ("rmsnorm_forward",), ("bfloat16",), shapes, run=2
    )
    points = list(sections.models_section(options))
    assert [p.name.get("weight") for p in points] == [None, "float32"] * 2
    assert all(p.name["run"] == 2 and p.name["section"] == "models" for p in points)
    assert ["torch.compile" in p.providers for p in points] == [True, False, False, False]


def test_weights_are_cast_for_every_provider(monkeypatch):
    given = []

    def prepare(providers, op, inputs, m):
        given.append([t.dtype for t in inputs])
        return {}, {}

    kinds = cases.OPERATORS["rmsnorm_backward"].inputs
    on_the_cpu = cases.Operator("rrw", lambda m, n, dtype, device: kinds(m, n, dtype, "cpu"), None, (1,))
    monkeypatch.setitem(sections.ALL, "rmsnorm_backward", on_the_cpu)
    monkeypatch.setattr(sections, "_prepare", prepare)
    monkeypatch.setattr(sections, "_beside_the_limit", lambda *arguments: {})
    for weight in (None, "float32"):
        case = models.Case("rmsnorm_backward", "bfloat16", 3, 8, weight)
        sections._models_point(("gander",), sections.Options(("gander",)), case)
    b16, f32 = torch.bfloat16, torch.float32
    assert given == [[b16, b16, b16, f32], [b16, f32, b16, f32]]


@pytest.mark.parametrize(
    ("op", "m", "n", "share"),
    [
        ("softmax_forward", 512, 262144, None),
        ("softmax_forward", 2048, 8192, 0.95),
        ("softmax_forward", 8192, 4096, 0.97),
        ("rmsnorm_backward", 2048, 4096, None),
        ("rmsnorm_backward", 8192, 4096, 0.88),
        ("rmsnorm_backward", 8192, 8192, 0.92),
    ],
)
def test_share_of_the_limit_by_size(op, m, n, share):
    assert models.share_of_limit(op, "bfloat16", m, n) == share


def runs(mine, others, ratio=1.0, **name):
    """A record for each run: gander's us and quack's."""
    name = {"op": "softmax_forward", "dtype": "bfloat16", "m": 8192, "n": 4096} | name
    environment = {"device": "a", "torch": "b", "commit": "c"}
    return [
        {"section": "models", "run": i, "environment": environment, "date": "2026-01-01", **name}
        | {"results": {"gander": us, "quack": {"us": other, "tbps": 2.0}}, "limit": {"us": ratio * us["us"]}}
        for i, (us, other) in enumerate(
            zip([{"us": us, "tbps": 3.0, "ratio": ratio} for us in mine], others, strict=True), 1
        )
    ]


@pytest.mark.parametrize(
    ("mine", "others", "met"),
    [
        ([103, 103, 103], [100, 100, 100], False),
        ([103, 103, 101], [100, 100, 100], True),  # one run within 2 %
        ([5.2, 5.2, 5.2], [5.0, 5.0, 5.0], True),  # 0.2 us
        ([5.4, 5.4, 5.4], [5.0, 5.0, 5.0], False),
        ([5.4, 5.25, 5.4], [5.0, 5.0, 5.0], True),
        ([90, 90, 90], [100, 100, 100], True),
    ],
)
def test_a_point_misses_if_all_runs_do(mine, others, met):
    found = [
        c for c in results.checks(runs(mine, others)) if c.target == "speed over the best other's, models"
    ]
    assert [check.met() for check in found] == [met]


def test_shares_of_the_limit_are_judged_with_the_same_slack():
    for us, ratio, met in ((90, 0.952, True), (90, 0.949, False), (10, 0.943, True), (10, 0.938, False)):
        checks = results.checks(runs([us] * 3, [us] * 3, ratio))
        (check,) = [c for c in checks if c.target == "share of the limit, models"]
        assert check.met() is met and check.measured == pytest.approx(ratio)


def test_misses_of_fewer_than_three_runs_are_named():
    records = runs([103, 103, 103], [100, 100, 100])
    limit, speed = results.checks(records[:2])
    assert limit.met() and not limit.point.endswith("runs")
    assert not speed.met() and speed.point.endswith(", 2 of 3 runs")
    records[0]["results"]["quack"] = {"error": "X"}
    limit, speed = results.checks(records)
    assert limit.met() and not speed.met() and speed.point.endswith(", 2 of 3 runs")


def test_a_point_is_undecided_until_a_run_meets_each_target():
    assert models.is_undecided([])
    assert not models.is_undecided(runs([100], [100]))
    assert models.is_undecided(runs([103, 103], [100, 100]))
    assert not models.is_undecided(runs([103, 101], [100, 100]))
    assert models.is_undecided(runs([103], [100], ratio=0.9))
    failed = runs([100], [100])
    failed[0]["results"]["gander"] = {"error": "X"}
    assert models.is_undecided(failed)


def test_runs_without_gander_are_not_compared():
    records = runs([103, 103, 103], [100, 100, 100])
    alone = [record | {"results": {"quack": {"us": 1.0}}} for record in records]
    assert results.checks(alone) == []
    (row,) = [row for table in report.summary(records) for row in table.rows]
    assert row[3] == "3"  # each run is a point of the summary


def test_a_failed_provider_is_not_compared_with():
    records = runs([10, 10, 10], [9, 9, 9])
    for record in records:
        record["results"]["quack"] = {"error": "X"}
    assert models.against_others(records) is None
    for record in records:
        record["results"] = {"gander": {"error": "X"}, "quack": {"us": 9.0}}
    verdict = models.against_others(records)
    assert verdict.measured is None and verdict.runs == 3
    assert not results.Check("", "", "", verdict.measured, verdict.at_least).met()


def test_table_of_medians():
    records = runs([10, 12, 30], [9, 9, 9]) + runs([4.0, 5.0, 6.0], [7, 8, 9], m=8)
    records += runs([1, 1, 1], [1, 1, 1], op="rmsnorm_forward", weight="float32")
    first, second = report.models_tables(records)
    assert first.columns == ["N", "M = 8", "M = 8192"]
    assert first.rows == [["4096", "5.0 (8.0)", "3.00 (2.00)"]]
    assert "RMSNorm forward, bfloat16, float32 weights" in second.title
    assert len(report.latest(records)) == 9  # runs are points of their own
