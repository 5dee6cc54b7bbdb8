import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT / "python"), str(ROOT / "bench")]
sys.path[:0] = [*PACKAGES, str(ROOT / "tests"), str(ROOT / "tests/jax")]  # for sample.py and formulas.py
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of XLA, which compile longer than the tests run
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from sample import pytest_collection_modifyitems, pytest_report_header  # noqa: E402, F401
