"""Steps of single rows through the lean decoder are those through the family's modules, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from tests.compiled import native as native
from tests.contract.families.pairs import Pair, Pairs
from tests.contract.families.sources import random_masks
from tests.random_checkpoints import DECODER_ONLY, VOCAB_SIZE, wide_heads

LEAN = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}
LEAN_BLOCKS = LEAN - {"qwen2_moe"}  # that has a shared expert
STEPS = 12


pytestmark = pytest.mark.usefixtures("native")


def ragged(pairs: Pairs, family: str) -> RaggedModel:
    pair = wide(pairs, family)
    model = RaggedModel(pair.loaded.model, native=pair.loaded.native)
    model.source = pair.source
    return model


def wide(pairs: Pairs, family: str) -> Pair:
    return pairs.get(family, "bfloat16", products="auto", **wide_heads(family))


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_which_families_have_one(pairs: Pairs, family: str) -> None:
    """Where a change of transformers loses one, its speed would be lost without a word."""
    model = ragged(pairs, family)
    try:
        assert (model.lean is not None) == (family in LEAN)
        if model.lean is not None:
            assert {layer.block is not None for layer in model.lean._layers} == {family in LEAN_BLOCKS}
    finally:
        model.restore()


@pytest.mark.parametrize("family", sorted(LEAN))
def test_three_sequences_decode_the_same(pairs: Pairs, family: str) -> None:
    """Their rows join at different lengths; the experts are asked for alike, layer after layer."""
    model = ragged(pairs, family)
    try:
        results, events = [], []
        lean = model.lean
        for way in (lean, None):
            model.lean = way
            pair = wide(pairs, family)
            store = KVStore(model.layout, 1 << 22)
            kvs = [store.reserve(40) for _ in range(3)]
            tokens = torch.randint(4, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
            for n, kv in enumerate(kvs):
                model.forward([Chunk(n, tokens[n][: 3 + 5 * n], kv, prefill=True, wants_logits=True)])
                kv.commit(3 + 5 * n)
            logits = []
            for step in range(STEPS):
                some = range(3) if step % 3 else range(2)
                chunks = [Chunk(n, [tokens[n][kvs[n].length]], kvs[n], False, wants_logits=n != 1) for n in some]
                logits.append(model.forward(chunks))
                for chunk in chunks:
                    chunk.kv.commit(1)
            results.append(torch.cat(logits))
            events.append(list(pair.source.events))
        assert torch.equal(*results)
        assert len(results[0]) == sum(2 if step % 3 else 1 for step in range(STEPS))
        assert events[0] == events[1]
    finally:
        model.restore()


@pytest.mark.parametrize("family", sorted(LEAN_BLOCKS))
def test_rows_under_masks_keep_to_them_in_compiled_layers(pairs: Pairs, family: str) -> None:
    """Beside the modules under the same masks: the logits are close in bf16, unless a pick was nearly a tie."""
    model = ragged(pairs, family)
    pair = wide(pairs, family)
    layers = pair.loaded.layers
    assert model.lean is not None
    assert model.native is not None
    rows = min(6, model.native.limits.prompt)  # more go through torch where that has instructions for bf16
    pair.source.masks = {n: random_masks(rows, layer.experts, layer.top_k, seed=n) for n, layer in enumerate(layers)}
    tokens = torch.randint(4, VOCAB_SIZE, (rows,), generator=torch.Generator().manual_seed(3)).tolist()
    results = []
    try:
        lean = model.lean
        for way in (lean, None):
            model.lean = way
            pair.source.picks.clear()
            with pytest.MonkeyPatch.context() as patch:
                if way is not None:
                    for layer in way._layers:
                        assert layer.block is not None
                        patch.setattr(layer.block._block, "forward", None)  # compiled, or it fails
                kv = KVStore(model.layout, 1 << 20).reserve(8)
                results.append(model.forward([Chunk(0, tokens, kv, prefill=True, wants_logits=True)]))
            for number, mask in pair.source.masks.items():
                (picks,) = pair.source.picks[number]
                assert np.take_along_axis(mask, picks, axis=1).all()
        lean_logits, expected = results
        assert torch.allclose(lean_logits.float(), expected.float(), rtol=0.1, atol=0.1)
    finally:
        model.restore()


def test_a_full_reservation_is_refused_before_anything_is_written(pairs: Pairs) -> None:
    model = ragged(pairs, "mixtral")
    try:
        kv = KVStore(model.layout, 1 << 20).reserve(2)
        model.forward([Chunk(0, [5, 6], kv, prefill=True, wants_logits=True)])
        kv.commit(2)
        with pytest.raises(ValueError, match="do not fit"):
            model.forward([Chunk(0, [7], kv, prefill=False, wants_logits=True)])
    finally:
        model.restore()
