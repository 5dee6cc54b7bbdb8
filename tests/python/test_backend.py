"""internal/backend.py: what `pip install .` builds, for which GPU, and what it refuses.

Here a mock stands in place of build.sh. ./build.sh test install compiles.
"""

import base64
import csv
import email
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"
# What takes the place of build.sh. The constants stay that the back end reads.
MOCK = r"""#!/bin/bash
readonly WHEEL_ARCHS="sm_80 sm_86 sm_90 sm_100 compute_90"
readonly SOURCES="capi dlpack internal python"
readonly MADE="lib/libgander.so.ABI _torch/libgander_torch.so jax/libgander_jax.so include/gander.h
include/dlpack.h lib/pkgconfig/gander.pc
lib/cmake/gander/gander-config.cmake lib/cmake/gander/gander-config-version.cmake"
[ "$1" != --numbers ] || echo "VERSION ABI"
[ "$1" != "${FAIL:-}" ] || { echo "build.sh: no gcc on PATH" >&2; exit 3; }
[ "$1" = --libraries ] || exit 0
echo "-> $* for $GANDER_ARCHS with ${PYTHONPATH:-no path}" >&2
for name in $MADE; do
  mkdir -p "$(dirname "$2/$name")"
  echo "$name" >"$2/$name"
done
"""


VERSION = re.search(r'\n__version__ = "(.*)"\n', (ROOT / "python/gander/info.py").read_text())[1]
ABI = re.search(r"#define GANDER_ABI_VERSION (\d+)\n", (ROOT / "capi/gander.h").read_text())[1]


def loaded(root):
    """The back end of a checkout."""
    spec = importlib.util.spec_from_file_location("backend", root / "internal/backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(root):
    """A folder with the files that a wheel is made of, and the mock."""
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "internal/backend.py",
        "capi/gander.h",
        "dlpack/dlpack.h",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    ignored = shutil.ignore_patterns("*.so", "include", "lib", "__pycache__")
    shutil.copytree(ROOT / "python/gander", root / "python/gander", ignore=ignored)
    (root / "build.sh").write_text(MOCK.replace("VERSION", VERSION).replace("ABI", ABI))
    return root


@pytest.fixture
def checkout(tmp_path):
    return copied(tmp_path / "a checkout")


@pytest.fixture
def backend(checkout, monkeypatch):
    monkeypatch.delenv("GANDER_ARCHS", raising=False)
    return loaded(checkout)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on PATH that prints a text."""

    def install(text, code=0):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return install


def files(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---- Numbers ----


def test_version_and_abi():
    """build.sh reads them, for both."""
    backend = loaded(ROOT)
    assert (backend.VERSION, backend.ABI) == (VERSION, ABI)


def test_without_bash(checkout, tmp_path, monkeypatch):
    """There is no version then. pip's first call says what is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = loaded(checkout)
    assert backend.VERSION == ""
    with pytest.raises(SystemExit, match="gander-kernels: no bash on PATH, which runs"):
        backend.get_requires_for_build_wheel()


# ---- Architectures ----


@pytest.mark.parametrize(
    ("said", "architectures"),
    [
        ("9.0\n", ["sm_90"]),
        ("9.0\n9.0\n", ["sm_90"]),
        ("8.6\n8.0\n", ["sm_80", "sm_86"]),
        ("8.9\n", ["sm_86"]),  # the newest machine code in the mock's wheel that 8.9 runs
        ("10.3\n", ["sm_100"]),
        ("11.0\n", ["compute_90"]),
        ("7.5\n9.0\n", ["sm_90"]),
    ],
)
def test_the_architecture_of_this_machines_gpu(backend, smi, said, architectures):
    smi(said)
    found, why = backend._architectures()
    assert found == architectures
    assert why.startswith("as nvidia-smi names compute capability ") and "7.5" not in why


@pytest.mark.parametrize("said", ["7.5\n", "", "NVIDIA-SMI has failed\n", "[N/A]\n"])
def test_without_a_gpu_sm_90(backend, smi, said):
    smi(said, code=9)
    assert backend._architectures()[0] == ["sm_90"]


def test_every_architecture_of_a_wheel_has_its_gpu():
    """build.sh's own list is read, and each of its architectures is what a GPU of that name gets."""
    backend = loaded(ROOT)
    native = re.findall(r"sm_(\d+)(\d)", re.search(r'WHEEL_ARCHS="(.*)"', (ROOT / "build.sh").read_text())[1])
    assert len(native) > 3
    for major, minor in native:
        assert backend._architecture(int(major), int(minor)) == f"sm_{major}{minor}"


def test_given_architectures_come_first(backend, smi, tmp_path, monkeypatch):
    smi("8.0\n")
    monkeypatch.setenv("GANDER_ARCHS", "sm_90 compute_90")
    assert backend._architectures() == (["sm_90", "compute_90"], "as GANDER_ARCHS says")
    assert backend.version_for(["sm_90", "compute_90"]) == f"{backend.VERSION}+sm90.compute90"
    assert backend.version_for([]) == backend.VERSION
    monkeypatch.setenv("GANDER_ARCHS", "sm_80,sm_90")
    for hook in HOOKS:
        with pytest.raises(SystemExit, match="GANDER_ARCHS has 'sm_80,sm_90', expected sm_XY or compute_XY"):
            called(backend, hook, tmp_path)


# ---- Refusals ----


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [
        ("Darwin", "arm64", ""),
        ("Windows", "AMD64", ""),
        ("Linux", "aarch64", "glibc"),
        ("Linux", "x86_64", ""),
    ],
)
def test_another_machine_is_refused(backend, tmp_path, monkeypatch, system, machine, libc):
    monkeypatch.setattr(backend.platform, "system", lambda: system)
    monkeypatch.setattr(backend.platform, "machine", lambda: machine)
    monkeypatch.setattr(backend.platform, "libc_ver", lambda: (libc, ""))
    for hook in HOOKS:
        with pytest.raises(SystemExit) as stop:
            called(backend, hook, tmp_path)
        assert f"this machine is {system}, {machine}, {libc or 'another libc'}; " in stop.value.code
        assert "pip install . in WSL 2" in stop.value.code and "go build ./..." in stop.value.code
    assert not list(tmp_path.glob("*.whl"))


