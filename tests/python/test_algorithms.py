"""algorithm= and batch_invariant=: names, lists, refusals, and their effect on the CPU."""

import inspect
import re

import gander
import numpy as np
import pytest
import torch
from gander._table import ALGORITHMS, IF_SERVED

NAMES = ("auto", "warp", "block", "register", "medium", "extreme", "cluster", "arbitrary", "splitk")
X, W = torch.randn(5, 40), torch.randn(40)
RSTD = torch.ones(5)
TARGET = torch.tensor([0, 39, 7, 7, 1])


def calls(x, w, rstd):
    """Every function that takes an algorithm."""
    return {
        "softmax": lambda **options: gander.softmax(x, **options),
        "softmax_fwd": lambda **options: gander.softmax_fwd(x, **options),
        "softmax_bwd": lambda **options: gander.softmax_bwd(x, x, **options),
        "rmsnorm": lambda **options: gander.rmsnorm(x, w, **options),
        "rmsnorm_fwd": lambda **options: gander.rmsnorm_fwd(x, w, store_rstd=True, **options)[2],
        "rmsnorm_bwd": lambda **options: gander.rmsnorm_bwd(x, w, x, rstd, **options)[1],
    }


ARRAYS = {"torch": calls(X, W, RSTD), "numpy": calls(X.numpy(), W.numpy(), RSTD.numpy())}
functions = pytest.mark.parametrize("function", ARRAYS["torch"])
kinds = pytest.mark.parametrize("kind", ARRAYS)


@pytest.mark.parametrize(
    "op", ["softmax", "softmax_fwd", "softmax_bwd", "rmsnorm", "rmsnorm_bwd", "softmax_backward"]
)
def test_list(op):
    found = gander.algorithms(op)
    assert tuple(algorithm.name for algorithm in found) == NAMES == ALGORITHMS
    assert all(algorithm.what and "rows of" in algorithm.limits for algorithm in found)
    assert repr(found[1]) == f"<warp: {found[1].what}; {found[1].limits}>"


def test_lists_differ_by_direction():
    forward, backward = gander.algorithms("softmax"), gander.algorithms("softmax_bwd")
    assert forward[1].limits == "rows of up to 4 KiB, unaligned ones of up to 2 KiB"
    assert backward[1].limits == "rows of up to 1 KiB"


def test_cross_entropy_has_one_algorithm():
    assert [algorithm.name for algorithm in gander.algorithms("cross_entropy")] == ["auto"]


def test_algorithms_of_an_unknown_op():
    with pytest.raises(
        ValueError, match='algorithms: op is "conv", expected cross_entropy, cross_entropy_fwd_dx, glu, '
    ):
        gander.algorithms("conv")


@functions
@kinds
def test_unknown_name(kind, function):
    with pytest.raises(ValueError, match=r"algorithm is 'fast', expected 'auto', 'warp', .* or 'splitk'"):
        ARRAYS[kind][function](algorithm="fast")


@pytest.mark.parametrize("name", NAMES[1:])
@functions
@kinds
def test_cpu_has_one_algorithm(kind, function, name):
    expected = (
        f'algorithm is "{name}" on cpu, expected "auto": host memory is served by one algorithm; '
        "leave it out, or"
    )
    with pytest.raises(NotImplementedError, match=expected):
        ARRAYS[kind][function](algorithm=name)


def test_explain():
    assert gander.explain("softmax", X, batch_invariant=True) == gander.explain("softmax", X)
    with pytest.raises(NotImplementedError, match='algorithm is "warp" on cpu'):
        gander.explain("softmax", X, algorithm="warp")
    with pytest.raises(ValueError, match="algorithm is 'fast', expected 'auto'"):
        gander.explain("softmax", X, algorithm="fast")
    with pytest.raises(ValueError, match='algorithm is "warp", expected "auto": the op has no others'):
        gander.explain("cross_entropy", X, algorithm="warp")


H100 = {"shape": (4096, 8192), "dtype": "bfloat16", "device": "h100"}
LONG = {"shape": (4096, 65536), "dtype": torch.float32}


@pytest.mark.parametrize(
    "shape",
    [(2**32, 2**32, 8), (2**64 + 3, 8), (4, 2**64 + 8), (-3, -4, 8), (3, -8), (2**58, 8), (4, 2**60)],
)
@pytest.mark.parametrize("function", [gander.explain, gander.algorithms])
def test_explain_refuses_impossible_sizes(function, shape):
    for device in "cpu", "h100":
        with pytest.raises(ValueError, match=r"fewer than 2\^60 elements"):
            function("softmax", shape=shape, dtype="bfloat16", device=device)


def test_explain_without_rows():
    nothing = {"shape": (0, 8), "dtype": "bfloat16", "device": "h100"}
    assert gander.explain("softmax", **nothing) == "there are no rows: nothing is launched"
    assert len(gander.algorithms("softmax", **nothing)) == len(gander.algorithms("softmax"))
    zeros = gander.explain("rmsnorm_bwd", **nothing)  # dw
    assert zeros.startswith("there are no rows\n") and "finish" in zeros


