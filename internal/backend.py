"""The PEP 517 back end: for `pip install .` build.sh compiles the library, and the wheel is packed here.

It needs the standard library alone, so that a build downloads nothing for itself. Archives have sorted names
and fixed times: the same files give the same bytes. ./build.sh wheel packs with it too.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

with contextlib.suppress(OSError):  # Python has just put this module's bytecode into the checkout
    Path(__spec__.cached).unlink()
    Path(__spec__.cached).parent.rmdir()

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAME = PROJECT["name"].replace("-", "_")  # in names of files


def _said(option: str) -> str:
    """What build.sh prints. Nothing without bash, which is refused at pip's first call."""
    script = ["bash", str(ROOT / "build.sh"), option]
    return subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True).stdout if _BASH else ""


_BASH = shutil.which("bash")
VERSION, ABI = _said("--numbers").split() or ("", "")
# What build.sh makes in the package: the libraries, and what C and C++ need.
LIBRARIES = f"lib/libgander.so.{ABI}", "_torch/libgander_torch.so", "jax/libgander_jax.so"
DEVELOPMENT = (
    "include/gander.h",
    "include/dlpack.h",
    "lib/pkgconfig/gander.pc",
    "lib/cmake/gander/gander-config.cmake",
    "lib/cmake/gander/gander-config-version.cmake",
)
PLATFORM = "linux_x86_64"  # of libraries that gcc links for this machine


# ---- What pip calls ----


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """pip's first call. What cannot be built is refused here, before anything is fetched or compiled."""
    _check_machine()
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(directory: str, config_settings: Any = None) -> str:
    _check_machine()
    return _write_metadata(directory, _installed_version(_architectures()[0]))


def prepare_metadata_for_build_editable(directory: str, config_settings: Any = None) -> str:
    _check_machine()
    return _write_metadata(directory, VERSION)


def build_wheel(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Compiles in a copy, so that the checkout, and what was built there, stay as they are."""
    _check_machine()
    architectures = _chosen()
    version = _installed_version(architectures)
    with tempfile.TemporaryDirectory() as folder:
        copy, libraries = Path(folder, "gander"), Path(folder, "libraries")
        _copy_sources(copy)
        _build_sh(copy, "--libraries", str(libraries), version, architectures=architectures)
        return pack(str(libraries), directory, version, PLATFORM)


def build_editable(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Compiles into the checkout, where ./build.sh build compiles again after a change.

    Its version is VERSION, as gander.__version__ is there.
    """
    _check_machine()
    _build_sh(ROOT, "--compile", architectures=_chosen())
    files = {f"{NAME}.pth": f"{ROOT / 'python'}\n".encode()}
    return _write_wheel(directory, VERSION, PLATFORM, files)


def build_sdist(directory: str, config_settings: Any = None) -> str:
    """Packs the tracked files, as they are in the checkout, and the name of its commit for build.sh."""
    name = f"{NAME}-{VERSION}"
    files = {path: ((ROOT / path).read_bytes(), (ROOT / path).stat().st_mode) for path in _tracked()}
    files["PKG-INFO"] = _metadata(VERSION), 0o644
    files["COMMIT"] = _commit(), 0o644
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, (data, mode) in sorted(files.items()):
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size, member.mode = len(data), 0o755 if mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(data))
    (Path(directory) / f"{name}.tar.gz").write_bytes(gzip.compress(tar.getvalue(), mtime=0))
    return f"{name}.tar.gz"


# ---- What is built, and for what ----


def version_for(architectures: list[str]) -> str:
    """0.1.0+sm90: a wheel for some architectures is never taken for the full one, 0.1.0."""
    return f"{VERSION}+{'.'.join(architectures).replace('_', '')}" if architectures else VERSION


def _installed_version(architectures: list[str]) -> str:
    """The version of a wheel that pip builds. From an sdist it accepts the sdist's alone."""
    return VERSION if (ROOT / "PKG-INFO").exists() else version_for(architectures)


def _refuse(message: str) -> NoReturn:
    sys.exit(f"{PROJECT['name']}: {message}")  # pip shows it without a traceback


