"""On a real GPU: what test_accelerator shows of the order, and that no step waits for the whole device."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from greenroom import LLM, SamplingParams
from greenroom.experts.copying.cuda import accelerator_of
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.layout import PackLayer, PackManifest, RecordLayout
from greenroom.moe.formats.expert_format import Expander
from greenroom.moe.kernels.expert_ring import ExpertRing, expander_for
from greenroom.moe.routing.expert_mlp import ExpertMlpProvider
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import LayerRouting, Phase, Prediction, PredictionRequest, Step
from greenroom.policies.duoserve.literal import EXPERT_MLP
from tests.contract.experts.engines import POLICIES, READS
from tests.contract.prepared_policies import mlp_file
from tests.unit.experts.fakes import FakeStore
from tests.unit.kernels.stored_experts import STORED, same_bits, stored_experts

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]

LAYERS, EXPERTS, TOP_K = 3, 8, 2
RECORD = RecordLayout.of([("w", (1024, 1023), "float32")])  # 4 MB: a copy takes longer than its launch
MANIFEST = PackManifest(
    "fake", "float32", "digest", tuple(PackLayer(f"layers.{n}", EXPERTS, TOP_K, RECORD) for n in range(LAYERS))
)


@pytest.fixture
def no_device_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a step synchronised the whole device")

    monkeypatch.setattr(torch.cuda, "synchronize", refused)


@pytest.mark.usefixtures("no_device_synchronisation")
@pytest.mark.parametrize("host_slots", [0, 4, LAYERS * EXPERTS])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("policy", ["lru", "restless"])
def test_computation_finds_its_experts(policy: str, reads: str, host_slots: int) -> None:
    accelerator = accelerator_of("cuda")
    assert accelerator is not None
    catalogue = catalogue_of(MANIFEST)
    # The restless policy of the contract draws for its own catalogue, so any model will do.
    engine = ExpertEngine(
        FakeStore(MANIFEST),
        catalogue,
        POLICIES[policy](catalogue),
        EngineConfig(device_slots=5, host_slots=host_slots),
        hardware=RealHardware(READS[reads], accelerator),
    )
    noise = np.random.default_rng(3)
    wrong = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    try:
        for _ in range(20):
            rows = np.zeros(3, dtype=np.int64)
            with engine.step(rows, rows == 0):
                for layer in range(LAYERS):
                    picks = np.stack([noise.permutation(EXPERTS)[:TOP_K] for _ in rows])
                    engine.layer_entered(layer)
                    with engine.routed(layer, picks) as landing:
                        for expert, (weights,) in landing:
                            for _ in range(5):  # the slot is read for a while after it was handed out
                                wrong += (weights != 100.0 * layer + expert).sum()
                    engine.audit(idle=True)
        assert wrong.item() == 0
        assert engine.counters.on_demand_fetches > 0
    finally:
        engine.close()


@pytest.mark.usefixtures("no_device_synchronisation")
@pytest.mark.parametrize("host", ["0%", "100%"])
def test_the_bundled_model_answers_alike_with_all_and_a_quarter_of_its_experts(host: str) -> None:
    prompts = ["compare 3 and 5", "classify: a good day", "reverse a b c"]
    sampling = SamplingParams(temperature=0, max_tokens=16)
    texts = []
    for memory in ("100%", "25%"):
        with LLM(device="cuda", expert_memory=memory, host_memory=host, warm_start=False) as llm:
            texts.append([completion.text for completion in llm.generate(prompts, sampling, progress=False)])
            assert llm.worker.experts.device.slots * 4 >= llm.worker.plan.experts
            assert "cuda" in llm.worker.describe()
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("no_device_synchronisation")
def test_networks_compute_beside_the_model_and_are_polled() -> None:
    """The answer is the CPU's up to rounding; it comes though the compute queue is busy; versions follow each other."""
    accelerator = accelerator_of("cuda")
    assert accelerator is not None
    catalogue = catalogue_of(MANIFEST)
    step = Step("fake", 1, np.arange(2), np.full(2, Phase.DECODE, dtype=np.uint8))
    for seed in (0, 1):
        here, there = ExpertMlpProvider(catalogue), ExpertMlpProvider(catalogue, accelerator)
        file = mlp_file([EXPERTS] * LAYERS, TOP_K, seed=seed)
        expected: Prediction | None = None
        for provider in (here, there):
            provider.on_artifact_swapped(artifact_of(catalogue, file, "random"))
            provider.on_step_started(step)
            provider.on_layer_routed(LayerRouting.from_picks(catalogue, step, 0, np.array([[0, 3], [5, 1]])))
            asked = PredictionRequest(EXPERT_MLP, (1, 2), step=1)
            found = provider.answer(asked)
            assert (found is None) == (provider is there)
            expected = expected or found
        deadline = time.monotonic() + 30
        while (found := there.poll()) is None:
            assert time.monotonic() < deadline
        assert expected is not None
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-2, atol=1e-2)
        assert there.poll() is None


@pytest.mark.parametrize("name", STORED)
def test_triton_expands_records_to_the_bit(name: str) -> None:
    """Of slots of one arena, several in a launch; torch's own expansion on the same GPU says what is right."""
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        own, layer, records = stored_experts(name, 544, 96, dtype, count=6)
        ring = expander_for(own, layer, device)
        assert isinstance(ring, ExpertRing), "the log says why torch expands"
        layout = own.record(layer)
        arena = torch.randint(0, 256, (len(records), layout.nbytes), dtype=torch.uint8, device=device)
        slots = [layout.views(arena[number]) for number in torch.randperm(len(records)).tolist()]
        for slot, record in zip(slots, records, strict=True):
            for view, part in zip(slot, record, strict=True):
                view.copy_(part)
        by_torch = Expander(own, layer)
        for _ in range(3):  # a launch overwrites what the one before has made
            one = ring.for_layer(partial(list, slots))
            for slot in slots:
                assert same_bits(one(slot), by_torch(slot))
