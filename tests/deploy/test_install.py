"""The development install, as it was made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", ["greenroom", "greenroom_load"])
def test_a_script_beside_the_clone_imports_what_is_in_it(tmp_path: Path, package: str) -> None:
    """There the clone's folder is on sys.path, and looks like a package without code."""
    (tmp_path / package).mkdir()
    (tmp_path / "script.py").write_text(f"import {package}\nprint({package}.__file__)\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{ROOT / 'services' / package / '__init__.py'}\n"
