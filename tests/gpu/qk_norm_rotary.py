"""Rotary embeddings of normalized heads against float64. The bound is the formula's error in x's dtype."""

import gander
import torch
from grid import EPS, same_bits
from rotary import for_elements, formula, tokens_first
from tolerance import assert_accurate

# As rotary's: sequences, tokens, heads of queries and of keys, columns, and how many of these are rotated. Of
# the last, backward's grid does more than a wave of heads, and forward's has several.
SIZES = (
    (1, 1, 1, 1, 2, 2),
    (2, 3, 2, 1, 7, 2),
    (2, 129, 4, 2, 64, 64),
    (3, 100, 7, 3, 128, 64),
    (1, 31, 3, 1, 96, 32),
    (1, 257, 5, 9, 50, 18),
    (1, 33, 2, 2, 512, 512),
    (2, 9, 3, 1, 511, 510),
    (2, 2048, 32, 8, 128, 128),
)
RESULTS = "q", "k", "dq", "dk", "dq_weight", "dk_weight"


def of_torch(tables, interleaved):
    """The formula, rounded to x's type after each of its steps."""
    tables = [for_elements(t, interleaved) for t in tables]

    def function(*given):
        heads, weights = given[:2], given[2:]
        normed = [
            torch.nn.functional.rms_norm(x, w.shape, w.to(x.dtype), EPS)
            for x, w in zip(heads, weights, strict=True)
        ]
        return [formula(x, *(t.to(x.dtype) for t in tables), interleaved) for x in normed]

    return function


def of_gander(tables, interleaved, **options):
    return lambda *given: gander.qk_norm_rotary(*given, *tables, EPS, interleaved=interleaved, **options)


def results_of(function, given, upstream):
    """The two results of a function, and the gradients of heads and weights."""
    leaves = [x.detach().requires_grad_() for x in given]
    results = function(*leaves)
    return *(y.detach() for y in results), *torch.autograd.grad(results, leaves, upstream)


def check(size, dtype, layout, interleaved, device="cuda"):
    sequences, tokens, of_q, of_k, columns, width = size
    shapes = [(sequences, tokens, heads, columns) for heads in (of_q, of_k)]
    values = [torch.randn(shape, device=device).to(dtype) for shape in (*shapes, *shapes)]
    weights = [(1 + torch.randn(columns, device=device) / 4).to(dtype) for _ in "qk"]
    angles = torch.randn(tokens, width // 2, device=device, dtype=torch.float64)
    tables = angles.cos().float(), angles.sin().float()

    def given(where):
        heads = [where(x) for x in values]
        return [*heads[:2], *weights], heads[2:]

    ours = of_gander(tables, interleaved)
    got, theirs = (results_of(f, *given(layout)) for f in (ours, of_torch(tables, interleaved)))
    wide = [[x.double() for x in part] for part in given(layout)]
    exact = results_of(of_torch(tables, interleaved), *wide)
    for what, *results in zip(RESULTS, got, theirs, exact, strict=True):
        # Gradients are differences, which may be much smaller than what is subtracted. Those of weights are
        # float32 sums of all heads, and parts of a small one may be as large as the others.
        extra = 2.0**-20 if what[0] == "d" else 0.0
        extra += results[-1].abs().max() * 2.0**-24 if "weight" in what else 0.0
        assert_accurate(*results, what, extra=extra)
    # The weights' gradients are sums over CTAs, whose order does not depend on when these run.
    assert all(map(same_bits, got, results_of(ours, *given(layout))))
    written = [layout(value.clone()) for value in values[:2]]
    alone = ours(written[0], None, weights[0], None)[0]
    assert same_bits(alone, got[0])
    in_place = of_gander(tables, interleaved, inplace=True)
    assert in_place(*written, *weights)[0] is written[0]
    assert all(map(same_bits, written, got[:2]))


def check_capture(dtype, device="cuda"):
    """A graph of forward and backward has the bits of calls, also for other values in its tensors."""
    values = [torch.randn(1, 500, heads, 128, device=device).to(dtype) for heads in (8, 2, 8, 2)]
    given = [*map(tokens_first, values[:2]), *(torch.rand(128, device=device).to(dtype) for _ in "qk")]
    upstream = [tokens_first(x) for x in values[2:]]
    angles = torch.randn(500, 64, device=device)
    function = of_gander((angles.cos(), angles.sin()), False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what autograd and the kernels need at first is not part of a graph
        results_of(function, given, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_of(function, given, upstream)
    for x in given:
        x.mul_(-1.5)
    graph.replay()
    assert all(map(same_bits, captured, results_of(function, given, upstream)))
