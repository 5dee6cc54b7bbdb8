"""The fast path, which bypasses the dispatcher: taken in the plain case only, with the same results.

These tests are skipped if GANDER_FAST_PATH=0 or this version of torch turns it off.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gander
import pytest
import torch
from demands import (
    ON_DEMAND,
    asked_for,
    calls_on_demand,
    check_unwanted,
    demands,
    every_demand,
    in_order,
    leaves,
    shown,
)
from gander._table import TORCH, differentiable
from gander._torch import backend
from gander._torch import fast as _fast
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

fast = _fast._functions
pytestmark = pytest.mark.skipif(_fast._untested() is not None, reason=str(_fast._untested()))

NAMES = ("softmax", "rmsnorm", "cross_entropy", "logsumexp")


def inputs_of(name, x, weight, target):
    return {"rmsnorm": (x, weight), "cross_entropy": (x, target)}.get(name, (x,))


def arguments(name, x, weight, target):
    return in_order(name, *inputs_of(name, x, weight, target))


def first(results):
    """The first result of an operator."""
    return results[0] if isinstance(results, tuple) else results


@pytest.fixture
def data(device):
    x, weight = torch.randn(6, 33, device=device), torch.randn(33, device=device)
    return x, weight, torch.tensor([0, 32, -100, 4, 4, 9], device=device)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def dispatcher(monkeypatch):
    """A function that turns the fast path off: all operators go through the dispatcher."""

    def switch():
        for name in fast:
            overload = getattr(torch.ops.gander, name).default
            monkeypatch.setattr(overload, "_op", _fast.dispatch[name])
            monkeypatch.setattr(backend, name, _fast.dispatch[name])

    return switch


def public(name, x, weight, target):
    """Calls a public function."""
    return {
        "softmax": lambda: gander.softmax(x),
        "rmsnorm": lambda: gander.rmsnorm(x, weight),
        "cross_entropy": lambda: gander.cross_entropy(x, target),
        "logsumexp": lambda: gander.logsumexp(x),
    }[name]()


def taken(name, *inputs):
    return fast[name](*arguments(name, *inputs)) is not None


def test_fast_path_is_on():
    assert gander.info()["fast_path"] is True
    writing = {name for name, operator in TORCH.items() if operator.writes and operator.results}
    assert set(fast) == set(TORCH) - writing == _fast._checked


def test_operators_that_write(data):
    """They are taken, with the dispatcher's bits, and increment versions as the dispatcher's kernel does."""
    x, weight, _ = data
    name = "fused_add_rmsnorm_"

    def taken(*given):
        return fast[name](*in_order(name, *given, weight_offset=1.0))

    bits, versions = [], []
    for function in fast[name], getattr(torch.ops.gander, name):
        mine, residual = x.clone(), x.sin()
        done = function(*in_order(name, mine, weight, residual, weight_offset=1.0))
        bits.append((mine, residual))
        versions.append((mine._version, residual._version))
    assert done is None
    assert all(map(torch.equal, *bits))
    assert versions[0] == versions[1]
    assert taken(x.clone(), weight, x.clone()) is True
    # what has to be copied back, what has a gradient, and errors go to the dispatcher
    apart = x.new_zeros(6, 66)[:, ::2]
    for given in (apart, weight, x.clone()), (x.clone(), weight, apart), (x.clone(), weight, x[:1]):
        before = [t.clone() for t in given]
        assert taken(*given) is None
        assert all(map(torch.equal, given, before))
    assert taken(x.clone().requires_grad_(), weight, x.clone()) is None
    with torch.inference_mode():
        mine, residual = x.clone(), x.sin()
        assert taken(mine, weight, residual) is True
    assert torch.equal(mine, bits[0][0])


def run(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


CALL = (
    "; x = torch.randn(3, 4, requires_grad=True); y = gander.softmax(x); y[0, 0].backward(); "
    "assert x.grad is not None"
)


@pytest.mark.parametrize(
    ("change", "environment", "reason"),
    [
        ("pass", {"GANDER_FAST_PATH": "0"}, "GANDER_FAST_PATH is 0"),
        ("torch.__version__ = '2.9.1'", {}, "torch is 2.9.1, and 2.10.0 to"),
        ("torch.__version__ = '3.0.0+cpu'", {}, r"torch is 3.0.0\+cpu, and 2.10.0 to"),
        ("torch.Tensor._cdata = property(lambda t: 1)", {}, "relies on: the address of a tensor"),
        ("keys = torch._C._dispatch_tls_local_include_set(); "
         "torch._C._dispatch_tls_local_include_set = lambda: keys",
         {}, "has another dispatch state"),
        ("mode = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize); mode.__enter__()",
         {}, "has another dispatch state, or a mode was active"),
    ],
    ids=["switch", "older", "newer", "symbol", "meaning", "mode"],
)  # fmt: skip
def test_off_with_a_reason(change, environment, reason):
    out = run(
        f"import torch; {change}; import gander{CALL}; print(gander.info()['fast_path'])", **environment
    )
    assert re.search(reason, out), out


def test_off_if_a_result_differs():
    code = (
        "import torch, gander; from gander._torch import fast as _fast; "
        "right = _fast._functions['rmsnorm']; "
        "_fast._functions['rmsnorm'] = lambda *a: (y := right(*a), y[0].data.add_(1e-6))[0]"
        f"{CALL}; print(gander.info()['fast_path']); print(len(_fast._functions))"
    )
    assert run(code).split("\n") == [
        f"torch {torch.__version__} returns another result through its dispatcher: rmsnorm",
        "0",
    ]


def test_first_calls_on_several_threads_write_once():
    """While one thread checks a function, or where the check fails, the dispatcher runs the operator. It must
    not find rows that the function has written already."""
    code = """
