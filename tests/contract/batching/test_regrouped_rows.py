"""A row owns its keys and values: its token is the same in any forward, company and place (ExpertFlow, §3.3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState, Rows
from greenroom.policies.batching.fcfs import planned
from greenroom.policies.batching.rounds import in_admission_order
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from tests.contract.batching.harness import SLIDING, Driver, generate, prompt_of, ragged, recorded, request
from tests.examples import examples

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("sdpa", {}),
    "mixtral, a window": ("sdpa", SLIDING["mixtral"]),
    "qwen2_moe, some windows": ("sdpa", SLIDING["qwen2_moe"]),
    "deepseek_v3": ("sdpa", {}),
    "gpt_oss": ("eager", {}),
}
PROMPTS = [prompt_of(length, 7) for length in (1, 3, 9, 14, 22, 5, 11)]
TOKENS = 8


class Shuffled(BatchPolicy):
    """Each round: the rows that decode in another order, in groups of other sizes; prompts beside any of them."""

    plans_rounds = True

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def decide(self, state: BatchState) -> BatchDecision:
        decoding = [each for each in state.running if not each.prefill_left]
        mixed = [decoding[place] for place in self._random.permutation(len(decoding))]
        groups: list[list[Rows]] = []
        while mixed:
            size = int(self._random.integers(1, min(len(mixed), state.limits.decode_rows) + 1))
            groups += in_admission_order(mixed[:size], size)
            mixed = mixed[size:]
        groups = groups or [[]]
        return planned(state, groups, int(self._random.integers(len(groups))))


class Random(TokenPaths):
    """Foretells anything."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        return self._random.random((len(sequences), 12), dtype=np.float32)

    def end(self, sequence: int) -> None: ...


def answers(family: str, policy: BatchPolicy, **options: Any) -> list[tuple[int, ...]]:
    attention, changes = FAMILIES[family]
    model = ragged(family.split(",")[0], attention, **changes)
    driver = Driver(model, policy=policy, plans_rounds=policy.plans_rounds, **options)
    asked = []
    for place, prompt in enumerate(PROMPTS):
        asked.append(driver.add(request(f"r{place}", prompt, TOKENS)))
        if place % 2:
            driver.step()
    driver.run()
    return [answer.ids for answer in asked]


def alone(family: str) -> list[tuple[int, ...]]:
    attention, changes = FAMILIES[family]
    return [generate(prompt, TOKENS, family.split(",")[0], attention, **changes) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 6), chunk=st.sampled_from([None, 4]))
def test_tokens_are_those_of_the_request_alone_however_rows_are_grouped(
    family: str, seed: int, rows: int, chunk: int | None
) -> None:
    found = answers(family, Shuffled(seed), tokens_per_step=8, rows_per_forward=rows, prefill_chunk=chunk)
    assert found == alone(family)


@pytest.mark.parametrize("force", [False, True])
@settings(max_examples=examples(6), deadline=None)
@given(seed=st.integers(0, 999), rows=st.sampled_from([None, 1, 3]))
def test_the_token_schedulers_groups_change_no_token(force: bool, seed: int, rows: int | None) -> None:
    policy = TokenScheduler(force=force, seed=seed)
    found = answers("mixtral", policy, tokens_per_step=6, max_running=12, rows_per_forward=rows, paths=Random(seed))
    assert found == alone("mixtral")


def test_the_logits_of_a_row_are_equal_to_rounding_in_another_place_of_another_forward() -> None:
    """Two rounds of the same six rows: all in one forward, and turned round in three."""
    model = ragged("mixtral")

    def last(policy: BatchPolicy) -> dict[int, torch.Tensor]:
        driver = Driver(model, policy=policy, tokens_per_step=64, max_running=8, plans_rounds=policy.plans_rounds)
        for place in range(6):
            driver.add(request(f"r{place}", PROMPTS[place], TOKENS))
        driver.step()
        with recorded(model) as seen:
            plans = policy.decide(_state_of(driver)).steps
            driver.step()
        order = [part.sequence for plan in plans for part in plan.rows]
        return dict(zip(order, torch.cat(seen), strict=True))

    class Turned(Shuffled):
        def decide(self, state: BatchState) -> BatchDecision:
            decoding = [each for each in state.running if not each.prefill_left][::-1]
            return planned(state, in_admission_order(decoding, 2))

    one, other = last(TokenScheduler()), last(Turned(0))
    assert one.keys() == other.keys() == set(range(6))
    for number, logits in one.items():
        torch.testing.assert_close(logits, other[number], rtol=1e-4, atol=1e-5)


def _state_of(driver: Driver) -> BatchState:
    engine = driver.engine
    return BatchState((), engine._described.running, engine.kv.free_bytes, engine._limits)
