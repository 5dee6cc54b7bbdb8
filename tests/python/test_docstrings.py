"""The public functions' documentation: every argument is there, and the examples are true."""

import doctest
import inspect
import re

import gander
import gander.distributed
import gander.nn
import pytest
import torch
from gander.nn import functional
from pages import sections

PUBLIC = {
    **{f"gander.{name}": getattr(gander, name) for name in gander.__all__},
    **{f"gander.nn.{name}": getattr(gander.nn, name) for name in gander.nn.__all__},
    **{f"gander.nn.functional.{name}": getattr(functional, name) for name in functional.__all__},
    **{
        f"gander.distributed.{name}": getattr(gander.distributed, name) for name in gander.distributed.__all__
    },
}
DOCUMENTED = {name: item for name, item in PUBLIC.items() if callable(item)}


def test_everything_public_is_looked_at():
    assert {"gander.softmax", "gander.nn.RMSNorm", "gander.nn.functional.rms_norm"} <= set(DOCUMENTED)
    assert {name for name in PUBLIC if name not in DOCUMENTED} == {
        "gander.__version__",
        "gander.cmake_prefix_path",
        "gander.nn",
        "gander.distributed",
        "gander.nn.functional",
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documentation_is_whole(name):
    item = DOCUMENTED[name]
    found, parameters = sections(item), list(inspect.signature(item).parameters)
    documented = re.findall(r"^    (\w+): ", found.get("Args", ""), re.MULTILINE)
    assert documented == parameters
    first = found[""].splitlines()[0]
    assert first.endswith(".") and len(first) <= 110
    writes = "out" in name.rpartition("_")[2] or name in ("gander.warmup", "gander.set_debug")
    returns = not (inspect.isclass(item) or writes or name == "gander.fused_add_rmsnorm")
    assert ("Returns" in found) == returns
    assert "Raises" in found and "Examples" in found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples(name):
    item = DOCUMENTED[name]
    globs = {"gander": gander, "torch": torch}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(item), globs, name, None, 0)
    assert test.examples
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    failed, _ = runner.run(test, out=report.append)
    assert not failed, "".join(report)


@pytest.mark.parametrize("name", ["gander.softmax", "gander.rmsnorm", "gander.cross_entropy"])
def test_help_shows_types(name):
    signature = str(inspect.signature(DOCUMENTED[name]))
    assert "batch_invariant: bool = False" in signature.replace("'", "")
