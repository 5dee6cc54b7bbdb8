"""Sections of the benchmark on small shapes, and the limit's plain kernels. No test checks a time."""

import functools

import pytest
import torch

pytest.importorskip("typer", reason="gander_bench needs it, and a GPU host may not have it")
pytest.importorskip("rich", reason="gander_bench needs it, and a GPU host may not have it")

from gander_bench import cases, limit, sections


@pytest.mark.parametrize("traffic", limit.TRAFFICS)
def test_plain_kernels_move_each_tensor(traffic):
    count = 4096 * 8 + 4 * 37  # int32: whole vectors, and no whole number of blocks
    read = [torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int32, device="cuda") for _ in "rrr"]
    read = read[: traffic.count("r")]
    written = [torch.zeros_like(read[0]) for _ in range(traffic.count("w"))]
    moves = limit.moves(traffic, read, written or [torch.zeros(4, dtype=torch.int32, device="cuda")])
    assert len(moves) >= 12
    want = functools.reduce(torch.bitwise_xor, read)
    for name, move in moves.items():
        for tensor in written:
            tensor.zero_()
        move()
        assert all(torch.equal(tensor, want) for tensor in written), name


LOSSES = cases.OPTIONED | cases.PROBABILITIES


def section_of(op):
    for operators, section in ((cases.NORMS, sections.norms), (LOSSES, sections.loss_options)):
        if op in operators:
            return section
    return sections.rotary


@pytest.mark.parametrize("op", cases.NORMS | cases.ROTARY | cases.QK_NORM | LOSSES)
def test_points_by_shape(op):
    options = sections.Options(("torch", "gander"), (op,), ("bfloat16", "float16"), ((33, 512),), seconds=0)
    for point in section_of(op)(options):
        figures = point.measure()
        assert figures["limit"]["us"] > 0
        assert all(figures["results"][name]["ratio"] > 0 for name in options.providers), figures


@pytest.mark.parametrize("section", [sections.linear, sections.sharded])
def test_points_of_losses(section):
    options = sections.Options(("torch", "gander"), shapes=((33, 512),), seconds=0)
    for point in section(options):
        figures = point.measure()
        assert (figures.get("limit") or figures["collective"])["us"] > 0
        assert set(figures["results"]) == set(point.providers)
        assert all(result["us"] > 0 for result in figures["results"].values()), figures
