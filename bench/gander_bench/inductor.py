"""What torch.compile makes of a function: its graphs and its kernels."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._inductor.utils import run_and_get_code


class Graphs(NamedTuple):
    compiled: int
    uncompiled_calls: int  # that ran without a graph


def recompile_limit() -> int:
    """From how many graphs on a function runs uncompiled."""
    return torch._dynamo.config.recompile_limit


def graphs_of(function: Callable, rows: Iterable[int], *, dynamic=None, marked: bool = False) -> Graphs:
    """How many graphs Dynamo makes of a function that is called with so many rows of 64 elements, one after
    the other. Whether it makes a new one does not depend on the backend, so this one only counts.

    marked: the number of rows is marked as dynamic before each call.
    """
    compiled, ran = [], []

    def counting(graph, example_inputs):
        compiled.append(graph)

        def forward(*arguments):
            ran.append(1)
            return graph(*arguments)

        return forward

    torch.compiler.reset()
    counted = torch.compile(function, backend=counting, dynamic=dynamic)
    sizes = list(rows)
    for m in sizes:
        x = torch.randn(m, 64)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        counted(x)
    return Graphs(len(compiled), len(sizes) - len(ran))


class Kernel(NamedTuple):
    name: str
    row_loops: int  # loops over the row
    loads: int  # of x, in the code
    code: str


def kernel_of(function: Callable, x: torch.Tensor, *more: torch.Tensor) -> Kernel:
    """Inductor's kernel for a function of rows x, without the code that launches it."""
    torch.compiler.reset()
    _, sources = run_and_get_code(torch.compile(function, dynamic=False), x, *more)
    begin = "def triton_" if x.is_cuda else 'extern "C"'
    code = "\n".join(re.findall(rf"^{begin}.*?(?=^''')", sources[0], re.M | re.S)) or sources[0]
    name = re.search(r"triton_\w+|cpp_fused\w*|kernel", code)
    return Kernel(
        name.group() if name else "unnamed",
        len(re.findall(r"for r0_offset in|for\(int64_t x1=", code)),
        len(re.findall(r"tl\.load\(in_ptr0|loadu\(in_ptr0", code)),
        code,
    )


def take_library_products():
    """Lets max-autotune take matrix products from torch's library alone."""
    torch._inductor.config.max_autotune_gemm_backends = "ATEN"
