"""The tightest control group decides, whichever version it is of and however deep it lies."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from greenroom.core.units import GIB, MIB
from greenroom.worker.usable_memory import memory, resident_bytes, usable_cores


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def group(folder: Path, limit: str, usage: int, *, version: int = 2, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_groups_the_machine_decides(roots: tuple[Path, Path]) -> None:
    found = memory(*roots)
    assert found.limit == psutil.virtual_memory().total
    assert found.source == "the machine"


def test_a_parent_group_counts(roots: tuple[Path, Path]) -> None:
    proc, cgroups = roots
    (proc / "self/cgroup").write_text("0::/a/b\n")
    group(cgroups / "a", str(512 * MIB), 112 * MIB)
    group(cgroups / "a/b", "max", 12 * MIB)
    assert memory(*roots).limit == 512 * MIB
    assert memory(*roots).available == 400 * MIB
    assert memory(*roots).source == "its control group"


def test_page_cache_is_given_back_before_memory_is_refused(roots: tuple[Path, Path]) -> None:
    proc, cgroups = roots
    (proc / "self/cgroup").write_text("0::/\n")
    group(cgroups, str(512 * MIB), 500 * MIB, inactive_file=300 * MIB)
    assert memory(*roots).available == 312 * MIB


def test_version_1_and_a_path_of_the_host(roots: tuple[Path, Path]) -> None:
    """In a container the path names the host's group; the files lie at the mount's root."""
    proc, cgroups = roots
    (proc / "self/cgroup").write_text("5:cpu:/docker/x\n4:memory:/docker/x\n0::/\n")
    group(cgroups / "memory", str(256 * MIB), 56 * MIB, version=1)
    assert memory(*roots).available == 200 * MIB


def test_a_limit_above_the_machine_is_none(roots: tuple[Path, Path]) -> None:
    proc, cgroups = roots
    (proc / "self/cgroup").write_text("0::/\n")
    group(cgroups, str(10**6 * GIB), 0)
    assert memory(*roots).limit == psutil.virtual_memory().total


def test_here_and_now() -> None:
    assert 0 < memory().available <= memory().limit
    assert resident_bytes() > MIB
    assert usable_cores() >= 1
