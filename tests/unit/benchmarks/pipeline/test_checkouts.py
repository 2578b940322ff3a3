"""Whose code a benchmark's processes run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from benchmarks.harness.children.processes import ROOT
from benchmarks.pipeline import checkouts
from benchmarks.pipeline.checkouts import Checkout


def made(folder: Path) -> Path:
    package = folder / "services" / "greenroom"
    (package / "moe" / "native").mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'theirs'\n")
    return folder


def test_its_processes_run_the_other_checkout_s_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "_compiled", lambda folder: [])
    other = Checkout.beside(made(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", "import greenroom, benchmarks; print(greenroom.WHOSE, benchmarks.__path__[0])"],
        env={**os.environ, **other.environment}, cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["theirs", str(ROOT / "benchmarks")]
    assert other.commit is None
    assert Checkout.here().folder == ROOT


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="is not a checkout"):
        Checkout.beside(tmp_path)


def test_one_without_the_compiled_products_that_are_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in another place there."""
    elsewhere = checkouts._compiled
    library = Path("services") / "greenroom" / "moe" / "native" / "_rows.so"
    monkeypatch.setattr(checkouts, "_compiled", lambda of: [ROOT / library] if of == ROOT else elsewhere(of))
    with pytest.raises(click.BadParameter, match=r"has no _rows\.so"):
        Checkout.beside(made(tmp_path))
    (tmp_path / library.parent.parent / library.name).touch()
    Checkout.beside(tmp_path)
