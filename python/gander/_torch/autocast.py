"""What CUDA autocast does to gander's operators."""

import torch
from torch import Tensor

from .._table import arguments
from .registry import complete, overloads, registry, untraced

# Operators that run in float32 under CUDA autocast. RMSNorm keeps the dtype of its input, like F.rms_norm in
# torch 2.10 and 2.11 (2.15 registers a cast to float32 for it). Cross-entropy's loss is always float32. CPU
# autocast casts none of these operators.
_IN_FLOAT32 = ("softmax",)

# These return float32 there. They compute in float32 anyway, so their inputs need no cast.
_TO_FLOAT32 = ("layernorm", "masked_softmax")


def _in_float32(overload):
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def widened(value):
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if half else value

    def kernel(*given):
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*map(widened, given))

    return kernel


def _to_float32(name):
    overload, position = overloads[name], arguments(name).index("out_dtype")
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def kernel(*given):
        given = list(complete(name, given))
        if given[position] is None and given[0].dtype in (torch.float16, torch.bfloat16):
            given[position] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*given)

    return kernel


for _name in _IN_FLOAT32:
    registry.impl(_name, untraced(_in_float32(overloads[_name])), "AutocastCUDA")
for _name in _TO_FLOAT32:
    registry.impl(_name, untraced(_to_float32(_name)), "AutocastCUDA")
