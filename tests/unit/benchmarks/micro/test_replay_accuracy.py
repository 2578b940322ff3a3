"""How the benchmark of predictions takes link and computing from a run."""

from __future__ import annotations

import pytest

from benchmarks.micro.replay_accuracy import Watch, _line


def test_of_one_row_the_line_is_exact_and_of_more_right_in_sum() -> None:
    intercept, slope = _line([(1, 2.0), (1, 4.0), (3, 5.0), (5, 11.0)])

    assert intercept + slope == pytest.approx(3.0)
    assert 2 * intercept + 8 * slope == pytest.approx(16.0)


def test_a_line_never_falls_and_never_starts_below_nothing() -> None:
    assert _line([(1, 4.0), (9, 2.0)]) == (4.0, 0.0)
    assert _line([(1, 1.0), (2, 9.0)]) == (0.0, 1.0)
    assert _line([(7, 2.0), (9, 3.0)])[0] >= 0


def test_reads_that_overlap_count_once() -> None:
    watch = Watch.__new__(Watch)
    watch.reads = [(0.0, 2.0, 100), (1.0, 3.0, 100), (5.0, 6.0, 100)]

    assert watch.link().bytes_per_s == pytest.approx(300 / 4.0)


def test_a_layer_run_in_one_call_is_shared_out_among_its_experts() -> None:
    class Engine:
        class catalogue:
            top_k = (2,)

        def __init__(self) -> None:
            self.counted = 0

        def resident_addresses(self, layer: int, picks: object) -> list[object] | None:
            return None if layer else []

        def layer_ran(self, layer: int, experts: int) -> None:
            self.counted += experts

        def step(self) -> None: ...

        def routed(self) -> None: ...

    class Pack:
        def read_part(self) -> None: ...

    engine = Engine()
    watch = Watch(engine, Pack())  # type: ignore[arg-type]
    watch._rows = 6
    engine.resident_addresses(0, None)
    engine.layer_ran(0, 4)
    assert [rows for rows, _ in watch.experts] == [3.0] * 4
    assert len({seconds for _, seconds in watch.experts}) == 1
    engine.resident_addresses(1, None)
    engine.layer_ran(1, 4)
    assert (len(watch.experts), engine.counted) == (4, 8), "what came expert by expert has been timed there"
