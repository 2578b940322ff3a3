from __future__ import annotations

from benchmarks.micro.start_time import ARMS, Start, row_of, table


def test_ratios_count_from_the_processes_beginning_and_from_its_imports() -> None:
    start = Start(imported_s=4.0, ready_s=5.0, first_token_s=8.0, read_s=2.0, fill_gb_s=None)
    assert (start.start_ratio, start.loaded_ratio) == (4.0, 2.0)


def test_a_row_has_medians_and_a_dash_for_what_was_not_measured() -> None:
    row = row_of(ARMS[1], [Start(4.0, 5.0, first, 2.0, None) for first in (8.0, 9.0, 12.0)])
    assert row["first_token_s"] == {"median": 9.0, "min": 8.0, "max": 12.0}
    assert row["fill_gb_s"] is None
    assert table([row]).splitlines()[1].split()[-4:] == ["4.50", "(4.00–6.00)", "2.50", "(2.00–4.00)"]
    assert " - " in table([row])
