"""The tests of gander.jax on the CPU, or with GANDER_JAX_TESTS=cuda, as tests/gpu runs them, on two GPUs."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT / "python"), str(ROOT / "bench")]
sys.path[:0] = [*PACKAGES, str(ROOT / "tests"), str(ROOT / "tests/jax")]  # for sample.py and formulas.py
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
ON_CUDA = os.environ.get("GANDER_JAX_TESTS") == "cuda"
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if ON_CUDA else "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of XLA, which compile longer than the tests run
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # the formulas' products, on a GPU too
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
if not ON_CUDA:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from sample import pytest_collection_modifyitems, pytest_report_header  # noqa: E402, F401


@pytest.fixture(autouse=True)
def served(request):
    if ON_CUDA and getattr(request.node, "callspec", None) and "float64" in request.node.callspec.id:
        pytest.skip("float64 is served on the CPU only")
