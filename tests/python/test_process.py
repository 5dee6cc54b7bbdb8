"""gander's effects on its process: imports, lazy loading, forks, signals, the command line."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import gander
import pytest
import torch


def python(script, *arguments, **environment):
    """Runs a script and returns its output. It must print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


LOADED = "lambda: any(str(gander._native.library.path()) in line for line in open('/proc/self/maps'))"


def test_import_loads_neither_torch_nor_numpy_nor_the_library():
    python(f"""
        import sys, gander
        loaded = {LOADED}
        assert not {{"torch", "numpy"}} & set(sys.modules)
        assert not loaded()
    """)


@pytest.mark.parametrize("first", ["torch", "gander"])
def test_operators_are_registered_in_either_order_of_imports(first):
    python(f"""
        import {first}, torch, gander, sys
        loaded = {LOADED}
        assert torch.ops.gander.softmax.default
        assert torch.ops.gander.softmax(torch.ones(2, 3, device="meta")).shape == (2, 3)
        assert not loaded()
        assert torch.equal(torch.ops.gander.softmax(torch.zeros(2, 4)), torch.full((2, 4), 0.25))
        assert loaded()
        assert not any(getattr(finder, "name", None) == "torch" for finder in sys.meta_path)
    """)


def test_functions_imported_before_torch_take_tensors():
    python("""
        from gander import softmax
        import torch
        assert softmax(torch.zeros(2, 4, requires_grad=True)).requires_grad
    """)


@pytest.mark.parametrize(
    "lookup", ["find_spec", "find_spec twice", "the loader's other methods", "LazyLoader"]
)
def test_torch_may_be_looked_for_before_it_is_imported(lookup):
    """transformers, accelerate and jax do this."""
    python(
        """
        import copy, importlib.util, sys, gander
        lookup = sys.argv[1]
        spec = importlib.util.find_spec("torch")
        assert spec.name == "torch" and spec.origin.endswith("__init__.py") and "torch" not in sys.modules
        if lookup == "find_spec twice":
            assert importlib.util.find_spec("torch").origin == spec.origin
        elif lookup == "the loader's other methods":
            assert spec.loader.is_package("torch") and "import" in copy.copy(spec.loader).get_source("torch")
        elif lookup == "LazyLoader":
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules["torch"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["torch"])
        import torch
        assert torch.zeros(1).shape == (1,)
        assert torch.ops.gander.softmax.default
        assert type(gander.softmax(torch.zeros(2, 4))) is torch.Tensor
        assert "gander" not in type(torch.__loader__).__module__ + type(torch.__spec__.loader).__module__
        assert not any(getattr(finder, "name", None) == "torch" for finder in sys.meta_path)
        """,
        lookup,
    )


def test_a_loader_of_many_modules_is_not_changed():
    """The loaders of zip files and of frozen programs load other modules too. The latter is a class."""
    python("""
        import importlib.util, sys
        torch_spec = importlib.util.find_spec("torch")

        class Frozen:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name in ("torch", "other"):
                    origin = torch_spec.origin
                    return importlib.util.spec_from_loader(name, Frozen, origin=origin, is_package=True)

            @staticmethod
            def is_package(name):
                return True

            @staticmethod
            def create_module(spec):
                return None

            @staticmethod
            def exec_module(module):
                if module.__name__ == "torch":
                    module.__path__[:] = torch_spec.submodule_search_locations
                    module.__file__ = torch_spec.origin
                    torch_spec.loader.exec_module(module)

        before = vars(Frozen).copy()
        sys.meta_path.insert(0, Frozen)
        import gander
        assert importlib.util.find_spec("torch")
        import other
        assert "gander._torch" not in sys.modules
        import torch
        assert "gander._torch" in sys.modules and torch.__loader__ is Frozen and vars(Frozen) == before
        assert gander.softmax(torch.zeros(2, 4))[0, 0] == 0.25
    """)


