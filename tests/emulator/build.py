"""Builds the emulator's libcuda.so.1: python build.py FOLDER CUDA_INCLUDE ARCH

ARCH is the compute capability as kernels see it, such as 900. What has not changed since the last build in
FOLDER is not compiled again.
"""

import hashlib
import os
import re
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


def build(folder, cuda, arch):
    rewrite.main(KERNELS, folder)
    compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True).stdout
    flags = [*FLAGS, f"-DEMULATED_ARCH={arch}", f"-I{HERE}", f"-I{folder}", f"-isystem{cuda}"]

    def compiled(source):
        forced = ["-include", "emulator.h"] if source.parent == folder else []
        digest = hashlib.sha256(compiler + " ".join(flags).encode())
        for path in [*included(source, (HERE, folder)), *([HERE / "emulator.h"] if forced else [])]:
            digest.update(path.read_bytes())
        target, stamp = folder / f"{source.stem}.o", folder / f"{source.stem}.digest"
        if not stamp.exists() or stamp.read_text() != digest.hexdigest():
            run("g++", *flags, *forced, "-c", str(source), "-o", str(target))
            stamp.write_text(digest.hexdigest())
        return str(target)

    sources = [*sorted(folder.glob("*_gen.cpp")), HERE / "emulator.cpp", HERE / "driver.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    library = folder / "libcuda.so.1"
    run("g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), *objects)


if __name__ == "__main__":
    build(*(Path(argument).resolve() for argument in sys.argv[1:3]), sys.argv[3])
