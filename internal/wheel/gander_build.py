"""The back end of pyproject.toml (PEP 517): build.sh compiles the library, setuptools packs the package.

`pip install .` compiles for this machine. `./build.sh wheel` calls the same functions with the setting
`glibc`, the oldest glibc that the wheel is for; without GANDER_ARCHS it then has all architectures. Every
other wheel names its architectures in its version (0.1.0+sm90), so that nobody takes it for that one.
"""

import contextlib
import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 315532800  # 1980-01-01, the earliest time that a zip archive can hold
OLDEST_GPU = 80  # the compute capability, without its point

# The files of a source distribution, as git pathspecs: what build.sh needs to compile and to pack.
SOURCES = (
    "build.sh",
    "pyproject.toml",
    "go.mod",
    "go.sum",
    "requirements*.txt",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    *("capi", "dlpack", "internal", "kernels", "ops", "python"),
    ":!*_test.go",
    ":!*/testdata/*",
)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    glibc = _glibc(config_settings)
    _check_machine()
    archs, reason = _architectures(glibc)
    if archs:
        print(f"gander: kernels for {reason}", file=sys.stderr, flush=True)
    with _staged(_version(archs)) as (package, setuptools):
        environment = {"GANDER_ARCHS": " ".join(archs)} if archs else {}
        if _build_sh("--package", package, _version(archs), *filter(None, [glibc]), **environment).returncode:
            sys.exit("gander-kernels was not built. The lines above say why.")
        _set_modes(package)
        platform_tag = f"manylinux_{glibc.replace('.', '_')}_x86_64" if glibc else "linux_x86_64"
        options = {"--global-option": "--quiet", "--build-option": f"--plat-name={platform_tag}"}
        return setuptools.build_wheel(str(Path(ROOT, wheel_directory)), options)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    glibc = _glibc(config_settings)
    _check_machine()
    with _staged(_version(_architectures(glibc)[0])) as (_, setuptools):
        return setuptools.prepare_metadata_for_build_wheel(str(Path(ROOT, metadata_directory)))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    sys.exit(
        "gander-kernels has no editable installation: ./build.sh build compiles the library into this checkout, "
        f"whose .venv/bin/python then imports gander (another Python does with PYTHONPATH={ROOT / 'python'})."
    )