def test_several_finders_may_wait_for_one_module(tmp_path):
    """Some import hooks are finders that ask all other finders."""
    (tmp_path / "awaited.py").write_text("")
    python(f"""
        import importlib.util, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from gander import _imports as _hook

        class Other:
            busy = False

            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name != "awaited" or cls.busy:
                    return None
                cls.busy = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    cls.busy = False

        seen, before = [], len(sys.meta_path)
        sys.meta_path.insert(0, Other)
        _hook.after_import("awaited", lambda: seen.append(1))
        _hook.after_import("awaited", lambda: seen.append(2))
        import awaited
        _hook.after_import("awaited", lambda: seen.append(3))
        assert sorted(seen) == [1, 2, 3] and len(sys.meta_path) == before + 1
        assert type(awaited.__loader__).__name__ == "SourceFileLoader"
    """)


def test_a_zipped_torch_is_imported(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("torch.py", "class Tensor:\n    pass\n")
        archive.writestr("other.py", "")
    python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path / "all.zip")!r})
        import gander, torch, other
        assert type(torch.__loader__).__name__ == "zipimporter"
        assert vars(other.__loader__) == vars(torch.__loader__)
    """)


def test_a_torch_imported_without_the_import_hook():
    """The first call with a tensor registers the operators."""
    python("""
        import sys, gander
        finders = [finder for finder in sys.meta_path if "gander" in str(finder)]
        sys.meta_path.remove(*finders)
        import torch, numpy as np
        assert "gander._torch" not in sys.modules
        assert type(gander.softmax(np.zeros((2, 4)))) is np.ndarray
        assert "gander._torch" not in sys.modules
        x = torch.zeros(2, 4, requires_grad=True)
        assert not gander.softmax_fwd(x).requires_grad and gander.softmax(x).requires_grad
    """)


def test_torch_may_be_initializing_when_gander_is_imported(tmp_path):
    """Another thread may be importing torch, or torch itself may import gander."""
    python("""
        import importlib, sys, threading, time
        thread = threading.Thread(target=importlib.import_module, args=("torch",))
        thread.start()
        while "torch" not in sys.modules:
            time.sleep(0.001)
        import gander
        thread.join()
        import torch
        assert torch.ops.gander.softmax.default
        assert gander.softmax(torch.zeros(2, 4))[0, 0] == 0.25
    """)
    (tmp_path / "torch.py").write_text("import gander\nclass Tensor:\n    pass\n")
    python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        assert "gander._torch" not in sys.modules and not torch.gander._backend.failure()
    """)


