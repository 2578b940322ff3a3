"""A thread that moves experts dies of a defect: the batch loop ends, every request has its end and no wrong token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from greenroom.core.errors import ModelBroken
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams
from greenroom.experts.copying.mover import Job, Mover
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop, LoopStopped
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.exactness.models import NEW_TOKENS, PREFETCHING, PROMPTS, Model, tokens_of
from tests.contract.prepared_policies import LITERAL, RandomPaths, prepared_policy, prepared_predictors
from tests.matrices import matrix
from tests.random_checkpoints import save_random

ENDS_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    root = tmp_path_factory.mktemp("dead")
    checkpoint = resolve(str(save_random("mixtral", root / "model", num_experts_per_tok=4)))
    pack = PackFile.open(ensure_pack(checkpoint, "float32", root / "cache"))
    loaded = load(checkpoint, "float32")
    yield Model(checkpoint.folder, loaded, RaggedModel(loaded.model, native=loaded.native), pack)
    pack.close()


def dies_after(mover: Mover, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its threads takes up the next one."""
    begin, left = mover._carrier.begin, jobs

    def counted(job: Job) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise ZeroDivisionError("a defect")
        return begin(job)

    monkeypatch.setattr(mover._carrier, "begin", counted)


@matrix(
    1,
    policy=("lru", "look-ahead", "moe-infinity", "reuse", "duoserve", "expertflow", LITERAL),
    link=("disk", "disk under a host", "host-device"),
)
def test_every_request_has_its_end_and_no_wrong_token(
    model: Model, monkeypatch: pytest.MonkeyPatch, policy: str, link: str
) -> None:
    """The worker ends. Its requests are other workers', where each goes on behind the tokens it had."""
    catalogue = catalogue_of(model.pack.manifest)
    config = EngineConfig(catalogue.size // 3, 0 if link == "disk" else catalogue.size // 4, transfer_timeout_s=60)
    made = prepared_policy(policy, catalogue)
    experts = ExpertEngine(model.pack, catalogue, made, config, predictors=prepared_predictors(made))
    dies_after(experts.movers[link == "host-device"], 3 * catalogue.size, monkeypatch)
    attach(model.loaded, experts)
    model.ragged.source = experts
    paths = RandomPaths(catalogue)
    engine = BatchEngine(
        model.ragged, BatchConfig(kv_budget_bytes=1 << 22, max_running=8), observer=experts, paths=paths
    )
    loop = BatchLoop(engine).start()
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers: list[list[Event]] = [[] for _ in PROMPTS]
    try:
        for place, (prompt, events) in enumerate(zip(PROMPTS, answers, strict=True)):
            loop.submit(GenerationRequest(f"r{place}", tuple(prompt), sampling), events.append)
        loop._thread.join(ENDS_WITHIN_S)
        assert not loop.alive
        assert isinstance(loop.failure, ModelBroken)
        assert policy not in PREFETCHING or experts.counters.prefetches > 0
        for expected, events in zip(model.expected(), answers, strict=True):
            assert isinstance(events[-1], Finished)
            assert (events[-1].reason, events[-1].error) == (FinishReason.FAILED, "the model has failed")
            assert tokens_of(events) == expected[: len(tokens_of(events))]
        assert any(map(tokens_of, answers)), "it died too early to say anything"
        with pytest.raises(LoopStopped, match="the model has failed"):
            loop.submit(GenerationRequest("later", (5, 6), sampling), print)
        with pytest.raises(ModelBroken, match="a mover has died"):
            loop.stop()
    finally:
        experts.close()


def test_it_is_found_out_where_nothing_runs_as_well(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host is filled."""
    catalogue = catalogue_of(model.pack.manifest)
    experts = ExpertEngine(
        model.pack, catalogue, prepared_policy("moe-infinity", catalogue), EngineConfig(catalogue.size // 3, 2)
    )
    dies_after(experts.movers[0], 1, monkeypatch)
    model.ragged.source = experts
    experts.fill_host(range(catalogue.size))
    loop = BatchLoop(BatchEngine(model.ragged, BatchConfig(kv_budget_bytes=1 << 22), observer=experts)).start()
    try:
        loop._thread.join(ENDS_WITHIN_S)
        assert isinstance(loop.failure, ModelBroken)
    finally:
        experts.close()
