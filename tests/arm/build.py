"""Compiles the library and what calls it for ARM, by a cross-compiler."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
"""Where Debian's cross-compiler has the C and C++ libraries."""
LIBRARY, DRIVER = "_rows.so", "driver"
TIMEOUT_S = 240.0
"""Of one compilation, or of one run of tests: less than pytest gives a test."""
BUILT = "GREENROOM_ARM_LIBRARY"
"""The environment variable with the folder of both, for processes that need not compile them."""


def missing() -> str | None:
    """Why nothing can be compiled or run for ARM here. None: it can."""
    lacking = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if not SYSTEM.is_dir():
        lacking.append(str(SYSTEM))
    if not lacking:
        return None
    return f"needs {' and '.join(lacking)}: on Debian, apt-get install g++-aarch64-linux-gnu qemu-user"


def build(folder: Path) -> str:
    """Writes LIBRARY, by the flags of ``setup.py``, and DRIVER. Returns the compiler's warnings."""
    setuptools = mock.Mock()
    with mock.patch.dict(sys.modules, setuptools=setuptools):
        runpy.run_path(str(ROOT / "setup.py"))
    (_, sources), options = setuptools.Extension.call_args
    of_library = [*options["extra_compile_args"], "-Wall", "-shared", "-fPIC", *sources]
    of_driver = ["-O2", "-std=c++17", "-Wall", str(Path(__file__).with_name("driver.cpp")), "-ldl", "-pthread"]
    said = ""
    for name, arguments in ((LIBRARY, of_library), (DRIVER, of_driver)):
        run = subprocess.run(
            [COMPILER, *arguments, "-o", str(folder / name)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        said += run.stderr
        run.check_returncode()
    return said
