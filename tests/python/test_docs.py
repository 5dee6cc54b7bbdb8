"""Each Python snippet of README.md and docs/ runs; those for a GPU run on the CPU where there is none.

tests/gpu/test_pages.py runs them as they stand.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
from pages import NEED_HF, PAGES, ROOT, WITH_PYTHON, name_of, run, snippets

sys.path.append(str(ROOT / "internal/site"))
import fill

LANGUAGES = {"python", "sh", "text", "console", "make"}
TASKS = re.findall(r"^  ([a-z-]+) +\S", (ROOT / "build.sh").read_text(), re.MULTILINE)


def test_pages_are_found():
    assert {"README.md", "docs/five-minutes.md"} <= {name_of(page) for page in WITH_PYTHON}
    assert {name_of(page) for page in NEED_HF} == {
        "README.md",
        "docs/huggingface.md",
        "docs/post-training.md",
    }


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python(page):
    torch.manual_seed(0)
    run(page, "cpu")


def test_a_mark_without_a_fact_stays_empty(monkeypatch):
    monkeypatch.setattr(fill.facts, "nothing", lambda: "", raising=False)
    text = "a\n<!--= nothing() -->\n\nbefore\n\n<!--/-->\nb"
    assert fill.filled(text) == "a\n<!--= nothing() -->\n<!--/-->\nb"


def test_the_table_of_whole_models(monkeypatch):
    """It is made from the newest record, and there is none before a GPU was measured."""
    from facts import standing

    parts = {"products": 100.0, "attention": 9.0, "optimizer": 7.0, "norms": 1.5}
    figures = dict(ms=120.4, peak_gib=60.0, kernels_ms=parts)
    record = dict(
        section="train", model="llama3-8b", dtype="bfloat16", batch=1, sequence=8192, steps=20, seed=0
    )
    record |= dict(on="cuda", environment={"device": "NVIDIA H200"})
    found = [
        record | dict(contestant=name, run=run, results={name: figures})
        for name in ("liger", "gander-hf")
        for run in (1, 2, 3)
    ]
    monkeypatch.setattr(standing.stored, "whole_models", lambda folder: ("a-train", found))
    monkeypatch.setattr(standing, "card", lambda file: "H200")
    table = standing.whole_models()
    assert "| llama3-8b | liger | 120 | 1.5 | 60.0 |" in table
    assert "| llama3-8b | gander-hf | 120 | 1.5 | 60.0 |" in table
    assert "H200, half of the layers, 1 x 8192 tokens, bfloat16, the median of 3 runs." in table
    assert "liger |" not in standing.whole_models("gander-hf")
    monkeypatch.setattr(standing.stored, "whole_models", lambda folder: None)
    assert standing.whole_models() == ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_other_languages_are_cut_from_programs(page):
    """C, C++ and Go stand in marks, which take them from programs that other tests run."""
    for line, language, _ in snippets(page):
        assert language in LANGUAGES, f"{name_of(page)}:{line}: a snippet in {language or 'no language'}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands(page):
    """Commands of gander run, and tasks of build.sh exist. Checks of build.sh run the others."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "bench")])}
    for line, _, code in snippets(page, "sh"):
        for command in code.splitlines():
            where = f"{name_of(page)}:{line}"
            command = command.partition(" #")[0].strip()
            if task := re.match(r"(?:\w+=\S+ )*\./build\.sh ([a-z-]+)", command):
                assert task[1] in TASKS, f"{where}: there is no task {task[1]}"
            if command.startswith("python -m gander "):
                arguments = command.split()[3:]
                done = subprocess.run(
                    [sys.executable, "-m", "gander", *arguments],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, f"{where}: {done.stderr}"