import threading, time, torch, gander
from gander._torch import fast as _fast
differs = _fast._differs
_fast._differs = lambda names: (time.sleep(0.2), differs(names))[1]
barrier, wrong = threading.Barrier(4), []
def first_calls(i):
    x, residual = torch.randn(8, 64), torch.randn(8, 64)
    want = x + residual
    barrier.wait()
    if i % 2:
        gander.rmsnorm(x, torch.ones(64))
    gander.fused_add_rmsnorm(x, residual, None)
    wrong.append(float((residual - want).abs().max()))
threads = [threading.Thread(target=first_calls, args=(i,)) for i in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(wrong)
"""
    assert run(code) == "[0.0, 0.0, 0.0, 0.0]"
    code = """
import torch, gander
from gander._torch import fast as _fast
_fast._differs = lambda names: names[0]
x, residual = torch.ones(2, 4), torch.ones(2, 4)
gander.fused_add_rmsnorm(x, residual, None)
print(residual.unique().tolist(), gander.info()["fast_path"])
"""
    name = "fused_add_rmsnorm_"
    assert (
        run(code) == f"[2.0] torch {torch.__version__} returns another result through its dispatcher: {name}"
    )


@pytest.mark.parametrize(
    "call",
    [
        "torch.vmap(lambda x, r: gander.fused_add_rmsnorm(x, r, None) or r)(x, r)",
        "torch.vmap(lambda x, r: gander.rmsnorm(x, out=r))(x, r)",
        "with torch.autocast('cpu'): gander.fused_add_rmsnorm(x, r, None)",
        "with torch.autograd.profiler.profile(): gander.fused_add_rmsnorm(x, r, None)",
    ],
)
def test_an_operator_that_writes_is_not_checked_where_it_goes_to_the_dispatcher(call):
    code = f"""
import torch, gander
from gander._torch import fast as _fast
made, example = [], _fast._example
_fast._example = lambda name: made.append(name) or example(name)
x, r = torch.ones(3, 2, 4), torch.zeros(3, 2, 4)
{call}
print(made, torch.allclose(r, torch.ones(3, 2, 4)))
"""
    assert run(code) == "[] True"


def test_a_mode_does_not_see_the_check_of_an_operator_that_writes():
    code = """
import torch, gander
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))
class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(function.__name__)
        return function(*args, **(kwargs or {}))
