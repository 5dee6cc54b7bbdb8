"""gander_bench as a distribution: what its wheel holds and asks for, and that its commands run from it."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
PIP = sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"
# What the benchmark compares with where it is installed, and what comes with torch.
OPTIONAL = {
    "quack",
    "triton",
    "liger_kernel",
    "transformers",
    "cudnn",
    "flashinfer",
    "cuda",
    "jax",
    "trl",
    "verl",
}

# Not by find_spec: setuptools' import hook takes a lookup of pip for pip itself, and then leaves this process
# the standard library's distutils, with which torch compiles nothing.
pytestmark = pytest.mark.skipif(
    not {"pip", "setuptools"} <= {found.name for found in importlib.metadata.distributions()},
    reason="this environment has no pip or no setuptools, which build a wheel",
)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of bench/, so that setuptools leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(BENCH, folder / "bench", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, folder / "bench")
    (found,) = folder.glob("*.whl")
    assert found.name.startswith("gander_bench-") and found.name.endswith("-py3-none-any.whl")
    return found


def test_the_wheel_holds_the_package_alone(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    listed = [path for path in (BENCH / "gander_bench").rglob("*") if path.suffix in (".py", ".cu")]
    assert sorted(names) == sorted(path.relative_to(BENCH).as_posix() for path in listed)
    assert "gander_bench/ceiling.cu" in names


def test_the_wheel_asks_for_what_it_imports(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    asked = set(re.findall(r"^Requires-Dist: ([\w-]+)", archive.read(metadata).decode(), re.MULTILINE))
    imported = set()
    for path in (BENCH / "gander_bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - OPTIONAL - {"gander_bench"}
    assert {name.replace("gander", "gander-kernels") for name in others} == asked


def test_the_commands_run_from_the_wheel(wheel, tmp_path):
    run(*PIP, "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT / 'python'}"}

    def python(*arguments):
        return run(sys.executable, *arguments, cwd=tmp_path, env=environment)

    where = Path(python("-c", "import gander_bench.cases; print(gander_bench.__file__)").strip())
    assert where.is_relative_to(tmp_path / "site")
    assert "--steps" in python("-m", "gander_bench", "demo", "--help")
    assert "--providers" in python("-m", "gander_bench", "bench", "--help")
    assert "--contestants" in python("-m", "gander_bench", "bench", "train", "--help")
    if "jax" in {found.name for found in importlib.metadata.distributions()}:
        assert "--limit-seconds" in python("-m", "gander_bench", "jax", "--help")
    else:
        with pytest.raises(AssertionError, match="gander_bench jax needs jax, which is not installed: pip"):
            python("-m", "gander_bench", "jax", "--help")
