"""gander.nn.functional against torch.nn.functional: signatures, results, gradients, what torch computes."""

import contextlib
import inspect
import warnings

import gander
import gander.nn.functional as F
import pytest
import torch
import torch.nn.functional as theirs
from test_ops import rand as random_on
from tolerance import assert_accurate

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def rand(*shape):
    return random_on(shape, torch.float32, "cpu")


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(F, "_warned", set())


@pytest.fixture
def from_torch(monkeypatch):
    """Counts the calls that torch's functions get."""
    calls = []

    def count(name):
        function = getattr(theirs, name)

        def counted(*arguments, **options):
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(F, f"_torch_{name}", counted)

    for name in F.__all__:
        count(name)
    return calls


def gradients(call, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(name, inputs, *rest, dtypes_agree=True, **options):
    """Results and gradients of the inputs, against torch's function in float64."""
    mine = gradients(lambda *x: getattr(F, name)(*x, *rest, **options), *inputs)
    other = gradients(lambda *x: getattr(theirs, name)(*x, *rest, **options), *inputs)
    wide = [x.double() for x in inputs]
    options = {k: v.double() if k == "weight" else v for k, v in options.items()}
    exact = gradients(lambda *x: getattr(theirs, name)(*x, *rest, **options), *wide)
    assert mine[0].is_contiguous()
    for got, expected, true in zip(mine, other, exact, strict=True):
        assert got.shape == expected.shape
        if dtypes_agree:
            assert got.dtype is expected.dtype
        if got.ndim == 0:  # one number: how its rounding compares with that of torch's is a matter of luck
            torch.testing.assert_close(got.double(), true, rtol=2**-20, atol=0)
        else:
            assert_accurate(got, expected.to(got.dtype), true)


@pytest.mark.parametrize("name", F.__all__)
def test_signatures(name):
    parameters = inspect.signature(getattr(F, name)).parameters.values()
    expected = inspect.signature(getattr(theirs, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in parameters] == [
        (p.name, p.kind, p.default) for p in expected
    ]


def test_other_names_are_torchs():
    assert F.gelu is theirs.gelu and F.group_norm is theirs.group_norm
    assert {"gelu", "softmax", "rms_norm"} <= set(dir(F))
    with pytest.raises(AttributeError, match="no_such_function"):
        F.no_such_function  # noqa: B018


# ---- Softmax ----


by_name = pytest.mark.parametrize("name", ["softmax", "log_softmax"])


@by_name
@by_dtype
@pytest.mark.parametrize(
    ("shape", "dim"), [((5, 33), -1), ((5, 33), 0), ((2, 3, 7), 1), ((2, 3, 7), -3), ((9,), 0), ((), 0)]
)
def test_softmax(name, shape, dim, dtype, from_torch):
    getattr(F, name)(rand(*shape).to(dtype), dim)
    assert from_torch == []
    compare(name, [rand(*shape).to(dtype)], dim)


@by_name
def test_softmax_casts_to_dtype(name, from_torch):
    x, mine, reference = rand(4, 9).to(torch.bfloat16), getattr(F, name), getattr(theirs, name)
    assert mine(torch.arange(6).view(2, 3), 1, dtype=torch.float32).dtype is torch.float32
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        torch.testing.assert_close(mine(x, -1, dtype=dtype), reference(x, -1, dtype=dtype))
    assert from_torch == []


@by_name
def test_softmax_leaves_to_torch(name, from_torch):
    mine = getattr(F, name)
    with pytest.warns(UserWarning, match=f"Implicit dimension choice for {name} has been deprecated"):
        mine(rand(2, 3))
    assert mine(rand(3, 0), -1).shape == (3, 0)
    with pytest.raises(IndexError, match="Dimension out of range"):
        mine(rand(2, 3), 2)
    assert from_torch == [name] * 3


# ---- RMSNorm ----


@by_dtype
@pytest.mark.parametrize("shape", [(33,), (3, 11)])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(shape, eps, dtype, from_torch):
    x, weight = rand(4, *shape).to(dtype), rand(*shape).to(dtype)
    F.rms_norm(x, shape, weight, eps)
    F.rms_norm(x, list(shape), eps=eps)
    assert from_torch == []
    mine = gradients(lambda x, w: F.rms_norm(x, shape, w, eps), x, weight)
    other = gradients(lambda x, w: theirs.rms_norm(x, shape, w, eps), x, weight)
    epsilon = torch.finfo(dtype if dtype.itemsize > 2 else torch.float32).eps
    exact = gradients(
        lambda x, w: theirs.rms_norm(x, shape, w, epsilon if eps is None else eps),
        x.double(),
        weight.double(),
    )
    for got, expected, true in zip(mine, other, exact, strict=True):
        assert_accurate(got, expected, true)


def test_rms_norm_leaves_to_torch(from_torch):
    for shape, weight in (((3,), None), ((4,), torch.ones(3))):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
            F.rms_norm(rand(2, 4), shape, weight)
    x = rand(2, 4).to(torch.complex64)
    refused = contextlib.suppress(RuntimeError, NotImplementedError)  # by some releases of torch
    with pytest.warns(UserWarning, match=r"does not support a torch\.complex64 tensor on cpu"), refused:
        F.rms_norm(x, (4,))
    assert from_torch == ["rms_norm"] * 3


# ---- LayerNorm ----


@by_dtype
@pytest.mark.parametrize("shape", [(33,), (3, 11)])
def test_layer_norm(shape, dtype, from_torch):
    x, weight, bias = rand(4, *shape).to(dtype), rand(*shape).to(dtype), rand(*shape).to(dtype)
    F.layer_norm(x, list(shape))
    F.layer_norm(x, shape, None, bias)
    assert from_torch == []
    run = [
        gradients(lambda x, w, b, f=f: f(x, shape, w, b, 1e-4), *(t.to(wide) for t in (x, weight, bias)))
        for f, wide in (
            (F.layer_norm, dtype),
            (theirs.layer_norm, dtype),
            (theirs.layer_norm, torch.float64),
        )
    ]
    for got, expected, true in zip(*run, strict=True):
        assert got.dtype is dtype
        assert_accurate(got, expected, true)


def test_layer_norm_leaves_to_torch(from_torch):
    for shape, weight, bias in ((3,), None, None), ((4,), torch.ones(3), None), ((4,), None, torch.ones(3)):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
            F.layer_norm(rand(2, 4), shape, weight, bias)
    F.layer_norm(rand(2, 4), (4,), eps=float("inf"))
    assert from_torch == ["layer_norm"] * 4


# ---- Cross-entropy ----


@by_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(97,), (64, 97), (8, 97, 11), (4, 97, 5, 3)])
def test_cross_entropy(shape, reduction, dtype, from_torch):
    x = rand(*shape).to(dtype)
    classes = shape[0] if len(shape) == 1 else shape[1]
    target = torch.randint(classes, () if len(shape) == 1 else (shape[0], *shape[2:]))
    if target.ndim:
        target.view(-1)[1] = -100
    weight = torch.rand(classes).to(dtype) + 0.5
    options = {"weight": weight, "reduction": reduction, "ignore_index": -100}
    loss = F.cross_entropy(x, target, **options)
    assert from_torch == []
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    compare("cross_entropy", [x], target, dtypes_agree=False, **options)


