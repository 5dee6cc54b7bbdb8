import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Inductor's cache may hold graphs that an earlier version of gander compiled. The processes of a run share
# one, with the header that Inductor compiles first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.mkdtemp(prefix="gander-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE
    atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT / "python"), str(ROOT / "bench")]  # of gander and of gander_bench
sys.path[:0] = [*PACKAGES, str(ROOT / "tests")]  # the latter for sample.py
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])

import pytest  # noqa: E402
import torch  # noqa: E402
from sample import pytest_collection_modifyitems, pytest_report_header  # noqa: E402, F401

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
