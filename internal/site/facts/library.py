"""What the library says: which kernels, and what is refused."""

import functools
import re
import textwrap

import gander
import tolerance

from . import ROOT
from .tables import table_of

PLACES = {  # of internal/policy's regimes: where a row lies, and who shares it
    "registers": "registers of one CTA, or of a part of it",
    "cluster-registers": "registers of a cluster of CTAs",
    "shared-memory": "shared memory of one CTA",
    "cluster-shared-memory": "shared memory of a cluster of CTAs",
    "persistent-loop": "registers of a part of a warp, which loads its next row meanwhile",
    "persistent-lanes": "registers of a part of a warp, which keeps its sums of dw there too",
    "persistent-ring": "a ring in shared memory: CTAs or clusters load their next rows meanwhile",
    "grid-cooperative": "rings in shared memory of all SMs, which share every row",
    "grid-shared-memory": "shared memory of all SMs, which share a few rows",
    "stream": "nowhere: it is read once and not kept",
    "two-passes": "nowhere: it is read twice, in chunks",
    "by-columns": "nowhere: sums of rows first, then dx and dw by columns",
    "elementwise": "nowhere: elements are independent, or what they need of the row is known",
}


def kernels(op: str, device: str = "h100", dtype: str = "bfloat16") -> str:
    """A table of which kernels serve which rows, for many rows and for few."""
    has_algorithms = len(gander.algorithms(op)) > 1
    rows = []
    for m in (32768, 4):
        found: list[list] = []
        for exponent in range(4, 23):
            n = 1 << exponent
            if m * n > 1 << 31:
                break
            regime, algorithm = regime_of(op, m, n, device, dtype)
            key = algorithm, PLACES[regime]
            if found and found[-1][2] == key:
                found[-1][1] = n
            else:
                found.append([n, n, key])
        for i, (first, last, (algorithm, place)) in enumerate(found):
            lengths = f"to {last}" if i == 0 else f"{first}" if first == last else f"{first} to {last}"
            rows.append([f"{m}", lengths, *([algorithm] if has_algorithms else []), place])
    columns = ["M", "N", *(["algorithm"] if has_algorithms else []), "where a row lies"]
    note = f"{device.upper()}, {dtype}, rows of powers of two whose operands are aligned to 16 bytes. "
    return table_of(columns, rows, note + "From gander.explain.", align="rrl")


def explained(
    op: str, shape: tuple[int, ...], device: str = "h100", dtype: str = "bfloat16", **choice
) -> str:
    """What gander.explain says."""
    text = gander.explain(op, shape=shape, dtype=dtype, device=device, **choice)
    return f"```text\n{text.strip()}\n```"


def refused_algorithm(op: str, shape: tuple[int, int], algorithm: str, device: str = "h100") -> str:
    """What is said of an algorithm that cannot serve a shape."""
    try:
        gander.explain(op, shape=shape, dtype="bfloat16", device=device, algorithm=algorithm)
    except NotImplementedError as error:
        return f"```text\n{textwrap.fill(f'NotImplementedError: {error}', 100)}\n```"
    raise LookupError(f"{algorithm} serves {op} of {shape}")


def regimes() -> str:
    """A table of the policy's regimes."""
    return table_of(["regime", "a row lies in"], PLACES.items(), align="l")


def by_device(
    op: str, *shapes: tuple[int, int], devices: tuple[str, ...] = ("h100", "b200", "rtx4090")
) -> str:
    """A table of the algorithm and of the place of a row on several devices."""
    rows = []
    for shape in shapes:
        for device in devices:
            regime, algorithm = regime_of(op, *shape, device)
            rows.append([f"{shape[0]} x {shape[1]}", device, algorithm, PLACES[regime]])
    columns = ["rows", "device", "algorithm", "where a row lies"]
    return table_of(columns, rows, f"{op}, bfloat16. From gander.explain.", align="l")


@functools.cache
def explanation(op: str, m: int, n: int, device: str, dtype: str) -> str:
    return gander.explain(op, shape=(m, n), dtype=dtype, device=device)


def regime_of(op: str, m: int, n: int, device: str = "h100", dtype: str = "bfloat16") -> tuple[str, str]:
    """The regime of the policy by which a call is planned, and its algorithm."""
    text = explanation(op, m, n, device, dtype)
    policy = re.search(r"^policy: .*", text, re.MULTILINE)
    algorithm = re.match(r"auto takes (\w+)", text)
    return next(word for word in policy[0].split() if word in PLACES), algorithm[1] if algorithm else "auto"


def algorithms(op: str = "softmax") -> str:
    """A table of the names of algorithms, what each does, and which rows it serves."""
    rows = [[f"`{each.name}`", each.what, each.limits] for each in gander.algorithms(op)]
    return table_of(["name", "what it does", "serves"], rows, align="l")


def refusal(call: str, *before: str) -> str:
    """A call that is refused, and what it says. before: the assignments that it needs."""
    import numpy
    import torch

    names = {"gander": gander, "torch": torch, "np": numpy}
    for line in before:
        exec(line, names)
    try:
        eval(call, names)
    except Exception as error:
        said = textwrap.fill(f"{type(error).__name__}: {error}", 72, break_long_words=False)
        typed = "".join(f">>> {line}\n" for line in (*before, call))
        return f"```pycon\n{typed}{said}\n```"
    raise ValueError(f"{call} is not refused")


def accuracy(reference: str) -> str:
    """The bounds of the tests of accuracy, beside the operator of torch that they are derived from."""
    text = (
        f"The tests compare with float64. The root mean square error is at most {tolerance.RMS:g} times that "
        f"of {reference}. The largest error is at most {tolerance.MAXIMUM:g} times its largest, or one unit "
        "in the last place."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False)


def accuracy_of_linear() -> str:
    """The bounds of linear_cross_entropy's gradients by the number of chunks."""
    rows = [[f"{n}", f"{tolerance.RMS:g}", f"{most:g}"] for n, most in tolerance.LINEAR_DW.items()]
    return table_of(["chunks", "dx", "dw"], rows, align="r")


def torch_releases() -> str:
    """The releases of torch that the tests run with."""
    from gander._torch import fast

    return ", ".join(fast.TESTED)


def jax_releases() -> str:
    """The releases of jax that the tests run with. gander.jax.CHECKED has them too, but needs jax."""
    return " and ".join(re.findall(r"^jax==(\S+)", (ROOT / "requirements-jax.txt").read_text(), re.MULTILINE))
