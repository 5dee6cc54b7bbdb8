"""The grid of models: the shapes that language models have, and how a point of it is judged."""

import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

HIDDEN = (
    *(1024, 1536, 2048, 2560, 2880, 3072, 3584, 3840, 4096, 5120, 5376, 6144, 7168, 8192, 11008, 12288),
    *(14336, 16384, 18432),
)
VOCABULARIES = (
    *(32000, 32768, 49152, 50257, 50304, 100352, 128256, 129280, 151936, 152064, 201088, 202048, 256000),
    *(262144, 262208),
)
HEADS = (64, 80, 96, 128, 192, 256)  # rows of the norms of queries and keys
HEAD_ROWS = (32768, 262144)  # tokens times heads
SERVING = (1, 8, 64, 512)  # tokens; forward only
TRAINING = (2048, 8192, 24576)
FEW_LENGTHS = (128, 4096, 5120, 50257, 128256)  # for float16 and float32; bfloat16 has all

FORWARD = ("softmax_forward", "rmsnorm_forward", "cross_entropy_forward")
BACKWARD = ("softmax_backward", "rmsnorm_backward", "cross_entropy_loss_gradient")
OPERATORS = tuple(op for pair in zip(FORWARD, BACKWARD, strict=True) for op in pair)
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# torch.compile is tuned for minutes, so it is measured at ten points, in bfloat16 with weights of that type.
COMPILED = {
    *((op, 8192, n) for op in ("rmsnorm_forward", "rmsnorm_backward") for n in (4096, 5120, 11008)),
    *(("cross_entropy_forward", 8192, n) for n in (50257, 128256)),
    *(("cross_entropy_loss_gradient", 8192, n) for n in (50257, 128256)),
}


class Case(NamedTuple):
    op: str
    dtype: str
    m: int
    n: int
    weight: str | None  # the dtype of RMSNorm's weights; None is that of the rows


def _weights(op: str, dtype: str) -> tuple[str | None, ...]:
    """Mixed precision and FSDP keep weights in float32."""
    return (None, "float32") if op.startswith("rmsnorm") and dtype != "float32" else (None,)


def _shapes(op: str) -> Iterator[tuple[int, int]]:
    tokens = (*SERVING, *TRAINING) if op in FORWARD else TRAINING
    lengths = HIDDEN if op.startswith("rmsnorm") else (*HIDDEN, *VOCABULARIES)
    yield from ((m, n) for n in lengths for m in tokens)
    if not op.startswith("cross_entropy"):
        yield from ((m, n) for n in HEADS for m in HEAD_ROWS)


def cases(
    operators: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    shapes: Iterable[tuple[int, int]] | None = None,
) -> Iterator[Case]:
    """All points, or those of some operators and dtypes, or other shapes."""
    for dtype in dtypes or ("bfloat16", "float16", "float32"):
        for op in operators or OPERATORS:
            for m, n in shapes or _shapes(op):
                if shapes or dtype == "bfloat16" or n in FEW_LENGTHS:
                    yield from (Case(op, dtype, m, n, weight) for weight in _weights(op, dtype))


def is_compiled(case: Case) -> bool:
    shape = case.op, case.m, case.n
    return case.dtype == "bfloat16" and case.weight is None and shape in COMPILED


# ---- How a point is judged ----

# A point is measured in three processes. It misses a target if it does so in all of them, by more than 2 %,
# or by more than 0.3 us where it takes less than 20 us.
RUNS = 3
_SLACK, _SLACK_US, _SHORT_US = 0.02, 0.3, 20.0


# By operator, the share of a plain kernel's speed that is aimed at from so many MiB of x on.
_SHARES = {
    "rmsnorm_backward": ((128, 0.92), (32, 0.88)),
    "rmsnorm_residual_backward": ((128, 0.92), (32, 0.88)),
    "layernorm_backward": ((128, 0.90), (32, 0.86)),
}
_OTHER_SHARES = ((64, 0.97), (0, 0.95))


