"""The output is that of the fully resident model, whatever the family, the budget and the policy.

fp32: greedy tokens equal transformers' own ``generate`` with eager experts, while requests join, leave and are
cancelled. bf16: the logits of the same batch are bit-identical. `make test` runs every pair of (family, budget),
(family, policy) and (budget, policy) at least once; `make test-full` all combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet

from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_engine import BatchConfig, BatchEngine
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import LoadedMoE, attach, load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.policies.registry import EXPERT_POLICIES
from tests.prepared_policies import prepared_policy
from tests.random_checkpoints import DECODER_ONLY, save_random, wide_heads

BUDGETS = ("100%", "33%", "smallest")
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [30, 20, 10], [40, 41] * 11, [77], [200, 3, 150, 99, 98, 97, 96])
NEW_TOKENS = 10
PREFETCHING = ("look-ahead", "moe-infinity", "next-layer", "top-k", "traced-top-k")
TOP_K = 4  # of two picks the sum is the same in either order


@dataclass
class Model:
    """One family's random checkpoint: packed, loaded without experts, and what transformers makes of it."""

    folder: Path
    loaded: LoadedMoE
    ragged: RaggedModel
    pack: PackFile
    resident_logits: list[torch.Tensor] = field(default_factory=list)

    @cache  # noqa: B019 - lives as long as the module's fixture
    def expected(self) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.loaded.dtype, experts_implementation="eager"
        )
        texts = []
        for prompt in PROMPTS:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            texts.append(ids[0, len(prompt) :].tolist())
        return texts

    def __hash__(self) -> int:
        return id(self)

    @contextmanager
    def experts(self, budget: str, policy: str) -> Iterator[ExpertEngine]:
        """The model on a budget; the engine is audited and closed on the way out."""
        catalogue = catalogue_of(self.pack.manifest)
        slots = {"100%": catalogue.size, "33%": catalogue.size // 3, "smallest": int(catalogue.top_k.max())}[budget]
        engine = ExpertEngine(
            self.pack, catalogue, prepared_policy(policy, catalogue), EngineConfig(device_slots=slots)
        )
        attach(self.loaded, engine)
        self.ragged.source = engine
        try:
            yield engine
            engine.audit(idle=True)
        finally:
            engine.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Model]]:
    made: dict[tuple[str, str], Model] = {}

    class Made(dict[tuple[str, str], Model]):
        def __missing__(self, key: tuple[str, str]) -> Model:
            family, dtype = key
            root = tmp_path_factory.mktemp(f"{family}-{dtype}")
            changes = wide_heads(family) if dtype == "bfloat16" else {}  # so that all that is compiled takes part
            if family != "phimoe":  # which picks two, whatever its configuration says
                changes["num_experts_per_tok"] = TOP_K
            checkpoint = resolve(str(save_random(family, root / "model", dtype=getattr(torch, dtype), **changes)))
            pack = PackFile.open(ensure_pack(checkpoint, dtype, root / "cache"))
            loaded = load(checkpoint, dtype)
            ragged = RaggedModel(loaded.model, native=loaded.native)
            made[key] = self[key] = Model(checkpoint.folder, loaded, ragged, pack)
            return made[key]

    yield Made()
    for model in made.values():
        model.pack.close()


def combinations() -> list[ParameterSet]:
    """All of them; those beyond a pairwise cover are marked ``full``."""
    chosen = []
    for (f, family), (b, budget), (p, policy) in product(
        enumerate(DECODER_ONLY), enumerate(BUDGETS), enumerate(sorted(EXPERT_POLICIES))
    ):
        marks = () if (f + b + p) % 3 == 0 else (pytest.mark.full,)
        chosen.append(pytest.param(family, budget, policy, marks=marks, id=f"{family}-{budget}-{policy}"))
    return chosen


@pytest.mark.parametrize(("family", "budget", "policy"), combinations())
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


@pytest.mark.parametrize(("family", "budget", "policy"), combinations())
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


def batch_logits(ragged: RaggedModel) -> list[torch.Tensor]:
    """A fixed batch: prompts of several lengths, then three decode steps of fixed tokens."""
    store = KVStore(ragged.layout, sum(ragged.layout.nbytes(len(prompt) + 4) for prompt in PROMPTS))
    kvs = [store.reserve(len(prompt) + 4) for prompt in PROMPTS]
    feeds = [PROMPTS, *([[(13 * step + 7 * n) % 250] for n in range(len(PROMPTS))] for step in range(3))]
    logits = []
    for step, tokens in enumerate(feeds):
        chunks = [
            Chunk(n, list(rows), kv, prefill=step == 0, wants_logits=True)
            for n, (rows, kv) in enumerate(zip(tokens, kvs, strict=True))
        ]
        logits.append(ragged.forward(chunks).clone())
        for chunk in chunks:
            chunk.kv.commit(len(chunk.tokens))
    return logits
