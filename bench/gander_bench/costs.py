"""Time and memory of a loss, or of tokens' log-probabilities and entropies, with their gradients: over the
vocabulary and over the number of tokens."""

from collections.abc import Callable, Iterable

import torch

from .cases import DTYPES, OPERATORS, provider
from .losses import OF_ENTROPY, linear_inputs, statistics_gradients
from .memory import peak_bytes
from .records import record
from .sections import each_result, forget
from .timing import GPUTimer, cpu_blocks


def _cross_entropy(function, m: int, n: int, hidden: int, dtype, device: str) -> Callable[[], object]:
    x, target = OPERATORS["cross_entropy_forward"].inputs(m, n, dtype, device)
    return _step(function, [x.requires_grad_()], target)


def _linear_cross_entropy(function, m: int, n: int, hidden: int, dtype, device: str) -> Callable[[], object]:
    *leaves, target = linear_inputs(m, hidden, n, dtype, device)
    return _step(function, [leaf.requires_grad_() for leaf in leaves], target)


def _step(function, leaves, target) -> Callable[[], object]:
    """What a training step does with its loss. Gradients of the call before are gone."""
    return lambda: torch.autograd.grad(function(*leaves, target), leaves)


def _token_statistics(function, m: int, n: int, hidden: int, dtype, device: str) -> Callable[[], object]:
    x, index = OPERATORS["cross_entropy_forward"].inputs(m, n, dtype, device)
    leaf, ones = x.requires_grad_(), torch.ones(m, device=device)
    return lambda: torch.autograd.grad(function(leaf, index), leaf, (ones, OF_ENTROPY * ones))


def _linear_token_statistics(function, m: int, n: int, hidden: int, dtype, device: str):
    inputs = linear_inputs(m, hidden, n, dtype, device)
    return statistics_gradients(function, *inputs, trained=True, entropy=True)


_CALLS = {
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "token_statistics": _token_statistics,
    "linear_token_statistics": _linear_token_statistics,
}


def loss_costs(
    op: str,
    shapes: Iterable[tuple[int, int]],
    contestants: Iterable[str],
    *,
    dtype: str,
    device: str,
    seconds: float,
    hidden: int = 4096,
) -> list[dict]:
    """A record for each shape (tokens, classes): microseconds and peak memory in MiB, of those contestants
    that have the loss.

    The peak is what torch allocates besides the operands: the logits, or x and weight where op begins with
    "linear_". Gradients are in it.
    """
    having = [name for name in contestants if op in provider(name).functions]
    records = []
    for m, n in shapes:
        calls: dict[str, Callable[[], object]] = {}

        def prepare(name, m=m, n=n, calls=calls):
            torch.manual_seed(0)
            call = _CALLS[op](provider(name).functions[op], m, n, hidden, DTYPES[dtype], device)
            call()  # compiles and tunes
            peak = peak_bytes(call, device)
            calls[name] = call
            return {"peak MiB": round(peak / 2**20, 1)}

        results = each_result(having, prepare)
        if device == "cuda":
            timings = GPUTimer()(calls, seconds)
        else:
            timings = cpu_blocks(calls, seconds, rounds=1)
        for name, timing in timings.items():
            results[name] |= timing._asdict()
        point = {"section": "loss", "op": op, "dtype": dtype, "m": m, "n": n}
        records.append(record(point, {"results": results}))
        forget()
    return records