# Any of them may be the first: frontends leave some out.
HOOKS = [
    f"{step}_{kind}"
    for step in ("get_requires_for_build", "prepare_metadata_for_build", "build")
    for kind in ("wheel", "editable")
]


def called(backend, hook, folder):
    """Calls a hook as pip does."""
    arguments = () if hook.startswith("get_requires") else (str(folder),)
    return getattr(backend, hook)(*arguments)


def test_an_old_python_is_refused(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.sys, "version_info", (3, 9, 25))
    monkeypatch.setattr(backend.platform, "python_version", lambda: "3.9.25")
    for hook in HOOKS:
        with pytest.raises(SystemExit, match=r"this is Python 3\.9\.25, expected 3\.10 or newer: .* -m pip "):
            called(backend, hook, tmp_path)


def pip_wheel(folder, out, **environment):
    done = subprocess.run(
        [*PIP, "wheel", "--no-index", "-w", out, folder],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_failed_build_is_one_sentence(checkout, tmp_path):
    code, said = pip_wheel(checkout, tmp_path, FAIL="--libraries")
    assert code != 0
    assert "build.sh: no gcc on PATH" in said and "build.sh failed; its last lines say why" in said
    assert "Traceback" not in said


def refusal(said):
    """What the back end said, in the frame that pip puts around it."""
    assert "Getting requirements to build wheel did not run successfully" in said
    (lines,) = re.findall(r"\[(\d+) lines? of output\]\n(.*?)\n *\[end of output\]", said, re.DOTALL)
    assert lines[0] == "1", said
    return lines[1].strip()


def test_a_machine_that_lacks_something_is_refused_at_pips_first_call(checkout, tmp_path):
    code, said = pip_wheel(checkout, tmp_path, FAIL="--machine")
    assert code != 0
    assert refusal(said) == "gander-kernels: no gcc on PATH"


@pytest.mark.parametrize(("there", "missing"), [((), "gcc and no g++"), (("gcc",), "g++")])
def test_no_compiler(tmp_path, there, missing):
    """build.sh itself, with a PATH on which there is none. Nothing is left in the checkout."""
    root, path = copied(tmp_path / "checkout"), tmp_path / "bin"
    shutil.copyfile(ROOT / "build.sh", root / "build.sh")
    before = files(root)
    path.mkdir()
    for tool in ("bash", "dirname", "uname", *there):
        (path / tool).symlink_to(shutil.which(tool))
    code, said = pip_wheel(root, tmp_path, PATH=str(path), HOME=str(tmp_path), GANDER_ARCHS="sm_90")
    assert code != 0
    said = refusal(said)
    assert said.startswith(f"gander-kernels: no {missing} on PATH: ") and "apt-get install gcc g++" in said
    assert files(root) == before


def test_a_python_without_venv(tmp_path, monkeypatch):
    """As Debian has it without python3-venv."""
    backend = loaded(copied(tmp_path / "checkout"))
    shutil.copyfile(ROOT / "build.sh", backend.ROOT / "build.sh")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\n')  # runs all other code
    python.chmod(0o755)
    monkeypatch.setenv("GANDER_PYTHON", str(python))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=f"gander-kernels: {python} has no venv module: .*python3-venv"):
        backend.get_requires_for_build_wheel()


