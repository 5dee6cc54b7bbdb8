"""Programs and the C header."""

import re
import textwrap
from pathlib import Path

from . import ROOT

_LANGUAGES = {".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".py": "python"}


def source(path: str, function: str = "") -> str:
    """A program that the tests run, or the body of one of its functions."""
    text = (ROOT / path).read_text()
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
    text = (ROOT / "capi/gander.h").read_text()
    lines = [line.strip().removeprefix("*").strip() for line in text[: text.index("*/")].splitlines()]
    _, *found = re.split(r"^(\w[\w ]*)\. {2,}", "\n".join(lines), flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    return "\n".join(f"- **{name}.** {what.strip()}" for name, what in pairs)


def c_reference() -> str:
    """The functions of gander.h, each with its documentation and its option struct."""
    text = (ROOT / "capi/gander.h").read_text()
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
