"""What pages may state: facts of the table of operators, of the library, and of the records of bench/results.

fill.py evaluates the marks of a page with these names. Each function returns Markdown.
"""

import functools
import io
import re
import statistics
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "python"), str(_ROOT / "bench")]

import gander  # noqa: E402
from gander import _table  # noqa: E402
from gander_bench import plots, records, report  # noqa: E402

# The records from which each kind of figure is taken.
GRID = "h100-8a2845d"  # throughput over the row lengths, beside the peers
NORMS = "h200-9bdc7ab"  # the norms with their options
LINEAR = "h200-9bdc7ab"
MODELS = {"softmax": "h200-727a294", "rmsnorm": "h200-9bdc7ab", "cross_entropy": "h200-1ed7d17"}

_CARDS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
_PEERS = {"quack": "QuACK", "liger": "Liger", "cudnn": "cuDNN", "torch": "torch"}


# ---- Records ----

_OPERATORS = ("softmax", "rmsnorm", "cross_entropy")


@functools.cache
def _read(file: str) -> list[dict]:
    return report.latest(records.read(_ROOT / "bench/results" / f"{file}.jsonl"))


def _points(op: str, file: str, section: str, **wanted) -> list[dict]:
    found = report.of(_read(file), section, op=op, **wanted)
    if not found:
        raise LookupError(f"{file}.jsonl has no point of {op} in section {section} with {wanted}")
    return found


def _ratios(points: list[dict], over: str) -> list[float]:
    """How many times as fast as another one gander is at each point that both have."""
    pairs = [(p["results"].get(over, {}).get("us"), p["results"]["gander"]["us"]) for p in points]
    return [other / mine for other, mine in pairs if other]


def _geomean(points: list[dict], over: str) -> float | None:
    ratios = _ratios(points, over)
    return statistics.geometric_mean(ratios) if ratios else None


def card(file: str = GRID) -> str:
    """The GPU of a file of records."""
    return _CARDS[_read(file)[-1]["environment"]["device"]]


def measured_with(file: str = GRID) -> str:
    """On what a file of records was measured."""
    newest = report.newest(_read(file))
    versions, environment = newest["versions"], newest["environment"]
    peers = ", ".join(f"{_PEERS[name]} {versions[name]}" for name in versions if name in _PEERS)
    return f"{environment['device']}, driver {environment['driver']}, CUDA {environment['cuda']}, {peers}"


def times(op: str, over: str, file: str = GRID, section: str = "throughput", **wanted) -> str:
    """The geometric mean of how many times as fast as another one gander is."""
    mean = _geomean(_points(op, file, section, **wanted), over)
    if mean is None:
        raise LookupError(f"{file}.jsonl has no {over} for {op} in section {section}")
    return f"{mean:.2f}" if mean < 2 else f"{mean:.1f}"


def cases_at_the_limit(least: float = 0.95) -> str:
    """How many points of the grid reach a share of the limit, of how many."""
    shares = [p["results"]["gander"]["ratio"] for p in report.of(_read(GRID), "throughput")]
    return f"{sum(share >= least for share in shares)} of {len(shares)}"


def first_call_ms() -> str:
    """The median time of a function's first call on a new shape, in ms."""
    results = report.of(_read(GRID), "load")[-1]["results"]["gander"]
    return f"{statistics.median(ms for op in _OPERATORS for ms in results[op]['new']):.1f}"


def speed(op: str, file: str = GRID, section: str = "throughput", dtype: str = "bfloat16") -> str:
    """A table of the throughput by shape, beside the limit and the peers."""
    points = _points(op, file, section, dtype=dtype)
    names = [name for name in _PEERS if any(name in p["results"] for p in points)]
    lines = [
        "| rows | TB/s | of the limit | " + " | ".join(f"over {_PEERS[name]}" for name in names) + " |",
        "|---|--:|--:|" + "--:|" * len(names),
    ]
    for p in points:
        mine = p["results"]["gander"]
        others = [f"{r[0]:.2f}" if (r := _ratios([p], name)) else "" for name in names]
        cells = [f"{p['m']} x {p['n']}", f"{mine['tbps']:.2f}", f"{mine['ratio']:.2f}", *others]
        lines.append("| " + " | ".join(cells) + " |")
    where = f"{_CARDS[points[0]['environment']['device']]}, {dtype}. bench/results/{file}.jsonl"
    return "\n".join([*lines, "", f"*{where}*"])


