"""Attention with sinks in families beside gpt-oss: by whom it is computed, and that what is said of it is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from greenroom.moe.attention import ragged_attention
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward import batch_invariance
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows
from tests.contract.families.pairs import make_pair
from tests.contract.families.registry_families import save_tiny

WIDE = {"head_dim": 32, "v_head_dim": 32}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    # Sinks in the layers with windows alone: the others hand none to the attention function.
    "mimo_v2_flash": ({**WIDE, "sliding_window": 8, "layer_types": SLIDING_AND_FULL}, True),
    # Its sinks stay in fp32, which the compiled attention does not read.
    "flint": ({"head_dim": 32, "sliding_window": 8}, False),
}
ROWS = 40


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_with_sinks(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    if family not in CONFIG_MAPPING:
        pytest.skip("the installed transformers does not have it")
    changes, compiled = FAMILIES[family]
    pair = make_pair(save_tiny(family, tmp_path / "model", **changes), tmp_path / "cache", "bfloat16", products="auto")
    tokens = torch.randint(4, 250, (ROWS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = pair.eager(input_ids=torch.tensor([tokens])).logits[0].float()
    model = RaggedModel(pair.loaded.model, native=pair.loaded.native)
    model.source = pair.source
    by_torch: list[torch.nn.Module] = []
    own = ragged_attention.own_attention

    def seen(module: torch.nn.Module) -> ragged_attention.AttentionFunction:
        by_torch.append(module)
        return own(module)

    monkeypatch.setattr(ragged_attention, "own_attention", seen)
    try:
        assert model.native is not None
        model.native.remove_limits()
        kv = KVStore(model.layout, 1 << 24).reserve(ROWS)
        found = model.forward([Chunk(0, tokens, kv, True, True, ROWS)]).float()
        why_not = batch_invariance.why_not(pair.loaded, model)
    finally:
        model.restore()
    off = (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)
    assert float(off.median()) < 0.1
    assert (not by_torch) == compiled == model.attention_compiled
    assert why_not == (None if compiled else "torch computes its attention")
