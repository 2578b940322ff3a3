"""What requests the real engine is sent, in place of those of a replay."""

from __future__ import annotations

from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.simulation.simulate import Way
from greenroom.demo.board import bundled_board_path
from greenroom.profiling.coe.sample_inputs import Samples
from greenroom.profiling.coe.served_throughput import calls_of

BOARD = read_collaboration(bundled_board_path())


def key(name: str) -> int:
    return BOARD.graph.names.index(name)


def names_of(*paths: tuple[str, ...]) -> list[Way]:
    return [Way(10.0 * at, tuple(map(key, path))) for at, path in enumerate(paths)]


def test_a_call_leads_to_the_first_expert_of_its_way() -> None:
    ways = names_of(("led", "polarity"), ("resistor",), ("led",))
    calls = calls_of(BOARD, ways, None, 0)
    assert [call.arrives_ms for call in calls] == [0.0, 10.0, 20.0]
    assert [BOARD.graph.first(call.value) for call in calls] == [way.experts[0] for way in ways]


def test_samples_that_say_where_they_go_are_sent_there() -> None:
    samples = Samples(
        images=(b"good led", b"bad led", b"a resistor"), paths=(("led", "polarity"), ("led",), ("resistor",))
    )
    ways = names_of(("led",), ("led", "polarity"), ("led",), ("resistor",))
    assert [call.given for call in calls_of(BOARD, ways, samples, 0)] == [
        b"bad led", b"good led", b"bad led", b"a resistor",
    ]  # fmt: skip


def test_samples_of_which_only_some_say_so_are_taken_as_they_come() -> None:
    samples = Samples(images=(b"one", b"another"), paths=(("led",),))
    given = [call.given for call in calls_of(BOARD, names_of(("led",), ("led",), ("resistor",)), samples, 0)]
    assert given == [b"one", b"another", b"one"]