def summary() -> str:
    """README's table: forward and backward over torch and over QuACK."""
    rows = [
        ("[softmax](docs/operators/softmax.md)", "softmax_forward", "softmax_backward"),
        ("[RMSNorm](docs/operators/rmsnorm.md)", "rmsnorm_forward", "rmsnorm_backward"),
        (
            "[cross-entropy](docs/operators/cross_entropy.md)",
            "cross_entropy_forward",
            "cross_entropy_loss_gradient",
        ),
    ]
    lines = [
        "| operator | forward / torch | forward / QuACK | with gradient / torch | with gradient / QuACK |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, *ops in rows:
        cells = [times(op, over) for op in ops for over in ("torch", "quack")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- The table of operators ----

_LETTERS = {"L": "...", "N": "N", "H": "H", "R": "R", "S": "2 M + 1"}


def _shape(rule: str) -> str:
    """The shapes that a rule allows."""
    shapes = []
    for form in _table.SHAPES[rule].forms:
        sizes = [_LETTERS.get(letter, letter) for letter in form.sizes]
        shapes.append(f"({', '.join(sizes)}{',' if len(sizes) == 1 and sizes[0] != '...' else ''})")
    return " or ".join(dict.fromkeys(shapes))


def _dtypes(operand: _table.Operand) -> str:
    if operand.dtype == "same":
        return f"that of {operand.like}"
    rule = _table.DTYPES[operand.dtype]
    wide = [name for name in rule.wide if name not in rule.narrow]
    beside = f"; where x is float64, {', '.join(wide)}" if wide else ""
    return ", ".join(rule.narrow) + beside


def operands(op: str) -> str:
    """A table of an operator's operands."""
    lines = ["| operand | shape | dtypes | |", "|---|---|---|---|"]
    for operand in _table.OPERATORS[op].operands:
        kind = "result" if operand.output else "input"
        kind = f"optional {kind}" if operand.optional else kind
        lines.append(f"| {operand.name} | {_shape(operand.shape)} | {_dtypes(operand)} | {kind} |")
    return "\n".join(lines)


def options(op: str) -> str:
    """A table of an operator's options, with their defaults."""
    lines = ["| option | type | default |", "|---|---|---|"]
    for option in _table.OPERATORS[op].options:
        default = {"flag": lambda v: str(bool(v)).lower(), "reduction": lambda v: _table.REDUCTIONS[int(v)]}
        default["algorithm"] = lambda v: _table.ALGORITHMS[int(v)]
        shown = default.get(option.type, lambda v: f"{v:g}")(option.default)
        lines.append(f"| {option.name} | {option.type} | {shown} |")
    return "\n".join(lines)


@functools.cache
def _go_structs() -> dict[str, str]:
    """Go's structs by their names in lower case."""
    text = "".join(path.read_text() for path in sorted((_ROOT / "ops").glob("*_gen.go")))
    return {name.lower(): name for name in re.findall(r"^type ([A-Z]\w+) struct", text, re.MULTILINE)}


def names(*ops: str) -> str:
    """Where operators are in PyTorch, in C and in Go."""
    lines = ["| torch.ops.gander | C | Go |", "|---|---|---|"]
    for op in ops:
        owned = _table.OPERATORS[op].owned
        torch = [f"`{name}`" for name, each in _table.TORCH.items() if each.operator == op]
        go = _go_structs()[op.replace("_", "")]
        c = f"`gander_{op}`" + (f", `{owned}`" if owned else "")
        lines.append(f"| {', '.join(torch)} | {c} | `ops.{go}` |")
    return "\n".join(lines)


# ---- The library ----

_PLACES = {  # of internal/policy's regimes: where a row lies, and who shares it
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
    "elementwise": "nowhere: its statistics are known, and elements are independent",
}


def kernels(op: str, device: str = "h100", dtype: str = "bfloat16") -> str:
    """A table of which kernels serve which rows, for many rows and for few."""
    lines = ["| M | N | algorithm | where a row lies |", "|--:|--:|---|---|"]
    for m in (32768, 4):
        found: list[list] = []
        for exponent in range(4, 23):
            n = 1 << exponent
            if m * n > 1 << 31:
                break
            text = gander.explain(op, shape=(m, n), dtype=dtype, device=device)
            policy = re.search(r"^policy: .*", text, re.MULTILINE)
            regime = next(word for word in policy[0].split() if word in _PLACES)
            algorithm = re.match(r"auto takes (\w+)", text)
            key = algorithm[1] if algorithm else "auto", _PLACES[regime]
            if found and found[-1][2] == key:
                found[-1][1] = n
            else:
                found.append([n, n, key])
        for i, (first, last, (algorithm, place)) in enumerate(found):
            lengths = f"to {last}" if i == 0 else f"{first}" if first == last else f"{first} to {last}"
            lines.append(f"| {m} | {lengths} | {algorithm} | {place} |")
    where = f"{device.upper()}, {dtype}, rows of powers of two whose operands are aligned to 16 bytes"
    return "\n".join([*lines, "", f"*{where}. From gander.explain.*"])


def explain(op: str, shape: tuple[int, int], dtype: str, device: str) -> str:
    """What gander.explain says."""
    return f"```text\n{gander.explain(op, shape=shape, dtype=dtype, device=device).strip()}\n```"


def algorithms(op: str = "softmax") -> str:
    """A table of the names of algorithms, and what each does."""
    lines = ["| name | what it does |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in gander.algorithms(op).items()]
    return "\n".join(lines)


def refusal(call: str) -> str:
    """A call that is refused, and what it says."""
    import numpy
    import torch

    try:
        eval(call, {"gander": gander, "torch": torch, "np": numpy})
    except Exception as error:
        said = textwrap.indent(textwrap.fill(f"{type(error).__name__}: {error}", 88), "# ")
        return f"```python\n{call}\n{said}\n```"
    raise ValueError(f"{call} is not refused")


def torch_releases() -> str:
    """The releases of torch that the tests run with."""
    from gander._torch import fast

    return ", ".join(fast.TESTED)


# ---- Sources ----

_LANGUAGES = {".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".py": "python"}


def source(path: str, function: str = "") -> str:
    """A program that the tests run, or the body of one of its functions."""
    text = (_ROOT / path).read_text()
    if function:
        found = re.search(rf"^[^\s].*\b{function}\([^)]*\)[^\n]*\{{\n(.*?)^\}}$", text, re.M | re.S)
        if not found:
            raise LookupError(f"{path} has no function {function}")
        text = textwrap.dedent(found[1]).expandtabs(4)
    language = _LANGUAGES[Path(path).suffix]
    return f"```{language}\n{text.strip()}\n```\n\n*{path}*"


_C_ITEMS = re.compile(  # of gander.h: a heading, a comment, an option struct, another type, a function
    r"""^/\*\ ----\ (?P<title>.*?)\ ----\n(?P<about>.*?)\*/
    |^/\*(?P<comment>.*?)\*/$
    |^typedef\ struct\ \{(?:(?!^\}).)*^\}\ gander_\w+_options;\n\#define\ \w+\ \\\n[^\n]*\n
    |^(?P<type>typedef\ (?:struct|enum)\ \{(?:(?!^\}).)*^\}\ \w+;|typedef\b[^;{]*;)
    |^(?P<function>[a-z][\w\ *]*\b(?P<name>gander_\w+)\([^;]*\);)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def _prose(comment: str) -> str:
    """A comment of gander.h as Markdown: operands become a list."""
    text = "\n".join(line.strip().removeprefix("*").removeprefix(" ") for line in comment.splitlines())
    text = re.sub(r"(?<=\n\n)((?:  .*\n)+)", lambda code: f"```c\n{textwrap.dedent(code[1])}```\n", text)
    first, *operands = re.split(r"^  (\w+): ", text, flags=re.MULTILINE)
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return "\n".join([first.strip(), "", *(f"- **{name}**: {what.strip()}" for name, what in pairs)]).strip()


def c_conventions() -> str:
    """What holds for all functions of gander.h: the head of the file."""
    text = (_ROOT / "capi/gander.h").read_text()
    lines = [line.strip().removeprefix("*").strip() for line in text[: text.index("*/")].splitlines()]
    _, *found = re.split(r"^(\w[\w ]*)\. {2,}", "\n".join(lines), flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    return "\n".join(f"- **{name}.** {what.strip()}" for name, what in pairs)


def c_reference() -> str:
    """The functions of gander.h, each with its documentation and its option struct."""
    text = (_ROOT / "capi/gander.h").read_text()
    made, comment, before = [], "", ""
    for item in _C_ITEMS.finditer(text, text.index('extern "C" {')):
        if item["comment"] is not None:
            if not item["comment"].strip().startswith(("generated:", "end of what")):
                comment = _prose(item["comment"])
            continue
        if item["title"]:
            made.append(f"## {item['title']}\n\n{_prose(item['about'])}")
        elif item["function"]:
            code = f"```c\n{before}{item['function']}\n```"
            made.append(f"### {item['name']}\n\n{comment}\n\n{code}")
        elif item["type"] and comment:
            made.append(f"{comment}\n\n```c\n{item['type']}\n```")
        else:
            before += item[0].strip() + "\n\n"
            continue
        comment = before = ""
    return "\n\n".join(made)


# ---- Pictures ----


def pictures() -> dict[str, str]:
    """By file name the pictures of docs/images that come from records."""
    ops = {op for _, *both in _PICTURES for op in both}
    points = [p for p in _read(GRID) if p["section"] == "throughput" and p["dtype"] == "bfloat16"]
    assert ops <= {p["op"] for p in points}, f"{GRID}.jsonl lacks some of {ops}"
    return {
        f"{name}.svg": _svg([p for p in points if p["op"] in (forward, backward)])
        for name, forward, backward in _PICTURES
    }


_PICTURES = (
    ("softmax", "softmax_forward", "softmax_backward"),
    ("rmsnorm", "rmsnorm_forward", "rmsnorm_backward"),
    ("cross_entropy", "cross_entropy_forward", "cross_entropy_loss_gradient"),
)


def _svg(points: list[dict]) -> str:
    file = io.BytesIO()
    plots.draw_throughput(points, file)
    return file.getvalue().decode()