def _check_machine() -> None:
    """Refuses in one message what cannot be built. build.sh says what is missing where it runs."""
    oldest = PROJECT["requires-python"].strip(">=")  # which pip compares only with a wheel's metadata
    if sys.version_info < tuple(map(int, oldest.split("."))):
        _refuse(
            f"this is Python {platform.python_version()}, expected {oldest} or newer: install one and use "
            "its pip, for example python3.12 -m pip install ."
        )
    found = platform.system(), platform.machine(), platform.libc_ver()[0] or "another libc"
    if found != ("Linux", "x86_64", "glibc"):
        _refuse(
            f"this machine is {', '.join(found)}; the library builds on Linux, x86_64, glibc. On Windows run "
            "pip install . in WSL 2. Elsewhere the Go packages work, on the CPU: go build ./..."
        )
    if _BASH is None:
        _refuse("no bash on PATH, which runs build.sh: apt-get install bash, or dnf install bash")
    _given()
    script = ["bash", str(ROOT / "build.sh"), "--machine"]
    done = subprocess.run(script, env=_environment(), stderr=subprocess.PIPE, text=True)
    if done.returncode:
        _refuse(done.stderr.strip().removeprefix("build.sh: "))


def _given() -> list[str]:
    """The architectures of GANDER_ARCHS."""
    given = os.environ.get("GANDER_ARCHS", "").split()
    for name in given:
        if not re.fullmatch(r"(sm|compute)_\d+[af]?", name):
            _refuse(f"GANDER_ARCHS has {name!r}, expected sm_XY or compute_XY, separated by spaces")
    return given


def _architectures() -> tuple[list[str], str]:
    """The architectures of GANDER_ARCHS, else of this machine's GPUs, else sm_90; and why."""
    if given := _given():
        return given, "as GANDER_ARCHS says"
    found = [capability for capability in _capabilities() if capability >= (8, 0)]
    if not found:
        return ["sm_90"], "as nvidia-smi names no GPU of compute capability 8.0 or newer"
    names = ", ".join(f"{major}.{minor}" for major, minor in found)
    architectures = dict.fromkeys(_architecture(*capability) for capability in found)
    return list(architectures), f"as nvidia-smi names compute capability {names}"


def _chosen() -> list[str]:
    architectures, why = _architectures()
    print(f"{PROJECT['name']}: for the CPU and {' '.join(architectures)}, {why}", flush=True)
    return architectures


def _capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of this machine's GPUs. None without nvidia-smi, or where it fails."""
    command = "nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted({(int(major), int(minor)) for major, minor in re.findall(r"(?m)^(\d+)\.(\d)\s*$", said)})


def _architecture(major: int, minor: int) -> str:
    """The architecture of a full wheel that such a GPU runs: machine code of its major version, else PTX."""
    native = re.findall(r"sm_(\d+)(\d)\b", _constant("WHEEL_ARCHS"))
    served = [int(y) for x, y in native if int(x) == major and int(y) <= minor]
    return f"sm_{major}{max(served)}" if served else "compute_90"


def _constant(name: str) -> str:
    """A constant of build.sh."""
    script = (ROOT / "build.sh").read_text("utf-8")
    return re.search(rf'^readonly {name}="(.*)"$', script, re.MULTILINE)[1]


def _environment() -> dict[str, str]:
    """build.sh's environment, with a Python for its downloads: this one if it can be used as it is."""
    environment = dict(os.environ)
    for name in "PYTHONPATH", "PYTHONNOUSERSITE":  # by which pip isolates this process, and hides itself
        environment.pop(name, None)
    if "GANDER_PYTHON" not in environment:
        has_pip = [sys.executable, "-c", "import pip"]
        usable = (
            sys.prefix != sys.base_prefix
            and not subprocess.run(has_pip, env=environment, stderr=subprocess.DEVNULL).returncode
        )
        base = getattr(sys, "_base_executable", sys.executable)
        environment["GANDER_PYTHON"] = sys.executable if usable else base
    return environment


def _build_sh(root: Path, *arguments: str, architectures: list[str]) -> None:
    environment = _environment() | {"GANDER_ARCHS": " ".join(architectures)}
    done = subprocess.run(["bash", str(root / "build.sh"), *arguments], env=environment)
    if done.returncode:
        _refuse("build.sh failed; its last lines say why")


