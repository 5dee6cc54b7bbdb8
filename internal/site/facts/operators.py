"""The table of operators."""

import functools
import re

from gander import _table

from . import ROOT
from .tables import table_of

_LETTERS = {"L": "...", "R": "...", "B": "...", "N": "N", "H": "H", "S": "2 M + 1", "*": "any"}


def _shape(rule: str) -> str:
    """The shapes that a rule allows."""
    forms, shapes = [form.sizes for form in _table.SHAPES[rule].forms], []
    if _table.SHAPES[rule].layout == "tables":  # one table for all sequences needs no leading dimensions
        forms = [form.removeprefix("B") for form in forms] + forms
    for form in forms:
        sizes = [_LETTERS.get(letter, letter) for letter in form]
        shapes.append(f"({', '.join(sizes)}{',' if len(sizes) == 1 and sizes[0] != '...' else ''})")
    return " or ".join(dict.fromkeys(shapes))


def _dtypes(operand: _table.Operand, first: str) -> str:
    """The dtypes of an operand, which depend on whether the first one is float64."""
    if operand.dtype == "same":
        return f"that of {operand.like}"
    rule = _table.DTYPES[operand.dtype]
    wide = [name for name in rule.wide if name not in rule.narrow]
    narrow = ", ".join(rule.narrow).replace("float64", "float64 on the CPU")
    return narrow + (f"; {', '.join(wide)} if {first} is" if wide else "")


def operands(op: str) -> str:
    """A table of an operator's operands."""
    rows = []
    of = _table.OPERATORS[op].operands
    for operand in of:
        role = "result" if operand.output else "input"
        role = f"optional {role}" if operand.optional else role
        rows.append([operand.name, _shape(operand.shape), _dtypes(operand, of[0].name), role])
    return table_of(["operand", "shape", "dtypes", "role"], rows, align="l")


def options(op: str) -> str:
    """A table of an operator's options, with their defaults."""
    rows = []
    for option in _table.OPERATORS[op].options:
        default = {"flag": lambda v: str(bool(v)).lower(), "reduction": lambda v: _table.REDUCTIONS[int(v)]}
        default["algorithm"] = lambda v: _table.ALGORITHMS[int(v)]
        shown = default.get(option.type, lambda v: f"{v:g}")(option.default)
        rows.append([option.name, _TYPES.get(option.type, "name"), shown])
    return table_of(["option", "type", "default"], rows, align="l")


_TYPES = {"flag": "bool", "real": "float", "integer": "int"}


def choices(names: tuple[str, ...]) -> str:
    """The values that an argument may have."""
    return ", ".join(f'`"{name}"`' for name in names)


@functools.cache
def _go_structs() -> dict[str, str]:
    """Go's structs by their names in lower case."""
    text = "".join(path.read_text() for path in sorted((ROOT / "ops").glob("*_gen.go")))
    return {name.lower(): name for name in re.findall(r"^type ([A-Z]\w+) struct", text, re.MULTILINE)}


def names(*ops: str) -> str:
    """Where operators are in PyTorch, in C and in Go."""
    rows = []
    for op in ops:
        owned = _table.OPERATORS[op].owned
        torch = [f"`{name}`" for name, each in _table.TORCH.items() if each.operator == op]
        go = _go_structs()[op.replace("_", "")]
        c = [f"`gander_{op}`"] + ([f"`{owned}`"] if owned else [])
        rows.append(["<br>".join(torch), "<br>".join(c), f"`ops.{go}`"])
    return table_of(["torch.ops.gander", "C", "Go"], rows, align="l")