def test_explain_heads():
    half = {"dtype": "bfloat16", "device": "h100"}
    text = gander.explain("rotary", shape=(2, 40, 4096, 128), **half)
    assert text.splitlines() == [
        "pairs are independent: a thread for 2 heads",
        "rotate_elementwise_bfloat16_256x2: 5120 CTAs of 256 threads",
    ]
    assert gander.explain("rotary_bwd", shape=(40, 8192, 128), **half) == text
    assert gander.explain("apply_rotary_emb", shape=(8192, 40, 128), **half) == text
    x = torch.empty(2, 4096, 40, 128, dtype=torch.bfloat16, device="meta")
    assert gander.explain("apply_rotary_emb_bwd", x, device="h100") == text
    normed = gander.explain("qk_norm_rotary", x.transpose(1, 2), device="h100")
    assert normed.endswith("qk_norm_rotate_elementwise_bfloat16_256x4: 2560 CTAs of 256 threads")
    back = gander.explain("qk_norm_rotary_bwd", x.transpose(1, 2), device="h100")
    assert back.count("CTAs") == 2 and "qk_norm_weights_finish" in back
    on_cpu = gander.explain("rotary", torch.empty(2, 3, 5, 8))
    assert on_cpu.startswith("rotary_forward of 10 tokens of 3 heads of 8 float32 on cpu: Go with ")


@pytest.mark.parametrize(
    "op, shape, options, message",
    [
        ("rotary", (4, 8), {}, r"shape is \(4, 8\), expected \(..., heads, tokens, columns\) for rotary"),
        ("apply_rotary_emb", (8,), {}, r"expected \(..., tokens, heads, columns\) for apply_rotary_emb"),
        ("rotary", (1, 2, 8), {"algorithm": "warp"}, "algorithm is 'warp', expected 'auto': rotary has no"),
        ("qk_norm_rotary", (1, 2, 600), {}, "expected at most 512 columns"),
        ("rotary", (0, 2, 8), {}, "expected M >= 0 tokens of H >= 1 heads"),
    ],
)
def test_explain_refuses_heads(op, shape, options, message):
    for device in "cpu", "h100":
        with pytest.raises(ValueError, match=message):
            gander.explain(op, shape=shape, dtype="bfloat16", device=device, **options)


def test_explain_for_a_gpu_of_another_machine():
    text = gander.explain("softmax", **H100)
    assert text.startswith("auto takes register: a row of 1024 vectors")
    assert "softmax_forward_rows_bfloat16_256x4: 4096 CTAs of 256 threads" in text
    x = torch.empty(2, 2048, 8192, device="meta", dtype=torch.bfloat16)
    for device in ("h100", "H100", "h200"):
        assert gander.explain("softmax", x, device=device) == text
    assert gander.explain("softmax", x, shape=8192, device="h100").endswith(": 1 CTAs of 256 threads")
    assert gander.explain("softmax", **H100 | {"dtype": np.float32}) != text
    assert gander.explain("softmax", **H100, algorithm="cluster") != text
    assert "in clusters of 8" in gander.explain("softmax", **LONG, device="h100")
    assert "in clusters of" not in gander.explain("softmax", **LONG, device="a100")
    assert gander.explain("cross_entropy_fwd_dx", **H100) != gander.explain("cross_entropy_fwd", **H100)
    assert gander.explain("softmax", **H100 | {"device": "cpu"}) == gander.explain(
        "softmax", **H100 | {"device": torch.device("cpu")}
    )


def named_in(error):
    """The names that a refusal lists."""
    return re.split(r", | or ", str(error.value).partition("expected ")[2])


def test_the_names_that_explain_takes():
    """The message lists what is taken, in Python's words, and the documentation names nothing else."""
    rows = {"shape": (4096, 8192), "dtype": "bfloat16"}
    with pytest.raises(ValueError, match='op is "x"') as error:
        gander.explain("x", **rows, device="h100")
    *ops, last = named_in(error)
    assert last == "such a name with _bwd"
    ops += [f"{op}_bwd" for op in ops if not op.endswith("_dx")]
    assert {"softmax", "softmax_bwd", "rmsnorm_residual_bwd"} <= set(ops)
    for op in ops:
        assert "forward" not in op and "backward" not in op
        assert gander.explain(op, **rows, device="h100")
    with pytest.raises(ValueError, match='device is "x"') as error:
        gander.explain("softmax", **rows, device="x")
    first, *devices = named_in(error)
    assert first == "a device of this machine"
    assert {"a100", "h100", "b200"} <= set(devices)
    for device in devices:
        assert gander.explain("softmax", **rows, device=device).startswith("auto takes ")
    for function in gander.explain, gander.algorithms:
        text = inspect.getdoc(function)
        assert set(re.findall(r'"([a-z]+\d{2,})"', text)) <= {*devices, "bfloat16"}
        assert set(re.findall(r'"((?:softmax|rmsnorm|l2norm|layernorm|cross)\w*)"', text)) <= set(ops)


