"""Every family says what ``generate`` says, also where sequences give up keys and values and compute them again."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.generation import FinishReason
from greenroom.policies.base.answer_lengths import AnswerLengths
from tests.contract.batching.harness import SLIDING, Driver, cases, generate, prompt_of, ragged, request

TOKENS, PROMPTS = 40, 6


class Hopeful(AnswerLengths):
    """Expects one token of every answer, so all are admitted that have room for their prompts."""

    def held_mean(self, task: str) -> float | None:
        return 1.0


def check(family: str, attention: str, **changes: Any) -> None:
    model = ragged(family, attention, **changes)
    prompts = [prompt_of(9 + 3 * i, seed=i) for i in range(PROMPTS)]
    longest = model.layout.nbytes(len(prompts[-1]) + TOKENS)
    d = Driver(model, kv_budget=2 * longest, prefill_chunk=16, lengths=Hopeful())
    answers = [d.add(request(f"r{i}", prompt, TOKENS)) for i, prompt in enumerate(prompts)]
    d.step()
    assert len(d.engine.running) > 2, "more than the memory holds at their ends"
    d.run()
    stats = d.engine.snapshot()
    assert stats.preemptions > 0
    assert 0 < stats.recomputed_rows < stats.rows
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == generate(prompt, TOKENS, family, attention, **changes)
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH


@cases()
def test_the_tokens_of_every_family(family: str, attention: str) -> None:
    check(family, attention)


@pytest.mark.parametrize("family", SLIDING)
def test_the_tokens_under_windows(family: str) -> None:
    check(family, "eager" if family == "gpt_oss" else "sdpa", **SLIDING[family])
