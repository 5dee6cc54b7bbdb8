"""Builds the emulator's libcuda.so.1: python build.py FOLDER CUDA_INCLUDE ARCH CACHE

ARCH is the compute capability as kernels see it, such as 900. CACHE keeps what was compiled, by a digest of
all that it depends on.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rewrite

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels" / "cuda"
# Optimization takes as long as it saves in the tests. nvcc contracts a * b + c to one operation, too.
FLAGS = ("-std=c++20", "-O1", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=fast", "-fPIC", "-w")
FLAGS += ("-fno-strict-aliasing", "-fwrapv")


def run(*command):
    subprocess.run(command, check=True)


def included(path, folders):
    """The path and the paths of all that it includes from the folders."""
    found, new = set(), {path}
    while new:
        found |= new
        names = {name for p in new for name in re.findall(r'^#include "(.*)"', p.read_text(), re.MULTILINE)}
        new = {f / name for f in folders for name in names if (f / name).exists()} - found
    return sorted(found)


def build(folder, cuda, arch, cache):
    rewrite.main(KERNELS, folder)
    compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True).stdout
    flags, paths = [*FLAGS, f"-DEMULATED_ARCH={arch}"], [f"-I{HERE}", f"-I{folder}", f"-isystem{cuda}"]
    cache.mkdir(parents=True, exist_ok=True)

    def compiled(source):
        forced = ["-include", "emulator.h"] if source.parent == folder else []
        digest = hashlib.sha256(compiler + " ".join(flags).encode())
        for path in [*included(source, (HERE, folder)), *([HERE / "emulator.h"] if forced else [])]:
            digest.update(path.read_bytes())
        target = cache / f"{digest.hexdigest()}.o"
        if not target.exists():
            made = folder / f"{source.stem}.o"
            run("g++", *flags, *paths, *forced, "-c", str(source), "-o", str(made))
            shutil.copy(made, copy := target.with_suffix(f".{os.getpid()}"))
            copy.replace(target)  # whole, or not at all
        return str(target)

    sources = [*sorted(folder.glob("*_gen.cpp")), HERE / "emulator.cpp", HERE / "driver.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    library = folder / "libcuda.so.1"
    run("g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), *objects)


if __name__ == "__main__":
    build(*(Path(argument).resolve() for argument in sys.argv[1:3]), sys.argv[3], Path(sys.argv[4]))
