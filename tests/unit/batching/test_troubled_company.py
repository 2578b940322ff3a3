"""Everything at once in too little KV memory. Whoever comes to their own end has said what they say alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.generation import Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.moe.attention.kv_memory import KVMemory
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.policies.registry import create_batch_policy, spelt
from tests.contract.batching.harness import Answer, Driver, request
from tests.examples import examples
from tests.unit.batching.test_preemption import ROWS, WIDE, Lengths, Told, WideModel

MODEL_LEN = 100
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((7, 1.5),)}


@dataclass(frozen=True)
class Asked:
    """``cut``: how much of the answer its client has had when it comes. ``stop``: at which token the stop checker ends
    it; 0: it has none. ``fails_at``: in that row, each time.
    """

    prompt: int
    tokens: int | None
    cut: int = 0
    stop: int = 0
    scored: bool = False
    drawn: bool = False
    changed: bool = False
    fails_at: int | None = None

    def request(self, number: int, prefix: tuple[Token, ...] = ()) -> GenerationRequest:
        sampling: dict[str, Any] = {"temperature": 0.8, "seed": number} if self.drawn else {}
        sampling |= PENALTIES if self.changed else {}
        sampling |= {"stop": (str(self.stop),)} if self.stop else {}
        sampling |= {"prompt_logprobs": 2} if self.scored else {}
        made = request(f"r{number}", [(number + 3 * k) % 60 for k in range(self.prompt)], self.tokens, **sampling)  # type: ignore[arg-type]
        return replace(made, prefix=prefix)


class EndsAt:
    """A stop string that is complete with the n-th token. It may not be told more."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.left = int(sampling.stop[0])

    def push(self, token_id: int) -> bool:
        assert self.left > 0, "fed again, or after the end"
        self.left -= 1
        return self.left == 0


class Rest(Answer):
    """The tokens behind those that its client has had."""

    def __init__(self, had: Sequence[Token]) -> None:
        super().__init__(tokens=list(had))


class Troubled(WideModel):
    """Fails with a row of ``fails_at``, and once when ``fails`` is set."""

    def __init__(self) -> None:
        super().__init__(self._before)
        self.fails = False
        self.fails_at: dict[int, int] = {}

    def _before(self, chunks: Sequence[Chunk]) -> None:
        if self.fails and len(chunks) > 1:
            self.fails = False
            raise ValueError("once")
        for chunk in chunks:
            row = self.fails_at.get(chunk.sequence)
            if row is not None and chunk.kv.length <= row < chunk.kv.length + len(chunk.tokens):
                raise ValueError("each time")


def alone(asked: Asked, number: int) -> Answer:
    driver = Driver(WideModel().as_ragged(), max_model_len=MODEL_LEN, stop_checkers=EndsAt)
    answer = driver.add(asked.request(number))
    driver.run()
    return answer


asked = st.builds(
    Asked,
    prompt=st.integers(1, 30),
    tokens=st.none() | st.integers(0, 60),
    cut=st.just(0) | st.integers(0, 70),
    stop=st.just(0) | st.integers(1, 50),
    scored=st.booleans(),
    drawn=st.booleans(),
    changed=st.booleans(),
    fails_at=st.none() | st.none() | st.integers(0, 60),
)
troubles = st.sampled_from(["none", "none", "none", "come", "come", "come", "cancel", "fail", "short"])


@pytest.mark.parametrize("policy", ["fcfs", "phases", "phases:apart=true", "token-scheduler:force=true"])
@settings(max_examples=examples(40), deadline=None)
@given(
    company=st.lists(asked, min_size=2, max_size=9),
    pages=st.integers(13, 26),
    expected=st.floats(1, 50),
    chunk=st.none() | st.integers(1, 9),
    running=st.integers(1, 8),
    script=st.lists(st.tuples(troubles, st.integers(0, 8)), max_size=60),
)
def test_whoever_comes_to_their_own_end_has_said_what_they_say_alone(
    policy: str,
    company: list[Asked],
    pages: int,
    expected: float,
    chunk: int | None,
    running: int,
    script: list[tuple[str, int]],
) -> None:
    name, options = spelt("batching", policy)
    model, told = Troubled(), Told()
    d = Driver(
        model.as_ragged(),
        kv_budget=WIDE.nbytes(pages * ROWS),
        lengths=Lengths(expected),
        policy=create_batch_policy(name, options=options),
        max_model_len=MODEL_LEN,
        max_running=running,
        tokens_per_step=40,
        prefill_chunk=chunk,
        stop_checkers=EndsAt,
        observer=told,
    )
    store, real = d.engine.kv, d.engine.kv._memory
    short = 0

    def memory(rows: int, most: int | None) -> KVMemory:
        nonlocal short
        if short and len(store):
            short -= 1
            raise MemoryError("pretended")
        return real(rows, most)

    store._memory = memory  # type: ignore[method-assign]
    whole = [alone(one, number) for number, one in enumerate(company)]
    answers: list[Answer] = []
    cancelled: set[int] = set()

    def come() -> None:
        number = len(answers)
        had = whole[number].tokens[: company[number].cut]
        answers.append(Rest(had))
        row = company[number].fails_at
        sequence = d.engine.new_sequence(company[number].request(number, tuple(had)), answers[number].take)
        answers[number].number = sequence.number
        if row is not None:
            model.fails_at[sequence.number] = row
        d.engine.add(sequence)
        d.engine.audit()

    def step() -> bool:
        before = list(d.engine.running)
        moved = d.step()
        if before and before[0] not in d.engine.running:
            assert before[0] not in d.engine.waiting, "the one admitted longest ago was preempted"
        return moved

    for trouble, which in script:
        if trouble == "come" and len(answers) < len(company):
            come()
        elif trouble == "cancel" and which < len(answers):
            if answers[which].finished is None:
                cancelled.add(which)
            d.engine.cancel(answers[which].number)
        elif trouble == "fail":
            model.fails = True
        elif trouble == "short":
            short = 1 + which % 3
        step()
    while len(answers) < len(company):
        come()
    for _ in range(5000):
        if not d.engine.busy:
            break
        assert step(), "it stands still"
    assert not d.engine.busy
    assert d.engine.stats.observer_failures == 0
    assert set(told.state.values()) == {"ended"}
    assert store.reserved_bytes == 0
    for number, (one, answer) in enumerate(zip(company, answers, strict=True)):
        said, wanted = answer.finished, whole[number].finished
        assert said is not None
        assert wanted is not None
        assert answer.ids == whole[number].ids[: len(answer.ids)]
        if said.reason is FinishReason.CANCELLED:
            assert number in cancelled
        elif said.reason is FinishReason.FAILED:
            assert one.fails_at is not None
        else:
            assert _same(said, wanted)
            assert answer.ids == whole[number].ids
        assert said.prefilled <= one.prompt + min(one.cut, len(whole[number].ids))


def _same(said: Finished, wanted: Finished) -> bool:
    assert replace(said, prompt_logprobs=None) == replace(wanted, prompt_logprobs=None)
    found, alone = said.prompt_logprobs, wanted.prompt_logprobs
    assert (found is None) == (alone is None)
    for one, other in zip(found or (), alone or (), strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    return True
