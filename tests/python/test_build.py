"""build.sh: its cache, and paths with spaces. Python, Go and nvcc are mocks unless a test says otherwise."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # ignored in what nohup or "&" of a script runs

# A mock of .venv/bin/python. The CUDA toolchain that it "installs" is a compiler that copies its input, and a
# header.
PYTHON = r"""#!/bin/sh
[ "$1" = -c ] && echo "$SITE"
[ "$1 $2" = "-m pip" ] || exit 0
while [ $# -gt 0 ] && [ "$1" != --target ]; do shift; done
[ $# -gt 0 ] || exit 0
echo "$2" >>"$PIPS"
mkdir -p "$2/nvidia/cu13/bin" "$2/nvidia/cuda_runtime/include"
while [ -e "$PIPS.hang" ]; do sleep 0.1; done
[ ! -e "$PIPS.fail" ] || exit 7
echo "enum { STAND_IN = 42 };" >"$2/nvidia/cuda_runtime/include/cuda.h"
cp "$NVCC" "$2/nvidia/cu13/bin/nvcc"
"""
NVCC = r"""#!/bin/sh
[ "$1" = --version ] && { echo "release 13.0, V13.0.88"; exit; }
for source; do :; done
while [ "$1" != -o ]; do shift; done
cat "$source" >"$2"
echo "ptxas info    : Compiling entry function 'kernel' for 'sm_90'"
echo "ptxas info    : Function properties for kernel"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
"""
GO = "#!/bin/sh\necho go version go1.26.8 linux/amd64\n"


class Checkout:
    """A copy of build.sh and of the files that it reads, in a separate folder, with a separate cache."""

    def __init__(self, folder, cache):
        self.root, self.cache, self.pips = folder, cache / "gander", folder / "pips"
        for path in [ROOT / "build.sh", *ROOT.glob("requirements*.txt")]:
            self.write(path.name, path.read_text())
        self.write(".venv/bin/python", PYTHON)
        self.write("nvcc", NVCC)
        self.write("bin/go", GO)
        self.environment = os.environ | {
            "XDG_CACHE_HOME": str(cache),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PIPS": str(self.pips),
            "NVCC": str(folder / "nvcc"),
            "SITE": str(folder / ".venv"),
        }
        for name in "GANDER_TRUST_CACHE", "GANDER_ARCHS", "GANDER_PYTHON", "CC":
            self.environment.pop(name, None)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *command, **environment):
        return subprocess.Popen(
            command or ["./build.sh", "env"],
            cwd=self.root,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
        )

    def run(self, *command, **environment):
        process = self.start(*command, **environment)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def unfinished(self):
        return list(self.cache.glob(".new-*"))

    def toolchain(self):
        (folder,) = self.cache.glob("requirements-toolchain-*")
        return folder

    def assert_whole(self):
        assert (self.toolchain() / "nvidia/cu13/bin/nvcc").read_text() == NVCC
        assert not self.unfinished()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "a checkout", tmp_path / "a cache")


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.05)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_env_is_quoted(tmp_path, shell):
    checkout = Checkout(tmp_path / "it is 5% off ~ a checkout!", tmp_path / "a cache")
    script = 'eval "$(./build.sh env)"; printf "%s\\n" "$PATH" "$PYTHONPATH" "$CGO_CFLAGS" "$GOFLAGS"'
    done = checkout.run(shell, "-c", script)
    assert done.returncode == 0, done.stderr
    path, pythonpath, flags, goflags = done.stdout.splitlines()
    assert path == checkout.environment["PATH"]
    assert pythonpath == f"{checkout.root}/python:{checkout.root}/bench"
    assert shlex.split(flags)[1] == f"-I{checkout.toolchain()}/nvidia/cuda_runtime/include"
    assert goflags == "-tags=cuda"


def test_a_compiler_for_musl(checkout):
    checkout.write("bin/gcc", "#!/bin/sh\necho x86_64-alpine-linux-musl\n")
    done = checkout.run()
    assert done.returncode == 1
    assert "gcc compiles for x86_64-alpine-linux-musl, expected glibc: " in done.stderr


@pytest.mark.parametrize("character", list("'\":(\\$\n"))
def test_characters_that_go_does_not_support(tmp_path, character):
    name = f"a{character}b"
    for folder, cache in [(name, "cache"), ("checkout", name)]:
        done = Checkout(tmp_path / folder, tmp_path / cache).run()
        assert done.returncode == 1
        assert "Go's tools and PATH do not take the path" in done.stderr
        assert not done.stdout


def test_a_relative_cache(checkout):
    done = checkout.run(XDG_CACHE_HOME="cache")
    assert done.returncode == 1
    assert "XDG_CACHE_HOME is 'cache': set it to a path that begins with /" in done.stderr


def test_a_failed_download_leaves_nothing(checkout):
    fail = Path(f"{checkout.pips}.fail")
    fail.touch()
    assert checkout.run().returncode == 7
    assert not checkout.unfinished()
    fail.unlink()
    assert checkout.run().returncode == 0
    checkout.assert_whole()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_download_leaves_nothing(checkout, number):
    Path(f"{checkout.pips}.hang").touch()
    process = checkout.start()
    until(checkout.pips.exists)
    assert checkout.unfinished()
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not checkout.unfinished()


def test_a_stopped_step_does_not_go_on(checkout):
    """The signal of `kill` reaches build.sh alone."""
    shutil.rmtree(checkout.root / ".venv")
    started = checkout.root / "started"
    checkout.write(
        "bin/slow",
        f"""#!/bin/sh
[ "$1" = -c ] && exit
echo $$ >"{started}.new" && mv "{started}.new" "{started}"
exec sleep 600
""",
    )
    process = checkout.start(GANDER_PYTHON="slow")
    until(started.exists)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
    until(lambda: not Path(f"/proc/{started.read_text().strip()}").exists())


def test_a_given_environment_is_left_as_it_is(checkout):
    checkout.write(
        "given/bin/python",
        f"""#!/bin/sh
[ "$1" = -c ] && exec echo "{checkout.root}/given"
case " $* " in *" --dry-run "*) echo "no torch" && exit 1 ;; esac
exec "{checkout.root}/pip" "$@"
""",
    )
    (checkout.root / ".venv/bin/python").rename(checkout.root / "pip")
    shutil.rmtree(checkout.root / ".venv")
    done = checkout.run("./build.sh", "test", "ruff", GANDER_PYTHON=f"{checkout.root}/given/bin/python")
    assert done.returncode == 1
    assert "lacks packages of requirements.txt:\nno torch" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_an_environment_of_its_user_is_not_emptied(checkout):
    """uv's have no pip. One that build.sh began is made again."""
    python = checkout.root / ".venv/bin/python"
    checkout.write("another", "#!/bin/sh\n")
    python.write_text("#!/bin/sh\nexit 1\n")
    done = checkout.run(GANDER_PYTHON="./another")
    assert done.returncode == 1
    assert f"the virtual environment {checkout.root}/.venv has no pip, and build.sh has not" in done.stderr
    assert python.exists()
    shutil.rmtree(checkout.root / ".venv")
    checkout.write("another", '#!/bin/sh\n[ "$2" != venv ] || { mkdir -p .venv; exit 1; }\n')
    for _ in range(2):
        done = checkout.run(GANDER_PYTHON="./another")
        assert "a virtual environment in .venv" in done.stderr and "has no pip" not in done.stderr
        assert (checkout.root / ".venv").exists()


def test_a_killed_download_is_removed_by_the_next(checkout):
    hang = Path(f"{checkout.pips}.hang")
    hang.touch()
    process = checkout.start()
    until(checkout.pips.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert checkout.unfinished()
    hang.unlink()
    assert checkout.run().returncode == 0
    checkout.assert_whole()


def test_two_builds_download_once(checkout):
    hang = Path(f"{checkout.pips}.hang")
    hang.touch()
    first = checkout.start()
    until(checkout.pips.exists)
    second = checkout.start()
    assert "waiting for another build" in second.stderr.readline()
    assert checkout.unfinished(), "the second removed what the first is writing"
    hang.unlink()
    for process in first, second:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len(checkout.pips.read_text().splitlines()) == 1
    checkout.assert_whole()


def test_a_cache_that_others_may_write_to(checkout):
    assert checkout.run().returncode == 0
    for path in [checkout.cache, checkout.toolchain(), checkout.toolchain() / "nvidia/cu13/bin/nvcc"]:
        mode = path.stat().st_mode
        for bit in 0o020, 0o002:
            path.chmod(mode | bit)
            done = checkout.run()
            assert done.returncode == 1
            assert f"another user may change {path} (" in done.stderr
            assert "GANDER_TRUST_CACHE=1" in done.stderr
            assert checkout.run(GANDER_TRUST_CACHE="1").returncode == 0
        path.chmod(mode)
    assert checkout.run().returncode == 0
    assert "GANDER_TRUST_CACHE" in checkout.run("./build.sh", "help").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_cache_of_another_user(checkout):
    assert checkout.run().returncode == 0
    os.chown(checkout.toolchain() / "nvidia/cu13/bin/nvcc", 12345, -1)
    done = checkout.run()
    assert done.returncode == 1
    assert "nvcc (-rwxr-xr-x, owner UNKNOWN)" in done.stderr
    assert checkout.run(GANDER_TRUST_CACHE="1").returncode == 0


def test_a_umask_that_lets_the_group_write(checkout):
    for _ in range(2):
        done = checkout.run("sh", "-c", "umask 002; exec ./build.sh env")
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go on PATH: ./build.sh test pytest finds one")
def test_the_digest_of_the_library_has_all_its_packages():
    """A package that is missing there is not built again when it changes."""
    listed = subprocess.run(
        ["go", "list", "-tags", "cuda", "-deps", "-f", "{{if not .Standard}}{{.Dir}}{{end}}", "./capi"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    ours = {Path(folder).relative_to(ROOT) for folder in listed if Path(folder).is_relative_to(ROOT)}
    assert Path("ops") in ours
    found = re.search(r"library_sources\(\) {\n  find (.*?) python/", (ROOT / "build.sh").read_text())[1]
    folders = [Path(folder) for folder in found.split()]
    assert [package for package in ours if not any(package.is_relative_to(f) for f in folders)] == []


def test_the_linker_of_a_wheel_gets_no_folder_that_is_missing(checkout):
    """zig warns of each, and gorgonia.org/cu names seven that few machines have."""
    script = ROOT / "internal/cmd/zigcc.sh"
    there, absent = checkout.root, checkout.root / "cuda"
    arguments = ["-o", "a b", f"-L{absent}", f"-L{there}", "-Wl,-soname,x", "-L", "c.o"]
    done = checkout.run("sh", script, *arguments, ZIG_PYTHON="echo", GLIBC="2.28")
    rest = f"-o a b -L{there} -Wl,-soname,x -L c.o"
    assert done.stdout == f"-m ziglang cc -target x86_64-linux-gnu.2.28 {rest}\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="commits are git's")
def test_the_commit_of_a_checkout_and_of_an_sdist(checkout):
    """An sdist that was unpacked within another repository is not of that repository's commit."""

    def git(*arguments):
        identity = "-c", "user.name=x", "-c", "user.email=x@example.org"
        done = checkout.run("git", "-C", where, *identity, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit():
        done = checkout.run("./build.sh", "--commit")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert commit() == "unknown"
    where = checkout.root.parent
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "x")
    assert commit() == "unknown"
    checkout.write("COMMIT", "of the sdist\n")
    assert commit() == "of the sdist"
    where = checkout.root
    git("init", "--quiet")
    assert commit() == "of the sdist"
    git("add", "nvcc")
    git("commit", "--quiet", "--message", "x")
    assert commit() == git("rev-parse", "HEAD")
    checkout.write("nvcc", "changed")
    assert commit() == f"{git('rev-parse', 'HEAD')}-dirty"


def test_building_where_paths_have_spaces(checkout):
    """Runs `build` with the real Go, gcc and internal/cmd/compile."""
    (checkout.root / "bin/go").unlink()
    if shutil.which("go") is None:
        pytest.skip("no Go on PATH: ./build.sh test pytest finds one")
    for folder in (
        "internal/cmd/compile",
        "internal/cubin",
        "dlpack",
        "ops",
        "internal/driver",
        "internal/policy",
        "internal/sizes",
    ):
        (checkout.root / folder).mkdir(parents=True)
    for package in "internal/cmd/compile", "internal/cubin", "kernels":
        for source in (ROOT / package).glob("*.go"):
            checkout.write(f"{package}/{source.name}", source.read_text())
    for path, text in {
        "go.mod": "module github.com/gander-go/gander\n\ngo 1.26\n",
        "go.sum": "",
        "kernels/cuda/stand_in_gen.cu": "// a kernel",
        "capi/exports_gen.map": "{ global: stand_in; local: *; };\n",
        "capi/gander.h": "#define GANDER_ABI_VERSION 7\n",
        "capi/gander.pc.in": "Version: @VERSION@ of @ABI@\n",
        "dlpack/dlpack.h": "// DLPack's\n",
        "python/gander/info.py": '__version__ = "1.2.3"\n',
        "capi/main.go": """package main

// #cgo LDFLAGS: -L${SRCDIR}
// #include <cuda.h>
import "C"

//export stand_in
func stand_in() int { return C.STAND_IN }

func main() {}
""",
        "python/gander/_torch/c/kernels.c": "int stand_in_too(void) { return 43; }\n",
        "python/gander/_torch/c/fast.c": "int stand_in_as_well(void) { return 44; }\n",
        "python/gander/jax/c/handlers.c": "int stand_in_for_xla(void) { return 45; }\n",
    }.items():
        checkout.write(path, text)
    # The folder of Go's own cache follows XDG_CACHE_HOME.
    objects = subprocess.run(
        ["go", "env", "GOCACHE"], capture_output=True, text=True, check=True
    ).stdout.strip()
    done = checkout.run("./build.sh", "build", GANDER_ARCHS="sm_80 sm_90", GOCACHE=objects)
    assert done.returncode == 0, done.stderr
    images = sorted(path.name for path in (checkout.root / "kernels/images").iterdir())
    assert images == ["SHA256SUMS", "stand_in.sm_80.fatbin", "stand_in.sm_90.fatbin"]
    paths = (checkout.root / ".venv/gander.pth").read_text().splitlines()
    assert paths == [f"{checkout.root}/python", f"{checkout.root}/bench"]
    built = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).stand_in())"
    done = checkout.run(sys.executable, "-c", built, "python/gander/lib/libgander.so.7")
    assert done.stdout == "42\n", done.stderr
    assert (checkout.root / "python/gander/include/dlpack.h").read_text() == "// DLPack's\n"
    assert (checkout.root / "python/gander/lib/pkgconfig/gander.pc").read_text() == "Version: 1.2.3 of 7\n"
