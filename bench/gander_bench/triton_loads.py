"""How a Triton kernel loads rows whose length is or is not a multiple of 16 bytes. It is compiled for sm_90,
which needs no GPU."""

import re
from collections import Counter

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BLOCK = 4096
_DIVISIBLE = [["tt.divisibility", 16]]  # of a pointer: torch's allocations begin at such addresses


@triton.jit
def _sums(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of bfloat16 rows, addressed as Inductor's kernels do."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + (at + N * row), at < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total))


def triton_loads(n: int) -> dict[str, int]:
    """The load instructions from global memory in the PTX for rows of n bfloat16 elements, of a thread of 256
    and for 4096 elements: how many of each kind. ld.global.v4.b32 loads 16 bytes, ld.global.b16 two."""
    source = ASTSource(
        fn=_sums,
        signature={"x_ptr": "*bf16", "out_ptr": "*fp32", "N": "constexpr", "BLOCK": "constexpr"},
        constexprs={"N": n, "BLOCK": _BLOCK},
        attrs={(0,): _DIVISIBLE, (1,): _DIVISIBLE},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return dict(Counter(re.findall(r"ld\.global[\w.:]*", kernel.asm["ptx"])))
