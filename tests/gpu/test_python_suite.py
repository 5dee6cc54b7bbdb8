"""The tests of tests/python that run on both devices, on CUDA."""

import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "python"
ON_CUDA = re.compile(r"def \w+\(.*\bdevice\b|def test_\w*cuda")  # the fixture `device`, or the test's name
ELSEWHERE = {"test_docs.py"}  # test_pages.py runs the pages
FILES = [
    path
    for path in sorted(FOLDER.glob("test_*.py"))
    if path.name not in ELSEWHERE and ON_CUDA.search(path.read_text())
]
PYTEST = sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", "-k", "cuda"


@pytest.mark.parametrize(
    "file", [pytest.param(path.name, marks=pytest.mark.job(*PYTEST, path)) for path in FILES]
)
def test_on_cuda(job, file, record_property):
    assert job.returncode == 0 and " passed" in job.stdout, job.stdout[-6000:]
    *skipped, last = re.findall(r"^SKIPPED.*|^.* passed.*", job.stdout, re.MULTILINE)
    record_property("note", "; ".join([f"tests/python/{file} on cuda: {last.strip('= ')}", *skipped]))