x, residual = torch.ones(2, 4), torch.ones(2, 4)
for mode in Functions(), Operators():
    with mode:
        gander.fused_add_rmsnorm(x, residual, None)
print([name for name in seen if "arange" in name or "equal" in name])
"""
    assert run(code) == "[]"


def test_versions():
    """The newest release that is tested is the one in .venv."""
    root = Path(__file__).parents[2]
    assert f"torch=={_fast.TESTED[-1]};" in (root / "requirements.in").read_text()


def test_nothing_is_checked_at_import():
    """The check needs the library, which an import must not load."""
    loaded = "'/libgander.so' in open('/proc/self/maps').read()"
    code = f"import torch, gander; print(gander._torch.fast._checked, {loaded})"
    assert run(code) == "set() False"
    checked = run(f"import torch, gander{CALL}; print(sorted(gander._torch.fast._checked))")
    assert checked == "['softmax', 'softmax_bwd']"  # no operator that is not called


def test_the_check_has_no_effect_on_the_caller():
    """The first call may be inside of hooks or of inference mode, or without gradients."""
    hooks = (
        "import torch, gander; kept = []; x = torch.randn(3, 4, requires_grad=True)\n"
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):\n"
        "    gander.rmsnorm(x)\n"
        "print(kept)"
    )
    assert run(hooks) == "[torch.Size([3, 4]), torch.Size([3])]"
    for mode in ("inference_mode", "no_grad"):
        code = (
            f"import torch, gander; x = torch.randn(3, 4, requires_grad=True)\nwith torch.{mode}():\n"
            "    y = gander.softmax(x)\n"
            f"print(y.is_inference(), y.requires_grad, gander._torch.fast._checked)"
        )
        assert run(code) == f"{mode == 'inference_mode'} False {{'softmax'}}"


def test_taken_in_the_plain_case(name, data):
    x, weight, target = data
    leaf, leaf_weight = x.clone().requires_grad_(), torch.nn.Parameter(weight)
    assert taken(name, x, weight, target)
    assert taken(name, torch.nn.Parameter(x), leaf_weight, target)

    def result(*inputs):
        return first(fast[name](*arguments(name, *inputs)))

    assert result(leaf, weight, target).requires_grad
    assert result(leaf * 1, leaf_weight, target).requires_grad
    with torch.no_grad():
        assert not result(leaf, leaf_weight, target).requires_grad
    with torch.inference_mode():
        assert result(leaf, leaf_weight, target).is_inference()
    assert not result(x, weight, target).is_inference()
    for dtype in (torch.float16, torch.bfloat16):
        assert taken(name, x.to(dtype), weight.to(dtype), target.int())


@pytest.fixture
def dispatched(monkeypatch):
    """The operators that torch.ops has called through the dispatcher."""
    assert _fast.status() is True  # after a check of all operators, which calls the dispatcher
    found = []

    def noting(name, through, attempt, operator):
        """What torch.ops calls, and whether the fast path would have declined the same arguments."""
        names = [argument.name for argument in operator.arguments]
        schema = getattr(torch.ops.gander, name).default._schema
        required = {a.name for a in schema.arguments if not a.has_default_value()}

        def call(*given, **named):
            whole = len(given) <= len(names) and not named.keys() - {*names[len(given) :]}
            whole = whole and required <= {*names[: len(given)], *named}
            if whole and attempt(*in_order(name, *given, **named), True) is None:
                found.append(name)
            return through(*given, **named)

        return call

    for name in fast:
        overload = getattr(torch.ops.gander, name).default
        monkeypatch.setattr(overload, "_op", noting(name, _fast._wholes[name], fast[name], TORCH[name]))
    return found


def test_taken_by_overloads(name, data, dispatched):
    """With arguments in any form that stands for all of them in order."""
    x, inputs = data[0], inputs_of(name, *data)
    overload = getattr(torch.ops.gander, name).default
    names = [argument.name for argument in overload._schema.arguments]
    full = arguments(name, *data)
    expected = first(getattr(torch.ops.gander, name)(*full))  # the packet calls the dispatcher
    after = len(inputs)
    ways = (inputs, {}), (full, {}), (inputs, dict(zip(names[after:], full[after:], strict=True)))
    with torch.no_grad():
        for given, named in ways:
            assert torch.equal(first(overload(*given, **named)), expected)
    assert dispatched == []
    for given, named in ((), dict(zip(names, full, strict=True))), (full[:-1], {names[-1]: full[-1]}):
        assert torch.equal(first(overload(*given, **named)), expected)
    assert dispatched == []
    for given, named in (  # keywords in another order, and not all of them
        (inputs, {names[-1]: full[-1]}),
        ((), dict(reversed([*zip(names, full, strict=True)]))),
    ):
        assert torch.equal(first(overload(*given, **named)), expected)
    assert dispatched == []
    for given, named in ((*full, 1), {}), ((), {}), (full, {"none": 1}), (full, {names[0]: x}):
        with pytest.raises((RuntimeError, TypeError)):
            overload(*given, **named)


@pytest.mark.parametrize(("name", "asked"), every_demand(ON_DEMAND), ids=shown)
def test_results_that_are_not_asked_for(name, asked, data, dispatched):
    """They are None where gander calls, and tensors without elements where torch's overload is called."""
    given, options = calls_on_demand(*data)[name]
    want = getattr(torch.ops.gander, name)(*given, **options, **demands(name)[-1])
    ways = [given]
    if differentiable(name):
        ways.append(leaves(name, given))
    for inputs in ways:
        full = in_order(name, *inputs, **options, **asked)
        ours, theirs = fast[name](*full), getattr(torch.ops.gander, name).default(*full)
        check_unwanted(name, asked, theirs, want)
        for wanted, mine, other, expected in zip(asked_for(name, asked), ours, theirs, want, strict=True):
            if wanted:
                assert torch.equal(mine, expected) and torch.equal(other, expected)
                assert (mine.requires_grad, mine.dtype) == (other.requires_grad, other.dtype)
            else:
                assert mine is None
        # A call with a gradient goes to the dispatcher, which makes the tensors without elements.
        assert dispatched == ([name] if inputs is not given and not all(asked.values()) else [])


