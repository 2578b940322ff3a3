"""An answer of which some is settled already: what follows is what would have followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Finished, FinishReason, GenerationRequest, Token
from greenroom.policies.base.events import SequenceEnd, SequenceInfo
from greenroom.text.stops import StopChecker
from tests.contract.batching.harness import Answer, Driver, request
from tests.examples import examples
from tests.unit.batching.fake_model import FakeModel, continuation
from tests.unit.batching.recorder import Recorder

PROMPT = (5, 6, 7)


def driver(model: FakeModel | None = None, **options: Any) -> Driver:
    return Driver((model or FakeModel()).as_ragged(), **options)


def behind(asked: GenerationRequest, *ids: int) -> GenerationRequest:
    """``asked`` with these tokens of its answer settled."""
    return replace(asked, prefix=tuple(Token(place, token_id) for place, token_id in enumerate(ids)))


class Continued(Answer):
    """Expects tokens from an index on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def take(self, event: Any) -> None:
        assert self.finished is None, "an event after the last"
        if isinstance(event, Finished):
            self.finished = event
        else:
            assert event.index == self.start + len(self.tokens), "a gap"
            self.tokens.append(event)


def go_on(d: Driver, asked: GenerationRequest, *ids: int) -> Answer:
    return d.add(behind(asked, *ids), Continued(len(ids)))


def ended(answer: Answer) -> Finished:
    assert answer.finished is not None
    return answer.finished


@pytest.mark.parametrize("cut", range(9))
def test_only_what_follows_is_generated_and_it_is_the_same(cut: int) -> None:
    whole = continuation(PROMPT, 8)
    d = driver(tokens_per_step=4, prefill_chunk=3)
    other = d.add(request("other", (9, 9), 12))
    d.step()
    rest = go_on(d, request("a", PROMPT, 8), *whole[:cut])
    d.run()
    assert whole[:cut] + rest.ids == whole
    assert ended(rest) == Finished(FinishReason.LENGTH, 3, 8)
    assert other.ids == continuation((9, 9), 12)


@settings(max_examples=examples(30), deadline=None)
@given(cut=st.integers(0, 10), chunk=st.sampled_from([None, 1, 3]), others=st.integers(0, 3), seed=st.integers(0, 50))
def test_a_draw_depends_on_its_place_and_not_on_where_the_answer_was_cut(
    cut: int, chunk: int | None, others: int, seed: int
) -> None:
    asked = request("a", PROMPT, 10, temperature=1.0, top_p=0.9, seed=seed or None)
    d = driver()
    whole = d.add(asked)
    d.run()
    d = driver(tokens_per_step=8, prefill_chunk=chunk)
    for place in range(others):
        d.add(request(f"other{place}", (place + 1,), 5 * place + 1))
        d.step()
    rest = go_on(d, asked, *whole.ids[:cut])
    d.run()
    assert whole.ids[:cut] + rest.ids == whole.ids


def test_the_prefix_is_prefilled_in_chunks_with_the_prompt() -> None:
    model = FakeModel()
    d = driver(model, prefill_chunk=4)
    whole = continuation(PROMPT, 8)
    go_on(d, request("a", PROMPT, 8), *whole[:6])
    d.run()
    assert model.forwards == [[(0, 4)], [(0, 4)], [(0, 1)], [(0, 1)]]
    stats = d.engine.snapshot()
    assert (stats.prefill_rows, stats.decode_rows, stats.generated_tokens) == (9, 1, 2)


# -- ends ----------------------------------------------------------------------------------------------------


def never_runs(asked: GenerationRequest, *ids: int, **options: Any) -> Finished:
    model = FakeModel()
    d = driver(model, **options)
    answer = go_on(d, asked, *ids)
    finished = ended(answer)  # before any step
    assert answer.tokens == []
    assert not d.engine.busy
    assert not d.step()
    assert model.forwards == []
    d.engine.audit()
    return finished


def test_a_prefix_of_the_whole_length_ends_at_once() -> None:
    whole = continuation(PROMPT, 4)
    assert never_runs(request("a", PROMPT, 4), *whole) == Finished(FinishReason.LENGTH, 3, 4)
    assert never_runs(request("a", PROMPT, 3), *whole).reason is FinishReason.LENGTH


def test_a_prefix_that_ends_in_the_end_of_sequence_ends_at_once() -> None:
    whole = continuation(PROMPT, 5)
    finished = never_runs(request("a", PROMPT, 9, ignore_eos=False), *whole[:3], eos_token_ids=[whole[2]])
    assert finished == Finished(FinishReason.STOP, 3, 3)
    asked = request("a", PROMPT, 9, stop_token_ids=(whole[2],))
    assert never_runs(asked, *whole[:3]).reason is FinishReason.STOP


