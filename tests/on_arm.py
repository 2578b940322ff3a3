"""``pytest -p tests.on_arm``: the compiled products are those of an ARM machine, under qemu's user mode.

``QEMU_CPU`` names the processor. Unless it is set that is one with all that qemu knows.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

import pytest

from greenroom.moe.native import library
from tests.arm.build import BUILT, build, missing
from tests.arm.library import ArmLibrary


@functools.cache
def arm_library() -> ArmLibrary:
    if lacking := missing():
        pytest.exit(lacking, returncode=1)
    if BUILT in os.environ:
        return ArmLibrary(Path(os.environ[BUILT]))
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        return ArmLibrary(Path(folder))


assert "greenroom.moe.native.rows" not in sys.modules, "what is loaded already has this machine's library"
library.native_library = arm_library  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    if arm_library.cache_info().currsize:
        arm_library().close()
