"""The tests of tests/python that run on both devices, on CUDA."""

import re
from pathlib import Path

import pytest
from suites import PYTEST, note_of

FOLDER = Path(__file__).resolve().parents[1] / "python"
ON_CUDA = re.compile(r"def \w+\(.*\bdevice\b|def test_\w*cuda")  # the fixture `device`, or the test's name
ELSEWHERE = {"test_docs.py"}  # test_pages.py runs the pages
FILES = [
    path
    for path in sorted(FOLDER.glob("test_*.py"))
    if path.name not in ELSEWHERE and ON_CUDA.search(path.read_text())
]


@pytest.mark.parametrize(
    "file", [pytest.param(path.name, marks=pytest.mark.job(*PYTEST, "-k", "cuda", path)) for path in FILES]
)
def test_on_cuda(job, file, record_property):
    record_property("note", note_of(job, f"tests/python/{file}"))
