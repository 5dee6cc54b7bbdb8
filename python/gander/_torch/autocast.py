"""What CUDA autocast does to gander's operators."""

import torch

from .._table import arguments
from .registry import complete, overloads, registry, untraced

# Operators whose result is float32 under CUDA autocast. They compute in float32 anyway, so if out_dtype can
# say so, x needs no cast. RMSNorm keeps the dtype of its input, like F.rms_norm in torch 2.10 and 2.11 (2.15
# registers a cast to float32 for it). The loss of cross-entropy is always float32. CPU autocast casts none of
# these operators.
_TO_FLOAT32 = ("softmax", "layernorm", "masked_softmax")


def _to_float32(name):
    overload, names = overloads[name], arguments(name)
    out_dtype = names.index("out_dtype") if "out_dtype" in names else None
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def kernel(*given):
        given = [*complete(name, given)]
        if given[0].dtype in (torch.float16, torch.bfloat16):
            if out_dtype is None:
                given[0] = given[0].float()
            elif given[out_dtype] is None:
                given[out_dtype] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*given)

    return kernel


for _name in _TO_FLOAT32:
    registry.impl(_name, untraced(_to_float32(_name)), "AutocastCUDA")
