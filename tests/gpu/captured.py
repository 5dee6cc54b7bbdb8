"""A program whose first gander call, and the first of every op and dtype, is in a CUDA graph capture."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "python"), str(Path(__file__).resolve().parent)]
from grid import DTYPES, OPS, Inputs, same_bits  # noqa: E402


def operands(n, dtype, scale):
    a = Inputs(40, n, dtype, scale=scale)
    # Create the cached properties now, before the capture and without gander.
    a.x, a.dy, a.y, a.weight, a.target, a.class_weight, a.dloss  # noqa: B018
    a.rstd = (a.x.float().square().mean(-1) + 1e-6).rsqrt()
    a.lse = torch.logsumexp(a.x.float(), -1)
    return a


assert "libgander.so" not in Path("/proc/self/maps").read_text(), "the library was loaded before a call"
cases = []
for dtype in DTYPES:
    for n in (1001, 8192, 300000):
        for op in OPS:
            a = operands(n, dtype, 1.0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = OPS[op](a)
            cases.append((op, n, a, graph, results))

for op, n, a, graph, results in cases:
    fresh = operands(n, a.dtype, 3.0)
    for operand in ("x", "dy", "y", "weight", "rstd", "lse"):
        getattr(a, operand).copy_(getattr(fresh, operand))
    graph.replay()
    for what, want in OPS[op](fresh).items():
        assert same_bits(results[what], want), f"{op} {n} {a.dtype}: {what} differs in the graph"
print(len(cases), "graphs, identical")
