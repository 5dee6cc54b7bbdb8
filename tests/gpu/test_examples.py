"""examples/cuda.c, compiled as in its head and run, and two of the examples in Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import gander
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def toolkit():
    """The folders of CUDA's headers and runtime library: those that torch's wheel brings, or the system's. A
    wheel may lack the headers that others include."""
    site, local = Path(torch.__file__).parents[1], Path("/usr/local")
    for folder in [*site.glob("nvidia/cu1[3-9]"), site / "nvidia/cuda_runtime", *sorted(local.glob("cuda*"))]:
        includes = [folder / "include", *folder.glob("targets/*/include")]
        headers = [each for each in includes if (each / "crt/host_defines.h").exists()]
        found = [*folder.glob("lib*/libcudart.so*"), *folder.glob("targets/*/lib/libcudart.so*")]
        if headers and (headers[0] / "cuda_runtime_api.h").exists() and found:
            return headers[0], found[0]
    return None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on PATH")
@pytest.mark.skipif(toolkit() is None, reason="no headers of CUDA's runtime")
def test_cuda(tmp_path):
    include, cudart = toolkit()
    library = gander._native.library.path()
    paths = [f"-I{gander.get_include()}", f"-I{include}", library, cudart]
    rpaths = [f"-Wl,-rpath,{path.parent}" for path in (library, cudart)]
    subprocess.run(
        ["cc", EXAMPLES / "cuda.c", *paths, *rpaths, "-lm", "-o", tmp_path / "cuda"], check=True, cwd=tmp_path
    )
    done = subprocess.run([tmp_path / "cuda"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "on GPU 0: largest error" in done.stdout, done.stdout + done.stderr


def run(name):
    command = sys.executable, EXAMPLES / name
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_step():
    assert run("training_step_torch.py").startswith("training on cuda\n")


def test_same_bits():
    assert run("same_bits.py").startswith("of 100 rows on cuda have other bits: 0 by products")
