"""Rows of a chunk that attend in parts, to save memory, come out as if all did at once: to the bit."""

from __future__ import annotations

import pytest
import torch

from greenroom.moe.attention import ragged_attention
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk, rows_at_once
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.forward.ragged_probe import experts_bypassed
from tests.contract.families.conftest import pairs as pairs
from tests.contract.families.pairs import Pairs

BEFORE, ROWS = 70, 90


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "attention"), [("gpt_oss", None), ("mixtral", "eager"), ("deepseek_v3", "sdpa"), ("mixtral", "sdpa")]
)
def test_parts_are_the_whole(
    pairs: Pairs, family: str, attention: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs.get(family, dtype)
    model = RaggedModel(pair.loaded.model, attention=attention)
    calls: list[int] = []
    own = ragged_attention.own_attention

    def counted(module: torch.nn.Module) -> ragged_attention.AttentionFunction:
        function = own(module)

        def call(*arguments: torch.Tensor, **options: object) -> object:
            calls.append(arguments[1].shape[2])
            return function(*arguments, **options)

        return call  # type: ignore[return-value]

    monkeypatch.setattr(ragged_attention, "own_attention", counted)
    results = []
    try:
        for at_once in (1 << 40, 1):
            monkeypatch.setattr(ragged_attention, "SCORES_AT_ONCE", at_once)
            kv = KVStore(model.layout, 1 << 24).reserve(BEFORE + ROWS)
            tokens = torch.randint(4, 250, (BEFORE + ROWS,), generator=torch.Generator().manual_seed(2)).tolist()
            with experts_bypassed(pair.loaded.model):
                model.forward([Chunk(0, tokens[:BEFORE], kv, True, False)])
                kv.commit(BEFORE)
                calls.clear()
                results.append(model.forward([Chunk(0, tokens[BEFORE:], kv, True, True, ROWS)]))
        if model.attention == "eager":
            assert set(calls) == {16, ROWS % 16}
    finally:
        model.restore()
    assert torch.equal(*results)


def test_short_contexts_never_come_to_parts() -> None:
    assert rows_at_once(256, 8192, 32, 2) == 256
    assert rows_at_once(512, 131_072, 64, 2) == 16
    assert rows_at_once(512, 40_000, 64, 2) % 16 == 0
    assert rows_at_once(5, 1 << 30, 64, 2) == 5
