"""What benchmarks control of the machine: memory cgroups, the page cache, the device's read-ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.children.cgroups import MemoryCgroup, NoCgroup, _parents, why_not
from benchmarks.harness.disk import ReadAhead, cached_bytes, drop_cache, files_of
from greenroom.core.units import MIB


def _tree(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A fake /proc and /sys/fs/cgroup."""
    proc, mount = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    mount.mkdir(exist_ok=True)
    return proc, mount


def test_v1_groups_lie_beneath_the_process_own(tmp_path: Path) -> None:
    proc, mount = _tree(
        tmp_path, "4:memory:/mine\n1:cpu:/other\n", {"memory/cgroup.procs": "", "memory/mine/cgroup.procs": ""}
    )
    assert [(path, files.version) for path, files in _parents(proc, mount)] == [(mount / "memory" / "mine", 1)]


def test_within_a_container_a_v1_group_of_the_host_is_the_root(tmp_path: Path) -> None:
    proc, mount = _tree(tmp_path, "4:memory:/docker/abc\n", {"memory/cgroup.procs": ""})
    assert [path for path, _ in _parents(proc, mount)] == [mount / "memory"]


def test_v2_groups_lie_where_the_memory_controller_is_handed_down(tmp_path: Path) -> None:
    proc, mount = _tree(
        tmp_path,
        "0::/user/session\n",
        {
            "cgroup.controllers": "cpu memory",
            "cgroup.subtree_control": "cpu memory",
            "user/cgroup.subtree_control": "cpu memory",
            "user/session/cgroup.subtree_control": "",
        },
    )
    assert [(path, files.version) for path, files in _parents(proc, mount)] == [(mount / "user", 2), (mount, 2)]


def test_without_a_memory_controller_the_reason_is_told(tmp_path: Path) -> None:
    proc, mount = _tree(tmp_path, "1:cpu:/\n", {"cpu/cgroup.procs": ""})
    with pytest.raises(NoCgroup, match="no memory controller"):
        MemoryCgroup(MIB, proc=proc, mount=mount)


def test_a_group_that_no_process_can_enter_is_none(tmp_path: Path) -> None:
    proc, mount = _tree(tmp_path, "4:memory:/\n", {"memory/cgroup.procs": ""})
    (mount / "memory").chmod(0o555)
    if os.access(mount / "memory", os.W_OK):  # root writes anywhere; then let entering fail
        (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/gone\n")
        (mount / "memory" / "cgroup.procs").unlink()
        (mount / "memory").rmdir()
        (mount / "memory").write_text("")
    with pytest.raises(NoCgroup):
        MemoryCgroup(MIB, proc=proc, mount=mount)


@pytest.fixture
def real() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"no memory cgroup can be made here: {reason}")


def _fills(mib: int) -> list[str]:
    code = f"blocks = [b'x' * {MIB} for _ in range({mib})]; print(sum(map(len, blocks)))"
    return [sys.executable, "-c", code]


@pytest.mark.usefixtures("real")
def test_a_group_counts_what_its_process_takes_and_ends_with_it() -> None:
    with MemoryCgroup(256 * MIB) as group:
        done = subprocess.run(group.command(_fills(64)), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.strip()) == (0, str(64 * MIB))
        assert group.peak_bytes is not None
        assert 64 * MIB <= group.peak_bytes <= 256 * MIB
        assert group.killed == 0
        path = group.path
    assert not path.exists()


@pytest.mark.usefixtures("real")
def test_a_process_that_wants_more_is_killed_in_its_group() -> None:
    with MemoryCgroup(48 * MIB) as group:
        done = subprocess.run(group.command(_fills(256)), capture_output=True, timeout=60)
        assert done.returncode != 0
        assert group.killed >= 1
        assert group.peak_bytes is not None
        assert group.peak_bytes <= 48 * MIB


@pytest.mark.usefixtures("real")
def test_page_cache_counts_in_the_group(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    file.write_bytes(os.urandom(32 * MIB))
    if drop_cache([file]):
        pytest.skip("this file system keeps its files in memory")
    with MemoryCgroup(512 * MIB) as group:
        read = [sys.executable, "-c", f"print(len(open({str(file)!r}, 'rb').read()) and 1)"]
        subprocess.run(group.command(["/bin/cat", str(file)]), stdout=subprocess.DEVNULL, check=True, timeout=60)
        assert group.usage_bytes is not None
        assert group.usage_bytes >= 32 * MIB  # though the process is gone and held none of it
        subprocess.run(read, stdout=subprocess.DEVNULL, check=True, timeout=60)


def test_a_dropped_file_is_in_no_cache(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(os.urandom(MIB))
    assert files_of(folder) == [folder / "a", folder / "b"]
    assert cached_bytes(folder / "a") == MIB
    left = drop_cache([folder])
    if left == 2 * MIB:
        pytest.skip("this file system keeps its files in memory")
    assert left == 0
    assert (folder / "a").read_bytes()
    assert cached_bytes(folder / "a") == MIB
    (folder / "empty").touch()
    assert cached_bytes(folder / "empty") == 0


def test_a_read_ahead_is_put_back_whatever_happens(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    queue = tmp_path / "dev" / f"{os.major(device)}:{os.minor(device)}" / "queue"
    queue.mkdir(parents=True)
    (queue / "read_ahead_kb").write_text("8192\n")

    def interrupted() -> None:
        with ReadAhead(tmp_path, sys_block=tmp_path / "dev") as read_ahead:
            assert read_ahead.original == 8192
            assert read_ahead.settable
            read_ahead.set(128)
            assert read_ahead.kib == 128
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (queue / "read_ahead_kb").read_text() == "8192"


def test_a_file_system_on_no_device_has_no_read_ahead(tmp_path: Path) -> None:
    read_ahead = ReadAhead(tmp_path, sys_block=tmp_path)
    assert (read_ahead.original, read_ahead.settable, read_ahead.device) == (None, False, "none")
    with pytest.raises(OSError, match="no block device"):
        read_ahead.set(128)
