"""Events come out whole however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from greenroom_load.transport.sse import Event, LineTooLong, SseParser

LINES = st.sampled_from(["data: one", "data:two", "data:", "data:  spaced", "event: error", "event:x", ": comment", "",
                         "id: 7", "retry: 5", "data", "data: {\"a\": \"é日\"}"])  # fmt: skip
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def whole(stream: str) -> list[Event]:
    """The same by the standard's own words, over the stream at once."""
    found: list[Event] = []
    data: list[str] = []
    name = ""
    lines = stream.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line in lines[:-1]:
        if line == "":
            if any(data) or len(data) > 1:
                found.append(Event(name.encode(), "\n".join(data).encode()))
            data, name = [], ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data" and ":" in line:
            data.append(value)
        elif field == "event":
            name = value.strip(" ")
    return found


@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=40),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
@example(lines=[("data: one", "\r\n"), ("", "\r\n")], cuts=[10, 12])
def test_events_do_not_depend_on_how_the_stream_is_cut(lines: list[tuple[str, str]], cuts: list[int]) -> None:
    # A bare CR before a line that begins with LF would be one CRLF: such streams have no line end of their own.
    stream = "".join(line + end for line, end in lines)
    raw = stream.encode()
    parser = SseParser()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    found = [event for a, b in pairwise(places) for event in parser.feed(raw[a:b])]

    assert found == whole(stream)


def test_an_unfinished_event_is_held_back() -> None:
    parser = SseParser()

    assert parser.feed(b"data: a\n\ndata: b\n") == [Event(b"", b"a")]
    assert parser.feed(b"\n") == [Event(b"", b"b")]


def test_a_line_without_end_is_refused() -> None:
    parser = SseParser()
    for _ in range(16):
        assert parser.feed(b"x" * 1_000_000) == []
    with pytest.raises(LineTooLong):
        parser.feed(b"x" * 1_000_000)
