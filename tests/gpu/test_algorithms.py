"""Algorithms by name: values, errors for rows that they do not serve, gradients, and batch invariance."""

import re

import gander
import pytest
import torch
from grid import EPS, OPS, Inputs, aligned, check, name, offset, same_bits

NAMES = [algorithm.name for algorithm in gander.algorithms("softmax")][1:]
DTYPES = (torch.bfloat16, torch.float32)
LENGTHS = (1, 64, 256, 1000, 1024, 4096, 4097, 8192, 16384, 32768, 50257, 65536, 114688, 262144, 1 << 20)
CHOOSABLE = tuple(OPS)[:5]
REFUSED = r'algorithm "{}" (holds|splits|takes|needs) .*; use (.*or )?"auto"$'
by_algorithm = pytest.mark.parametrize("algorithm", NAMES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
by_op = pytest.mark.parametrize("op", CHOOSABLE)


def on_hopper():
    return torch.cuda.get_device_capability()[0] >= 9


def rows_of(n):
    """One row, a few, and enough for several rounds of persistent CTAs."""
    return (1, 3, 64) if n > 1 << 17 else (1, 3, 199, 2000) if n <= 8192 else (1, 3, 199)


def served(op, a, **options):
    """Whether the algorithm serves these inputs. If not, the error must say why, and which algorithms do."""
    try:
        OPS[op](a, **options)
        return True
    except NotImplementedError as refusal:
        assert re.search(REFUSED.format(options["algorithm"]), str(refusal)), refusal
        return False


@by_algorithm
@by_dtype
@by_op
def test_values(op, dtype, algorithm):
    counts = [0, 0]
    for n in LENGTHS:
        for layout in (aligned, offset):
            cases = [Inputs(m, n, dtype, layout) for m in rows_of(n)]
            cases = [a for a in cases if served(op, a, algorithm=algorithm)]
            counts[layout is offset] += len(cases)
            if cases:
                check(op, cases, algorithm=algorithm)
    if algorithm in ("extreme", "cluster") and not on_hopper():
        assert counts == [0, 0], "served on a device without clusters"
        pytest.skip("clusters need compute capability 9.0")
    if not counts[0]:
        assert not on_hopper(), "the algorithm serves no shape at all"
        pytest.skip("rings in shared memory need compute capability 9.0")


@by_dtype
@by_op
def test_results_agree(op, dtype):
    """An algorithm changes only the order of sums."""
    a = Inputs(40, 4096, dtype)
    want = OPS[op](a)
    serving = [algorithm for algorithm in NAMES if served(op, a, algorithm=algorithm)]
    assert len(serving) >= (4 if on_hopper() else 2)
    for algorithm in serving:
        for what, got in OPS[op](a, algorithm=algorithm).items():
            torch.testing.assert_close(got, want[what])


def test_refusals():
    x = torch.empty(4, 1 << 20, device="cuda", dtype=torch.bfloat16)
    for algorithm in ("warp", "register", "medium"):
        with pytest.raises(
            NotImplementedError,
            match=rf'softmax_forward: algorithm "{algorithm}" holds rows of up to \d+ bfloat16 elements on '
            r'this device, these have 1048576; use .*"arbitrary", "splitk" or "auto"$',
        ):
            gander.softmax(x, algorithm=algorithm)
    few = torch.empty(4, 1024, device="cuda", dtype=torch.bfloat16)
    message = "splits rows of more than 8192 bfloat16 elements, these have 1024"
    with pytest.raises(NotImplementedError, match=message):
        gander.softmax(few, algorithm="splitk")
    weight = torch.empty(1001, device="cuda")
    if on_hopper():
        with pytest.raises(NotImplementedError, match="vectors only where all operands have the same offset"):
            gander.rmsnorm(offset(torch.empty(4, 1001, device="cuda")), weight, algorithm="medium")
    else:
        message = r"needs clusters .* compute capability \d+\.\d+, does not have"
        with pytest.raises(NotImplementedError, match=message):
            gander.softmax(few, algorithm="cluster")
    with pytest.raises(ValueError, match="algorithm is 'fast', expected 'auto'"):
        gander.softmax(few, algorithm="fast")


def test_explain():
    for shape, taken in (((32768, 256), "warp"), ((4096, 8192), "register"), ((4, 1 << 25), "splitk")):
        x = torch.empty(shape[1], device="cuda", dtype=torch.bfloat16).expand(shape)
        assert gander.explain("softmax", x).startswith(f"auto takes {taken}: ")
        assert gander.explain("softmax", x, algorithm=taken).startswith(f"{taken}: ")
        assert gander.explain("softmax", x, algorithm="arbitrary").startswith("arbitrary: ")
    with pytest.raises(NotImplementedError, match='algorithm "warp" holds rows'):
        gander.explain("softmax", x, algorithm="warp")


# ---- Gradients ----


@by_dtype
def test_gradients_follow(dtype):
    """Backward uses the algorithm of forward if that serves it, and otherwise auto."""
    for n, algorithms in ((1024, ("block", "arbitrary", "register")), (16384, ("splitk", "register"))):
        a = Inputs(64, n, dtype)
        for algorithm in algorithms:
            if not served("softmax_forward", a, algorithm=algorithm):
                assert not on_hopper() or algorithm == "register", f"{algorithm} does not serve rows of {n}"
                continue
            x, weight = a.x.detach().requires_grad_(), a.weight.detach().requires_grad_()
            y = gander.softmax(x, algorithm=algorithm)
            assert same_bits(y.detach(), gander.softmax_fwd(a.x, algorithm=algorithm))
            (dx,) = torch.autograd.grad(y, x, a.dy)
            same = served("softmax_backward", a, algorithm=algorithm)
            options = {"algorithm": algorithm} if same else {}
            assert same_bits(dx, gander.softmax_bwd(a.dy, y.detach(), **options))
            out = gander.rmsnorm(x, weight, eps=EPS, algorithm=algorithm)
            rstd = gander.rmsnorm_fwd(a.x, a.weight, eps=EPS, store_rstd=True, algorithm=algorithm)[2]
            same = served("rmsnorm_backward_dw", a, algorithm=algorithm)
            options = {"algorithm": algorithm} if same else {}
            want = gander.rmsnorm_bwd(a.x, a.weight, a.dy, rstd, **options)[:2]
            for got, expected in zip(torch.autograd.grad(out, (x, weight), a.dy), want, strict=True):
                assert same_bits(got, expected)


def test_compiled():
    a = Inputs(64, 1024, torch.bfloat16)

    def step(x, weight):
        y = gander.softmax(x, algorithm="block")
        return gander.rmsnorm(y, weight, algorithm="register", batch_invariant=True)

    def gradients(function):
        x, weight = a.x.detach().requires_grad_(), a.weight.detach().requires_grad_()
        out = function(x, weight)
        return out.detach(), *torch.autograd.grad(out, (x, weight), a.dy)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(step), strict=True):
        assert same_bits(got, want)


