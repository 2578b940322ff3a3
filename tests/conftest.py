"""For all tests: tiny models compute on one thread, so that suites do not fight over cores with other processes; and
what takes longest begins where it hinders least; and what tests start ends with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import examples, reaper

reaper.start()
examples.register()

TESTS = Path(__file__).parent

BEGINS = {"integration/pipeline/test_chaos.py": "contract", "integration/pipeline/test_failures.py": "unit"}
"""The two files that take minutes, each a whole cluster under load, and the folder that each goes first in. Tests of
those folders compute in one process: beside them a cluster gets on, while two clusters at once keep each other waiting.
"""

KERNELS = "tests/unit/kernels/"
ON_ARM = f"{KERNELS}test_on_arm.py::test_the_products_pass_their_tests["


@pytest.fixture(autouse=True, scope="session")
def _torch_as_tests_need_it() -> None:
    from greenroom.moe.native.tiles import avoid_tiles_without_shape

    avoid_tiles_without_shape()  # transformers is computed with in tests too, and by its own loading


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before each test: a model that one opens in this process takes all cores, which the next ones are not to have."""
    import torch  # takes seconds, for which a process that only hands tests out would wait as well

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path))


def place(path: Path) -> tuple[str, bool]:
    """What tests are sorted by: folder by folder, and in each as they were found."""
    if not path.is_relative_to(TESTS):
        return "", True
    within = path.relative_to(TESTS)
    folder = BEGINS.get(within.as_posix())
    return (within.parts[0], True) if folder is None else (folder, False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says on which instruction sets the compiled products were tested: others' tests can not run on this machine."""
    ran = (
        report.nodeid for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "when")
    )
    if not any(node.startswith(KERNELS) for node in ran):
        return
    from greenroom.moe.native.library import NativeUnavailable
    from greenroom.moe.native.rows import native_rows

    try:
        found = ", ".join(native_rows().instruction_sets)
    except NativeUnavailable as error:
        found = f"none ({error})"
    emulated = [
        report.nodeid.removeprefix(ON_ARM).rstrip("]")
        for report in terminalreporter.stats.get("passed", ())
        if report.nodeid.startswith(ON_ARM)
    ]
    if emulated:
        found += f"; under qemu: {', '.join(emulated)}"
    terminalreporter.write_line(f"instruction sets that the compiled products were tested on: {found}")