def test_an_overload_that_writes_returns_nothing(data, dispatched):
    x, weight, _ = data
    mine, residual = x.clone(), x.sin()
    assert torch.ops.gander.fused_add_rmsnorm_.default(mine, weight, residual) is None
    assert not torch.equal(mine, x)
    assert dispatched == []


@pytest.mark.parametrize("gradient", [False, True])
def test_taken_by_compiled_code(data, gradient, dispatched):
    x, weight, target = data
    torch._dynamo.reset()

    def model(x, weight):
        return gander.cross_entropy(gander.softmax(gander.rmsnorm(x, weight)) * 8, target)

    compiled, leaf = torch.compile(model, fullgraph=True), x.clone().requires_grad_(gradient)
    for _ in range(2):
        dispatched.clear()
        loss = compiled(leaf, weight)
        if gradient:
            (dx,) = torch.autograd.grad(loss, leaf)
    assert dispatched == []
    torch.testing.assert_close(loss, model(leaf, weight))
    if gradient:
        torch.testing.assert_close(dx, torch.autograd.grad(model(leaf, weight), leaf)[0])


def test_taken_on_every_thread(name, data):
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(taken(name, *data)))
        thread.start()
        thread.join()
    assert found == [True, True]


def test_taken_in_a_backward_pass(name, data):
    found = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.append(taken(name, *data))
            return gradient

    Watch.apply(data[0].clone().requires_grad_()).sum().backward()
    assert found == [True]