# ---- Batch invariance ----


class Some:
    """Some of the rows of an op's inputs: views of them, or what `place` makes of the views."""

    def __init__(self, a, rows, place=lambda x: x):
        self.x, self.dy, self.y, self.weight = place(a.x[rows]), place(a.dy[rows]), place(a.y[rows]), a.weight
        self.rstd, self.target = a.rstd[rows], a.target[rows]
        self.dloss, self.lse = a.dloss[rows], a.lse[rows]


def per_row(op, a, **options):
    results = OPS[op](a, batch_invariant=True, **options)
    results.pop("dw", None)  # a sum over rows, which is not batch-invariant
    return results


def cross_entropy(a):
    options = {"return_lse": True, "batch_invariant": True}
    loss, lse = gander.cross_entropy_fwd(a.x, a.target, **options)
    both, _, dx = gander.cross_entropy_fwd(a.x, a.target, return_dx=True, **options)
    x = a.x.detach().requires_grad_()
    total = gander.cross_entropy(x, a.target, reduction="sum", batch_invariant=True)
    return {
        "loss": loss,
        "lse": lse,
        "loss with dx": both,
        "dx": dx,
        "dx of sum": torch.autograd.grad(total, x)[0],
        "dx of backward": gander.cross_entropy_bwd(a.x, a.target, a.dloss, a.lse),
    }


def assert_invariant(function, a):
    """Some of the rows have the same bits as among all rows. Unaligned rows have them at any address."""
    every = function(a)
    places = [lambda x: x]
    if a.n * a.x.element_size() % 16:
        places += [torch.clone, offset]
    for m in (1, 3, 64, 1000):
        for first in {0, min(5, a.m - 1)}:
            rows = slice(first, min(first + m, a.m))
            for place in places:
                for what, got in function(Some(a, rows, place)).items():
                    same = same_bits(got, every[what][rows])
                    assert same, f"{what}: other bits with {m} rows of {a.n} from row {first} on"


INVARIANT_LENGTHS = (8, 200, 256, 1001, 1024, 4096, 16384, 50257, 65536, 131072, 262144, 1 << 20)


def invariant_inputs(dtype):
    for n in INVARIANT_LENGTHS:
        for layout in (aligned, offset):
            yield Inputs(1100 if n <= 65536 else 80, n, dtype, layout)


@by_dtype
@by_op
def test_bits_of_a_row_do_not_depend_on_the_others(op, dtype):
    for a in invariant_inputs(dtype):
        assert_invariant(lambda some: per_row(op, some), a)


@by_dtype
def test_bits_of_cross_entropy(dtype):
    for a in invariant_inputs(dtype):
        assert_invariant(cross_entropy, a)


@by_algorithm
@by_op
def test_bits_by_algorithm(op, algorithm):
    lengths = (256, 1024, 4096, 50257, 131072)
    every = [Inputs(80, n, torch.bfloat16) for n in lengths]
    serving = [a for a in every if served(op, a, algorithm=algorithm, batch_invariant=True)]
    assert serving or not on_hopper()
    for a in serving:
        assert_invariant(lambda some: per_row(op, some, algorithm=algorithm), a)
