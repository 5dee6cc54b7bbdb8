import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT / "python"), str(ROOT / "bench")]
sys.path[:0] = [*PACKAGES, str(ROOT / "tests"), str(ROOT / "tests/hf")]  # for sample.py and models.py
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from sample import pytest_collection_modifyitems, pytest_report_header  # noqa: E402, F401

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.compiler.reset()