def test_not_taken_for_gradients_that_it_does_not_compute(data):
    """Gradients of gradient operators."""
    x, weight, _ = data
    leaf, rstd = x.clone().requires_grad_(), torch.rand(6, device=x.device)
    assert fast["softmax_bwd"](leaf, x, 0, False) is None
    norm = in_order("rmsnorm_bwd", x, weight.clone().requires_grad_(), x, None, rstd, needs_dw=True)
    assert fast["rmsnorm_bwd"](*norm) is None
    with torch.no_grad():
        assert fast["rmsnorm_bwd"](*norm)[2] is not None
        assert fast["softmax_bwd"](leaf, x, 0, False) is not None


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeenFunction(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Profile:
    """A profile of the host's work, which lists all ops by name."""

    def __init__(self):
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def __enter__(self):
        return self.profile.__enter__()

    def __exit__(self, *error):
        self.profile.__exit__(*error)


class Trace:
    """A trace of the executed ops, as tools that replay them need it. Its callback is not visible to
    Python."""

    def __enter__(self):
        self.file = tempfile.NamedTemporaryFile(suffix=".json")
        self.observer = torch.profiler.ExecutionTraceObserver()
        self.observer.register_callback(self.file.name)
        self.observer.start()

    def __exit__(self, *error):
        self.observer.stop()
        self.observer.unregister_callback()
        self.file.close()


MODES = {
    "dispatch mode": Seen,
    "function mode": SeenFunction,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward AD": forward_ad.dual_level,
    "profiler": Profile,
    "execution trace": Trace,
}


@pytest.mark.parametrize("mode", MODES)
def test_not_taken_in_a_mode(name, data, mode):
    x, weight, target = data
    for inputs in (data, (x.clone().requires_grad_(), weight, target)):
        with MODES[mode]():
            assert not taken(name, *inputs)
            with torch.inference_mode():
                assert not taken(name, *inputs)
        assert taken(name, *inputs)


def test_not_taken_in_a_transform(name, data):
    x, weight, target = data
    found = []

    def watch(x):
        found.append(taken(name, x, weight, target))
        found.append(taken(name, data[0], weight, target))  # a plain tensor, but inside the transform
        return x.sum()

    torch.vmap(watch)(x.expand(2, 6, 33))
    torch.func.grad(watch)(x)
    torch.func.jvp(watch, (x,), (x,))
    torch.func.functionalize(watch)(x)
    assert found == [False] * 8
    assert taken(name, x, weight, target)


def test_not_taken_in_tracing(data):
    x, _, _ = data
    found = []

    def traced(x):
        found.append(taken("softmax", x, None, None))
        return x * 2

    torch.jit.trace(traced, x, check_trace=False)
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(traced)(x)
    make_fx(traced, tracing_mode="fake")(x)
    assert found == [False] * 3


def test_a_profile_shows_the_op(name, data):
    x, weight, target = data
    for leaf in (x, x.clone().requires_grad_()):
        with Profile() as profile:
            public(name, leaf, weight, target)
        assert any(event.key.startswith(f"gander::{name}") for event in profile.key_averages())


def test_not_taken_for_other_than_plain_tensors(name, data):
    x, weight, target = data

    class Subclass(torch.Tensor):
        pass

    for other in (
        None,
        x.cpu().numpy(),
        x.as_subclass(Subclass),
        torch.nn.Parameter(x.as_subclass(Subclass)),
        x.to("meta"),
        x.to_sparse(),
        x.int(),
        torch.randn(6, 33, dtype=torch.complex64, device=x.device),
        torch.randn(6, 33, dtype=torch.complex64, device=x.device).conj().imag,
        torch._efficientzerotensor((6, 33), device=x.device),
        torch._to_functional_tensor(x),
        x[:0],
        x[:, :0],
        torch.nested.nested_tensor([x, x[:2]]),
    ):
        assert not taken(name, other, weight, target), type(other)
    assert taken(name, x, weight, target)


def test_other_threads_run_while_inputs_are_copied():
    ticks, stop = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)  # gives up the GIL, which nothing else does within the interval

    thread, interval = threading.Thread(target=tick), sys.getswitchinterval()
    x, weight = torch.zeros(4096, 4096).t(), torch.ones(1)  # the weight is refused after x has been copied
    sys.setswitchinterval(100)
    try:
        thread.start()
        before = ticks
        assert fast["rmsnorm"](*in_order("rmsnorm", x, weight)) is None
        during = ticks - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert during > 10


