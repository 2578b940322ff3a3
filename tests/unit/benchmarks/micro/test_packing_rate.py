from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from benchmarks.micro.packing_rate import Pieces, Turn, measured, summary, table


def test_shares_are_taken_round_by_round() -> None:
    turns = {
        "pack": [Turn(8 * 10**9, 8.0, 4.0), Turn(8 * 10**9, 16.0, 4.0)],
        "copy": [Turn(8 * 10**9, 4.0, 1.0), Turn(8 * 10**9, 16.0, 1.0)],
        "write": [Turn(8 * 10**9, 2.0, 1.0), Turn(8 * 10**9, 4.0, 1.0)],
    }
    rows, shares = summary(turns)
    assert rows[0] == {
        "arm": "pack",
        "gb_s": {"median": 0.75, "min": 0.5, "max": 1.0},
        "cpu_s_gb": {"median": 0.5, "min": 0.5, "max": 0.5},
    }
    assert shares["packing_share"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert shares["write_share"] == {"median": 0.25, "min": 0.25, "max": 0.25}
    assert table(rows, shares).splitlines()[-2:] == ["packing_share 0.75 (0.50–1.00)", "write_share 0.25 (0.25–0.25)"]


def test_a_copy_has_all_whole_pages_and_a_turn_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(9 << 20) + b"end")
    copied = []

    def copy(folder: Path) -> int:
        nbytes = Pieces().copy([source], folder)
        copied.append((folder / "source").read_bytes())
        return nbytes

    try:
        turn = measured(copy, [source], tmp_path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("no direct I/O in this file system")
    assert copied == [source.read_bytes()[: 9 << 20]]
    assert turn.nbytes == 9 << 20
    assert list(tmp_path.iterdir()) == [source]
