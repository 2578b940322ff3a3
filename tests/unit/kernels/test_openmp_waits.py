from __future__ import annotations

import os
import subprocess
import sys

import pytest

from greenroom.moe import openmp_waits
from greenroom.moe.openmp_waits import SPINS, VARIABLE, wait_briefly


@pytest.fixture(autouse=True)
def without_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, openmp_waits._POLICY):
        monkeypatch.setenv(name, "")  # so that it is put back whatever it was
        monkeypatch.delenv(name)


def test_threads_are_to_sleep_soon() -> None:
    wait_briefly()
    assert os.environ[VARIABLE] == str(SPINS)


@pytest.mark.parametrize("name", [VARIABLE, openmp_waits._POLICY])
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active" if name != VARIABLE else "7")
    wait_briefly()
    assert os.environ.get(VARIABLE) == (None if name != VARIABLE else "7")


@pytest.mark.parametrize(
    "program", ["import greenroom; greenroom.LLM", "from greenroom.cli import main; main(['info', '--help'])"]
)
def test_the_command_line_and_the_python_api_set_it_before_torch_is_there(program: str) -> None:
    said = f"""
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            assert os.environ.get({VARIABLE!r}) == {str(SPINS)!r}, "torch is imported, and it was not set"

sys.meta_path.insert(0, Finder())
try:
    {program}
except SystemExit:
    pass
assert os.environ.get({VARIABLE!r}) == {str(SPINS)!r}
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