def test_nothing_is_printed(name, data, capfd):
    """Older releases of torch print that a tensor has no strides or no storage."""
    x, weight, target = data
    for other in (x.to_sparse(), x.to_sparse_csr(), x.cpu().to_mkldnn()):
        assert not taken(name, other, weight, target)
    assert capfd.readouterr() == ("", "")


def test_copy_on_write(name, data):
    """A lazy clone that is read stays shared, and one that is written does not change its original."""
    x, weight, target = data
    original = x.clone()
    lazy = torch._lazy_clone(original)
    assert taken(name, lazy, weight, target)
    assert torch._C._is_cow_tensor(lazy)
    residual = x.sin()
    lazy = torch._lazy_clone(original), torch._lazy_clone(residual)
    given = in_order("fused_add_rmsnorm_", lazy[0], weight, lazy[1], weight_offset=1.0)
    assert fast["fused_add_rmsnorm_"](*given) is True
    assert torch.equal(original, x)
    assert torch.equal(residual, x.sin())
    assert not torch.equal(lazy[0], x)
    torch.testing.assert_close(lazy[1], x + x.sin())


def test_not_taken_for_other_arguments(data):
    x, weight, target = data
    leaf = x.clone().requires_grad_()

    def rmsnorm(*given, **options):
        return fast["rmsnorm"](*in_order("rmsnorm", *given, **options))

    def cross_entropy(*given, **options):
        return fast["cross_entropy"](*in_order("cross_entropy", *given, **options))

    assert (
        fast["softmax"]()
        is fast["softmax"](x)
        is fast["softmax"](x, 0, 1)
        is fast["softmax"](x, "a", False)
        is None
    )
    for a in (x, leaf):
        assert rmsnorm(a, weight) is not None
        assert rmsnorm(a, weight, eps="a") is None
        assert rmsnorm(a, weight, out_dtype=torch.int8) is None
        assert rmsnorm(a, weight, out_dtype="float32") is None
        assert rmsnorm(a, weight, needs_rstd=1) is None
        assert rmsnorm(a, weight[1:]) is None
        assert rmsnorm(a, weight.double()) is None
        assert rmsnorm(a, weight.to("meta")) is None
        assert cross_entropy(a, target) is not None
        assert cross_entropy(a, target[1:]) is None
        assert cross_entropy(a, target.float()) is None
        assert cross_entropy(a, target, ignore_index=0.5) is None
        assert cross_entropy(a, target, ignore_index=1 << 70) is None
        assert cross_entropy(a, target, reduction=7) is None
    for in_place, one_pass in (True, None), (False, True), (False, False):
        assert cross_entropy(leaf, target, inplace_backward=in_place, one_pass=one_pass) is None
    assert cross_entropy(leaf, target, weight=weight.clone().requires_grad_()) is None
    if x.is_cuda:
        assert rmsnorm(x, weight.cpu()) is None
        assert cross_entropy(x, target.cpu()) is None
        many = leaf[:1].expand(1 << 18, 33), target[:1].expand(1 << 18)
        assert cross_entropy(*many) is None  # one pass for loss and gradient
        assert cross_entropy(many[0].detach(), many[1]) is not None