def test_the_end_at_the_model_limit_is_found_too() -> None:
    whole = continuation(PROMPT, 7)
    finished = never_runs(request("a", PROMPT, None), *whole, max_model_len=10)  # type: ignore[arg-type]
    assert finished == Finished(FinishReason.LENGTH, 3, 7)


class Letters:
    """A tokenizer of single letters: token 1 is ``b``."""

    def detokenizer(self, *, behind_text: bool = False) -> Any:
        class Plain:
            pending = ""

            def push(self, token_id: int) -> str:
                return chr(ord("a") + token_id % 26)

            def flush(self) -> str:
                return ""

        return Plain()


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token_id % 26) for token_id in ids)


@pytest.mark.parametrize("cut", range(7))
def test_a_stop_string_that_straddles_the_cut_is_found(cut: int) -> None:
    whole = continuation(PROMPT, 8)
    stop = text_of(whole)[3:6]
    assert text_of(whole).index(stop) == 3
    d = driver(stop_checkers=lambda params: StopChecker(Letters(), params.stop))
    rest = go_on(d, request("a", PROMPT, 8, stop=(stop,)), *whole[:cut])
    d.run()
    assert whole[:cut] + rest.ids == whole[:6]
    assert ended(rest) == Finished(FinishReason.STOP, 3, 6)


def test_a_prefix_with_a_whole_stop_string_ends_at_once() -> None:
    whole = continuation(PROMPT, 8)
    stop = text_of(whole)[3:6]
    finished = never_runs(
        request("a", PROMPT, 8, stop=(stop,)),
        *whole[:6],
        stop_checkers=lambda params: StopChecker(Letters(), params.stop),
    )
    assert finished == Finished(FinishReason.STOP, 3, 6)


def test_a_stop_checker_that_fails_on_the_prefix_fails_the_request() -> None:
    class Broken:
        def push(self, token_id: int) -> bool:
            raise LookupError("no such token")

    finished = never_runs(request("a", PROMPT, 8, stop=("x",)), 1, 2, stop_checkers=lambda params: Broken())
    assert (finished.reason, finished.error) == (FinishReason.FAILED, "internal error (LookupError)")


# -- refusals, and what others are told ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ((Token(0, 64),), "from 0 to 63"),
        ((Token(0, -1),), "from 0 to 63"),
        ((Token(1, 5),), "from index 0 on, without gap"),
        ((Token(0, 5), Token(2, 5)), "from index 0 on, without gap"),
    ],
)
def test_a_prefix_that_can_not_be_one_is_refused(prefix: tuple[Token, ...], message: str) -> None:
    d = driver()
    with pytest.raises(InvalidRequest, match=message) as caught:
        d.add(replace(request("a", PROMPT, 8), prefix=prefix))
    assert caught.value.param == "prefix"
    assert not d.engine.busy


def test_observers_hear_of_the_prompt_alone_and_of_what_is_left_to_generate() -> None:
    whole = continuation(PROMPT, 8)
    recorder = Recorder()
    d = driver(observer=recorder)
    go_on(d, request("a", PROMPT, 8), *whole[:5])
    go_on(d, request("done", PROMPT, 8), *whole)
    d.run()
    half, done = SequenceInfo(0, "unknown", 3, 3), SequenceInfo(1, "unknown", 3, 0)
    assert recorder.told == [
        ("queued", half),
        ("queued", done),
        ("ended", 1, SequenceEnd.FINISHED),
        ("started", half),
        ("ended", 0, SequenceEnd.FINISHED),
    ]
    stats = d.engine.snapshot()
    assert (stats.submitted, stats.started, stats.finished[FinishReason.LENGTH]) == (2, 1, 2)


def test_a_request_reserves_as_much_with_a_prefix_as_without() -> None:
    whole = continuation(PROMPT, 8)
    peaks = []
    for cut in (0, 5):
        d = driver()
        go_on(d, request("a", PROMPT, 8), *whole[:cut])
        d.run()
        peaks.append(d.engine.kv.peak_bytes)
    assert peaks[0] == peaks[1]


class Confined(Recorder):
    """Half of the routing is approximate; ``rows`` are those that it was asked of."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def approximated(self, sequence: int, rows: int) -> float:
        self.rows.append(rows)
        return 0.5


def test_what_was_approximated_is_a_share_of_all_rows_that_ran_here_the_settled_ones_among_them() -> None:
    whole = continuation(PROMPT, 8)
    observer = Confined()
    d = driver(observer=observer)
    rest = go_on(d, request("a", PROMPT, 8), *whole[:5])
    done = go_on(d, request("done", PROMPT, 8), *whole)
    d.run()
    assert (ended(rest).approximated, observer.rows) == (0.5, [len(PROMPT) + 8 - 1])
    assert ended(done).approximated == 0.0, "nothing of it ran here"
