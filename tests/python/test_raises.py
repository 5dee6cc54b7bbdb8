"""Every `raise` of the package is in raises.txt, with what Go cannot see there.

What an operator refuses of shapes, dtypes, devices, strides and options Go says: see test_sentences.py.
`python tests/python/test_raises.py` writes the list anew. A new line has "?" in place of a reason.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "gander"
LIST = Path(__file__).with_name("raises.txt")
APART = ("bench", "demo", "hf", "rl")  # programs, and adapters, of whose refusals Go knows nothing

REASONS = {
    "passed on": "what the library, torch or an array's producer said, in the right type of exception",
    "type": "an argument of a Python type that no operator takes",
    "option": "an argument that is Python's (a name, a dimension, a dtype, out), and what it goes with",
    "tensor": "a tensor or an array that no kernel gets: nested, negated, read-only, of another library",
    "traced": "tensors that are traced, transformed or differentiated",
    "ranks": "DTensors, and what ranks have to agree on",
    "composed": "the arguments of a function of several operators, which get none of them as it is",
    "fake": "a rule of the table, against which a fake tensor is",
    "debug": "values of elements, which only set_debug reads",
    "setup": "the installation: the library's file, its version, torch's version",
    "protocol": "what Python or DLPack ask an object to raise",
}


class Raises(ast.NodeVisitor):
    """Counts the `raise` statements of each function. One without an exception raises no other sentence."""

    def __init__(self):
        self.names, self.counts = [], Counter()

    def visit_function(self, node):
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_function

    def visit_Raise(self, node):
        if node.exc is not None:
            self.counts[".".join(self.names) or "module"] += 1


def found():
    """The number of `raise` statements by "file function"."""
    counts = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in APART or name.name.endswith("_gen.py"):
            continue
        raises = Raises()
        raises.visit(ast.parse(path.read_text()))
        counts.update({f"{name} {function}": count for function, count in raises.counts.items()})
    return counts


def listed():
    """The number and the reason by "file function"."""
    entries = {}
    for line in LIST.read_text().splitlines():
        path, function, count, reason = line.split(maxsplit=3)
        assert f"{path} {function}" not in entries, f"raises.txt lists {path} {function} twice"
        entries[f"{path} {function}"] = int(count), reason
    return entries


def test_every_raise_is_listed():
    entries, counts = listed(), found()
    different = sorted(
        key for key in entries.keys() | counts.keys() if counts[key] != entries.get(key, (0,))[0]
    )
    told = [f"{key}: {counts[key]} found, {entries.get(key, (0,))[0]} listed" for key in different]
    assert not told, (
        "tests/python/raises.txt lists other raise statements. If Go can see what is refused, the sentence "
        f"belongs into ops/. Otherwise list it with a reason: {'; '.join(told)}"
    )


def test_every_reason_is_one():
    unknown = {key: reason for key, (_, reason) in listed().items() if reason not in REASONS}
    assert not unknown, f"expected one of {', '.join(REASONS)}"


if __name__ == "__main__":
    known = listed() if LIST.exists() else {}
    lines = [f"{key} {count} {known.get(key, (0, '?'))[1]}" for key, count in sorted(found().items())]
    LIST.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{LIST}: {sum(found().values())} raise statements in {len(lines)} functions\n")
