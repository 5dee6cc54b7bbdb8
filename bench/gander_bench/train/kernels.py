"""Where the GPU's time of a training step goes: its kernels by what they compute, from a profile."""

import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from .. import trace

# The first part whose pattern is in a kernel's name has it. So what is named after several things comes
# first: attention is built of CUTLASS as products are, and queries and keys are normed and rotated in one
# kernel. Elementwise kernels of torch say what they compute and not for whom: a rotary embedding's sum counts
# as an addition, and most of an eager norm as "other". A fused kernel of torch.compile counts once.
_PATTERNS = {
    "attention": r"flash|fmha|sdpa|attention|cudnn::fusion",
    "products": r"gemm|nvjet|cutlass|cublas|splitk",
    "optimizer": r"multi_tensor_apply|adam",
    "rotary": r"qk_norm|rotate_elementwise|rotary|rope",
    "MLP": r"swiglu|geglu|glu_(for|back)ward|silu|gelu",
    "loss": r"cross_entropy|token_statistics|nll_loss|log_?softmax|element_mul_kernel"
    r"|(class_weights|combine_slices|denominator|total)_finish|rescale_elementwise",
    "norms": r"norm_|_norm|rsqrt|weight_gradient_finish",
    "additions": r"functor_add<|fused_add_\d",
}
PARTS = (*_PATTERNS, "other")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events
_STEPS = 3  # that are profiled


def part_of(name: str) -> str:
    """The part that a kernel belongs to."""
    return next((part for part, pattern in _PATTERNS.items() if re.search(pattern, name, re.I)), "other")


def breakdown(events: Iterable[dict], steps: int) -> dict:
    """Milliseconds a step of each part, the names of attention's kernels, and the kernels that take most of
    the time outside of attention and products; {} of a profile without a GPU.

    events: those of a Chrome trace.
    """
    found = [e for e in events if e.get("cat") in _ON_GPU]
    if not found:
        return {}
    us, named = dict.fromkeys(PARTS, 0.0), Counter()
    for event, alone in trace.without_overlap(found):
        part = part_of(event["name"])
        us[part] += alone
        if part not in ("attention", "products"):
            named[f"{part}: {event['name'][:160]}"] += alone
    attention = {event["name"] for event in found if part_of(event["name"]) == "attention"}
    return {
        "kernels_ms": {part: round(total / steps / 1e3, 4) for part, total in us.items()},
        "attention_kernels": sorted(name[:200] for name in attention),
        "largest_ms": {name: round(took / steps / 1e3, 4) for name, took in named.most_common(16)},
    }


def profiled(step: Callable[[], object]) -> dict:
    """The breakdown of some steps on the GPU, which have run before."""

    def steps():
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()

    return breakdown(trace.events(steps, torch.profiler.ProfilerActivity.CUDA), _STEPS)
