"""Random checkpoints: packed, run on a budget, and beside it what transformers makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from greenroom.core.generation import Event, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.load_model import LoadedMoE, attach
from tests.contract.prepared_policies import (
    LITERAL,
    LITERAL_FLOW,
    RandomPaths,
    prepared_policy,
    prepared_predictors,
)

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [30, 20, 10], [40, 41] * 11, [77], [200, 3, 150, 99, 98, 97, 96])
NEW_TOKENS = 10
PREFETCHING = (
    LITERAL, LITERAL_FLOW, "expertflow", "look-ahead", "moe-infinity", "next-layer", "top-k", "traced-top-k",
)  # fmt: skip
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
        made = prepared_policy(policy, catalogue)
        engine = ExpertEngine(
            self.pack, catalogue, made, EngineConfig(device_slots=slots), predictors=prepared_predictors(made)
        )
        attach(self.loaded, engine)
        self.ragged.source = engine
        try:
            yield engine
            engine.audit(idle=True)
        finally:
            engine.close()


def logits_of(ragged: RaggedModel, tokens: list[int]) -> torch.Tensor:
    """Of every position."""
    store = KVStore(ragged.layout, ragged.layout.nbytes(len(tokens)))
    kv = store.reserve(len(tokens))
    chunk = Chunk(0, tokens, kv, prefill=True, wants_logits=True, logit_rows=len(tokens))
    return ragged.forward([chunk]).float().clone()


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
        logits.append(ragged.forward(chunks, paths_of(ragged, chunks)).clone())
        for chunk in chunks:
            chunk.kv.commit(len(chunk.tokens))
    return logits


def paths_of(ragged: RaggedModel, chunks: list[Chunk]) -> NDArray[np.float32] | None:
    """Random ones of these rows; None where no policy would hear of them."""
    if not isinstance(ragged.source, ExpertEngine):
        return None
    rows = [
        (chunk.sequence, chunk.kv.length + row, token) for chunk in chunks for row, token in enumerate(chunk.tokens)
    ]
    sequences, positions, tokens = np.array(rows, dtype=np.int64).T
    return RandomPaths(ragged.source.catalogue).chances(sequences, positions, tokens)


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]