def test_a_failed_registration_is_reported_by_the_first_call(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '1.2'\nclass Tensor:\n    pass\n")
    for first, second in (("torch", "gander"), ("gander", "torch")):
        python(f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import {first}, {second}, gander, torch, numpy as np
            assert gander.softmax(np.zeros((2, 4)))[0, 0] == 0.25
            assert "Error: " in gander.info()["fast_path"]
            for _ in range(2):
                try:
                    gander.softmax(torch.Tensor())
                except RuntimeError as error:
                    assert "gander could not register its operators with torch 1.2: " in str(error)
                    assert isinstance(error.__cause__, ImportError)
                else:
                    raise AssertionError("no error")
        """)


def test_a_failed_import_of_torch_raises_its_own_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken torch')")
    python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import gander
        for _ in range(2):
            try:
                import torch
            except ImportError as error:
                assert str(error) == "broken torch"
            else:
                raise AssertionError("no error")
        sys.path.pop(0)
        import torch
        assert torch.ops.gander.softmax.default
    """)


def test_a_missing_library_is_one_clear_error(tmp_path):
    python(
        """
        import gander, torch
        for call in (lambda: gander.softmax(torch.ones(2, 3)), gander.info):
            for _ in range(2):
                try:
                    call()
                except RuntimeError as error:
                    assert type(error) is RuntimeError
                    assert "gander: cannot load its library" in str(error), error
                else:
                    raise AssertionError("no error")
        """,
        GANDER_LIBRARY=str(tmp_path / "nothing.so"),
    )


def test_fork_after_a_call_is_refused_and_does_not_hang():
    python("""
        import os, torch, gander, numpy as np
        x = torch.randn(4, 6)
        explain = lambda: gander.explain("softmax", x)
        gander.softmax(x)
        child = os.fork()
        if child == 0:
            code = 0
            for function in (lambda: gander.softmax(x), lambda: gander.softmax(x.numpy()), explain):
                try:
                    function()
                    code |= 1
                except RuntimeError as error:
                    code |= 0 if "fork" in str(error) and "spawn or forkserver" in str(error) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gander.softmax(x)
    """)


def test_fork_before_the_first_call_works():
    python("""
        import os, torch, gander
        child = os.fork()
        if child == 0:
            os._exit(0 if gander.softmax(torch.zeros(2, 4))[0, 0] == 0.25 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gander.softmax(torch.zeros(2, 4))
    """)


def test_fork_after_torch_has_used_its_threads():
    """These do not exist in the child, so a call there that is large enough for them runs on gander's own."""
    python(
        """
        import os, signal, torch, gander
        torch.set_num_threads(2)
        x = torch.randn(512, 1024)
        x.exp()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends the child if it hangs
            last = gander.softmax(x)[-1]
            os._exit(0 if abs(last.sum().item() - 1) < 1e-5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gander.softmax(x)
        assert "threads of the caller's framework" in gander.explain("softmax", x)
        """
    )


# ---- Signals: a call on the CPU uses all threads, and the signal may arrive while any of them runs Go code
# ----


def test_python_signal_handlers_run_and_results_stay_correct():
    python("""
        import signal, torch, gander
        ticks = 0
        def tick(*_):
            global ticks
            ticks += 1
        small, large = torch.randn(4, 64), torch.randn(512, 2048)
        signal.signal(signal.SIGUSR1, tick)  # before the library is loaded
        expected = gander.softmax(small), gander.softmax(large)
        signal.signal(signal.SIGALRM, tick)  # after it
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        calls = 0
        while calls < 1000 or ticks < 100:
            calls += 1
            assert torch.equal(gander.softmax(small), expected[0])
            assert torch.equal(gander.softmax(large), expected[1])
            try:
                gander.softmax(small.int())
                raise AssertionError("no error")
            except TypeError:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        ticks = 0
        signal.raise_signal(signal.SIGUSR1)
        assert ticks == 1
    """)


def test_an_interrupt_during_a_call_is_raised_after_it():
    python("""
        import os, signal, threading, torch, gander
        signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
        x = torch.randn(2048, 8192)
        expected = gander.softmax(x)
        for _ in range(10):
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
            results = [expected]
            try:
                timer.start()
                while True:
                    results[0] = gander.softmax(x)
            except KeyboardInterrupt:
                timer.join()
            assert torch.equal(results[0], expected)
        assert torch.equal(gander.softmax(x), expected)
    """)


@pytest.mark.parametrize("when", ["before", "after"])
def test_faulthandler_reports_a_crash_whenever_it_was_enabled(when):
    script = f"""
        import ctypes, faulthandler, resource, gander, numpy as np
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if {when!r} == "before":
            faulthandler.enable()
        x = np.arange(2**20, dtype=np.float32).reshape(512, 2048) % 61
        expected = gander.softmax(x)
        if {when!r} == "after":
            faulthandler.enable()
        for _ in range(100):
            assert np.array_equal(gander.softmax(x), expected)
        print("calls are right", flush=True)
        ctypes.string_at(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.stdout == "calls are right\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr and "in string_at" in done.stderr


def test_a_closed_pipe_is_still_an_exception():
    python("""
        import os, gander, numpy as np
        gander.softmax(np.ones((2, 3), np.float32))
        reader, writer = os.pipe()
        os.close(reader)
        try:
            os.write(writer, b"x")
            raise AssertionError("no error")
        except BrokenPipeError:
            pass
    """)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return gander.softmax(torch.full((3,), float(index)))


def test_workers_of_a_data_loader_started_by_spawn():
    gander.softmax(torch.ones(2, 3))
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(torch.cat(list(loader)), torch.full((4, 3), 1 / 3))


def test_info():
    facts = gander.info()
    assert facts["version"] == gander.__version__
    assert facts["abi_version"] == gander._native.library.ABI_VERSION
    assert facts["torch"] == torch.__version__
    assert facts["fast_path"] is True or facts["fast_path"]
    assert os.path.exists(facts["library"])


@pytest.mark.parametrize("cpu", ['"cpu"', 'torch.device("cpu")'])
def test_warmup_loads_the_library(cpu):
    python(f"""
        import gander, torch
        loaded = {LOADED}
        assert not loaded()
        gander.warmup({cpu})
        assert loaded()
    """)


def run(*arguments, without=()):
    """`python -m gander` as a user runs it who has not installed some packages."""
    script = """
        import runpy, sys
        sys.modules |= dict.fromkeys(sys.argv.pop(1).split())
        runpy.run_module("gander", run_name="__main__")
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), " ".join(without), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )


BARE = "typer", "rich", "matplotlib", "torch", "numpy"
EXPLAIN = "explain", "softmax", "--shape", "8192,4096", "--dtype", "bfloat16", "--device", "h100"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "explain "),
        (("info",), "torch          None\n"),
        (("info", "--json"), '"torch": null'),
        (EXPLAIN, "auto takes register"),
        ((*EXPLAIN, "--algorithm", "cluster"), "in clusters of 2"),
    ],
)
def test_the_command_line_needs_no_package(arguments, expected):
    done = run(*arguments, without=BARE)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout and done.stderr == ""


def test_info_reports_on_torch():
    assert f"torch          {torch.__version__}\n" in run("info").stdout
    assert json.loads(run("info", "--json").stdout) == gander.info()


def test_explain_on_the_command_line_passes_all_options_on():
    invariant = run(*EXPLAIN, "--batch-invariant", "--shape", "4,4096")
    options = dict(shape=(4, 4096), dtype="bfloat16", device="h100")
    assert invariant.stdout == gander.explain("softmax", **options, batch_invariant=True) + "\n"
    assert invariant.stdout != gander.explain("softmax", **options) + "\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("demo",), "invalid choice: 'demo' (choose from "),
        (("explain", "softmax"), "required: --shape, --dtype, --device"),
        (
            (*EXPLAIN, "--shape", "8x4"),
            "argument --shape: '8x4' is no shape, expected sizes such as 8192,",
        ),
        ((*EXPLAIN, "--dtype", "int8"), "dtype is int8, expected float16, bfloat16"),
        ((*EXPLAIN, "--algorithm", "best"), "algorithm is 'best', expected 'auto'"),
        ((*EXPLAIN, "--algorithm", "warp"), 'algorithm "warp" holds rows of up to'),
        (("check",), "check needs torch or NumPy, and neither is installed"),
    ],
)
def test_errors_of_the_command_line_are_a_sentence(arguments, expected):
    done = run(*arguments, without=BARE)
    assert done.returncode == 2
    assert done.stdout == "" and expected in done.stderr
    assert done.stderr.startswith("python -m gander") and done.stderr.count("\n") == 1


def test_public_names():
    for name in gander.__all__:
        assert getattr(gander, name) is not None
        assert name.startswith("__") or name == "nn" or getattr(gander, name).__doc__
    with pytest.raises(AttributeError, match="module 'gander' has no attribute 'groupnorm'"):
        gander.groupnorm  # noqa: B018