def test_a_cuda_device_that_is_not_current():
    """The call runs on x's device and its stream, and leaves the current device as it was."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(6, 33, device="cuda:1")
    assert taken("softmax", x, None, None)
    with torch.cuda.stream(torch.cuda.Stream(1)), torch.cuda.device(0):
        leaf = x.clone().requires_grad_()
        y = gander.softmax(leaf)
        (dx,) = torch.autograd.grad(y, leaf, x)
        torch.cuda.current_stream(1).synchronize()
    assert torch.cuda.current_device() == 0
    assert y.device == dx.device == x.device
    torch.testing.assert_close(y, x.softmax(-1))
    torch.testing.assert_close(dx, torch._softmax_backward_data(x, y.detach(), -1, x.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bits_are_those_of_the_dispatcher(data, dispatcher, dtype):
    x, weight, target = data
    wide = torch.randn(6, 66, device=x.device)
    views = (
        x,
        x.t().contiguous().t(),
        wide[:, ::2],
        wide[:, 1:34],
        x.view(2, 3, 33),
        x[0],
        x[:1].expand(6, 33),
    )

    def everything():
        results = []
        for view in views:
            a, w = view.to(dtype).detach().requires_grad_(), weight.to(dtype).requires_grad_()
            t = target[: view[..., 0].numel()].view(view.shape[:-1])
            for out, inputs in (
                (gander.softmax(a), (a,)),
                (gander.rmsnorm(a, w), (a, w)),
                (gander.rmsnorm(a, w.detach(), out_dtype=torch.float32, eps=0.1), (a,)),
                (gander.rmsnorm(a.detach(), w), (w,)),
                (gander.rmsnorm(a), (a,)),
                (gander.cross_entropy(a, t, weight=w.detach().abs(), ignore_index=4), (a,)),
                (gander.cross_entropy(a, t, reduction="sum"), (a,)),
                (gander.cross_entropy(a, t, reduction="sum", divisor=7), (a,)),
                (gander.cross_entropy(a, t.int(), reduction="none"), (a,)),
                (gander.logsumexp(a), (a,)),
            ):
                results += [out, *torch.autograd.grad(out, inputs, torch.full_like(out, 0.5))]
            with torch.no_grad():
                results += [gander.softmax(a), gander.rmsnorm(a, w), gander.cross_entropy(a, t)]
        return results

    got = everything()
    dispatcher()
    expected = everything()
    assert len(got) == len(expected) > 100
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()
        assert a.requires_grad == b.requires_grad
        assert (a.grad_fn and a.grad_fn.name()) == (b.grad_fn and b.grad_fn.name())


def test_errors_are_those_of_the_dispatcher(data, dispatcher):
    x, weight, target = data
    leaf = x.clone().requires_grad_()

    def errors():
        found = []
        for a in (x, leaf):
            for call in (
                lambda a=a: gander.softmax(a.int()),
                lambda a=a: gander.softmax(a[:, :0]),
                lambda a=a: gander.rmsnorm(a, weight[1:]),
                lambda a=a: gander.rmsnorm(a, weight, out_dtype=torch.int8),
                lambda a=a: gander.rmsnorm(a, [1.0]),
                lambda a=a: gander.rmsnorm(a, weight, eps="a"),
                lambda a=a: gander.cross_entropy(a, target[1:]),
                lambda a=a: gander.cross_entropy(a, target.float()),
                lambda a=a: gander.cross_entropy(a, target, weight=weight.clone().requires_grad_()),
            ):
                with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
                    call()
                found.append((error.type, str(error.value)))
        return found

    got = errors()
    dispatcher()
    assert got == errors()


def test_hooks_on_saved_tensors_may_call_gander(data):
    x, weight, target = data
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(gander.rmsnorm(leaf, weight).sum(), leaf)[0]
    packed = []

    def pack(t):
        packed.append(gander.softmax(x.clone().requires_grad_()) if len(packed) < 3 else None)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = gander.rmsnorm(leaf, weight)
    assert len(packed) > 2
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], expected)

    def refuse(t):
        raise ZeroDivisionError("not saved")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t), pytest.raises(ZeroDivisionError):
        gander.rmsnorm(leaf, weight)
    with torch.no_grad():
        assert taken("rmsnorm", leaf, weight, target)


def test_forward_refuses_other_callers(data):
    forward = type(gander.softmax(data[0].clone().requires_grad_()).grad_fn)._forward_cls.forward
    with pytest.raises(RuntimeError, match="gander"):
        forward(object(), torch.ones(2, 3))


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2. Resident memory grows only after a leak has filled what others freed."""

    _fields_ = (("fields", ctypes.c_size_t * 10),)

    def used(self):
        return self.fields[4] + self.fields[7]  # hblkhd and uordblks: bytes from mmap and in heaps


