"""Each Python snippet of README.md and docs/ runs; those for a GPU run on the CPU where there is none.

tests/gpu/test_pages.py runs them as they stand.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "internal/site"))
import fill  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The marks' own snippets are run when they are filled in.
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "text", "console", "make"}
TASKS = re.findall(r"^  ([a-z-]+) +\S", (ROOT / "build.sh").read_text(), re.MULTILINE)


def name_of(page):
    return str(page.relative_to(ROOT))


def snippets(page, *languages):
    """(line, code) of each snippet that a person has written."""
    # A mark keeps its lines, so that numbers of lines stay right.
    text = fill.MARK.sub(lambda mark: "\n" * mark[0].count("\n"), page.read_text())
    for found in FENCE.finditer(text):
        if not languages or found["language"] in languages:
            yield text[: found.start()].count("\n") + 1, found["language"], found["code"]


def run(page, device):
    """Runs the Python snippets of a page, one after the other, with the same names."""
    names = {"__name__": "snippet"}
    for line, _, code in snippets(page, "python"):
        source = "\n" * line + (code if device == "cuda" else code.replace('"cuda"', f'"{device}"'))
        exec(compile(source, name_of(page), "exec"), names)


# The check `hf` runs these, where the packages are that they need.
NEED_HF = [ROOT / "docs/huggingface.md"]
WITH_PYTHON = [page for page in PAGES if any(snippets(page, "python")) and page not in NEED_HF]


def test_pages_are_found():
    assert {"README.md", "docs/five-minutes.md"} <= {name_of(page) for page in WITH_PYTHON}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python(page):
    torch.manual_seed(0)
    run(page, "cpu")


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
