"""A prompt that is scored: every row once, no more rows at once than there is memory for, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.generation import Finished, FinishReason, GenerationRequest, Token, TokenLogprobs
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.prompt_logprobs import prompt_logprobs
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.batching.phases import PhasesBatching
from tests.contract.batching.harness import Answer, Driver, request
from tests.examples import examples
from tests.stand_in_device import StandInTensor, stand_in, watched
from tests.unit.batching.fake_model import FakeModel, continuation, next_logits

PROMPT = tuple((7 * place + 3) % 60 for place in range(40))


class Rest(Answer):
    """Behind a prefix."""

    def take(self, event: Any) -> None:
        if isinstance(event, Finished):
            self.finished = event
        else:
            self.tokens.append(event)


class Watched(FakeModel):
    """Notes of every forward how many rows of logits it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_rows: list[int] = []

    def forward(self, chunks: Sequence[Chunk], paths: object = None) -> torch.Tensor:
        logits = super().forward(chunks, paths)
        self.logit_rows.append(len(logits))
        return logits


def scores(prompt: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    rows = torch.stack([next_logits(prompt[:end]) for end in range(1, len(prompt))]).log_softmax(-1)
    return tuple(
        TokenLogprobs(
            float(row[token]),
            tuple((int(i), float(row[i])) for i in row.topk(top).indices) if top else (),
        )
        for row, token in zip(rows, prompt[1:], strict=True)
    )


def finished(answer: Answer) -> Finished:
    assert answer.finished is not None
    return answer.finished


def same(found: tuple[TokenLogprobs, ...] | None, wanted: tuple[TokenLogprobs, ...]) -> bool:
    assert found is not None
    assert [[token for token, _ in one.top] for one in found] == [[token for token, _ in one.top] for one in wanted]
    assert [one.chosen for one in found] == pytest.approx([one.chosen for one in wanted], abs=1e-5)
    return True


@pytest.mark.parametrize("policy", [FcfsBatching, PhasesBatching])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_token_of_the_prompt_is_scored_behind_those_before_it(
    policy: Any, top: int, chunk: int, tokens: int
) -> None:
    driver = Driver(Watched().as_ragged(), tokens_per_step=64, prefill_chunk=chunk, policy=policy())
    other = driver.add(request("other", (1, 2, 3), 12))
    answer = driver.add(request("a", PROMPT, tokens, prompt_logprobs=top))
    driver.run()
    assert answer.ids == continuation(PROMPT, tokens)
    assert same(finished(answer).prompt_logprobs, scores(PROMPT, top))
    assert finished(answer).reason is FinishReason.LENGTH
    assert finished(answer).generated_tokens == tokens
    assert other.ids == continuation((1, 2, 3), 12)
    assert finished(other).prompt_logprobs is None


@pytest.mark.parametrize("running", [1, 3, 30])
def test_no_forward_has_more_rows_of_logits_than_the_plan_counts(running: int) -> None:
    model = Watched()
    driver = Driver(model.as_ragged(), tokens_per_step=64, max_running=running)
    answers = [driver.add(request(f"r{i}", PROMPT[i:], 3, prompt_logprobs=0)) for i in range(4)]
    driver.add(request("other", PROMPT, 3))
    driver.run()
    assert max(model.logit_rows) <= driver.engine.config.logit_rows == max(16, running)
    for i, answer in enumerate(answers):
        assert same(finished(answer).prompt_logprobs, scores(PROMPT[i:], 0))
        assert answer.ids == continuation(PROMPT[i:], 3)


def test_prompts_that_are_not_scored_run_in_chunks_as_ever() -> None:
    model = Watched()
    driver = Driver(model.as_ragged(), tokens_per_step=64)
    driver.add(request("a", PROMPT, 2))
    driver.run()
    assert model.forwards == [[(0, 40)], [(0, 1)]]
    assert model.logit_rows == [1, 1]


def test_nothing_is_computed_for_an_answer_of_no_tokens() -> None:
    model = Watched()
    driver = Driver(model.as_ragged())
    answers = [driver.add(request("a", PROMPT, 0)), driver.add(request("b", (5,), 0, prompt_logprobs=2))]
    assert not driver.engine.busy
    assert finished(answers[0]) == Finished(FinishReason.LENGTH, 40, 0)
    assert finished(answers[1]) == Finished(FinishReason.LENGTH, 1, 0, prompt_logprobs=())
    assert model.forwards == []


def test_a_prompt_of_the_whole_context_can_be_scored() -> None:
    driver = Driver(FakeModel().as_ragged(), max_model_len=len(PROMPT))
    answer = driver.add(request("a", PROMPT, 0, prompt_logprobs=0))
    driver.run()
    assert same(finished(answer).prompt_logprobs, scores(PROMPT, 0))


@given(cut=st.integers(0, 6), chunk=st.integers(1, 50), tokens=st.integers(0, 6))
@settings(deadline=None, max_examples=examples(60))
def test_a_request_that_goes_on_elsewhere_scores_its_prompt_again(cut: int, chunk: int, tokens: int) -> None:
    """Its answer may have come to its end already: the prompt runs all the same."""
    cut = min(cut, tokens)
    whole = continuation(PROMPT, tokens)
    prefix = tuple(Token(place, token_id) for place, token_id in enumerate(whole[:cut]))
    driver = Driver(Watched().as_ragged(), tokens_per_step=50, prefill_chunk=chunk)
    asked: GenerationRequest = replace(request("a", PROMPT, tokens, prompt_logprobs=1), prefix=prefix)
    answer = driver.add(asked, Rest())
    driver.run()
    assert whole[:cut] + answer.ids == whole
    assert same(finished(answer).prompt_logprobs, scores(PROMPT, 1))
    assert finished(answer).generated_tokens == tokens


def test_a_stop_in_the_prefix_ends_it_once_the_prompt_is_scored() -> None:
    first = continuation(PROMPT, 1)[0]
    driver = Driver(FakeModel().as_ragged())
    asked = request("a", PROMPT, 8, prompt_logprobs=0, stop_token_ids=(first,))
    answer = driver.add(replace(asked, prefix=(Token(0, first),)), Rest())
    driver.run()
    assert finished(answer).reason is FinishReason.STOP
    assert same(finished(answer).prompt_logprobs, scores(PROMPT, 0))


def test_a_prompt_without_usable_logits_fails_alone() -> None:
    class Broken(FakeModel):
        def forward(self, chunks: Sequence[Chunk], paths: object = None) -> torch.Tensor:
            logits = super().forward(chunks, paths)
            row = 0
            for chunk in chunks:
                if chunk.wants_logits:
                    if chunk.sequence == 1 and chunk.logit_rows > 1:
                        logits[row, 3] = torch.nan
                    row += chunk.logit_rows
            return logits

    driver = Driver(Broken().as_ragged())
    answers = [driver.add(request(f"r{i}", PROMPT, 2, prompt_logprobs=0)) for i in range(3)]
    driver.run()
    assert [finished(answer).reason for answer in answers] == [
        FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH,
    ]  # fmt: skip
    assert "no usable logits" in (finished(answers[1]).error or "")
    assert finished(answers[1]).prompt_logprobs is None


def test_a_step_that_fails_is_scored_when_each_request_runs_alone() -> None:
    failed: list[int] = []

    def fails_together(chunks: Sequence[Chunk]) -> None:
        if len(chunks) > 1:
            failed.append(len(chunks))
            raise OSError("together they do not fit")

    driver = Driver(FakeModel(fails_together).as_ragged())
    answers = [driver.add(request(f"r{i}", PROMPT, 2, prompt_logprobs=0)) for i in range(2)]
    driver.run()
    assert failed
    for answer in answers:
        assert same(finished(answer).prompt_logprobs, scores(PROMPT, 0))


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with stand_in(monkeypatch), watched() as watch, torch.inference_mode():
        found = prompt_logprobs(StandInTensor(logits), [1, 2, 3, 4, 5], 2)
    assert len(watch.blocking) == 1, watch.blocking
    assert found == prompt_logprobs(logits, [1, 2, 3, 4, 5], 2)
