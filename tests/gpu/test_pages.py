"""The Python snippets of README.md and docs/ as they stand. tests/python/test_docs.py has the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
from pages import WITH_PYTHON, name_of, run


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_page(page):
    torch.manual_seed(0)
    run(page, "cuda")