def test_nothing_is_leaked(data):
    """References and memory, for calls that succeed, that are declined and that fail."""
    x, weight, target = data
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    watched = (x, weight, target, leaf, leaf_weight, torch.float32, torch.Tensor, *fast.values())
    shared = None, True, False  # counts that others change a little
    short, eps, ignored = weight[1:], 1e-6, 1 << 40
    written, residual = x.clone(), x.clone()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo

    calls = [
        (fast[name], in_order(name, *given, **options))
        for a, w in ((x, weight), (leaf, leaf_weight), (x.t(), None))
        for name, given, options in (
            ("softmax", (a,), {}),
            ("logsumexp", (a,), {}),
            ("fused_add_rmsnorm_", (written, weight, residual), {"eps": eps, "weight_offset": 1.0}),
            ("rmsnorm", (a, w), {"residual": a, "eps": eps}),
            ("rmsnorm", (a, w), {"out_dtype": torch.float32, "eps": eps}),
            ("rmsnorm", (a, w), {"eps": eps, "needs_residual_out": True, "needs_rstd": True}),
            ("rmsnorm", (a, short), {"eps": eps}),
            ("cross_entropy", (a, target), {"ignore_index": ignored}),
            (
                "cross_entropy",
                (a, target),
                {"ignore_index": ignored, "reduction": 0, "inplace_backward": True},
            ),
        )
    ]
    # As torch's overload calls it: results that are not asked for are tensors.
    calls += [(fast["rmsnorm"], (*in_order("rmsnorm", a, weight, eps=eps), True)) for a in (x, leaf)]

    def rounds(count):
        for _ in range(count):
            for function, given in calls:
                function(*given)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return sys.getallocatedblocks(), mallinfo().used(), resident

    rounds(1100)
    counts = [sys.getrefcount(o) for o in (*watched, eps, ignored, *shared)]
    before = rounds(1000)
    blocks, used, resident = (b - a for a, b in zip(before, rounds(10_000), strict=True))
    after = [sys.getrefcount(o) for o in (*watched, eps, ignored, *shared)]
    assert after[:-3] == counts[:-3]
    assert all(abs(a - b) < 100 for a, b in zip(after[-3:], counts[-3:], strict=True))
    assert blocks < 1000, "small objects of Python; a leak of one per round is 10000"
    assert used < 100_000, "bytes from malloc; a leak of the smallest block per round is 320000"
    assert resident < 4_000_000, "bytes, also of Go; a leak of 32 per call is 7680000"
    for inputs in (data, (leaf, leaf_weight, target)):
        out = public("rmsnorm", *inputs)
        assert sys.getrefcount(out) == 2  # the context holds none, which would be a cycle


def test_memory_belongs_to_the_cuda_caching_allocator():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.randn(1 << 10, 1 << 10, device="cuda")
    before = torch.cuda.memory_allocated()
    y = gander.softmax(x)
    assert torch.cuda.memory_allocated() - before == y.nbytes
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        y.record_stream(side)
    pointer = y.data_ptr()
    del y
    assert torch.empty_like(x).data_ptr() != pointer  # still in use by the side stream
    torch.cuda.synchronize()
