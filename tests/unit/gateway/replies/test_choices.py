"""From events to the parts of a choice, and to JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from greenroom.core.generation import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from greenroom.gateway.replies.choices import ChoiceAssembler, Delta, GenerationFailed, Job
from greenroom.gateway.replies.reply_bodies import Usage
from greenroom.gateway.replies.reply_writers import ChatWriter, CompletionWriter, Head, StreamUsage, Tally, token_text
from greenroom.text import Tokenizer
from tests import small_tokenizers

HEAD = Head("id", 1, "m", "fp")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(small_tokenizers.write_chat(Path(tmp_path_factory.mktemp("x"))))


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = small_tokenizers.write(tmp_path_factory.mktemp("y"), small_tokenizers.byte_fallback())
    return Tokenizer.from_folder(folder)


def tokens(tokenizer: Tokenizer, text: str, logprob: float | None = None) -> list[Token]:
    logprobs = None if logprob is None else TokenLogprobs(logprob, ((3, logprob),))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [Token(place, token_id, logprobs) for place, token_id in enumerate(ids)]


def assemble(tokenizer: Tokenizer, events: list[Event], eos: int = 4, **fields: Any) -> tuple[str, Delta]:
    """The text and the last part."""
    job_fields = {name: fields.pop(name) for name in ("behind_text", "keep_stop") if name in fields}
    job = Job(5, GenerationRequest("r", (1,), SamplingParams(**fields)), **job_fields)
    assembler = ChoiceAssembler(job, tokenizer, [eos])
    parts = [part for event in events if assembler.finish is None and (part := assembler.push(event))]
    assert all(part.index == 5 for part in parts)
    assert [part.finish for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert assembler.finish is parts[-1].finish
    return "".join(part.text for part in parts), parts[-1]


def test_text_and_count(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "hello 🚀")
    text, last = assemble(tokenizer, [*said, Finished(FinishReason.LENGTH, 1, len(said))])
    assert (text, last.finish, last.generated) == ("hello 🚀", FinishReason.LENGTH, len(said))


def test_the_last_part_says_what_was_approximated(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "hello")
    _, last = assemble(tokenizer, [*said, Finished(FinishReason.LENGTH, 1, len(said), approximated=0.25)])
    assert last.approximated == 0.25


choices = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(0, 7)), min_size=1, max_size=5)


@given(choices)
def test_a_reply_is_approximated_as_its_rows_are(given_choices: list[tuple[int, int, int]]) -> None:
    """Of seven layers, each choice had ``many`` approximated in all of its rows: it counts by how many rows it has."""
    tally = Tally(9, [prompt for prompt, _, _ in given_choices])
    for index, (_, generated, many) in enumerate(given_choices):
        tally.add(Delta(index, "", finish=FinishReason.STOP, generated=generated, approximated=many / 7))
    rows = [prompt + generated - 1 for prompt, generated, _ in given_choices]
    pairs = sum(own * many for own, (_, _, many) in zip(rows, given_choices, strict=True))
    completion = sum(generated for _, generated, _ in given_choices)
    assert tally.usage() == Usage(prompt_tokens=9, completion_tokens=completion, total_tokens=9 + completion)
    assert tally.approximated() == pytest.approx(pairs / (7 * sum(rows)) if sum(rows) else 0.0, abs=1e-6)


def test_a_half_character_at_the_end_is_marked(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "🚀")[:-1]
    assert said
    text, _ = assemble(tokenizer, [*said, Finished(FinishReason.LENGTH, 1, len(said))])
    assert text == "\ufffd"


def test_text_held_back_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "hello the")
    text, last = assemble(tokenizer, [*said, Finished(FinishReason.LENGTH, 1, len(said))], stop=("there",))
    assert (text, last.finish) == ("hello the", FinishReason.LENGTH)


def test_a_generator_that_goes_on_behind_a_stop_string_is_cut(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "hello there! hello")
    text, last = assemble(tokenizer, [*said], stop=("!",))
    at = len(tokens(tokenizer, "hello there!"))
    assert (text, last.finish, last.generated) == ("hello there", FinishReason.STOP, at)
    assert last.approximated is None, "it has not said"


@pytest.mark.parametrize("place", [0, 1])
def test_where_one_choice_is_not_known_the_reply_says_nothing_of_approximation(place: int) -> None:
    tally = Tally(3, [3, 3])
    for index in range(2):
        approximated = None if index == place else 0.0
        tally.add(Delta(index, "", finish=FinishReason.STOP, generated=2, approximated=approximated))
    assert tally.approximated() is UNSET


def test_a_stop_string_with_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "hello!")
    text, last = assemble(tokenizer, [*said, Finished(FinishReason.LENGTH, 1, len(said))], stop=("!",))
    assert (text, last.finish, last.generated) == ("hello", FinishReason.STOP, len(said))


def test_the_text_of_the_ending_token_is_left_out(tokenizer: Tokenizer) -> None:
    """Even where the tokenizer does not call it special."""
    said = tokens(tokenizer, "hello<tool>")
    end = said[-1].token_id
    events: list[Event] = [*said, Finished(FinishReason.STOP, 1, len(said))]
    assert assemble(tokenizer, events, eos=end)[0] == "hello"
    assert assemble(tokenizer, events, stop_token_ids=(end,))[0] == "hello"
    assert assemble(tokenizer, events, eos=end, ignore_eos=True)[0] == "hello<tool>"


def test_the_first_word_keeps_its_space_only_behind_a_text(llama_like: Tokenizer) -> None:
    said = tokens(llama_like, "hello the")
    events: list[Event] = [*said, Finished(FinishReason.STOP, 1, len(said))]
    assert assemble(llama_like, events)[0] == "hello the"
    assert assemble(llama_like, events, behind_text=True)[0] == " hello the"


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.CANCELLED])
def test_failures(tokenizer: Tokenizer, reason: FinishReason) -> None:
    with pytest.raises(GenerationFailed, match="out of luck") as caught:
        assemble(tokenizer, [Finished(reason, 1, 0, "out of luck")])
    assert caught.value.reason is reason


def test_json_has_no_infinity(tokenizer: Tokenizer) -> None:
    said = tokens(tokenizer, "a", -math.inf)
    job = Job(0, GenerationRequest("r", (1,), SamplingParams(logprobs=1)))
    part = ChoiceAssembler(job, tokenizer, ()).push(said[0])
    assert part is not None
    for writer in (ChatWriter, CompletionWriter):
        written = writer(HEAD, tokenizer, usage=StreamUsage(), prompts=[1], logprobs=True).part(part)
        assert "inf" not in str(written)
        assert "-9999.0" in str(written)


def test_the_chosen_token_is_among_the_most_likely(tokenizer: Tokenizer) -> None:
    first, second = tokens(tokenizer, "ab")[:2] if len(tokens(tokenizer, "ab")) > 1 else tokens(tokenizer, "a b")[:2]
    record = Token(0, first.token_id, TokenLogprobs(-2.0, ((second.token_id, -0.5),)))
    job = Job(0, GenerationRequest("r", (1,), SamplingParams(logprobs=1)))
    part = ChoiceAssembler(job, tokenizer, ()).push(record)
    assert part is not None
    writer = CompletionWriter(HEAD, tokenizer, usage=StreamUsage(), prompts=[1], logprobs=True)
    logprobs = writer.part(part).choices[0].logprobs
    assert logprobs is not None
    [top] = logprobs.top_logprobs
    assert top is not None
    assert list(top.values()) == [-0.5, -2.0]


def test_bytes_that_are_no_character_are_written_as_bytes() -> None:
    assert token_text(" é".encode()) == " é"
    assert token_text(b"\xe6\x97") == r"bytes:\xe6\x97"
