from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.replay.traces.join import joined
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.trace_file import TraceError

WHOLE = RoutingTrace(
    experts=np.arange(12, dtype=np.uint8).reshape(6, 2, 1) % 5,
    seq_starts=np.array([0, 1, 4, 4, 6]),
    num_experts=5,
    phase=np.array([1, 0, 1, 1, 0, 1], dtype=np.uint8),
    step=np.array([0, 1, 2, 3, 4, 5]),
    task=("a", "b", "c", "d"),
    request=("1", "2", "3", "4"),
    arrival=np.arange(4.0),
    model="m",
    decoder_start=1,
)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, None), (-1, None), (3, 1), (9, 12)])
def test_a_part_has_the_sequences_that_a_slice_has(start: int, stop: int | None) -> None:
    part = WHOLE.part(start, stop)
    chosen = range(4)[start:stop]
    rows = [row for one in chosen for row in range(WHOLE.seq_starts[one], WHOLE.seq_starts[one + 1])]
    assert part.experts.tolist() == WHOLE.experts[rows].tolist()
    assert np.diff(part.seq_starts).tolist() == [int(np.diff(WHOLE.seq_starts)[one]) for one in chosen]
    assert part.task == tuple("abcd"[one] for one in chosen)
    assert part.phase is not None
    assert part.step is not None
    assert part.arrival is not None
    assert part.phase.tolist() == WHOLE.phase[rows].tolist()  # type: ignore[index]
    assert part.step.tolist() == rows
    assert part.arrival.tolist() == list(chosen)
    assert (part.model, part.decoder_start, part.request) == ("m", 1, tuple("1234"[one] for one in chosen))


def test_parts_make_the_whole_but_for_what_ran_together() -> None:
    again = joined([WHOLE.part(0, 1), WHOLE.part(1, 2), WHOLE.part(2)])
    assert again.experts.tolist() == WHOLE.experts.tolist()
    assert again.seq_starts.tolist() == WHOLE.seq_starts.tolist()
    assert again.phase is not None
    assert again.phase.tolist() == [1, 0, 1, 1, 0, 1]
    assert (again.step, again.task, again.model, again.decoder_start) == (None, None, "m", 1)
    assert joined([WHOLE]) is WHOLE


def test_one_whose_phases_were_not_recorded_is_taken_to_have_decoded_and_models_are_not_mixed() -> None:
    bare = replace(WHOLE, phase=None, model="other")
    both = joined([bare, WHOLE])
    assert both.phase is not None
    assert both.phase.tolist() == [1] * 6 + [1, 0, 1, 1, 0, 1]
    assert both.model == ""
    assert joined([bare, bare]).phase is None
    with pytest.raises(TraceError, match="several models"):
        joined([WHOLE, replace(WHOLE, num_experts=6)])
