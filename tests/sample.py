"""Hooks for conftest.py: `pytest FOLDER` takes a sample of the tests, unless GANDER_TEST is `all`.

A function with many cases runs CASES of them: which ones follows from their names, so that all runs and all
processes of a run take the same. CI runs all. So do `pytest FILE` and `pytest -k EXPRESSION`.
"""

import os
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

CASES = 4


def samples(config):
    whole = os.environ.get("GANDER_TEST") == "all" or config.option.keyword
    return not whole and all(Path(argument).is_dir() for argument in config.args)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not samples(config):
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        kept.update(sorted(cases, key=lambda case: zlib.crc32(case.name.encode()))[:CASES])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_report_header(config):
    return "a sample of the tests, GANDER_TEST=all runs all" if samples(config) else None
