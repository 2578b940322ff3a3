"""Whatever the movers do, what comes out is what the fully resident model makes: reads are late at random, fail and are
tried again, or fail for good and take their forward with them. Under every policy, with prefetching on, with and
without a host tier, in fp32 and bf16, by torch's products and by the compiled ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from greenroom.core.errors import TransferFailed
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.copying.transfers import Store
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.replacement.belady import Belady, Future
from tests.contract.exactness.models import NEW_TOKENS, PREFETCHING, PROMPTS, Model, batch_logits, tokens_of
from tests.contract.exactness.troubled_store import TroubledStore
from tests.contract.experts.engines import Recorder
from tests.contract.prepared_policies import EVERY_POLICY, RandomPaths, prepared_policy, prepared_predictors
from tests.random_checkpoints import save_random, wide_heads

ARITHMETICS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "torch"))
READS = (ReadSettings(), ReadSettings(read_bytes=4096, threads=2, depth=2))
MOST_FAILURES = 60
TOP_K = 4  # of two picks the sum is the same in either order


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Model]]:
    """One random Mixtral by dtype and products; the bf16 ones with what they compute when all is resident."""
    made = {}
    for dtype, products in ARITHMETICS:
        root = tmp_path_factory.mktemp(f"{dtype}-{products}")
        changes = {**wide_heads("mixtral"), "num_experts_per_tok": TOP_K}
        folder = save_random("mixtral", root / "model", dtype=getattr(torch, dtype), **changes)
        checkpoint = resolve(str(folder))
        pack = PackFile.open(ensure_pack(checkpoint, dtype, root / "cache"))
        loaded = load(checkpoint, dtype, products=products)
        model = Model(folder, loaded, RaggedModel(loaded.model, native=loaded.native), pack)
        with model.experts("100%", "lru"):
            model.resident_logits = batch_logits(model.ragged)
        made[dtype, products] = model
    yield made
    for model in made.values():
        model.pack.close()


@contextmanager
def running(
    model: Model, policy: ExpertPolicy, store: Store, *, host: bool = False, reads: ReadSettings = READS[0]
) -> Iterator[ExpertEngine]:
    """The model on a third of its experts; afterwards nothing is held."""
    size = policy.catalogue.size
    config = EngineConfig(device_slots=size // 3, host_slots=size // 4 if host else 0, transfer_timeout_s=20)
    engine = ExpertEngine(
        store, policy.catalogue, policy, config, hardware=RealHardware(reads), predictors=prepared_predictors(policy)
    )
    attach(model.loaded, engine)
    model.ragged.source = engine
    try:
        yield engine
        engine.audit_idle()
        assert engine.counters.stall_seconds < 15, "a layer waited though nothing moved"
    finally:
        engine.close()


def cases(*arithmetics: tuple[str, str]) -> list[ParameterSet]:
    """Every policy with a host tier and without, its records read whole and in parts, in each of ``arithmetics``. All
    but one for each policy are ``full``.
    """
    return [
        pytest.param(
            policy, host, READS[(number // 2 + host) % 2], *arithmetic,
            marks=() if (number + host) % 2 and number // 2 % len(arithmetics) == place else pytest.mark.full,
            id="-".join((policy, "host" if host else "device", *(arithmetic if len(arithmetics) > 1 else ()))),
        )
        for place, arithmetic in enumerate(arithmetics)
        for (number, policy), host in product(enumerate(EVERY_POLICY), (False, True))
    ]  # fmt: skip


@pytest.mark.parametrize(("policy", "host", "reads", "dtype", "products"), cases(*ARITHMETICS))
def test_logits_are_those_of_the_resident_model_to_the_bit(
    models: dict[tuple[str, str], Model],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    host: bool,
    reads: ReadSettings,
    dtype: str,
    products: str,
) -> None:
    """A forward that fails is run again on the same KV, as the batch loop does; half of the experts make one fail."""
    model = models[dtype, products]
    store = TroubledStore(model.pack, lambda layer, expert: (layer + expert) % 2 == 0, seed=len(policy) + host)
    catalogue = catalogue_of(model.pack.manifest)
    failed: list[str] = []
    with running(model, prepared_policy(policy, catalogue), store, host=host, reads=reads) as experts:
        forward = model.ragged.forward

        def until_it_works(chunks: list[Chunk], *paths: Any) -> torch.Tensor:
            while True:
                try:
                    return forward(chunks, *paths)
                except TransferFailed as error:
                    failed.append(str(error))
                    experts.audit(idle=True)
                    assert len(failed) < MOST_FAILURES

        monkeypatch.setattr(model.ragged, "forward", until_it_works)
        logits = batch_logits(model.ragged)
        assert failed
        assert store.made_good > 0
        assert all("injected for good" in message for message in failed), "no layer waits until its deadline"
        assert experts.counters.evictions > 0
        assert policy not in PREFETCHING or experts.counters.prefetches > 0
    for step, (ours, resident) in enumerate(zip(logits, model.resident_logits, strict=True)):
        assert torch.equal(ours, resident), f"step {step}"


@pytest.mark.parametrize(("policy", "host", "reads", "dtype", "products"), cases(("float32", "auto")))
def test_requests_fail_alone_and_the_others_get_generates_tokens(
    models: dict[tuple[str, str], Model], policy: str, host: bool, reads: ReadSettings, dtype: str, products: str
) -> None:
    """fp32: a request without a lost expert has the tokens of transformers' own generate; one with such has their
    beginning; asked again it gets all of them.
    """
    model = models[dtype, products]
    store = TroubledStore(model.pack, lambda layer, expert: (layer, expert) in ((0, 3), (1, 2), (2, 5)), seed=host)
    catalogue = catalogue_of(model.pack.manifest)
    with running(model, prepared_policy(policy, catalogue), store, host=host, reads=reads) as experts:
        engine = BatchEngine(
            model.ragged,
            BatchConfig(kv_budget_bytes=1 << 22, tokens_per_step=16, prefill_chunk=6, max_running=8),
            observer=experts,
            paths=RandomPaths(experts.catalogue),
        )

        def ask(place: int) -> list[Event]:
            events: list[Event] = []
            sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            request = GenerationRequest(f"r{place}", tuple(PROMPTS[place]), sampling)
            engine.add(engine.new_sequence(request, events.append))
            return events

        def finish() -> None:
            while engine.busy:
                assert engine.step()
                engine.audit()
                experts.audit(idle=True)

        answers = []
        for place in range(len(PROMPTS)):
            answers.append(ask(place))
            engine.step()
        finish()
        assert experts.counters.failed_transfers > 0
        expected = model.expected()
        again = []
        for place, events in enumerate(answers):
            assert tokens_of(events) == expected[place][: len(tokens_of(events))]
            match events[-1]:
                case Finished(reason=FinishReason.LENGTH):
                    assert len(tokens_of(events)) == NEW_TOKENS
                case Finished(reason=FinishReason.FAILED, error=error):
                    assert error is not None
                    assert "injected for good" in error
                    again.append(place)
                case other:
                    pytest.fail(f"ended with {other}")
        assert len(again) < len(PROMPTS)
        second = {place: ask(place) for place in again}
        finish()
        assert {place: tokens_of(events) for place, events in second.items()} == {n: expected[n] for n in again}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("dtype", "products"), ARITHMETICS)
def test_the_oracle_runs_a_recorded_stream_again_to_the_bit(
    models: dict[tuple[str, str], Model], dtype: str, products: str, ahead: int
) -> None:
    """Belady's policy with its future, on the model itself; its name alone has none and is LRU."""
    model = models[dtype, products]
    recorder = Recorder()
    with model.experts("100%", "lru") as resident:
        resident.listener = recorder
        batch_logits(model.ragged)
    catalogue = catalogue_of(model.pack.manifest)
    oracle = Belady(catalogue, future=Future.of_picks(catalogue, recorder.picks), ahead=ahead)
    store = TroubledStore(model.pack, lambda layer, expert: False, seed=ahead)
    with running(model, oracle, store, reads=READS[1]) as experts:
        logits = batch_logits(model.ragged)
        assert oracle.departures == 0
        assert experts.counters.evictions > 0
        assert bool(experts.counters.prefetches_used) == bool(ahead)
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, model.resident_logits, strict=True))
