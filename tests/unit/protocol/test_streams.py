"""The gateway's rules, one by one, and in_flight on top of them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.attempts import Attempt
from greenroom.core.errors import Conflict
from greenroom.core.generation import Event, Finished, FinishReason, Token, TokenLogprobs
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.logprobs import pack_logprobs, unpack_tokens
from greenroom.core.messages import Outcome
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.in_flight import InFlightRequests
from greenroom.gateway.pipeline.stream_book import Diverged, Gap, StreamBook, Unwanted

A1, A2 = Attempt(0, 1), Attempt(0, 2)


def tokens(*ids: int, start: int = 0) -> list[Token]:
    return [Token(start + i, token_id) for i, token_id in enumerate(ids)]


def outcome(*ids: int, reason: FinishReason = FinishReason.LENGTH, keyed: bool = False, digest: bytes = b"") -> Outcome:
    return Outcome(epoch=0, request_id="r", reason=reason, token_ids=ids, keyed=keyed, digest=digest)


@pytest.fixture
def book() -> StreamBook:
    book = StreamBook()
    book.expect("r")
    return book


def test_the_stream_opened_last_for_the_highest_attempt_is_listened_to(book: StreamBook) -> None:
    assert book.open("r", A1, "old") == ()
    assert book.add("r", "old", tokens(10)) == tokens(10)
    assert book.open("r", A2, "new") == tuple(tokens(10))
    assert book.add("r", "old", tokens(11, start=1)) is Unwanted.STALE
    assert book.open("r", A1, "again") is Unwanted.STALE
    assert book.add("r", "new", tokens(12, start=1)) == tokens(12, start=1)
    assert book.delivered("r") == tuple(tokens(10, 12))


def test_of_one_attempt_the_later_stream_is(book: StreamBook) -> None:
    book.open("r", A1, "first")
    book.open("r", A1, "second")
    assert book.add("r", "first", tokens(10)) is Unwanted.STALE


def test_repeats_are_passed_over_and_gaps_refused(book: StreamBook) -> None:
    book.open("r", A1, "s")
    book.add("r", "s", tokens(10, 11))
    assert book.add("r", "s", tokens(10, 11, 12)) == tokens(12, start=2)
    with pytest.raises(Gap, match="has 3"):
        book.add("r", "s", tokens(14, start=4))
    assert len(book.delivered("r")) == 3


def test_the_outcome_gives_the_rest_and_ends_it(book: StreamBook) -> None:
    book.open("r", A1, "s")
    book.add("r", "s", tokens(10))
    assert book.end(outcome(10, 11), tokens(10, 11)) == tokens(11, start=1)
    assert book.add("r", "s", tokens(11, start=1)) is Unwanted.ENDED
    assert book.open("r", A2, "t") is Unwanted.ENDED


def test_of_one_that_is_disowned_no_worker_is_told_that_it_has_ended(book: StreamBook) -> None:
    book.open("r", A1, "s")
    book.disown("r")
    assert book.add("r", "s", tokens(10)) is Unwanted.NO_STREAM
    assert book.open("r", A2, "t") is Unwanted.NO_STREAM
    assert book.open("never heard of", A2, "t") is Unwanted.NO_STREAM


def test_a_retry_of_one_that_is_disowned_has_its_stream_opened_anew(book: StreamBook) -> None:
    book.open("r", A1, "s")
    book.disown("r")
    book.expect("r")
    assert not book.opened("r")
    with pytest.raises(Gap, match="anew"):
        book.add("r", "s", tokens(10))
    assert book.open("r", A1, "s") == ()
    assert book.opened("r")
    assert book.add("r", "s", tokens(10)) == tokens(10)


def test_what_is_over_is_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.gateway.pipeline.stream_book._REMEMBERED", 2)
    book = StreamBook()
    for name in ("a", "b", "c"):
        book.expect(name)
        book.forget(name)
    assert [book.open(name, A1, "s") for name in ("a", "b", "c")] == [
        Unwanted.NO_STREAM, Unwanted.ENDED, Unwanted.ENDED,
    ]  # fmt: skip


@pytest.mark.parametrize("reason", FinishReason)
def test_a_lost_end_comes_from_the_outcome_where_there_is_one(book: StreamBook, reason: FinishReason) -> None:
    completed = reason in {FinishReason.STOP, FinishReason.LENGTH}
    assert list(book.end(outcome(10, 11, reason=reason), tokens(10, 11))) == (tokens(10, 11) if completed else [])


def test_an_outcome_that_is_another_text_is_not_delivered(book: StreamBook) -> None:
    book.open("r", A1, "s")
    book.add("r", "s", tokens(10))
    with pytest.raises(Diverged):
        book.end(outcome(99, 11), tokens(99, 11))


async def gather(events: object) -> list[Event]:
    return [event async for event in events]  # type: ignore[attr-defined]


async def test_two_listeners_to_one_request_each_get_all_of_it() -> None:
    in_flight = InFlightRequests(StreamBook(), 1000)
    running = in_flight.begin("r", b"d", keyed=True)
    first = asyncio.create_task(gather(running.events()))
    in_flight.book.open("r", A1, "s")
    assert in_flight.add("r", "s", tokens(10)) == tokens(10)
    await asyncio.sleep(0)
    second = asyncio.create_task(gather(running.events()))
    in_flight.outcome(outcome(10, 11, keyed=True, digest=b"d"))
    expected = [*tokens(10, 11), Finished(FinishReason.LENGTH, 0, 2)]
    assert await asyncio.wait_for(first, 5) == expected
    assert await asyncio.wait_for(second, 5) == expected
    assert len(in_flight) == 0
    assert in_flight.known("r", b"d") == expected


async def test_an_end_says_what_the_outcome_says() -> None:
    in_flight = InFlightRequests(StreamBook(), 1000)
    running = in_flight.begin("r", b"", keyed=False)
    in_flight.outcome(msgspec.structs.replace(outcome(10, 11), queue_ms=2500.0, approximated=0.125))
    *_, end = await asyncio.wait_for(gather(running.events()), 5)
    assert isinstance(end, Finished)
    assert (end.queue_seconds, end.approximated) == (2.5, 0.125)


async def test_another_request_under_the_same_key_is_a_conflict() -> None:
    in_flight = InFlightRequests(StreamBook(), 1000)
    running = in_flight.begin("r", b"mine", keyed=True)
    with pytest.raises(Conflict):
        in_flight.join("r", b"other")
    in_flight.outcome(outcome(10, keyed=True, digest=b"other"))
    with pytest.raises(Conflict):
        await asyncio.wait_for(gather(running.events()), 5)
    assert "r" not in in_flight.book


def test_kept_outcomes_are_bounded_and_the_first_one_stays() -> None:
    in_flight = InFlightRequests(StreamBook(), 400)
    in_flight.outcome(outcome(1, keyed=True))
    first = in_flight.known("r", b"")
    in_flight.outcome(outcome(2, keyed=True))
    assert in_flight.known("r", b"") == first
    for number in range(10):
        in_flight.outcome(Outcome(epoch=0, request_id=f"k{number}", reason=FinishReason.STOP, keyed=True))
    assert in_flight.kept.answers_dropped > 0
    assert in_flight.kept.ends_dropped > 0
    assert in_flight.known("r", b"") is None


def ended(name: str, tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Outcome:
    return Outcome(epoch=0, request_id=name, reason=reason, token_ids=(7,) * tokens, keyed=True, digest=b"d")


def test_of_an_answer_that_was_dropped_it_is_known_that_there_was_one() -> None:
    in_flight = InFlightRequests(StreamBook(), 16_384)
    in_flight.outcome(ended("failed", 0, FinishReason.FAILED))
    for number in range(12):
        in_flight.outcome(ended(f"r{number}", 2_000))
    assert in_flight.kept.answers_dropped
    assert not in_flight.kept.ends_dropped
    with pytest.raises(ApiError, match="dropped the answer") as caught:
        in_flight.known("r0", b"d")
    assert (caught.value.status, caught.value.code) == (409, "answer_dropped")
    with pytest.raises(Conflict):
        in_flight.known("r0", b"other")
    assert in_flight.known("failed", b"d") == [Finished(FinishReason.FAILED, 0, 0)], "there was no answer to drop"
    newest = in_flight.known("r11", b"d")
    assert newest is not None
    assert len(newest) == 2_001
    in_flight.outcome(ended("r0", 3))
    with pytest.raises(ApiError, match="dropped the answer"):
        in_flight.known("r0", b"d")


def test_an_older_outcome_takes_the_place_of_a_later_one_whose_answer_was_dropped() -> None:
    in_flight = InFlightRequests(StreamBook(), 16_384)
    for number in range(12):
        in_flight.outcome(ended(f"r{number}", 2_000))
    in_flight.older(ended("r0", 0, FinishReason.CANCELLED))
    assert in_flight.known("r0", b"d") == [Finished(FinishReason.CANCELLED, 0, 0)]
    in_flight.older(ended("r0", 0, FinishReason.FAILED))
    assert in_flight.known("r0", b"d") == [Finished(FinishReason.CANCELLED, 0, 0)], "the first one stays"


def test_a_cancel_that_came_before_its_request_is_the_end_of_it() -> None:
    in_flight = InFlightRequests(StreamBook(), 16_384)
    unread = Outcome(epoch=0, request_id="r", reason=FinishReason.CANCELLED, message="it was cancelled")
    in_flight.outcome(unread)
    assert in_flight.known("r", b"d") == [Finished(FinishReason.CANCELLED, 0, 0, "it was cancelled")]
    in_flight.outcome(msgspec.structs.replace(unread, request_id="s", task_type="chat"))
    assert in_flight.known("s", b"d") is None, "it had no key"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 200),
            st.floats(-50, 0, width=32),
            st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0, width=32)), max_size=4),
        ),
        max_size=6,
    )
)
def test_packed_log_probabilities_come_back(given: list[tuple[int, float, list[tuple[int, float]]]]) -> None:
    made = [Token(i, token, TokenLogprobs(chosen, tuple(top))) for i, (token, chosen, top) in enumerate(given)]
    packed = pack_logprobs(made)
    assert (packed is None) == (not made)
    assert unpack_tokens([token.token_id for token in made], packed) == made


def test_of_an_inference_its_outputs_are_dropped_to_make_room() -> None:
    in_flight = InFlightRequests(StreamBook(), 16_384)
    found = InferenceOutputs(path=("chip",), label="good", score=0.5, embedding=bytes(2_000))
    for number in range(12):
        in_flight.outcome(
            Outcome(epoch=0, request_id=f"r{number}", reason=FinishReason.STOP, keyed=True, digest=b"d", outputs=found)
        )
    assert in_flight.known("r11", b"d") == [Finished(FinishReason.STOP, 0, 0, outputs=found)]
    with pytest.raises(ApiError, match="dropped the answer"):
        in_flight.known("r0", b"d")
