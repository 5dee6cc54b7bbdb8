"""What `./build.sh install` and a wheel bring for C and C++, as their users build with it.

`./build.sh test cinstall` makes both, and names their folder in CINSTALL, and that of CUDA's headers in CUDA.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if "CINSTALL" not in os.environ:
    pytest.skip("./build.sh test cinstall installs what is tested here", allow_module_level=True)

TORCH = importlib.util.find_spec("torch").submodule_search_locations[0]  # to import it takes seconds
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MADE = Path(os.environ["CINSTALL"])
INSTALLED = MADE / "installed"
WHEEL = MADE / "wheel/gander"
ABI = re.search(r"GANDER_ABI_VERSION (\d+)", (ROOT / "capi/gander.h").read_text())[1]
SONAME = f"libgander.so.{ABI}"
VERSION = re.search(r'^__version__ = "(.*)"$', (WHEEL / "info.py").read_text(), re.MULTILINE)[1]
CC = os.environ.get("CC", "cc")

prefixes = pytest.mark.parametrize("prefix", [INSTALLED, WHEEL], ids=["installed", "wheel"])
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")
needs_pkg_config = pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config on PATH")


def run(*command, code=0, **options):
    """Runs a command without what leads programs to a library, and returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    environment |= options.pop("env", {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, **options)
    assert code is None or done.returncode == code, (command, done.returncode, done.stdout + done.stderr)
    return done.stdout + done.stderr


# ---- The examples ----


def commands():
    """The command in the head of each example."""
    for source in sorted(EXAMPLES.glob("*.c*")):
        head = source.read_text().partition("*/")[0]
        (command,) = re.findall(r"^ \*   ((?:.*\\\n \*)*.*)", head, re.MULTILINE)
        yield pytest.param(command.replace("\\\n *", ""), id=source.name)


@pytest.mark.parametrize("command", [*commands()])
def test_the_command_in_an_example_s_head(command, tmp_path):
    """As a user follows it. A GPU, where there is none, is all that may be missing."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    cuda = tmp_path / "toolkit"
    cuda.mkdir()
    (cuda / "include").symlink_to(f"{os.environ['CUDA']}/include")
    (cuda / "lib64").symlink_to(cudart(tmp_path))
    for name, path in ("PREFIX", INSTALLED), ("TORCH", TORCH), ("/usr/local/cuda", cuda):
        command = command.replace(name, str(path))
    said = run("sh", "-c", command, cwd=tmp_path, code=None if "cuda" in command else 0)
    if "there is no GPU here" in said:
        pytest.skip(f"compiled, but not run: {said.strip()}")
    assert "error" not in said.replace("largest error", "")
    assert f"gander {VERSION}" in said or "step 29: loss" in said, said


def cudart(folder):
    """A folder with CUDA's runtime library, under the name for the linker, which its wheel lacks."""
    (library,) = Path(f"{os.environ['CUDA']}/lib").glob("libcudart.so.*")
    made = folder / "lib64"
    made.mkdir()
    for name in "libcudart.so", library.name:
        (made / name).symlink_to(library)
    return made


@needs_pkg_config
@prefixes
def test_pkg_config(prefix, tmp_path):
    where = {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"}
    assert run("pkg-config", "--modversion", "gander", env=where) == f"{VERSION}\n"
    flags = run("pkg-config", "--cflags", "--libs", "gander", env=where).split()
    folder = run("pkg-config", "--variable=libdir", "gander", env=where).strip()
    program = tmp_path / "cpu"
    run(CC, EXAMPLES / "cpu.c", *flags, f"-Wl,-rpath,{folder}", "-lm", "-o", program)
    assert f"gander {VERSION}\n" in run(program)


@needs_cmake
@prefixes
def test_find_package(prefix, tmp_path):
    run("cmake", "-S", EXAMPLES, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    said = run("ctest", "--test-dir", tmp_path)
    assert re.search(r"100% tests passed, 0 tests failed out of [23]\n", said), said
    for name in "cpu", "training_step":
        assert f"{prefix}/lib/{SONAME}" in run("ldd", tmp_path / name)


@needs_cmake
@needs_pkg_config
def test_cmake_through_pkg_config(tmp_path):
    """CMake drops the folder from what a wheel's file says, -L and -l:, so wheels need find_package."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(user LANGUAGES C)\n"
        "find_package(PkgConfig REQUIRED)\n"
        "pkg_check_modules(gander REQUIRED IMPORTED_TARGET gander)\n"
        f"add_executable(cpu {EXAMPLES}/cpu.c)\n"
        "target_link_libraries(cpu PRIVATE PkgConfig::gander m)\n"
    )
    run("cmake", "-S", tmp_path, "-B", tmp_path, env={"PKG_CONFIG_PATH": f"{INSTALLED}/lib/pkgconfig"})
    run("cmake", "--build", tmp_path)
    assert f"gander {VERSION}\n" in run(tmp_path / "cpu")


def configure(folder, request, before=""):
    shutil.rmtree(folder / "build", ignore_errors=True)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(user LANGUAGES NONE)\n"
        f"{before}\n"
        f"find_package(gander {request} REQUIRED)\n"
        "message(STATUS found=${gander_VERSION})\n"
    )
    build = folder / "build"
    said = run("cmake", "-S", folder, "-B", build, f"-DCMAKE_PREFIX_PATH={INSTALLED}", code=None)
    return " ".join(said.split())  # CMake breaks lines


@needs_cmake
def test_versions_that_are_asked_for(tmp_path):
    major, minor, patch = map(int, VERSION.split("."))
    served = ["", f"{major}.{minor}", VERSION, f"{VERSION} EXACT"]
    refused = [f"{major + 1}.0", f"{major}.{minor + 1}", f"{major}.{minor}.{patch + 1}"]
    if major == 0:
        refused += [f"0.{minor - 1}", f"0.{minor}{minor}"]
    for request in served:
        assert f"found={VERSION}" in configure(tmp_path, request), request
    for request in refused:
        said = configure(tmp_path, request)
        assert "compatible with requested" in said and f"version: {VERSION}" in said, (request, said)


@needs_cmake
def test_another_machine_is_refused_by_cmake(tmp_path):
    said = configure(tmp_path, "", "set(CMAKE_SYSTEM_PROCESSOR aarch64)")
    assert "The target is Linux on aarch64, expected Linux on x86_64: libgander runs" in said, said


# ---- Files ----


def test_names_of_the_library():
    files = sorted(path.name for path in (INSTALLED / "lib").glob("lib*"))
    assert files == ["libgander.so", f"libgander.so.{VERSION}", SONAME]
    assert os.readlink(INSTALLED / "lib/libgander.so") == SONAME
    assert os.readlink(INSTALLED / f"lib/{SONAME}") == f"libgander.so.{VERSION}"
    assert (INSTALLED / f"lib/{SONAME}").read_bytes() == (WHEEL / f"lib/{SONAME}").read_bytes()


def test_a_folder_may_be_moved(tmp_path):
    """No file has the path of the checkout, or of the folder that it was installed to."""
    for prefix in INSTALLED, WHEEL:
        for path in prefix.glob("lib/*/**/*"):
            assert path.is_dir() or str(ROOT) not in path.read_text(), path


def python(code, **environment):
    return run(sys.executable, "-c", code, env={"PYTHONPATH": str(WHEEL.parent), **environment})


def test_what_python_says_of_a_wheel():
    said = python("import gander; print(gander.get_include(), gander.cmake_prefix_path)")
    assert said.split() == [f"{WHEEL}/include", str(WHEEL)]


def test_a_checkout_in_which_nothing_was_built(tmp_path):
    built = shutil.ignore_patterns("include", "lib", "*.so", "__pycache__")
    shutil.copytree(ROOT / "python/gander", tmp_path / "gander", ignore=built)
    for asked in "get_include()", "cmake_prefix_path":
        said = run(
            sys.executable, "-c", f"import gander; gander.{asked}", code=1, env={"PYTHONPATH": str(tmp_path)}
        )
        assert (
            f"RuntimeError: gander: there is no gander.h in {tmp_path}/gander/include; run ./build.sh" in said
        )


@pytest.mark.parametrize(
    "given", [[], ["PREFIX", "OTHER"], ["relative/folder"]], ids=["none", "two", "relative"]
)
def test_a_prefix_that_is_refused(given):
    said = run(ROOT / "build.sh", "install", *given, code=1)
    want = "begins with /" if len(given) == 1 else f"install got {len(given)} arguments, expected the folder"
    assert want in said


def test_musl_is_refused(tmp_path):
    """musl's headers define no macro of their own. Here a stdint.h that is not glibc's stands for them."""
    (tmp_path / "stdint.h").write_text(
        "#define UINT64_C(x) x##ul\n"
        + "".join(
            f"typedef {sign} {kind} {prefix}int{bits}_t;\n"
            for prefix, sign in (("", "signed"), ("u", "unsigned"))
            for bits, kind in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
        )
    )
    source = tmp_path / "user.c"
    source.write_text('#include "gander.h"\n')
    command = CC, "-fsyntax-only", f"-I{INSTALLED}/include", source
    assert run(*command) == ""
    said = run(*command, f"-I{tmp_path}", code=1)
    assert said.count("error:") == 1 and "compile for glibc, not for musl" in said, said


# ---- One library in a process ----


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A library that is linked against the installed libgander, as an extension module would be."""
    folder = tmp_path_factory.mktemp("plugin")
    source = folder / "plugin.c"
    source.write_text(
        '#include "gander.h"\nconst void* place(void) { return (const void*)gander_build_info(); }\n'
    )
    lib = f"{INSTALLED}/lib"
    options = f"-I{INSTALLED}/include", f"-L{lib}", "-lgander", f"-Wl,-rpath,{lib}"
    run(CC, "-shared", "-fPIC", source, *options, "-o", folder / "plugin.so")
    return folder / "plugin.so"


CALLS = {
    "numpy": "import gander, numpy as np; assert gander.softmax(np.zeros((2, 4), np.float32))[1, 3] == 0.25",
    "torch": "import gander, torch; assert gander.softmax(torch.zeros(2, 4))[1, 3] == 0.25",
}
MAPPED = """
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/libgander.so" in line}
build_info = gander._native.library.load()["gander_build_info"]
build_info.restype = plugin.place.restype = ctypes.c_void_p
assert build_info() == plugin.place(), "two libraries"
assert os.path.realpath(gander.info()["library"]) in mapped
print(*mapped)
"""


# torch's kernels load the library by themselves. Importing torch takes seconds.
@pytest.mark.parametrize(
    ("first", "framework"), [("gander", "numpy"), ("plugin", "numpy"), ("plugin", "torch")]
)
def test_a_wheel_and_an_installed_library_in_one_process(plugin, framework, first):
    """Whichever is loaded first serves both."""
    steps = [CALLS[framework], f"plugin = ctypes.CDLL({str(plugin)!r})"]
    if first == "plugin":
        steps.reverse()
    said = python("import ctypes, os\n" + "\n".join(steps) + MAPPED)
    want = WHEEL if first == "gander" else INSTALLED
    assert said == f"{os.path.realpath(want / 'lib' / SONAME)}\n"


def test_dlopen_finds_the_loaded_library_by_its_soname():
    said = python(
        f"import ctypes; {CALLS['numpy']}; there = ctypes.CDLL({SONAME!r})\n"
        "here = gander._native.library.load()\n"
        "print(there._handle == here._handle)"
    )
    assert said == "True\n"


@pytest.mark.parametrize("framework", CALLS)
def test_an_older_library_that_was_loaded_before(framework, tmp_path):
    """It has the ABI version, and not all functions."""
    source = tmp_path / "older.c"
    source.write_text(f"int gander_abi_version(void) {{ return {ABI}; }}\n")
    older = tmp_path / "older.so"
    run(CC, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", source, "-o", older)
    said = run(
        sys.executable,
        "-c",
        f"import ctypes; ctypes.CDLL({str(older)!r}); {CALLS[framework]}",
        code=1,
        env={"PYTHONPATH": str(WHEEL.parent)},
    )
    assert re.search(rf"RuntimeError: .*gander: {older} has no gander_\w+, expected libgander in", said), said
