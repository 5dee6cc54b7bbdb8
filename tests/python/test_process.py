"""What gander does to its process: imports, lazy loading, forks, both bindings, the command line."""

import os
import signal
import subprocess
import sys
import textwrap

import gander
import pytest
import torch


def python(script, *arguments, **environment):
    """Runs a script and returns what it prints; it must print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


LOADED = "lambda: any(str(gander._library.path()) in line for line in open('/proc/self/maps'))"


def test_import_brings_neither_torch_nor_numpy_nor_the_library():
    python(f"""
        import sys, gander
        loaded = {LOADED}
        assert not {{"torch", "numpy"}} & set(sys.modules)
        assert not loaded()
    """)


@pytest.mark.parametrize("first", ["torch", "gander"])
def test_operators_are_registered_whichever_import_comes_first(first):
    python(f"""
        import {first}, torch, gander, sys
        loaded = {LOADED}
        assert torch.ops.gander.softmax.default
        assert torch.ops.gander.softmax_fwd(torch.ones(2, 3, device="meta")).shape == (2, 3)
        assert not loaded()
        assert torch.equal(torch.ops.gander.softmax(torch.zeros(2, 4)), torch.full((2, 4), 0.25))
        assert loaded()
        assert not any(finder.__module__ == "gander._hook" for finder in sys.meta_path if hasattr(finder, "__module__"))
    """)


def test_functions_imported_before_torch_take_tensors():
    python("""
        from gander import softmax
        import torch
        assert softmax(torch.zeros(2, 4, requires_grad=True)).requires_grad
    """)


def test_a_failed_import_of_torch_is_its_own(tmp_path):
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
                    assert type(error) is RuntimeError and "gander: cannot load its library" in str(error), error
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


def test_fork_before_the_first_call_is_fine():
    python("""
        import os, torch, gander
        child = os.fork()
        if child == 0:
            os._exit(0 if gander.softmax(torch.zeros(2, 4))[0, 0] == 0.25 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gander.softmax(torch.zeros(2, 4))
    """)


# ---- Signals: a call on the CPU uses all threads, and a handler may find any of them in Go ----


def test_python_handlers_run_while_calls_stay_right():
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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


def test_both_bindings_give_the_same_bits(tmp_path):
    """Without torch's stable C ABI the ops go through ctypes."""
    script = """
        import sys, torch, gander
        torch.manual_seed(0)
        x, weight = torch.randn(3, 40, 67), torch.randn(67)
        results = []
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for view in (x, x.transpose(0, 1), x[:1].expand(2, 40, 67), x[0, 0]):
                a = view.to(dtype).detach().requires_grad_()
                w = weight.to(dtype).requires_grad_()
                t = torch.randint(67, view.shape[:-1])
                for out, inputs in (
                    (gander.softmax(a), (a,)),
                    (gander.rmsnorm(a, w), (a, w)),
                    (gander.rmsnorm(a), (a,)),
                    (gander.cross_entropy(a, t, weight=w.detach().abs()), (a,)),
                    (gander.cross_entropy(a, t, reduction="none"), (a,)),
                    (gander.cross_entropy(a * 1, t, inplace_backward=True), (a,)),
                ):
                    results += [out.detach(), *torch.autograd.grad(out.sum(), inputs)]
                a = view.to(dtype, copy=True).clone()
                results += gander.cross_entropy_fwd(a, t, return_lse=True, return_dx=True)
                loss, lse = gander.cross_entropy_fwd(a, t, return_lse=True)
                results += [gander.cross_entropy_bwd(a, t, loss, lse)]
                version = a._version
                gander.cross_entropy_fwd(a, t, return_dx=True, inplace_backward=True)
                assert a._version > version
                results += [a]
        for call, kind, message in (
            (lambda: gander.softmax(torch.ones(3).int()), TypeError, "x has dtype int32"),
            (lambda: gander.rmsnorm(x, weight[:5]), ValueError, "weight has shape (5,)"),
            (lambda: gander.cross_entropy(x, t), ValueError, "target has shape (), expected (3, 40)"),
        ):
            try:
                call()
                raise AssertionError("no error")
            except kind as error:
                assert message in str(error), error
        assert gander.info()["torch_binding"] == sys.argv[2]
        torch.save(results, sys.argv[1])
    """
    python(script, str(tmp_path / "c"), "stable C ABI")
    python(script, str(tmp_path / "ctypes"), "ctypes", GANDER_TORCH_BINDING="ctypes")
    ours, theirs = torch.load(tmp_path / "c"), torch.load(tmp_path / "ctypes")
    assert len(ours) == len(theirs) > 100
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_info():
    facts = gander.info()
    assert facts["version"] == gander.__version__
    assert facts["abi_version"] == 1
    assert facts["torch"] == torch.__version__
    assert facts["torch_binding"] == "stable C ABI"
    assert os.path.exists(facts["library"])


def test_warmup():
    gander.warmup("cpu")
    gander.warmup(torch.device("cpu"))


def test_command_line_says_what_is_here():
    pytest.importorskip("typer", reason="the command line needs the extra `demo`")
    for arguments, expected in ((["info"], "torch_binding  stable C ABI"), (["demo", "--help"], "--steps")):
        done = subprocess.run([sys.executable, "-m", "gander", *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_public_names():
    for name in gander.__all__:
        assert getattr(gander, name) is not None
        assert name.startswith("__") or name == "nn" or getattr(gander, name).__doc__
    with pytest.raises(AttributeError, match="module 'gander' has no attribute 'layernorm'"):
        gander.layernorm  # noqa: B018