def _copy_sources(copy: Path) -> None:
    """Copies what build.sh compiles, whether git tracks it or not."""
    built = shutil.ignore_patterns("*.so", "*.fatbin", "SHA256SUMS", "include", "lib", "__pycache__")
    for folder in _constant("SOURCES").split():
        shutil.copytree(ROOT / folder, copy / folder, ignore=built)
    for path in [ROOT / "build.sh", *ROOT.glob("go.*"), *ROOT.glob("requirements*.txt")]:
        shutil.copy(path, copy)
    (copy / "COMMIT").write_bytes(_commit())


def _commit() -> bytes:
    """The content of the file COMMIT."""
    return f"{_said('--commit')}\n".encode()


def _tracked() -> list[str]:
    listed = None
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed is None or listed.returncode:
        _refuse("an sdist has the files that git tracks: make it in a git checkout")
    return listed.stdout.rstrip("\0").split("\0")


# ---- Archives ----


def pack(libraries: str, directory: str, version: str, platform_tag: str) -> str:
    """Writes the wheel of the Python package with what build.sh made in a folder. Returns its name."""
    package = ROOT / "python/gander"
    sources = [*package.rglob("*.py"), package / "py.typed"]
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in sources}
    files |= {name: (Path(libraries) / name).read_bytes() for name in (*LIBRARIES, *DEVELOPMENT)}
    files["info.py"] = files["info.py"].replace(f'"{VERSION}"'.encode(), f'"{version}"'.encode())
    files = {f"gander/{name}": data for name, data in files.items()}
    return _write_wheel(directory, version, platform_tag, files)


def _write_wheel(directory: str, version: str, platform_tag: str, files: dict[str, bytes]) -> str:
    tag = f"py3-none-{platform_tag}"  # any Python 3: the libraries do not use Python's C API
    info = _info(version)
    files = dict(sorted(files.items()))
    files[f"{info}/METADATA"] = _metadata(version)
    lines = ["Wheel-Version: 1.0", "Generator: gander", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    files[f"{info}/WHEEL"] = "\n".join(lines).encode()
    for name in PROJECT["license-files"]:
        files[f"{info}/licenses/{name}"] = (ROOT / name).read_bytes()
    record = f"{info}/RECORD"
    files[record] = "".join([*map(_record, files, files.values()), f"{record},,\n"]).encode()
    name = f"{NAME}-{version}-{tag}.whl"
    with zipfile.ZipFile(Path(directory) / name, "w") as archive:
        for path, data in files.items():
            member = zipfile.ZipInfo(path)  # of 1980
            member.external_attr = (0o100755 if ".so" in Path(path).suffixes else 0o100644) << 16
            archive.writestr(member, data, zipfile.ZIP_DEFLATED)
    return name


def _record(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(data)}\n"


def _info(version: str) -> str:
    return f"{NAME}-{version}.dist-info"


def _write_metadata(directory: str, version: str) -> str:
    folder = Path(directory) / _info(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_bytes(_metadata(version))
    return folder.name


def _metadata(version: str) -> bytes:
    """Core metadata 2.4 of the [project] table, every key of which is used here."""
    project = dict(PROJECT)
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", project.pop("name")),
        ("Version", version),
        ("Summary", project.pop("description")),
        *[("Author", author["name"]) for author in project.pop("authors")],
        ("License-Expression", project.pop("license")),
        *[("License-File", name) for name in project.pop("license-files")],
        ("Keywords", ",".join(project.pop("keywords"))),
        *[("Classifier", name) for name in project.pop("classifiers")],
        ("Requires-Python", project.pop("requires-python")),
        *[("Project-URL", f"{label}, {url}") for label, url in project.pop("urls").items()],
        *_extras(project.pop("optional-dependencies")),
        ("Description-Content-Type", "text/markdown"),
    ]
    if project.pop("dynamic") != ["readme", "version"] or project:
        _refuse(f"pyproject.toml has keys that internal/backend.py does not know: {', '.join(project)}")
    return "".join(f"{name}: {value}\n" for name, value in fields).encode() + b"\n" + _readme().encode()


def _extras(extras: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    for extra, requirements in extras.items():
        yield "Provides-Extra", extra
        for requirement in requirements:
            yield "Requires-Dist", f'{requirement}; extra == "{extra}"'


def _readme() -> str:
    """README.md with absolute links: an index shows it apart from the files that it links to."""
    address = PROJECT["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({address}/{kind}/v{VERSION}/{link['path']})"

    links = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)]+)\)")
    return links.sub(absolute, (ROOT / "README.md").read_text("utf-8"))
