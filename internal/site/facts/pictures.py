"""Pictures of records and of the planner."""

import io
import math
import re

from gander_bench import plots

from .library import explanation, regime_of
from .measured import GRID, NORMS, points_of


def pictures() -> dict[str, str]:
    """By file name the pictures of docs/images that come from records, and from the planner."""
    made = {
        f"{name}.svg": _svg([p for op in ops for p in points_of(op, file, section, dtype="bfloat16")])
        for name, (file, section, *ops) in _PICTURES.items()
    }
    return made | {"ladder.svg": _ladder()}


_LADDER = {
    "softmax": "softmax",
    "softmax_bwd": "its backward",
    "rmsnorm": "RMSNorm",
    "rmsnorm_bwd": "its backward",
    "cross_entropy": "cross-entropy",
    "cross_entropy_fwd_dx": "with gradient",
}
_STEPS_OF_THE_LADDER = {  # a color and a legend by regime
    "warp": ("#cfe8f7", "registers of a warp, or of a part of it"),
    "registers": ("#8cc4e8", "registers of a CTA"),
    "cluster-registers": ("#3f86bd", "registers of a cluster"),
    "shared-memory": ("#bfe5c4", "shared memory of a CTA"),
    "cluster-shared-memory": ("#5fb374", "shared memory of a cluster"),
    "persistent": ("#f6dc8a", "persistent CTAs or clusters"),
    "grid": ("#e8995c", "shared memory of all SMs"),
    "none": ("#d0d0d0", "not kept: read once, or twice"),
}
_KIND = {"stream": "none", "two-passes": "none", "by-columns": "none"}


def _kind(op: str, m: int, n: int) -> str:
    """The step of the ladder that takes a row."""
    regime, _ = regime_of(op, m, n)
    if regime == "registers":
        text = explanation(op, m, n, "h100", "bfloat16")
        threads = re.search(r"registers of (\d+) threads", text)
        return "warp" if int(threads[1]) <= 32 else regime
    return _KIND.get(regime) or next(
        (kind for kind in ("persistent", "grid") if regime.startswith(kind)), regime
    )


def _ladder() -> str:
    """A picture of which kernel takes a row, by its length, for many rows and for four."""
    first, last, left, right = 4, 22, 118, 548

    def x(n: float) -> float:
        return left + (right - left) * (math.log2(n) - first) / (last - first)

    lengths = sorted({round(2 ** (k / 4) / 8) * 8 for k in range(4 * first, 4 * last + 1)})
    parts, used, y = [], set(), 30
    for title, rows in (("Many rows (2^31 elements, at most 32768 rows)", 32768), ("Four rows", 4)):
        parts.append(f'<text x="12" y="{y}" font-weight="600">{title}</text>')
        y += 10
        for op, name in _LADDER.items():
            parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{name}</text>')
            found = [(n, _kind(op, min(rows, (1 << 31) // n), n)) for n in lengths]
            used |= {kind for _, kind in found}
            runs = [pair for i, pair in enumerate(found) if not i or pair[1] != found[i - 1][1]]
            ends = [n for n, _ in runs[1:]] + [1 << last]
            for (start, kind), end in zip(runs, ends, strict=True):
                color = _STEPS_OF_THE_LADDER[kind][0]
                parts.append(
                    f'<rect x="{x(start):.1f}" y="{y}" width="{x(end) - x(start):.1f}" height="22" '
                    f'fill="{color}" stroke="#fff"/>'
                )
            y += 26
        for exponent in range(first, last + 1, 3):
            n = 1 << exponent
            label = f"{n >> 20} Mi" if n >> 20 else f"{n >> 10} Ki" if n >> 10 else str(n)
            parts.append(
                f'<text x="{x(n):.1f}" y="{y + 14}" text-anchor="middle" font-size="12">{label}</text>'
            )
            parts.append(f'<path d="M{x(n):.1f} {y - 2}v4" stroke="#666"/>')
        y += 44
    parts.append(
        f'<text x="12" y="{y - 6}" font-weight="600">Where a row lies while it waits for its sum</text>'
    )
    for i, kind in enumerate(kind for kind in _STEPS_OF_THE_LADDER if kind in used):
        color, legend = _STEPS_OF_THE_LADDER[kind]
        column, line = 12 + 278 * (i // 4), y + 8 + 24 * (i % 4)
        parts.append(f'<rect x="{column}" y="{line}" width="18" height="16" fill="{color}"/>')
        parts.append(f'<text x="{column + 26}" y="{line + 13}" font-size="12.5">{legend}</text>')
    height = y + 116
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 568 {height}" font-size="13" fill="#222" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">\n'
        f'<rect x=".5" y=".5" width="567" height="{height - 1}" rx="6" fill="#fff" stroke="#ddd"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


_PICTURES = {
    "softmax": (GRID, "throughput", "softmax_forward", "softmax_backward"),
    "rmsnorm": (GRID, "throughput", "rmsnorm_forward", "rmsnorm_backward"),
    "rmsnorm_residual": (NORMS, "norms", "rmsnorm_residual_forward", "rmsnorm_residual_backward"),
    "layernorm": (NORMS, "norms", "layernorm_forward", "layernorm_backward"),
    "cross_entropy": (GRID, "throughput", "cross_entropy_forward", "cross_entropy_loss_gradient"),
}


def _svg(points: list[dict]) -> str:
    file = io.BytesIO()
    plots.draw_throughput([p | {"section": "throughput"} for p in points], file)
    return file.getvalue().decode()
