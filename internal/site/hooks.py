"""Hooks of MkDocs: formulas as MathML, names of gander that have to exist, links to types of arguments, and
nothing from other addresses."""

import ast
import functools
import html
import inspect
import re
from pathlib import Path
from typing import Literal, get_origin

import fill
import latex2mathml.converter
import mkdocs.exceptions
import mkdocs.utils
from marks import MARK

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_NAME = re.compile(r"(?<![\w/.-])gander(?:\.[A-Za-z_]\w*)+")
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|link(?![^>]*rel="canonical"))\b[^>]*(?:src|href)="https?:[^"]*"""
    r"""|url\(["']?https?:[^)]*|@import\s+["']https?:[^"']*"""
)
_EXPLAINS_TYPES = "operators/index.md"
_BUILT = ("gander.h", "gander.pc", "gander.Tensor")


def on_page_markdown(markdown: str, **_) -> str:
    """Leaves out the marks, which would end up in headings and in the search."""
    return MARK.sub(r"\g<text>", markdown)


def on_page_content(content: str, page, **_) -> str:
    for code in _CODE.findall(content):
        for name in _NAME.findall(html.unescape(code)):
            if not _exists(name):
                raise mkdocs.exceptions.PluginError(f"{page.file.src_path}: there is no {name}")
    if page.file.src_path == _EXPLAINS_TYPES:
        for name in _types():
            if f"<td><code>{name}</code></td>" not in content:
                raise mkdocs.exceptions.PluginError(f"{_EXPLAINS_TYPES} does not explain the type {name}")
    types = mkdocs.utils.get_relative_url(_EXPLAINS_TYPES.replace(".md", ".html"), page.url) + "#types"
    written = rf'<span (?:class="n"|title="gander\.[\w.]+")>({"|".join(_types())})</span>'
    content = re.sub(written, rf'<a class="type" href="{types}">\1</a>', content)
    return _FORMULA.sub(_mathml, content)


def on_post_build(config, **_) -> None:
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := _LOADED.search(path.read_text())):
            raise mkdocs.exceptions.PluginError(f"{path.relative_to(config.site_dir)} loads {found[0]}")


@functools.cache
def _types() -> list[str]:
    """gander's types in the signatures of its functions."""
    import gander

    found = set()
    for function in filter(inspect.isfunction, map(vars(gander).get, gander.__all__)):
        for name in re.findall(r"\b[A-Z]\w*", " ".join(map(str, function.__annotations__.values()))):
            type_ = function.__globals__.get(name)
            if get_origin(type_) is Literal or getattr(type_, "__module__", "").startswith("gander."):
                found.add(name)
    return sorted(found)


def _mathml(found: re.Match) -> str:
    display, latex = ("block" if found[1] == "div" else "inline"), html.unescape(found[2]).strip()
    # Within brackets and roots the converter would put the index beside a sum, not below it.
    latex = re.sub(r"\\sum(?=_)", r"\\sum\\limits", latex)
    return latex2mathml.converter.convert(latex, display=display)


@functools.cache
def _of_jax() -> list[str]:
    """The public names of gander.jax."""
    source = Path(fill.__file__).parents[2] / "python/gander/jax/__init__.py"
    return ast.literal_eval(re.search(r"^__all__ = (\[.*?\])", source.read_text(), re.M | re.S)[1])


def _exists(name: str) -> bool:
    """Whether a name that begins with "gander." is one, or a file's that is called so."""
    if name in _BUILT:
        return True
    if name.startswith("gander.jax"):  # importing it needs jax
        return name.removeprefix("gander.jax").removeprefix(".") in ("", *_of_jax())
    import gander
    import gander.hf  # gander imports no adapter
    import gander.rl

    found = gander
    for part in name.split(".")[1:]:
        if inspect.isclass(found) and part in inspect.get_annotations(found):
            return True  # an attribute of instances
        try:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        except AttributeError:
            return False
    return True
