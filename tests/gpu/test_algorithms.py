"""Algorithms by name: right values where they serve, a reason where they do not; rows whose bits stay the same."""

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
    """One row, a few, and enough for persistent CTAs to go round."""
    return (1, 3, 64) if n > 1 << 17 else (1, 3, 199, 2000) if n <= 8192 else (1, 3, 199)


def served(op, a, **how):
    """Whether the algorithm serves these inputs; a refusal has to say why and what does."""
    try:
        OPS[op](a, **how)
        return True
    except NotImplementedError as refusal:
        assert re.search(REFUSED.format(how["algorithm"]), str(refusal)), refusal
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
        assert counts == [0, 0], "clusters on a device without them"
        pytest.skip("clusters need compute capability 9.0")
    if not counts[0]:
        assert not on_hopper(), "the algorithm serves no shape at all"
        pytest.skip("rings in shared memory need compute capability 9.0")


@by_dtype
@by_op
def test_results_agree(op, dtype):
    """An algorithm changes the order of sums and nothing else."""
    a = Inputs(40, 4096, dtype)
    want = OPS[op](a)
    for algorithm in NAMES:
        if served(op, a, algorithm=algorithm):
            for what, got in OPS[op](a, algorithm=algorithm).items():
                torch.testing.assert_close(got, want[what])


def test_refusals():
    x = torch.empty(4, 1 << 20, device="cuda", dtype=torch.bfloat16)
    for algorithm in ("warp", "register", "medium"):
        with pytest.raises(
            NotImplementedError,
            match=rf'softmax_forward: algorithm "{algorithm}" holds rows of up to \d+ bfloat16 elements on this '
            r'device, these have 1048576; use .*"arbitrary", "splitk" or "auto"$',
        ):
            gander.softmax(x, algorithm=algorithm)
    few = torch.empty(4, 1024, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="splits rows of more than 8192 bfloat16 elements, these have 1024"):
        gander.softmax(few, algorithm="splitk")
    weight = torch.empty(1001, device="cuda")
    if on_hopper():
        with pytest.raises(NotImplementedError, match="vectors only where all operands have the same offset"):
            gander.rmsnorm(offset(torch.empty(4, 1001, device="cuda")), weight, algorithm="medium")
    else:
        with pytest.raises(NotImplementedError, match=r"needs clusters .* compute capability \d+\.\d+, does not have"):
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
    """Backward takes the algorithm of forward where that serves it, and auto where it does not."""
    for n, algorithms in ((1024, ("block", "arbitrary", "register")), (16384, ("splitk", "register"))):
        a = Inputs(64, n, dtype)
        for algorithm in algorithms:
            if not served("softmax_forward", a, algorithm=algorithm):
                continue
            x, weight = a.x.detach().requires_grad_(), a.weight.detach().requires_grad_()
            y = gander.softmax(x, algorithm=algorithm)
            assert same_bits(y.detach(), gander.softmax_fwd(a.x, algorithm=algorithm))
            (dx,) = torch.autograd.grad(y, x, a.dy)
            strict = served("softmax_backward", a, algorithm=algorithm)
            how = {"algorithm": algorithm} if strict else {}
            assert same_bits(dx, gander.softmax_bwd(a.dy, y.detach(), **how))
            out = gander.rmsnorm(x, weight, eps=EPS, algorithm=algorithm)
            rstd = gander.rmsnorm_fwd(a.x, a.weight, eps=EPS, store_rstd=True, algorithm=algorithm)[2]
            how = {"algorithm": algorithm} if served("rmsnorm_backward_dw", a, algorithm=algorithm) else {}
            want = gander.rmsnorm_bwd(a.x, a.weight, a.dy, rstd, **how)[:2]
            for got, expected in zip(torch.autograd.grad(out, (x, weight), a.dy), want, strict=True):
                assert same_bits(got, expected)


def test_compiled():
    a = Inputs(64, 1024, torch.bfloat16)

    def step(x, weight):
        return gander.rmsnorm(gander.softmax(x, algorithm="block"), weight, algorithm="register", batch_invariant=True)

    def gradients(function):
        x, weight = a.x.detach().requires_grad_(), a.weight.detach().requires_grad_()
        out = function(x, weight)
        return out.detach(), *torch.autograd.grad(out, (x, weight), a.dy)

    for got, want in zip(
        gradients(torch.compile(step, fullgraph=True, backend="aot_eager")), gradients(step), strict=True
    ):
        assert same_bits(got, want)


# ---- Batch invariance ----


class Some:
    """Some of the rows of an op's inputs: where they lie, or copies elsewhere."""

    def __init__(self, a, rows, place=lambda x: x):
        self.x, self.dy, self.y, self.weight = place(a.x[rows]), place(a.dy[rows]), place(a.y[rows]), a.weight
        self.rstd, self.target, self.dloss, self.lse = a.rstd[rows], a.target[rows], a.dloss[rows], a.lse[rows]


def per_row(op, a, **how):
    results = OPS[op](a, batch_invariant=True, **how)
    results.pop("dw", None)  # a sum over rows
    return results


def cross_entropy(a):
    loss, lse = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, batch_invariant=True)
    both, _, dx = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, return_dx=True, batch_invariant=True)
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
    """Rows at the front and in the middle, alone and with others, as among all; unaligned ones anywhere."""
    every = function(a)
    places = [lambda x: x]
    if a.n * a.x.element_size() % 16:
        places += [torch.clone, offset]
    for m in (1, 3, 64, 1000):
        for first in {0, min(5, a.m - 1)}:
            rows = slice(first, min(first + m, a.m))
            for place in places:
                for what, got in function(Some(a, rows, place)).items():
                    assert same_bits(got, every[what][rows]), f"{what}: other bits with {m} of {a.n} from {first} on"


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
    for n in (256, 1024, 4096, 50257, 131072):
        a = Inputs(80, n, torch.bfloat16)
        if served(op, a, algorithm=algorithm, batch_invariant=True):
            assert_invariant(lambda some: per_row(op, some, algorithm=algorithm), a)
