"""The Python snippets of README.md and docs/, and the sections of docstrings. Their tests have different
packages, so this module needs none."""

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "internal/site"))
from marks import MARK  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The marks' own snippets are run when they are filled in.
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    return str(page.relative_to(ROOT))


def snippets(page, *languages):
    """(line, code) of each snippet that a person has written."""
    # A mark keeps its lines, so that numbers of lines stay right.
    text = MARK.sub(lambda mark: "\n" * mark[0].count("\n"), page.read_text())
    for found in FENCE.finditer(text):
        if not languages or found["language"] in languages:
            yield text[: found.start()].count("\n") + 1, found["language"], found["code"]


def needs_hf(code):
    """Or TRL, which gander.rl.trl changes."""
    return re.search(r"^(from|import) transformers|\bgander\.rl\b|\bswap\b", code, re.MULTILINE) is not None


def run(page, device, with_hf=False):
    """Runs the Python snippets of a page, one after the other, with the same names; those that need
    transformers or TRL only with_hf."""
    names = {"__name__": "snippet"}
    for line, _, code in snippets(page, "python"):
        if needs_hf(code) and not with_hf:
            continue
        source = "\n" * line + (code if device == "cuda" else code.replace('"cuda"', f'"{device}"'))
        exec(compile(source, name_of(page), "exec"), names)


# The checks `jax` and `hf` run these, where the packages are that they need. Of README.md and
# docs/post-training.md the check `pytest` runs the other snippets.
NEED_JAX = [ROOT / "docs/jax.md"]
NEED_HF = [page for page in PAGES if any(needs_hf(code) for _, _, code in snippets(page, "python"))]
ELSEWHERE = [ROOT / "docs/huggingface.md", *NEED_JAX]
WITH_PYTHON = [page for page in PAGES if any(snippets(page, "python")) and page not in ELSEWHERE]

SECTION = re.compile(r"^(Args|Returns|Raises|Examples):$", re.MULTILINE)


def sections(item):
    """The text of each section of a docstring, and of what comes before them as ""."""
    head, *rest = SECTION.split(inspect.getdoc(item))
    return {"": head} | dict(zip(rest[::2], rest[1::2], strict=True))
