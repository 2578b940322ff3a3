"""A lock between processes: waited for with a deadline, and free again when its holder dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from greenroom.experts.pack.file_lock import file_lock
from tests.unit.experts.refused_locks import first_refusal

DEADLINE_S = 30.0
HOLDER = """
import sys
from pathlib import Path
from greenroom.experts.pack.file_lock import file_lock
with file_lock(Path(sys.argv[1]), 20) as held:
    print("held" if held else "not held", flush=True)
    sys.stdin.readline()
print("free", flush=True)
"""


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that holds the lock until it is told a line."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate(timeout=DEADLINE_S)


def test_only_one_process_has_it_and_the_other_has_it_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    with another_process(path) as holder:
        with file_lock(path, 0) as held:
            assert not held
        taken: list[bool] = []
        refused = first_refusal(monkeypatch)

        def wait() -> None:
            with file_lock(path, DEADLINE_S) as held:
                taken.append(held)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert refused.wait(DEADLINE_S)
        assert not taken
        output, _ = holder.communicate("\n", timeout=DEADLINE_S)
        waiting.join(DEADLINE_S)
        assert output == "free\n"
        assert taken == [True]
    assert path.exists()


def test_the_wait_ends_at_its_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with another_process(path):
        begin = time.monotonic()
        with file_lock(path, 0.2, poll_s=60) as held:
            assert not held
        assert 0.2 <= time.monotonic() - begin < 30, "not a poll later"


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with another_process(path) as holder:
        holder.kill()
        holder.wait(DEADLINE_S)
        with file_lock(path, DEADLINE_S) as held:
            assert held


def test_threads_of_a_process_exclude_each_other_and_a_failure_gives_it_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with contextlib.suppress(ZeroDivisionError), file_lock(path, 0) as first:
        assert first
        with file_lock(path, 0) as second:
            assert not second
        raise ZeroDivisionError
    with file_lock(path, 0) as again:
        assert again


def test_a_place_where_no_file_can_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), file_lock(tmp_path / "nowhere" / "lock", 1):
        pass
