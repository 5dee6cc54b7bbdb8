"""The sections of the benchmark: which points they have, and how a point is measured."""

import functools
import gc
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gander
import torch

from . import limit, load, losses, models
from .cases import (
    ALGORITHMS,
    ALL,
    BATCH_INVARIANT,
    DTYPES,
    GLU,
    NORMS,
    OPERATORS,
    OPTIONED,
    PROBABILITIES,
    PROVIDERS,
    QK_NORM,
    ROTARY,
    STATISTICS,
    double,
    nan_last,
    provider,
    provider_version,
    rows_of,
    statistics_gradient,
)
from .memory import peak_bytes
from .records import record
from .report import IN_TURNS, NEW_MEMORY
from .timing import GPUTimer, Timing, cpu_blocks, host_cost, reused_memory

# Training: as many rows as a batch has tokens, rows from an attention head to a vocabulary.
TRAINING = (*((32768, 2**k) for k in range(8, 17)), (16384, 131072), (8192, 262144))
# Few rows, where the question is how long one row keeps how much of the GPU busy. Beyond 2^27 elements a
# tensor is long enough to be a case of throughput.
FEW = tuple(
    (m, n)
    for m in (1, 4, 16, 128)
    for n in (2**12, 2**15, 2**17, 2**20, 2**22, 2**23, 2**25)
    if m * n <= 2**27
)
# What algorithms for softmax and RMSNorm are commonly compared on.
PUBLISHED = (
    (128, 1024),
    *((2048, n) for n in (1024, 2048, 4096, 8192)),
    *((4, n) for n in (16384, 32768, 65536, 114688)),
    *((1, n) for n in (1 << 20, 1 << 25)),
)
INVARIANT = (*((m, n) for m in (1, 16, 128) for n in (4096, 65536)), (4, 1 << 20), (32768, 4096))
# 1 KiB to 256 MiB of float32, and short rows.
CPU = ((4, 64), *((m, 4096) for m in (4, 64, 1024, 16384)), (16384, 64), (4096, 512))
TINY = (4, 256)
# Off the grid: vocabularies and widths as models have them, some rows unaligned, and a prime number of rows.
ODD = tuple((4099, n) for n in (1000, 12288, 50257, 128256))
# Tokens by the widths of MLPs: a decoder of one, few and many tokens, and experts.
MLPS = (
    *((m, n) for m in (1, 64, 2048, 8192) for n in (3072, 11008, 14336)),
    *((32768, 768), (65536, 1536), (4099, 10001)),
)
# Tokens by the elements of their heads of 128: Llama-3-8B, with 32 of queries and 8 of keys, in decoding and
# in training, and Qwen3-30B-A3B, with 32 and 4.
TOKENS = ((1, 5120), (64, 5120), (8192, 5120), (32768, 4608))
# The norms with options: as many rows as a tensor needs to have 64 MiB, at least 32768; and in place, as
# inference servers call them.
NORM_LENGTHS = (256, 512, 1024, 2048, 4096, 5120, 8192, 11008, 16384, 32768)
NORM_ROWS, NORM_BYTES = 32768, 64 << 20
SERVED = tuple((m, n) for n in (4096, 5120, 7168, 16384) for m in models.SERVING)
LOGITS = (8192, 128256)  # of a step: tokens by the vocabulary of Llama 3
HEAD = (8192, 151936)  # of a head: tokens by the vocabulary of Qwen 3
HIDDEN = 4096  # of its linear head
# Where options of a loss are measured: vocabularies, rows of a few KiB, and a few tokens.
LOSSES = ((8192, 128256), (8192, 151936), (32768, 4096), (4096, 32768), (8, 151936))
FEW_LOGITS = ((1, 128256), (64, 32768), (512, 4096))  # less than 64 MiB
SLICES = tuple((8192, 128256 // ranks) for ranks in (4, 8))  # of its vocabulary
DIVIDED = ((8192, 128256), (4096, 151936), (2048, 262144))  # tokens by vocabularies that several ranks share
# What is computed of slices, and how many numbers of a row a rank sends: the maximum, the sum, the target's
# logit, and for the entropy another sum.
SHARDED = {"cross_entropy": 3, "token_statistics": 4}

# A result of 16-bit operands is rounded to 2^-9 or 2^-12 of its value; sums over a row add little to that.
# What is further off than this is not the operator, and its time means nothing.
WRONG = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


@dataclass
class Options:
    """What a user chose; None: what the section has by default."""

    providers: tuple[str, ...]
    operators: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    shapes: tuple[tuple[int, int], ...] | None = None
    seconds: float = 0.4  # for the timing of one point
    run: int = 1  # of several processes that measure the grids of models and norms


@dataclass(frozen=True)
class Point:
    name: dict
    providers: tuple[str, ...]  # those that were asked for and have what is measured
    measure: Callable[[], dict]
    versions: dict[str, str] | None = None  # to record, in place of the providers'


def _point(name: dict, providers, measure: Callable[..., dict], *arguments) -> Iterator[Point]:
    """The point, unless nobody has it; measure(providers, *arguments) gives its figures."""
    if providers:
        yield Point(name, providers, functools.partial(measure, providers, *arguments))


def reason(error: Exception) -> str:
    """An error in one line: its first, and the next where the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {first[:200]}"


def recorded(*errors: type[Exception]) -> tuple[type[Exception], ...]:
    """Those of these errors that are a result, after which the rest goes on. With several ranks that is a
    wrong result alone, on which they agree: others would wait for a rank that went on by itself."""
    return errors if losses.ranks() == 1 else (ArithmeticError,)


def each_result(providers, figures: Callable[[str], dict]) -> dict:
    """Results by provider; what goes wrong for one of them is its result."""
    results = {}
    for name in providers:
        try:
            results[name] = figures(name)
        # Whatever a provider raises: the others are measured all the same.
        except recorded(Exception) as error:
            results[name] = {"error": reason(error)}
    return results


def installed(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of those providers that can be imported here, and why the others cannot."""
    versions, reasons = {}, {}
    for name in names:
        try:
            provider(name)
            versions[name] = provider_version(name)
        except Exception as error:  # whatever an import may raise
            reasons[name] = reason(error)
    return versions, reasons


# ---- Operators on tensors: throughput, few, cpu ----


def _distance(name, inputs, outputs, m) -> float:
    """How far the first and the last row of the results are from float64, relative to their size: of the
    result that is further off."""
    rows = torch.tensor(sorted({0, m - 1}), device=inputs[0].device)
    wanted = ALL[name].reference(*double(rows_of(name, inputs, rows)))[: ALL[name].checked]
    offs = (_off(output[rows], want) for output, want in zip(outputs[: len(wanted)], wanted, strict=True))
    return max(offs, key=nan_last)


def _off(got, want) -> float:
    facts = torch.finfo(got.dtype)
    subnormal = facts.smallest_normal * facts.eps * want.numel() ** 0.5  # lost by rounding what is close to 0
    return ((got.double() - want).norm() - subnormal).item() / max(want.norm().item(), facts.tiny)


def _prepare(providers, op: str, inputs, m) -> tuple[dict, dict]:
    """Calls by provider that have run and were right, and the results of the other providers."""
    calls = {}

    def prepare(name):
        call = provider(name).operators[op](*inputs)
        off = _distance(op, inputs, call(), m)
        if not off < WRONG[inputs[0].dtype]:
            raise ArithmeticError(f"wrong result: {off:.1e} off")
        call()
        calls[name] = call
        return {"off": float(f"{off:.2e}")}

    results = each_result(providers, prepare)
    return calls, results


_gpu_timer = functools.cache(GPUTimer)
_fastest: dict[tuple, str] = {}  # plain kernel by traffic and bytes


def _limit(traffic: str, inputs) -> dict[str, Callable]:
    """The fastest of the plain kernels that move the bytes of an operator."""
    kernels = limit.launches(traffic, [t for t in inputs if t.shape == inputs[0].shape])
    key = traffic, inputs[0].nbytes
    if key not in _fastest:
        for kernel in kernels.values():
            kernel()
        quick = _gpu_timer()(kernels, 0, least=3)
        _fastest[key] = min(quick, key=lambda name: quick[name].us)
    return {_fastest[key]: kernels[_fastest[key]]}


def _gpu_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    operator = ALL[op]
    torch.manual_seed(0)
    inputs = operator.inputs(m, n, DTYPES[dtype], "cuda")
    calls, results = _prepare(providers, op, inputs, m)
    return _beside_the_limit(options, operator.traffic, inputs, calls, results)


def _beside_the_limit(options: Options, traffic: str, inputs, calls, results, together=None) -> dict:
    """The calls in turns with a plain kernel; their figures go into the results. together: see GPUTimer."""
    figures = {"results": results}
    plain = {}
    try:
        plain = _limit(traffic, inputs)
    except recorded(limit.Unavailable, torch.OutOfMemoryError) as error:
        figures["limit"] = {"error": reason(error)}
    timings = _gpu_timer()(calls | plain, options.seconds, together=together)
    figures["pause_us"] = _gpu_timer().pause_us
    size = len(traffic) * inputs[0].nbytes
    for kernel in plain:
        figures["limit"] = timings[kernel]._asdict() | {
            "kernel": kernel,
            "tbps": _tbps(size, timings[kernel].us),
        }
    for name in calls:
        results[name] |= timings[name]._asdict() | {"tbps": _tbps(size, timings[name].us)}
        if plain:
            results[name]["ratio"] = round(figures["limit"]["us"] / timings[name].us, 4)
    return figures


def _tbps(size: int, us: float) -> float:
    return round(size / us / 1e6, 4)


def _cpu_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    torch.manual_seed(0)
    inputs = ALL[op].inputs(m, n, DTYPES[dtype], "cpu")
    calls, results = _prepare(providers, op, inputs, m)
    with reused_memory():
        for name, timing in cpu_blocks(calls, options.seconds).items():
            results[name] |= timing._asdict()
        turns = host_cost(calls, lambda: None, options.seconds / 2 * len(calls), least=5, most=1000, batch=1)
        for name, timing in turns.items():
            results[name][IN_TURNS] = timing.us
    for name, timing in cpu_blocks(calls, options.seconds / 2, rounds=2, keep=True).items():
        results[name][NEW_MEMORY] = timing.us
    return {"results": results}


def _grid(section, measure, shapes, operators, dtypes, options: Options) -> Iterator[Point]:
    chosen = itertools.product(
        options.dtypes or dtypes, options.shapes or shapes, options.operators or operators
    )
    for dtype, (m, n), op in chosen:
        name = {"section": section, "op": op, "dtype": dtype, "m": m, "n": n}
        having = _having_operator(options.providers, op)
        yield from _point(name, having, measure, options, op, dtype, m, n)


def _having_operator(providers, op: str) -> tuple[str, ...]:
    return tuple(who for who in providers if op in provider(who).operators)


def _having(providers, *functions: str) -> tuple[str, ...]:
    return tuple(who for who in providers if set(functions) <= set(provider(who).functions))


def throughput(options: Options) -> Iterator[Point]:
    return _grid("throughput", _gpu_point, TRAINING, tuple(OPERATORS), ("bfloat16", "float32"), options)


def odd(options: Options) -> Iterator[Point]:
    return _grid("odd", _gpu_point, ODD, tuple(OPERATORS), ("bfloat16", "float32"), options)


def few(options: Options) -> Iterator[Point]:
    forward = ("softmax_forward", "rmsnorm_forward", "cross_entropy_forward")
    return _grid("few", _gpu_point, FEW, forward, ("bfloat16",), options)


def _models_point(providers, options: Options, case: models.Case) -> dict:
    operator = ALL[case.op]
    torch.manual_seed(0)
    inputs = list(operator.inputs(case.m, case.n, DTYPES[case.dtype], "cuda"))
    if case.weight is not None:
        for position in operator.shared:
            inputs[position] = inputs[position].to(DTYPES[case.weight])
    calls, results = _prepare(providers, case.op, inputs, case.m)
    return _beside_the_limit(options, operator.traffic, inputs, calls, results)


def models_section(options: Options) -> Iterator[Point]:
    """The shapes that models have. Each run is a process of its own: see models.RUNS."""
    for case in models.cases(options.operators, options.dtypes, options.shapes):
        name = {"section": "models"} | {k: v for k, v in case._asdict().items() if v is not None}
        having = tuple(
            who
            for who in _having_operator(options.providers, case.op)
            if who != "torch.compile" or models.is_compiled(case)
        )
        yield from _point(name | {"run": options.run}, having, _models_point, options, case)


def _norm_dtypes(op: str) -> tuple[str, ...]:
    return ("bfloat16", "float16") if op == "fused_add_rmsnorm" else ("bfloat16", "float32")


def _norm_shapes(op: str, dtype: str) -> tuple[tuple[int, int], ...]:
    if op == "fused_add_rmsnorm":
        return SERVED
    lengths = NORM_LENGTHS[1:] if op.endswith("backward") else NORM_LENGTHS
    return tuple((max(NORM_ROWS, NORM_BYTES // (n * models.BYTES[dtype])), n) for n in lengths)


def norms(options: Options) -> Iterator[Point]:
    """The norms with options. Each run is a process of its own, as with models."""
    for op in options.operators or NORMS:
        for dtype in options.dtypes or _norm_dtypes(op):
            for m, n in options.shapes or _norm_shapes(op, dtype):
                name = {"section": "norms", "op": op, "dtype": dtype, "m": m, "n": n, "run": options.run}
                having = _having_operator(options.providers, op)
                yield from _point(name, having, _gpu_point, options, op, dtype, m, n)


def glu(options: Options) -> Iterator[Point]:
    """Gated linear units at the widths of MLPs. Each run is a process of its own, as with models."""
    for op in options.operators or GLU:
        for dtype in options.dtypes or ("bfloat16", "float16", "float32"):
            for m, n in options.shapes or MLPS:
                name = {"section": "glu", "op": op, "dtype": dtype, "m": m, "n": n, "run": options.run}
                having = _having_operator(options.providers, op)
                yield from _point(name, having, _gpu_point, options, op, dtype, m, n)


def _rotary_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    operator = ALL[op]
    torch.manual_seed(0)
    inputs = operator.inputs(m, n, DTYPES[dtype], "cuda")
    calls, results = _prepare(providers, op, inputs, m)
    # Heads are read and written, both tables are read: as if one of them were read and written. Backward of
    # normalized heads reads as many gradients.
    q, k, cos, *_ = inputs
    moved = torch.cat([t.flatten() for t in (q, k, cos)])
    read = [moved, *(moved.clone() for _ in range(operator.traffic.count("r") - 1))]
    return _beside_the_limit(options, operator.traffic, read, calls, results)


def rotary(options: Options) -> Iterator[Point]:
    """Rotary embeddings of queries and keys, as they are and normalized. Each run is a process of its own, as
    with models."""
    for op in options.operators or ROTARY | QK_NORM:
        for dtype in options.dtypes or ("bfloat16", "float32"):
            for m, n in options.shapes or TOKENS:
                name = {"section": "rotary", "op": op, "dtype": dtype, "m": m, "n": n, "run": options.run}
                having = _having_operator(options.providers, op)
                yield from _point(name, having, _rotary_point, options, op, dtype, m, n)


def _options_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    """Also without options, by "gander-plain". With a gradient the limit reads two tensors and writes one, as
    a kernel has to that reads the logits again."""
    torch.manual_seed(0)
    inputs = ALL[op].inputs(m, n, DTYPES[dtype], "cuda")
    plain = f"cross_entropy_{'forward' if op.endswith('forward') else 'loss_gradient'}"
    with_options = tuple(name for name in providers if name != _PLAIN)
    calls, results = _prepare(with_options, op, inputs, m)
    for found, more in zip((calls, results), _prepare((_PLAIN,), plain, inputs, m), strict=True):
        found |= more
    traffic = "r" if op.endswith("forward") else "rrw"
    read = [inputs[0], *(inputs[0].clone() for _ in range(traffic.count("r") - 1))]
    return _beside_the_limit(options, traffic, read, calls, results)


_PLAIN = "gander-plain"


def loss_options(options: Options) -> Iterator[Point]:
    """Cross-entropy with each of its options and with all of them, beside it without; and of class
    probabilities."""
    for op in options.operators or OPTIONED | PROBABILITIES:
        for dtype in options.dtypes or ("bfloat16", "float32"):
            for m, n in options.shapes or LOSSES:
                name = {"section": "options", "op": op, "dtype": dtype, "m": m, "n": n}
                having, measure = _having_operator(options.providers, op), _gpu_point
                if op in OPTIONED:
                    having, measure = (*having, _PLAIN), _options_point
                yield from _point(name, having, measure, options, op, dtype, m, n)


def _tokens_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    """Also cross-entropy of as many logits, by "gander-plain"."""
    torch.manual_seed(0)
    inputs = ALL[op].inputs(m, n, DTYPES[dtype], "cuda")
    calls, results = _prepare(tuple(name for name in providers if name != _PLAIN), op, inputs, m)
    plain = f"cross_entropy_{'forward' if op.endswith('forward') else 'loss_gradient'}"
    for found, more in zip((calls, results), _prepare((_PLAIN,), plain, inputs[:2], m), strict=True):
        found |= more
    traffic, x = "r" if op.endswith("forward") else "rrw", inputs[0]
    if "masked" in op:  # half of the rows are read, once or twice, and the gradients of all are written
        traffic, x = ("r", x[: (m + 1) // 2]) if traffic == "r" else ("rw", x)
    read = [x, *(x.clone() for _ in traffic[2:])]
    return _beside_the_limit(options, traffic, read, calls, results)


def tokens(options: Options) -> Iterator[Point]:
    """Statistics of tokens: log-probability and entropy, forward and with the gradient, and all of them."""
    for op in options.operators or STATISTICS:
        for dtype in options.dtypes or ("bfloat16", "float32"):
            for m, n in options.shapes or (*LOSSES, *FEW_LOGITS):
                name = {"section": "tokens", "op": op, "dtype": dtype, "m": m, "n": n}
                having = (*_having_operator(options.providers, op), _PLAIN)
                yield from _point(name, having, _tokens_point, options, op, dtype, m, n)


def _algorithms_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    figures = _gpu_point(providers, options, op, dtype, m, n)
    rows = torch.empty(n, dtype=DTYPES[dtype], device="cuda").expand(m, n)  # only described
    return figures | {"taken": gander.explain(op, rows).partition(":")[0].removeprefix("auto takes ")}


def algorithms(options: Options) -> Iterator[Point]:
    """Auto next to every algorithm that can be forced. One that refuses a shape has its reason as result."""
    options = replace(options, providers=ALGORITHMS)
    operators = tuple(op for op in OPERATORS if op.startswith(("softmax", "rmsnorm")))
    return _grid(
        "algorithms", _algorithms_point, PUBLISHED + TRAINING, operators, ("bfloat16", "float32"), options
    )


def invariant(options: Options) -> Iterator[Point]:
    """What `batch_invariant=True` costs, which makes every choice as for many rows."""
    options = replace(options, providers=("gander", "gander-batch-invariant"))
    return _grid("invariant", _gpu_point, INVARIANT, BATCH_INVARIANT, ("bfloat16",), options)


def cpu(options: Options) -> Iterator[Point]:
    return _grid("cpu", _cpu_point, CPU, tuple(OPERATORS), ("float32", "bfloat16"), options)


# ---- step: cross-entropy as a training step calls it ----

# By what the loss is multiplied: gradient accumulation, a number of ranks, a GradScaler.
STEPS = {"backward": 1.0, "a quarter": 1 / 4, "a third": 1 / 3, "eight times": 8.0, "scaled": 1.0}


def _step_call(cross_entropy, mode: str, x, target, told: bool = False) -> Callable[[], torch.Tensor]:
    """Loss and gradient through autograd, which gives x.grad anew: of the loss times a factor of the step's
    or of a GradScaler. told: the call says by `upstream` which one."""
    scaler = torch.amp.GradScaler(x.device.type, enabled=mode == "scaled")
    share = STEPS[mode]
    factor = scaler.get_scale() * share
    options = {"upstream": factor} if told else {}

    def run():
        x.grad = None
        loss = cross_entropy(x, target, **options)
        scaler.scale(loss if share == 1 else loss * share).backward()
        return x.grad

    run.factor = factor
    return run


_TOLD = ("gander-upstream", "gander-one-pass.compile")


def _step_distance(x, target, gradient, factor) -> float:
    """How far a step's gradient is from float64 in the first and the last row, relative to its size."""
    rows = torch.tensor(sorted({0, len(x) - 1}), device=x.device)
    want = OPERATORS["cross_entropy_loss_gradient"].reference(x[rows].detach().double(), target[rows])[0]
    want *= factor / len(x)
    return ((gradient[rows].double() - want).norm() / want.norm()).item()


def _peak_mib(call) -> float:
    """The memory that a call needs at most besides what there is, its results with it."""
    return round(peak_bytes(call, "cuda") / 2**20, 1)


def _step_peak(call, x) -> dict:
    """The memory that a step needs besides the logits, and how many times their size that is."""
    x.grad = None
    peak = _peak_mib(call)
    x.grad = None
    return {"peak MiB": peak, "peak / logits": round(peak * 2**20 / x.nbytes, 3)}


def _step_point(providers, options: Options, mode: str, dtype: str, m: int, n: int) -> dict:
    torch.manual_seed(0)
    logits, target = OPERATORS["cross_entropy_forward"].inputs(m, n, DTYPES[dtype], "cuda")
    calls = {}

    def prepare(name):
        # liger writes the gradient over the logits, so each has its own: liger's change after the first step.
        x = logits.clone().requires_grad_()
        function = provider(name).functions["cross_entropy"]
        call = _step_call(function, mode, x, target, told=name in _TOLD)
        off = _step_distance(logits, target, call(), call.factor)
        if not off < WRONG[x.dtype]:
            raise ArithmeticError(f"wrong result: {off:.1e} off")
        figures = {"off": float(f"{off:.2e}")} | _step_peak(call, x)
        calls[name] = call
        return figures

    results = each_result(providers, prepare)
    return _beside_the_limit(options, "rw", (logits,), calls, results)


def step(options: Options) -> Iterator[Point]:
    shapes, dtypes = options.shapes or (LOGITS,), options.dtypes or ("bfloat16",)
    own = ("gander-two-passes", "gander-upstream", "gander-remember") if "gander" in options.providers else ()
    if own and "torch.compile" in options.providers:
        own += "gander.compile", "gander-one-pass.compile"
    having = _having(dict.fromkeys(options.providers + own), "cross_entropy")
    for dtype, (m, n), mode in itertools.product(dtypes, shapes, STEPS):
        name = {"section": "step", "op": "cross_entropy", "dtype": dtype, "m": m, "n": n, "mode": mode}
        yield from _point(name, having, _step_point, options, mode, dtype, m, n)


# ---- linear, head and sharded: a head that keeps no logits, and the loss of a slice of the classes ----


def _errors_and_memory(call, wanted) -> dict:
    """How far dx, and dw if it is made, are from float64, and the memory of a call besides them."""
    made = call()
    pairs = zip(("dx", "dw")[: len(wanted)], made, wanted, strict=True)
    far = {f"{which} off": losses.off(got, want) for which, got, want in pairs}
    furthest = max(far.values(), key=nan_last)
    if not furthest < WRONG[made[0].dtype]:
        raise ArithmeticError(f"wrong result: {furthest:.1e} off")
    gradients = sum(gradient.nbytes for gradient in made) / 2**20
    del made
    return far | {"peak MiB": round(_peak_mib(call) - gradients, 1)}


def _linear_point(providers, options: Options, dtype: str, m: int, n: int) -> dict:
    torch.manual_seed(0)
    inputs = losses.linear_inputs(m, HIDDEN, n, DTYPES[dtype], "cuda")
    wanted = losses.linear_reference(*inputs)
    calls = {}

    def prepare(name):
        call = losses.linear_gradients(provider(name).functions["linear_cross_entropy"], *inputs)
        figures = _errors_and_memory(call, wanted)
        calls[name] = call
        return figures

    results = each_result(providers, prepare)
    matmuls = losses.matmuls(*inputs[:2])
    timings = _gpu_timer()(calls | {"matmuls": matmuls}, options.seconds)
    least = timings["matmuls"]
    for name in calls:
        results[name] |= timings[name]._asdict() | {"ratio": round(least.us / timings[name].us, 4)}
    return {"results": results, "limit": least._asdict() | {"kernel": "three matmuls"}}


def linear(options: Options) -> Iterator[Point]:
    own = tuple(name for name in PROVIDERS if name.startswith("gander-"))
    having = _having(
        dict.fromkeys(options.providers + (own if "gander" in options.providers else ())),
        "linear_cross_entropy",
    )
    for dtype, (m, n) in itertools.product(options.dtypes or ("bfloat16",), options.shapes or (LOGITS,)):
        name = {"section": "linear", "op": "linear_cross_entropy", "dtype": dtype, "m": m, "n": n}
        yield from _point(name, having, _linear_point, options, dtype, m, n)


# By mode: whether the weight is trained, and whether entropies are in the loss.
HEADS = {
    "trained": {"trained": True, "entropy": True},
    "frozen": {"trained": False, "entropy": True},
    "frozen, log_prob": {"trained": False, "entropy": False},
}


def _head_point(providers, options: Options, mode: str, dtype: str, m: int, n: int) -> dict:
    """Beside the matmuls alone, as many as there are with the logits kept, and with them made again."""
    torch.manual_seed(0)
    how = HEADS[mode]
    inputs = losses.linear_inputs(m, HIDDEN, n, DTYPES[dtype], "cuda")
    wanted = losses.statistics_reference(*inputs, **how)
    calls = {}

    def prepare(name):
        function = provider(name).functions["linear_token_statistics"]
        call = losses.statistics_gradients(function, *inputs, **how)
        figures = _errors_and_memory(call, wanted)
        calls[name] = call
        return figures

    results = each_result(providers, prepare)
    trained = how["trained"]
    alone = {
        "kept": losses.matmuls(*inputs[:2], trained=trained),
        "again": losses.matmuls(*inputs[:2], again=True, trained=trained),
    }
    timings = _gpu_timer()(calls | alone, options.seconds)
    for name in calls:
        results[name] |= timings[name]._asdict()
        results[name] |= {f"over {which}": round(timings[name].us / timings[which].us, 4) for which in alone}
    return {"results": results, "matmuls": {which: timings[which]._asdict() for which in alone}}


def head(options: Options) -> Iterator[Point]:
    """Log-probabilities and entropies of a head, with gradients."""
    own = ("gander-kept",) if "gander" in options.providers else ()
    having = _having(dict.fromkeys(options.providers + own), "linear_token_statistics")
    for dtype, (m, n), mode in itertools.product(
        options.dtypes or ("bfloat16",), options.shapes or (HEAD,), HEADS
    ):
        name = {"section": "head", "op": "linear_token_statistics", "dtype": dtype, "m": m, "n": n}
        yield from _point(name | {"mode": mode}, having, _head_point, options, mode, dtype, m, n)


def _sharded_point(providers, options: Options, op: str, dtype: str, m: int, n: int) -> dict:
    """A rank's results and gradient beside two reads and a write of its slice, and the collective alone. Who
    knows no slices has the slice's classes alone."""
    from torch.distributed.tensor.parallel import loss_parallel

    with losses.group("cuda") as ranks, loss_parallel():
        logits, index = losses.slice_inputs(m, n, DTYPES[dtype], "cuda")
        calls = {}

        def prepare(name):
            call, off = sharded_call(op, provider(name).functions, logits, index)
            if not off < WRONG[logits.dtype]:
                raise ArithmeticError(f"wrong result: {off:.1e} off")
            calls[name] = call
            return {"off": float(f"{off:.2e}"), "peak MiB": round(_peak_mib(call) - logits.nbytes / 2**20, 1)}

        results = each_result(providers, prepare) | {_COLLECTIVE: {}}
        calls[_COLLECTIVE] = losses.all_gather(SHARDED[op] * m, "cuda")
        together = losses.all_gather(1, "cuda") if ranks > 1 else None
        moved = [logits, logits.clone()]
        figures = _beside_the_limit(options, "rrw", moved, calls, results, together)
    collective = results.pop(_COLLECTIVE)
    return figures | {"collective": {name: collective[name] for name in Timing._fields}}


_COLLECTIVE = "all-gather"


def sharded_call(op: str, functions: dict, logits, index) -> tuple[Callable, float]:
    """A call that makes a slice's gradient anew, and how far its first and last row are from float64, on the
    rank where that is furthest: as they are, or without the target's column, beside which all others are
    small."""
    divided = f"sharded_{op}" in functions
    function = functions[f"sharded_{op}" if divided else op]
    if not divided:
        index = index % logits.shape[1]
    if op == "token_statistics":
        call = statistics_gradient(lambda x, index, row_mask: function(x, index, row_mask=row_mask))(
            logits, index
        )
        reference, factor = ALL["token_statistics_gradient"].reference, 1
    else:
        leaf = logits.detach().requires_grad_()

        def call():
            return torch.autograd.grad(function(leaf, index), leaf)

        reference, factor = ALL["cross_entropy_loss_gradient"].reference, 1 / len(logits)
    rows = torch.tensor(sorted({0, len(logits) - 1}), device=logits.device)
    classes = losses.all_classes(logits[rows]) if divided else logits[rows]
    (want,) = reference(classes.double(), index[rows])
    others = torch.arange(classes.shape[1], device=logits.device) != index[rows, None]
    if divided:
        want, others = losses.own_classes(want), losses.own_classes(others)
    got, want = call()[0][rows], factor * want
    off = max(_off(got, want), _off(got * others, want * others), key=nan_last)
    return call, losses.furthest(off, logits.device)


def sharded(options: Options) -> Iterator[Point]:
    """Under torchrun of classes that are divided among its processes, else of a group of one."""
    ranks = losses.ranks()
    own = ("gander-two-passes", "gander-sharded") if "gander" in options.providers else ()
    for op, dtype, (m, n) in itertools.product(
        SHARDED, options.dtypes or ("bfloat16",), _slices(options, ranks)
    ):
        name = {"section": "sharded", "op": op, "dtype": dtype, "m": m, "n": n}
        others = _having(options.providers, f"sharded_{op}") if ranks > 1 else ()
        yield from _point(
            name | ({"ranks": ranks} if ranks > 1 else {}),
            tuple(dict.fromkeys(own + others)),
            _sharded_point,
            options,
            op,
            dtype,
            m,
            n,
        )


def _slices(options: Options, ranks: int) -> tuple[tuple[int, int], ...]:
    return options.shapes or (tuple((m, n // ranks) for m, n in DIVIDED) if ranks > 1 else SLICES)


# ---- host: what a call costs before its kernel starts ----


def _host_call(function, name, mode, x, weight, target):
    more = {"softmax": (), "rmsnorm": (weight,), "cross_entropy": (target,)}[name]
    if mode == "forward":
        return lambda: function(x, *more)
    leaves = [t.detach().requires_grad_() for t in (x, *more) if t.is_floating_point()]
    arguments = (*leaves, *more[len(leaves) - 1 :])
    if mode == "with gradient":
        return lambda: function(*arguments)
    seed = torch.ones_like(function(*arguments))
    return lambda: torch.autograd.grad(function(*arguments), leaves, seed)


def _host_point(providers, options: Options, name: str, mode: str) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    m, n = TINY
    dtype = DTYPES[(options.dtypes or ("bfloat16",))[0]]
    x = torch.randn(m, n, dtype=dtype, device=device)
    weight = torch.randn(n, dtype=dtype, device=device)
    target = torch.randint(n, (m,), device=device)
    calls = {}

    def prepare(who):
        call = _host_call(provider(who).functions[name], name, mode, x, weight, target)
        call()
        calls[who] = call
        return {}

    results = each_result(providers, prepare)
    timings = host_cost(calls, torch.cuda.synchronize if device == "cuda" else (lambda: None))
    for who, timing in timings.items():
        results[who] |= timing._asdict()
        if "torch" in timings:
            results[who]["over torch"] = round(timing.us / timings["torch"].us, 3)
    return {"results": results}


def host(options: Options) -> Iterator[Point]:
    own = ("gander.compile",) if {"gander", "torch.compile"} <= set(options.providers) else ()
    providers = dict.fromkeys(options.providers + own)
    for name in load.FUNCTIONS:
        for mode in ("forward", "with gradient", "forward and backward"):
            point = {"section": "host", "op": name, "mode": mode}
            yield from _point(point, _having(providers, name), _host_point, options, name, mode)


# ---- load: what the first call costs ----

_PROCESSES = 3


def _median(runs: list[dict]) -> dict:
    """The median of each figure over several processes, in the nesting that they came in."""
    first = runs[0]
    if isinstance(first, dict):
        return {name: _median([run[name] for run in runs]) for name in first}
    if isinstance(first, list):
        return [_median(list(values)) for values in zip(*runs, strict=True)]
    return round(statistics.median(runs), 3)


def _load_point(providers) -> dict:
    def first_calls(name):
        processes = 1 if name == "torch.compile" else _PROCESSES  # it takes its time
        figures = _median([load.in_a_fresh_process(name) for _ in range(processes)])
        if name == "gander":
            figures["megabytes"] = round(Path(gander.info()["library"]).stat().st_size / 1e6, 2)
        else:
            del figures["import"]
        return figures

    return {"results": each_result(providers, first_calls)}


def load_section(options: Options) -> Iterator[Point]:
    yield from _point({"section": "load"}, _having(options.providers, *load.FUNCTIONS), _load_point)


SECTIONS = {
    "host": host,
    "load": load_section,
    "throughput": throughput,
    "odd": odd,
    "few": few,
    "models": models_section,
    "norms": norms,
    "glu": glu,
    "rotary": rotary,
    "options": loss_options,
    "tokens": tokens,
    "algorithms": algorithms,
    "invariant": invariant,
    "step": step,
    "linear": linear,
    "head": head,
    "sharded": sharded,
    "cpu": cpu,
}
NEEDS_GPU = tuple(name for name in SECTIONS if name not in ("host", "load", "cpu"))


def figures_of(point: Point) -> dict:
    """What a point's measurement gives. What goes wrong in all of it is the result of each provider."""
    try:
        return point.measure()
    except recorded(Exception) as error:  # out of memory, say: the next point is another one
        return {"results": {name: {"error": reason(error)} for name in point.providers}}


def measured(points: Iterable[Point]) -> list[dict]:
    """The records of points, which no file keeps."""
    records = []
    for point in points:
        records.append(record(point.name, figures_of(point), point.versions))
        forget()
    return records


def context_is_lost() -> bool:
    """Whether an error has made the GPU unusable for this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def forget() -> None:
    """Gives memory and compiled code of a point back."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
