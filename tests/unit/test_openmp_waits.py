"""How long OpenMP's threads wait: said before torch is imported, and never against what a user has said."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom.moe.openmp_waits import SPINS, VARIABLE, wait_briefly


@pytest.mark.parametrize(
    ("set_before", "after"),
    [({}, str(SPINS)), ({VARIABLE: "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_what_is_set_already_stays(
    set_before: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    assert os.environ.get(VARIABLE) == after


def test_the_command_line_says_it_before_torch_is_imported() -> None:
    """OpenMP reads it once, when it is loaded."""
    code = (
        "import os, sys\n"
        "from greenroom.cli.main import main\n"
        "assert 'torch' not in sys.modules\n"
        "main.callback('info')\n"
        f"print(os.environ['{VARIABLE}'])"
    )
    own = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "OMP_WAIT_POLICY")}
    ran = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout.strip().endswith(str(SPINS)), ran.stderr
