"""The output is that of the fully resident model, whatever the family, the budget and the policy.

fp32: greedy tokens equal transformers' own ``generate`` with eager experts, while requests join, leave and are
cancelled. bf16: the logits of the same batch are bit-identical. `make test` runs every pair of two of dtype, family,
budget and policy at least once; `make test-full` all combinations.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet

from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from tests.contract.exactness.models import NEW_TOKENS, PREFETCHING, PROMPTS, Model, batch_logits
from tests.contract.prepared_policies import EVERY_POLICY, RandomPaths
from tests.random_checkpoints import DECODER_ONLY

BUDGETS = ("100%", "33%", "smallest")


def combinations(dtype: int) -> list[ParameterSet]:
    """All of them; those beyond a pairwise cover are marked ``full``. ``dtype``: 0 or 1, of the two that there are."""
    chosen = []
    for (f, family), (b, budget), (p, policy) in product(
        enumerate(DECODER_ONLY), enumerate(BUDGETS), enumerate(EVERY_POLICY)
    ):
        marks = () if (f + b + p) % 3 == 0 and (f + p) % 2 == dtype else (pytest.mark.full,)
        chosen.append(pytest.param(family, budget, policy, marks=marks, id=f"{family}-{budget}-{policy}"))
    return chosen


@pytest.mark.parametrize(("family", "budget", "policy"), combinations(dtype=0))
def test_fp32_greedy_tokens_equal_generate(
    models: dict[tuple[str, str], Model], family: str, budget: str, policy: str
) -> None:
    """Requests join at different steps, in chunks; one is cancelled midway; the others never notice."""
    model = models[family, "float32"]
    with model.experts(budget, policy) as experts:
        engine = BatchEngine(
            model.ragged,
            BatchConfig(kv_budget_bytes=1 << 22, tokens_per_step=16, prefill_chunk=6, max_running=8),
            observer=experts,
            paths=RandomPaths(experts.catalogue),
        )
        events: list[list[Event]] = [[] for _ in PROMPTS]
        numbers = []
        for place, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            request = GenerationRequest(f"r{place}", tuple(prompt), sampling, task_type="question")
            sequence = engine.new_sequence(request, events[place].append)
            engine.add(sequence)
            numbers.append(sequence.number)
            engine.step()
            engine.step()
        engine.cancel(numbers[2])
        while engine.busy:
            assert engine.step()
            experts.audit(idle=True)
        engine.audit()
        expected = model.expected()
        for place, own in enumerate(events):
            tokens = [event.token_id for event in own if isinstance(event, Token)]
            end = own[-1]
            assert isinstance(end, Finished)
            assert end.reason is (FinishReason.CANCELLED if place == 2 else FinishReason.LENGTH)
            assert tokens == expected[place][: len(tokens)]
            assert len(tokens) == NEW_TOKENS or place == 2
        assert experts.counters.lookups > 0
        assert budget == "100%" or experts.counters.evictions > 0, "the budget was never felt"
        assert budget != "33%" or policy not in PREFETCHING or experts.counters.prefetches > 0, "nothing was prefetched"


@pytest.mark.parametrize(("family", "budget", "policy"), combinations(dtype=1))
def test_bf16_logits_are_bit_identical(
    models: dict[tuple[str, str], Model], family: str, budget: str, policy: str
) -> None:
    model = models[family, "bfloat16"]
    if not model.resident_logits:
        with model.experts("100%", "lru"):
            model.resident_logits = batch_logits(model.ragged)
    with model.experts(budget, policy):
        logits = batch_logits(model.ragged)
    for step, (ours, resident) in enumerate(zip(logits, model.resident_logits, strict=True)):
        assert torch.equal(ours, resident), f"step {step}"
