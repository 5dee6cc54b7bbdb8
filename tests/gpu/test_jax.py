"""The tests of tests/jax on CUDA."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from suites import PYTEST, note_of

FOLDER = Path(__file__).resolve().parents[1] / "jax"
VISIBLE = ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2])
ON_CUDA = {"GANDER_JAX_TESTS": "cuda", "GANDER_TEST": "all", "CUDA_VISIBLE_DEVICES": VISIBLE}

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)),
    reason="no JAX for CUDA is installed",
)


def on_cuda(path):
    return pytest.param(path.name, marks=pytest.mark.job(*PYTEST, path, **ON_CUDA))


@pytest.mark.parametrize("file", [on_cuda(path) for path in sorted(FOLDER.glob("test_*.py"))])
def test_on_cuda(job, file, record_property):
    if file == "test_sharding.py" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    record_property("note", note_of(job, f"tests/jax/{file}"))
