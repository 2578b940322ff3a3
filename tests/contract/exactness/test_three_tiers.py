"""The output is that of the fully resident model while experts are brought to the host tier ahead of need as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from greenroom.core.generation import Event, GenerationRequest, SamplingParams, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.loading.load_model import attach
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.registry import create_policy
from tests.contract.exactness.models import NEW_TOKENS, PROMPTS, Model, batch_logits
from tests.contract.exactness.troubled_store import TroubledStore
from tests.contract.experts.engines import POLICIES
from tests.contract.prepared_policies import RandomPaths, prepared_policy

WANTING: dict[str, Callable[[Catalogue], ExpertPolicy]] = {
    "next-use": lambda catalogue: create_policy("next-use", catalogue=catalogue, options={"host": True}),
    "decayed": lambda catalogue: create_policy("decayed", catalogue=catalogue, options={"host": True}),
    "moe-infinity": lambda catalogue: prepared_policy("moe-infinity", catalogue),
    "restless-host": POLICIES["restless-host"],
}
every_case = pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("mixtral", "next-use"),
        ("mixtral", "restless-host"),
        ("mixtral", "moe-infinity"),
        ("qwen3_moe", "decayed"),
        pytest.param("qwen3_moe", "restless-host", marks=pytest.mark.full),
        pytest.param("gpt_oss", "next-use", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "restless-host", marks=pytest.mark.full),
    ],
)


@contextmanager
def on_three_tiers(model: Model, policy: str) -> Iterator[ExpertEngine]:
    """A quarter of the experts on the device and as many on the host; reads are late, and fail once now and then."""
    catalogue = catalogue_of(model.pack.manifest)
    slots = max(int(catalogue.top_k.max()), catalogue.size // 4)
    store = TroubledStore(model.pack, lambda layer, expert: False, seed=3)
    config = EngineConfig(device_slots=slots, host_slots=slots, transfer_timeout_s=20)
    engine = ExpertEngine(store, catalogue, WANTING[policy](catalogue), config)
    if (order := engine.policy.fill_order()) is not None:
        engine.preload(order.tolist())
        engine.fill_host(order.tolist())
    attach(model.loaded, engine)
    model.ragged.source = engine
    try:
        yield engine
        engine.audit_idle()
        counters = engine.counters
        assert counters.evictions > 0
        assert counters.host_prefetches > 0
        assert counters.host_prefetches_used + counters.host_prefetches_wasted <= counters.host_prefetches
        assert store.made_good > 0
    finally:
        engine.close()


@every_case
def test_bf16_logits_are_bit_identical(models: dict[tuple[str, str], Model], family: str, policy: str) -> None:
    model = models[family, "bfloat16"]
    with model.experts("100%", "lru"):
        resident = batch_logits(model.ragged)
    with on_three_tiers(model, policy):
        logits = batch_logits(model.ragged)
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, resident, strict=True))


@every_case
def test_fp32_greedy_tokens_equal_generate(models: dict[tuple[str, str], Model], family: str, policy: str) -> None:
    model = models[family, "float32"]
    with on_three_tiers(model, policy) as experts:
        engine = BatchEngine(
            model.ragged,
            BatchConfig(kv_budget_bytes=1 << 22, tokens_per_step=16, prefill_chunk=6, max_running=8),
            observer=experts,
            paths=RandomPaths(experts.catalogue),
        )
        answers: list[list[Event]] = [[] for _ in PROMPTS]
        for place, (prompt, events) in enumerate(zip(PROMPTS, answers, strict=True)):
            sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            engine.add(engine.new_sequence(GenerationRequest(f"r{place}", tuple(prompt), sampling), events.append))
            engine.step()
        while engine.busy:
            assert engine.step()
            engine.audit()
            experts.audit(idle=True)
        tokens = [[event.token_id for event in events if isinstance(event, Token)] for events in answers]
        assert tokens == model.expected()