def test_algorithms_of_rows():
    def names(op, *rows, **more):
        return [algorithm.name for algorithm in gander.algorithms(op, *rows, **more)]

    assert names("softmax", X) == names("softmax", X.numpy()) == ["auto"]
    assert names("softmax", X, device="h100") == list(NAMES[:-1])  # "splitk" is for long rows
    assert "cluster" in names("softmax", **LONG, device="h100")
    assert "cluster" not in names("softmax", **LONG, device="a100")
    assert names("cross_entropy", **H100) == ["auto"]
    with pytest.raises(ValueError, match='op is "conv"'):
        gander.algorithms("conv", X)
    with pytest.raises(TypeError, match="shape is None, expected x, or shape"):
        gander.algorithms("softmax", device="h100")


@pytest.mark.parametrize("dynamic", [False, True])
def test_explain_and_algorithms_inside_compiled_functions(dynamic):
    said = []

    def function(x):
        texts = (
            gander.explain("softmax", x),
            gander.explain("softmax", x, device="h100"),
            gander.explain("rmsnorm", **H100),
        )
        names = [
            algorithm.name for algorithm in gander.algorithms("softmax") + gander.algorithms("softmax", x)
        ]
        return x + 1, texts, names

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
    for shape in ((4, 7), (5, 7), (2, 3, 9)):
        x = torch.zeros(shape)
        _, *got = compiled(x)
        _, *want = function(x)
        assert got == want
        said.append(got)
    assert said[0] != said[1] != said[2]


@functions
@kinds
def test_batch_invariant_results_are_correct(kind, function):
    call = ARRAYS[kind][function]
    np.testing.assert_array_equal(call(batch_invariant=True), call())


def test_gradients():
    """autograd, torch.compile and the operators all pass the options on."""

    def step(x, w):
        return gander.rmsnorm(gander.softmax(x, batch_invariant=True), w, batch_invariant=True)

    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        out = function(x, w)
        want = gander.rmsnorm(gander.softmax(x), w)
        assert torch.equal(out, want)
        for got, expected in zip(
            torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w)), strict=True
        ):
            assert torch.equal(got, expected)
    with pytest.raises(NotImplementedError, match='algorithm is "warp" on cpu'):
        gander.softmax(X.clone().requires_grad_(), algorithm="warp")


def test_backward_only_prefers_an_algorithm():
    y, algorithm = gander.softmax(X), ALGORITHMS.index("warp")
    with pytest.raises((NotImplementedError, RuntimeError), match='algorithm is "warp" on cpu'):
        torch.ops.gander.softmax_bwd(X, y, algorithm=algorithm)
    dx = torch.ops.gander.softmax_bwd(X, y, algorithm=algorithm | IF_SERVED)
    assert torch.equal(dx, gander.softmax_bwd(X, y))


@pytest.mark.parametrize("n", [40, 1001, 300001])
def test_bits_of_a_row_do_not_depend_on_other_rows(n):
    x = torch.randn(7, n)
    weight, target = torch.randn(n), torch.randint(n, (7,))

    def results(x, target):
        y = gander.softmax_fwd(x, batch_invariant=True)
        out, _, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True, batch_invariant=True)
        loss, lse, dx = gander.cross_entropy_fwd(
            x, target, return_lse=True, return_dx=True, batch_invariant=True
        )
        return [
            y,
            gander.softmax_bwd(x, y, batch_invariant=True),
            out,
            rstd,
            gander.rmsnorm_bwd(x, weight, y, rstd, batch_invariant=True)[0],
            gander.cross_entropy(x, target, reduction="none", batch_invariant=True),
            loss,
            lse,
            dx,
        ]

    every = results(x, target)
    for some in (slice(0, 1), slice(2, 5), slice(6, 7)):
        for got, want in zip(results(x[some], target[some]), every, strict=True):
            assert torch.equal(got, want[some])


def test_cross_entropy_gradient():
    x = X.clone().requires_grad_()
    loss = gander.cross_entropy(x, TARGET, reduction="sum", batch_invariant=True)
    want = gander.cross_entropy(x, TARGET, reduction="sum")
    assert torch.equal(loss, want)
    assert torch.equal(*(torch.autograd.grad(value, x)[0] for value in (loss, want)))
    compiled = torch.compile(gander.cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, TARGET, reduction="sum", inplace_backward=True, batch_invariant=True)
    assert torch.equal(
        *(
            torch.autograd.grad(value, x)[0]
            for value in (loss, gander.cross_entropy(x, TARGET, reduction="sum"))
        )
    )
    written = X.clone()
    loss, dx = gander.cross_entropy_fwd(
        written, TARGET, return_dx=True, inplace_backward=True, batch_invariant=True
    )
    assert dx is written and torch.equal(dx, gander.cross_entropy_fwd(X, TARGET, return_dx=True)[1])
    got = gander.cross_entropy(X.numpy(), TARGET.numpy(), batch_invariant=True)
    np.testing.assert_array_equal(got, gander.cross_entropy(X.numpy(), TARGET.numpy()))