def build_sdist(sdist_directory, config_settings=None):
    version = _version()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode or not listed.stdout:
        sys.exit(
            "gander-kernels: a source distribution holds the files that git tracks, and this is no git checkout. "
            f"Run: git clone {address()}"
        )
    files = {name: (ROOT / name).read_bytes() for name in listed.stdout.split("\0")[:-1]}
    with tempfile.TemporaryDirectory() as folder, _staged(version) as (_, setuptools):
        found = setuptools.prepare_metadata_for_build_wheel(folder)
        files["PKG-INFO"] = Path(folder, found, "METADATA").read_bytes()
    base = f"gander_kernels-{version}"
    # Neither the times nor the owners of files: the same files give the same bytes.
    with (
        open(Path(ROOT, sdist_directory, f"{base}.tar.gz"), "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=EPOCH) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(f"{base}/{name}")
            member.size, member.mtime = len(content), EPOCH
            member.mode = 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(content))
    return f"{base}.tar.gz"


def address():
    """The project's address on the web. go.mod has it, because Go finds a module by it."""
    return "https://" + re.search(r"^module (\S+)$", (ROOT / "go.mod").read_text(), re.MULTILINE)[1]


def absolute_links(text, version):
    """A document of the checkout's root for readers elsewhere: links and pictures of that version."""

    def absolute(match):
        picture, path = match[1].startswith("!"), match[2]
        kind = "raw" if picture else "blob"
        return f"{match[1]}({address()}/{kind}/v{version}/{path})" if (ROOT / path).exists() else match[0]

    return re.sub(r"(!?\[[^\]]*\])\(([^)#:\s]+)\)", absolute, text)


def _glibc(settings):
    """The oldest glibc that the wheel is for. None if it is for this machine alone."""
    unknown = set(settings or {}) - {"glibc"}
    if unknown:
        sys.exit(f"gander-kernels: the setting {min(unknown)!r} is unknown, expected 'glibc', such as glibc=2.28")
    return (settings or {}).get("glibc")


def _check_machine():
    """Refuses a machine that lacks something, before anything is downloaded."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64" or platform.libc_ver()[0] != "glibc":
        sys.exit(
            "gander-kernels cannot be built here: gander runs on Linux x86_64 with glibc, and this is "
            f"{machine}{' with another C library' * (machine == 'Linux x86_64')}. A container of such a system "
            "will do."
        )
    if shutil.which("bash") is None:
        problem = "no bash on PATH: install bash"
    else:
        done = _build_sh("--machine", stderr=subprocess.PIPE, text=True)
        problem = done.stderr.strip().removeprefix("build.sh: ") if done.returncode else None
    if problem:
        sys.exit(
            f"gander-kernels cannot be built here: {problem}\n"
            "Then run `pip install .` again. A wheel needs none of this: `GANDER_ARCHS=sm_90 ./build.sh wheel` "
            "makes one on another machine, and `pip install gander_kernels-*.whl` installs it here."
        )


def _architectures(glibc):
    """The architectures to compile for, and a text that says why these. None: all, as build.sh lists them."""
    given = os.environ.get("GANDER_ARCHS", "").split()
    for arch in given:
        if not re.fullmatch(r"(sm|compute)_[0-9]+[af]?", arch):
            sys.exit(f"gander-kernels: GANDER_ARCHS has {arch!r}, expected names such as in 'sm_90 compute_90'")
    if given:
        return given, f"{' '.join(given)}, which GANDER_ARCHS names"
    if glibc:
        return None, ""
    found = [f"sm_{capability}" for capability in _capabilities() if capability >= OLDEST_GPU]
    if found:
        return found, f"{' '.join(found)}, the GPU of this machine; GANDER_ARCHS names others"
    return ["sm_90"], (
        "sm_90 (H100, H200), and the CPU: nvidia-smi finds no GPU of compute capability 8.0 or newer; "
        "GANDER_ARCHS names other architectures"
    )


def _capabilities():
    """The compute capabilities of this machine's GPUs: 86 for 8.6."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({10 * int(major) + int(minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", output, re.M)})


def _version(archs=None):
    text = (ROOT / "python/gander/info.py").read_text()
    version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]
    return version + ("+" + ".".join(archs).replace("_", "") if archs else "")


def _build_sh(*arguments, stderr=None, text=None, **environment):
    """Runs build.sh with a Python that it can make a virtual environment from."""
    environment = {"GANDER_PYTHON": getattr(sys, "_base_executable", sys.executable)} | os.environ | environment
    environment.pop("PYTHONPATH", None)  # in an isolated build it hides pip
    command = ["bash", str(ROOT / "build.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, stderr=stderr, text=text, check=False)


@contextlib.contextmanager
def _staged(version):
    """Stages the package elsewhere, with this version and without what was compiled into the checkout.

    Yields the staged package, and setuptools' back end, which works in the current folder: the checkout stays
    as it is. Modes and times do not depend on the checkout, so the same files give the same wheel.
    """
    from setuptools import build_meta

    before, umask = Path.cwd(), os.umask(0o022)
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(EPOCH))
    try:
        with tempfile.TemporaryDirectory(prefix="gander-") as name:
            stage = Path(name)
            package = stage / "python/gander"
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / "python/gander", package, ignore=ignored)
            for file in "pyproject.toml", "LICENSE":
                shutil.copy(ROOT / file, stage)
            readme = (ROOT / "README.md").read_text()
            (stage / "README.md").write_text(absolute_links(readme, _version()))
            info = package / "info.py"
            info.write_text(info.read_text().replace(f'"{_version()}"', f'"{version}"', 1))
            _set_modes(stage)
            os.chdir(stage)
            yield package, build_meta
    finally:
        os.chdir(before)
        os.umask(umask)


def _set_modes(folder):
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
