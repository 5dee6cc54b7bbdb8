"""The training benchmark on a GPU. No test checks a time."""

import pytest

pytest.importorskip("typer", reason="gander_bench needs it, and a GPU host may not have it")
pytest.importorskip("rich", reason="gander_bench needs it, and a GPU host may not have it")

from gander_bench import train
from gander_bench.train import child, contestants, models


def trained(name, model):
    settings = child.Settings(name, model, batch=2, sequence=64, steps=6, seed=0, device="cuda")
    if "liger" not in name:
        return child.measure(settings)
    contestants.CONTESTANTS[name].version()
    return train._in_a_process(settings, 300)  # its patch of transformers would stay in this one


def test_the_stand_in():
    figures = {
        name: trained(name, "stand-in") for name in ("torch", "gander", "torch.compile", "gander.compile")
    }
    for name, mine in figures.items():
        assert mine["ms"] > 0 and mine["peak_gib"] > 0, name
        assert mine.get("graph_breaks", 0) == 0, name
        assert mine["losses"] == pytest.approx(figures["torch"]["losses"], abs=1e-3), name


def test_transformers_llama():
    pytest.importorskip("transformers", reason="transformers is not installed")
    figures = {name: trained(name, "tiny") for name in ("torch", "gander", "gander.compile")}
    for name, mine in figures.items():
        assert mine["losses"] == pytest.approx(figures["torch"]["losses"], abs=1e-3), name
    assert figures["gander.compile"]["graph_breaks"] == 0


def test_a_whole_model_in_small(checked_transformers):
    figures = {}
    for name in models.PRESETS["tiny-qwen3"].contestants:
        try:
            figures[name] = trained(name, "tiny-qwen3")
        except contestants.NotRun as why:
            assert name.startswith("liger"), why
    assert {"torch", "torch.compile", "gander-hf", "gander-hf-linear"} <= set(figures)
    for name, mine in figures.items():
        assert mine["losses"] == pytest.approx(figures["torch"]["losses"], abs=1e-3), name
        assert mine["kernels_ms"]["products"] > 0 and mine["kernels_ms"]["optimizer"] > 0, name
        assert mine["attention_kernels"] == figures["torch"]["attention_kernels"], name