def test_cross_entropy_takes_torchs_old_options(from_torch):
    x, target = rand(4, 7), torch.tensor([0, 1, 2, 3])
    for options in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
            got = F.cross_entropy(x, target, **options)
        assert from_torch == []
        with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
            expected = theirs.cross_entropy(x, target, **options)
        from_torch.clear()
        torch.testing.assert_close(got, expected)


def test_cross_entropy_leaves_to_torch(from_torch):
    x, target = rand(4, 7), torch.tensor([0, 1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # without a word
        for options in {}, {"label_smoothing": 0.1}:  # their own gradient is torch's
            F.cross_entropy(x, rand(4, 7).softmax(-1).requires_grad_(), **options)
    F.cross_entropy(x, target.to(torch.uint8))
    for wrong in (
        lambda: F.cross_entropy(x, target[:3]),  # gander's own error
        lambda: F.cross_entropy(x, target, reduction="avg"),
        lambda: F.cross_entropy(x, target, torch.ones(6)),  # gander's own error
        lambda: F.cross_entropy(x, target, torch.ones(7, dtype=torch.float64)),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            wrong()
    assert from_torch == ["cross_entropy"] * 5


# ---- Transforms ----


def model(functions, x, weight, target):
    h = functions.rms_norm(x, (4, 9), weight, 1e-5)
    h = functions.softmax(h, 1) + functions.gelu(h)
    return functions.cross_entropy(h.movedim(2, 1), target)


def test_a_model_trains_eager_compiled_and_transformed():
    x, weight, target = rand(6, 4, 9), rand(4, 9), torch.randint(9, (6, 4))

    def mine(x, w):
        return model(F, x, w, target)

    def trained(function):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        return torch.autograd.grad(function(*leaves), leaves)

    expected = trained(lambda x, w: model(theirs, x, w, target))
    torch.testing.assert_close(trained(mine), expected)
    torch.testing.assert_close(trained(torch.compile(mine, backend="aot_eager", fullgraph=True)), expected)
    torch.testing.assert_close(torch.func.grad(mine, argnums=(0, 1))(x, weight), expected)


def test_a_warning_comes_once_for_each_function_and_reason():
    x = rand(2, 3).to(torch.float8_e4m3fn)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            for function in (lambda: F.softmax(x, -1), lambda: F.rms_norm(x, (3,))):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # of torch, for float8
                    function()
    texts = [str(w.message) for w in found if "torch's operator" in str(w.message)]
    assert len(texts) == 2, texts
    assert "gander.nn.functional.softmax does not support a torch.float8_e4m3fn tensor on cpu" in texts[0]


# ---- What torch handles ----


def losses(functions, x, target):
    h = functions.rms_norm(functions.softmax(x, -1), (x.shape[-1],))
    return functions.cross_entropy(h, target, reduction="sum")


def test_no_rows_eager_and_compiled(from_torch):
    x, target = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    for call in (losses, torch.compile(losses, backend="eager", fullgraph=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call(F, x, target) == 0
    assert from_torch == []


def test_sizes_that_a_graph_does_not_know():
    x, target, kept = rand(6, 5), torch.randint(5, (6,)), torch.tensor([1, 0, 1, 1, 0, 0]) > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            lambda x, t, k: losses(F, x[k], t[k]), backend="aot_eager", fullgraph=True, dynamic=True
        )
        torch.testing.assert_close(compiled(x, target, kept), losses(theirs, x[kept], target[kept]))


def test_what_torch_computes_compiles_without_a_break():
    x, target = rand(4, 7), torch.tensor([0, 1, 2, 3])

    def run(functions, x):
        loss = functions.cross_entropy(x, target, size_average=False)
        loss = loss + functions.cross_entropy(x, target, reduce=False).sum()
        return loss + functions.cross_entropy(x, target, label_smoothing=0.1)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(compiled(F, x), run(theirs, x))


def test_tensors_that_handle_functions_themselves(from_torch):
    nested = torch.nested.nested_tensor([rand(2, 3), rand(4, 3)])
    assert F.softmax(nested, -1).is_nested
    masked = torch.masked.masked_tensor(rand(2, 3), rand(2, 3) > -9)
    assert type(F.softmax(masked, -1)) is type(masked)

    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    F.softmax(rand(2, 3).as_subclass(Logged), -1)
    assert theirs.softmax in seen
    assert from_torch == ["softmax"] * 3

    class Plain(torch.Tensor):
        pass

    assert type(F.softmax(rand(2, 3).as_subclass(Plain), -1)) is Plain
    F.softmax(torch.nn.Parameter(rand(2, 3)), -1)
    assert from_torch == ["softmax"] * 3


def test_in_torchs_place(monkeypatch):
    for name in F.__all__:
        monkeypatch.setattr(theirs, name, getattr(F, name))
    x = rand(4, 7)
    assert theirs.softmax(x.to(torch.float64), 1).dtype is torch.float64
    with pytest.warns(UserWarning, match="Implicit dimension"):
        theirs.softmax(x)
    assert theirs.cross_entropy(x, torch.tensor([0, 1, 2, 3]), label_smoothing=0.1).ndim == 0


@contextlib.contextmanager
def cuda_autocast():
    """torch.autocast("cuda") does nothing without a GPU, so the dispatch key is enabled directly."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutocastCUDA)
    with FakeTensorMode(allow_non_fake_inputs=True):
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            yield


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_dtype_under_autocast(name, dim, dtype, from_torch):
    with cuda_autocast():
        x = torch.empty(4, 6, dtype=torch.bfloat16, device="cuda")
        assert getattr(theirs, name)(x, dim, dtype=dtype).dtype is (dtype or torch.float32)
        assert getattr(F, name)(x, dim, dtype=dtype).dtype is (dtype or torch.float32)
    assert from_torch == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layer_norm_under_autocast(dtype):
    """The result is float32 like torch's, and the sum keeps the dtype of the residual."""
    with cuda_autocast():
        x, weight = torch.empty(4, 6, dtype=dtype, device="cuda"), torch.empty(6, device="cuda")
        assert F.layer_norm(x, (6,), weight).dtype is theirs.layer_norm(x, (6,), weight).dtype
        assert theirs.layer_norm(x, (6,), weight).dtype is torch.float32
        y, total = gander.layernorm(x, weight, residual=x, prenorm=True)
        assert (y.dtype, total.dtype) == (torch.float32, dtype)
        assert gander.layernorm(x, weight, residual=x).dtype is torch.float32
        assert gander.layernorm(x, weight, out_dtype=torch.float16).dtype is torch.float16


def test_eps_that_torch_takes(from_torch):
    x = rand(2, 4)
    F.rms_norm(x, (4,), eps=0)
    assert from_torch == []
    F.rms_norm(x, (4,), eps=float("inf"))
    with pytest.raises(TypeError):
        F.rms_norm(x, 4)
    with pytest.raises((TypeError, RuntimeError)):
        F.softmax(x, "rows")
    assert from_torch == ["rms_norm", "rms_norm", "softmax"]
