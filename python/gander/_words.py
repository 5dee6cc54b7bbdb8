"""What refusals say about an argument, and refusals of what the library cannot see: Python's types.

An option that is true or false takes True or False, Python's or NumPy's. What else Python takes for one of
them is refused: "False" would count as True, and a tensor would wait for its device. A number is real, and no
bool.
"""

import re
from numbers import Integral, Real
from typing import Any

REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError)
_SIMPLE = (str, bytes, int, float, complex, tuple, list, dict, type(None))


def kind(value: Any) -> str:
    """What came in place of a tensor."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def shown(value: Any) -> str:
    """A value, in few characters."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if not isinstance(value, _SIMPLE):
        return kind(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shortened(error: Exception) -> str:
    """What another library says, in at most 120 characters of its first sentence."""
    line = str(error).removeprefix("Internal error: ").partition("\n")[0].partition(". ")[0].rstrip(".")
    return line if len(line) <= 120 else f"{line[:117]}..."


def renamed(error: Exception, names: dict[str, str] | None) -> Exception:
    """The same error about the caller's arguments. names: theirs, by an operator's."""
    if not names or type(error) not in REFUSALS:
        return error
    operand = rf"(?<!['\w])({'|'.join(names)})(?!['\w])"
    text = re.sub(operand, lambda found: names[found[0]], str(error))
    # Callers choose the dtype of a new tensor, so the argument is that dtype.
    return type(error)(re.sub(r"\b(\w*dtype) has dtype (.*); convert it$", r"\1 is \2", text))


def check_flags(**flags: Any) -> None:
    """Refuses what is neither True nor False."""
    for name, value in flags.items():
        if type(value).__name__ not in ("bool", "bool_", "SymBool"):
            raise TypeError(f"{name} is {shown(value)}, expected True or False")


def number(name: str, value: Any, or_none: str = "") -> float:
    """A number as a float. A tensor that requires a gradient would silently get none. A number that depends
    on a size that an exported program leaves open would silently stay what it was in the export."""
    if type(value).__name__ in ("SymFloat", "SymInt"):
        raise NotImplementedError(
            f"{name} is {value}, expected a number that does not depend on a dynamic size; export with that "
            "size fixed" + (", or multiply x instead" if name == "scale" else "")
        )
    if isinstance(value, bool) or not isinstance(value, Real):
        advice = f", which has no gradient; pass float({name})" if hasattr(value, "dtype") else ""
        raise TypeError(f"{name} is {shown(value)}, expected {or_none}a number{advice}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}, expected a number that float64 holds") from None


def integer(name: str, value: Any, expected: str = "an integer of 64 bits") -> int:
    """An integer as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)}, expected {expected}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {shown(value)}, expected {expected}")
    return int(value)
