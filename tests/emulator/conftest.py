"""Reports which kernels ran, in all processes that share the tests. Where all tests run, all kernels must."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for sample.py

import pytest
from emulated import DEVICE
from sample import pytest_collection_modifyitems, pytest_report_header, samples  # noqa: F401
from test_emulated import KERNELS

LAUNCHED = pytest.StashKey[set[str]]()


def pytest_configure(config):
    config.stash[LAUNCHED] = set()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    node.config.stash[LAUNCHED].update(getattr(node, "workeroutput", {}).get("launched", ()))


def pytest_sessionfinish(session):
    config = session.config
    launched = config.stash[LAUNCHED]
    launched.update(kernel for kernel in KERNELS if DEVICE.launches(kernel) > 0)
    if hasattr(config, "workeroutput"):
        config.workeroutput["launched"] = sorted(launched)
    elif not KERNELS or not (samples(config) or config.option.keyword or launched.issuperset(KERNELS)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    launched = config.stash[LAUNCHED]
    terminalreporter.write_line(f"{len(launched)} of {len(KERNELS)} kernels ran")
    for kernel in sorted(set(KERNELS) - launched)[:20]:
        terminalreporter.write_line(f"  not {kernel}")