def test_the_folder_python_is_no_project(tmp_path):
    """It was, and `pip install ./python` made a wheel without the library."""
    done = subprocess.run(
        [*PIP, "wheel", "--no-index", "-w", tmp_path, ROOT / "python"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "Neither 'setup.py' nor 'pyproject.toml' found" in done.stderr


# ---- Wheels ----


def test_pip_builds_a_wheel_and_changes_nothing_else(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GANDER_ARCHS", "sm_80 sm_90")
    before = files(checkout)
    command = [*PIP, "wheel", "-v", "--no-index", "-w", tmp_path / "out", checkout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert files(checkout) == before
    assert "gander-kernels: for the CPU and sm_80 sm_90, as GANDER_ARCHS says" in said
    steps = re.search(r"-> --libraries \S+ (\S+) for sm_80 sm_90 with no path", said)
    version = f"{loaded(checkout).VERSION}+sm80.sm90"
    assert steps and steps[1] == version
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"gander_kernels-{version}-py3-none-linux_x86_64.whl"


def test_what_a_wheel_holds(backend, checkout, tmp_path):
    version = backend.version_for(["sm_90"])
    name = packed(backend, tmp_path, version)
    archive = zipfile.ZipFile(tmp_path / name)
    names = archive.namelist()
    info = f"gander_kernels-{version}.dist-info"
    python = [path.relative_to(checkout / "python").as_posix() for path in checkout.rglob("gander/**/*.py")]
    made = re.search(r'readonly MADE="(.*?)"', MOCK, re.DOTALL)[1].replace("ABI", ABI).split()
    others = ["gander/py.typed", *(f"gander/{name}" for name in made)]
    about = [f"{info}/{file}" for file in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")]
    assert len(python) > 50 and sorted(names) == sorted(python + others + about)

    recorded = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode()))}
    assert recorded.pop(f"{info}/RECORD") == ["", ""]
    for path, (digest, size) in recorded.items():
        data = archive.read(path)
        want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={want}", len(data)), path
    assert set(recorded) == set(names) - {f"{info}/RECORD"}
    assert f'\n__version__ = "{version}"\n' in archive.read("gander/info.py").decode()
    assert names[:-4] == sorted(names[:-4]), "the order of a folder's files shows"
    for path in names:
        assert archive.getinfo(path).date_time == (1980, 1, 1, 0, 0, 0), path
        mode = archive.getinfo(path).external_attr >> 16
        assert mode == (0o100755 if path.endswith((".so", f".so.{ABI}")) else 0o100644), path


def packed(backend, folder, version):
    libraries = folder / "libraries"
    for name in (*backend.LIBRARIES, *backend.DEVELOPMENT):
        (libraries / name).parent.mkdir(parents=True, exist_ok=True)
        (libraries / name).write_bytes(name.encode())
    return backend.pack(str(libraries), str(folder), version, "manylinux_2_28_x86_64")


def test_two_folders_give_the_same_wheel(backend, tmp_path):
    """Neither the folder's name nor times, modes or the order of its files show."""
    other = copied(tmp_path / "another")
    for path in sorted(other.rglob("*"), reverse=True):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700)
    digests = set()
    for number, root in enumerate([backend.ROOT, other]):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = packed(loaded(root), folder, "0.1.0")
        digests.add(hashlib.sha256((folder / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_metadata(backend):
    metadata = pytest.importorskip("packaging.metadata", reason="packaging reads the metadata")
    text = backend._metadata("0.1.0+sm90")
    found = metadata.Metadata.from_email(text, validate=True)
    assert (found.name, str(found.version), found.author) == (
        "gander-kernels",
        "0.1.0+sm90",
        "the gander developers",
    )
    assert found.provides_extra == ["jax", "hf", "rl"]
    markers = {f'extra == "{extra}"' for extra in found.provides_extra}
    assert {str(r.marker) for r in found.requires_dist} == markers, "torch is left to its user"
    releases = [name.rpartition(" ")[2] for name in found.classifiers if "Python :: 3." in name]
    assert releases == [f"3.{minor}" for minor in range(10, 15)]
    assert str(found.requires_python) == f">={releases[0]}"
    assert email.message_from_bytes(text).get_payload().startswith("# gander\n")


def test_metadata_of_a_key_that_nothing_writes(backend):
    backend.PROJECT["dependencies"] = ["torch"]
    with pytest.raises(SystemExit, match="does not know: dependencies"):
        backend._metadata("0.1.0")


def test_the_build_asks_for_what_it_imports():
    """requires is empty where Python has tomllib, so pip builds without a network."""
    backend = loaded(ROOT)
    asked = backend.tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    text = (ROOT / "internal/backend.py").read_text()
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names - {"tomllib"} == {"tomli"}
    assert asked == ["tomli>=2 ; python_version < '3.11'"]


def test_pips_own_python_is_used_where_it_can_be(backend, tmp_path, monkeypatch):
    """In a virtual environment with pip. No other is made then."""
    monkeypatch.setenv("PYTHONPATH", "of pip's isolation")
    monkeypatch.setenv("GANDER_PYTHON", "given")
    assert backend._environment()["GANDER_PYTHON"] == "given"
    monkeypatch.delenv("GANDER_PYTHON")
    base = getattr(sys, "_base_executable", sys.executable)
    assert backend._environment()["GANDER_PYTHON"] == (
        sys.executable if sys.prefix != sys.base_prefix else base
    )
    assert "PYTHONPATH" not in backend._environment()
    without_pip = tmp_path / "python"
    without_pip.write_text("#!/bin/sh\nexit 1\n")
    without_pip.chmod(0o755)
    monkeypatch.setattr(backend.sys, "executable", str(without_pip))
    assert backend._environment()["GANDER_PYTHON"] == base


def test_what_is_compiled_is_a_copy(backend, checkout, tmp_path):
    """Without what was built. A new file is in it though git does not track it."""
    built = {f"python/gander/{name}" for name in (*backend.LIBRARIES, *backend.DEVELOPMENT)}
    for name in built:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("built")
    (checkout / "python/gander" / "new.py").write_text("new")
    backend._copy_sources(tmp_path / "copy")
    copy = {path.relative_to(tmp_path / "copy").as_posix() for path in files(tmp_path / "copy")}
    sources = {path.relative_to(checkout).as_posix() for path in files(checkout)}
    assert copy - sources == {"COMMIT"}
    assert sources - copy == {"README.md", "LICENSE", "pyproject.toml"} | built


def test_the_copy_compiles_what_the_checkout_does():
    """Where the copy lacks a file that build.sh reads, ./build.sh test install fails. It takes longer."""
    backend = loaded(ROOT)
    folders = backend._constant("SOURCES").split()
    found = re.search(
        r"library_sources\(\) {\n  find (.*?) -type", (ROOT / "build.sh").read_text(), re.DOTALL
    )
    for path in found[1].replace("\\", " ").split():
        assert path.partition("/")[0] in folders or path.startswith("go."), path


def test_an_editable_install_imports_the_checkout(checkout, tmp_path):
    run = [*PIP, "install", "--no-index", "--target", tmp_path / "site", "--editable", checkout]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "site").glob("*.pth")
    assert path.read_text() == f"{checkout / 'python'}\n"
    (info,) = (tmp_path / "site").glob("*.dist-info")
    assert info.name == f"gander_kernels-{loaded(checkout).VERSION}.dist-info", (
        "gander.__version__ is another"
    )


# ---- The sdist ----

needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or not shutil.which("git"), reason="an sdist is made in a git checkout"
)


@needs_git
def test_an_sdist_has_the_tracked_files(tmp_path):
    backend = loaded(ROOT)
    name = backend.build_sdist(str(tmp_path))
    top = f"gander_kernels-{backend.VERSION}"
    assert name == f"{top}.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        members = {member.name: member for member in archive.getmembers()}
        built = {path: archive.extractfile(member).read() for path, member in members.items()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    others = ["PKG-INFO", "COMMIT"]
    assert list(members) == sorted(f"{top}/{path}" for path in [*tracked.splitlines(), *others])
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert built[f"{top}/COMMIT"].decode().removesuffix("\n").removesuffix("-dirty") == head.stdout.strip()
    for path in "build.sh", "pyproject.toml", "internal/backend.py", "requirements-toolchain.txt", "go.sum":
        assert built[f"{top}/{path}"] == (ROOT / path).read_bytes()
    assert members[f"{top}/build.sh"].mode == 0o755 and members[f"{top}/README.md"].mode == 0o644
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, 0, "", "")}
    first = (tmp_path / name).read_bytes()
    backend.build_sdist(str(tmp_path))
    assert (tmp_path / name).read_bytes() == first


def test_an_sdist_outside_of_git_is_refused(backend, tmp_path):
    with pytest.raises(SystemExit, match="an sdist has the files that git tracks: make it in a git checkout"):
        backend.build_sdist(str(tmp_path))


def test_pip_installs_an_sdist_by_name(checkout, tmp_path):
    """pip compares the version in the sdist's name with that of its metadata and of the wheel."""
    git = ["git", "-C", checkout, "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in ["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "x"]:
        subprocess.run([*git, *command], check=True)
    version = loaded(checkout).VERSION
    loaded(checkout).build_sdist(str(tmp_path))
    again = [*PIP, "install", "-v", "--no-index", "--no-cache-dir", "--find-links", tmp_path, "--target"]
    done = subprocess.run(
        [*again, tmp_path / "site", "gander-kernels"],
        env=os.environ | {"GANDER_ARCHS": "sm_80 sm_90"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for the CPU and sm_80 sm_90" in done.stdout + done.stderr
    assert f'\n__version__ = "{version}"\n' in (tmp_path / "site/gander/info.py").read_text()
    assert (tmp_path / f"site/gander_kernels-{version}.dist-info").is_dir()


# ---- The version and the project's address ----


def test_the_version_is_the_same_everywhere():
    """capi/main_test.go compares the library's."""
    version = loaded(ROOT).VERSION
    for name, line in (
        ("CITATION.cff", f"version: {version}"),
        ("bench/pyproject.toml", f'version = "{version}"'),
    ):
        assert line in (ROOT / name).read_text().splitlines(), name
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"git tag --annotate v{version} " in (ROOT / "RELEASING.md").read_text()


def test_links_of_the_page_on_an_index(backend):
    """README.md's links are absolute there. Those into the repository name files that it has."""
    address = backend.PROJECT["urls"]["Repository"]
    links = re.findall(r"\]\(([^)]+)\)", backend._readme())
    inside = [link for link in links if link.startswith(f"{address}/")]
    assert len(inside) > 5
    for link in links:
        assert link.startswith(("https://", "#")), link
    for link in inside:
        path = re.fullmatch(rf"{re.escape(address)}/(?:blob|raw)/v[^/]+/([^#]+)(?:#.*)?", link)[1]
        assert (ROOT / path).exists(), link


def test_one_sentence_says_what_gander_is():
    """pyproject.toml has it, and for whom it is."""
    what, _, _ = loaded(ROOT).PROJECT["description"].rpartition(", for ")
    what = what[0].lower() + what[1:]
    pages = "README.md", "docs/index.md", "mkdocs.yml", "CITATION.cff"
    for name in (*pages, "capi/gander.h", "capi/gander.pc.in", "python/gander/__init__.py"):
        text = " ".join((ROOT / name).read_text().split())
        assert what in text or what[0].upper() + what[1:] in text, name


def test_the_address_is_the_same_everywhere():
    """pyproject.toml has it. No link leaves this machine."""
    address = loaded(ROOT).PROJECT["urls"]["Repository"]
    assert f"module {address.removeprefix('https://')}\n" in (ROOT / "go.mod").read_text()
    assert all(url.startswith(address) for url in loaded(ROOT).PROJECT["urls"].values())
    pages = [
        *(
            ROOT / name
            for name in ("pyproject.toml", "SECURITY.md", "CITATION.cff", "RELEASING.md", "README.md")
        ),
        *(path for path in (ROOT / ".github").rglob("*") if path.is_file()),
    ]
    repository = address.rpartition("/")[2]
    named = 0
    for page in pages:
        for found in re.findall(rf"https?://[^/\s\"')]+/[\w.-]+/{repository}\b", page.read_text()):
            assert found == address, page
            named += 1
    assert named > 5