def share_of_limit(op: str, dtype: str, m: int, n: int) -> float | None:
    """What share of a plain kernel's speed is aimed at; None where there is no such target."""
    if m < TRAINING[0]:
        return None
    mib = m * n * BYTES[dtype] / 2**20
    return next((share for least, share in _SHARES.get(op, _OTHER_SHARES) if mib >= least), None)


class Verdict(NamedTuple):
    measured: float | None  # a speed relative to what it is compared with; None if no run succeeded
    at_least: float
    runs: int = 1  # of which this is the best

    def met(self) -> bool:
        return self.measured is not None and self.measured >= self.at_least


def _best(found: list[Verdict]) -> Verdict | None:
    """The run in which gander is best; None if no run can be judged."""
    best = max(found, key=lambda v: (v.measured or 0) / v.at_least, default=None)
    return best and best._replace(runs=len(found))


def _least(base_us: float, share: float, mine: float | None) -> float:
    """The speed relative to base_us that is at least needed where a share of it is aimed at."""
    if mine is not None and mine < _SHORT_US:
        return base_us / (base_us / share + _SLACK_US)
    return share / (1 + _SLACK)


def _has_gander(run: dict) -> bool:
    return "gander" in run["results"]


def against_others(runs: list[dict]) -> Verdict | None:
    """gander's speed over that of the best other provider, in the run in which it is best."""
    found = []
    for run in filter(_has_gander, runs):
        mine, best = run["results"]["gander"].get("us"), best_other(run)
        if best is not None:
            found.append(Verdict(mine and best / mine, _least(best, 1, mine)))
    return _best(found)


def against_limit(runs: list[dict]) -> Verdict | None:
    """gander's share of the limit, in the run in which it is best."""
    target = share_of_limit(*(runs[0][part] for part in ("op", "dtype", "m", "n")))
    if target is None:
        return None
    found = []
    for run in filter(_has_gander, runs):
        mine, limit = run["results"]["gander"].get("us"), run.get("limit", {}).get("us")
        if limit is not None:
            found.append(Verdict(mine and limit / mine, _least(limit, target, mine)))
    return _best(found)


SECTIONS = ("models", "norms", "glu", "rotary")  # of the benchmark, which are judged like this


def verdicts(runs: list[dict]) -> dict[str, Verdict]:
    """By target, without those that no run can be judged by."""
    judged = {
        "share of the limit": against_limit(runs),
        "speed over the best other's": against_others(runs),
    }
    return {target: verdict for target, verdict in judged.items() if verdict is not None}


def is_undecided(runs: list[dict]) -> bool:
    """Whether another run could change a verdict: one on a target that all of these have missed."""
    found = verdicts(runs).values() if runs else ()
    return not found or not all(verdict.met() for verdict in found)


def case_of(record: dict) -> Case:
    return Case(*(record.get(part) for part in Case._fields))


def by_case(records: Iterable[dict], section: str) -> dict[Case, list[dict]]:
    """The runs of each point of a section."""
    runs: dict[Case, list[dict]] = {}
    for record in records:
        if record["section"] == section:
            runs.setdefault(case_of(record), []).append(record)
    return runs


def median(runs: list[dict], provider: str, field: str) -> float | None:
    """Over the runs in which the provider succeeded."""
    return median_of(run["results"].get(provider, {}).get(field) for run in runs)


def median_of(figures: Iterable[float | None]) -> float | None:
    found = [figure for figure in figures if figure is not None]
    return statistics.median(found) if found else None


def best_other(record: dict, field: str = "us") -> float | None:
    """The best figure of another provider: the shortest time, or the highest speed."""
    return best_median([record], field)


def best_median(runs: list[dict], field: str) -> float | None:
    """The best median of another provider over several runs."""
    names = {name for run in runs for name in run["results"] if not name.startswith("gander")}
    medians = [m for name in names if (m := median(runs, name, field)) is not None]
    return (min if field.startswith("us") else max)(medians, default=None)
