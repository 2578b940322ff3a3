"""Whose code is measured: this checkout's, or another one's beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.harness.children.processes import ROOT

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Checkout:
    """A working tree of the repository. ``commit``: with a + where tracked files differ from it; None where git does
    not know it."""

    folder: Path
    commit: str | None

    @classmethod
    def here(cls) -> Checkout:
        return cls(ROOT, _commit(ROOT))

    @classmethod
    def beside(cls, folder: Path) -> Checkout:
        """Raises BadParameter where processes would not run this folder's code, or not its compiled products."""
        found = cls(folder.absolute(), _commit(folder))
        code = "import greenroom; print(greenroom.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **found.environment}, cwd="/", capture_output=True,
            text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode or not Path(done.stdout.strip()).is_relative_to(found.folder):
            raise click.BadParameter(f"{folder} is not a checkout of greenroom: {done.stderr or done.stdout}")
        there = {file.name for file in _compiled(found.folder)}
        missing = [file.name for file in _compiled(ROOT) if file.name not in there]
        if missing:
            raise click.BadParameter(f"{folder} has no {missing[0]}: build it there, lest two engines are compared")
        return found

    @property
    def environment(self) -> Mapping[str, str]:
        """With these variables a process has its package ``greenroom``, and the benchmarks of this checkout."""
        return {"PYTHONPATH": os.pathsep.join([str(self.folder / "services"), str(ROOT)])}


def _compiled(folder: Path) -> list[Path]:
    return list((folder / "services" / "greenroom" / "moe").rglob("*.so"))  # its place differs between versions


def _commit(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"], cwd=folder, capture_output=True,
            text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
