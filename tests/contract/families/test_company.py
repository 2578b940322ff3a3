"""A row's logits are the same, to the bit, in whatever chunk it comes and whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from tests.compiled import native as native
from tests.contract.families.pairs import Pairs
from tests.random_checkpoints import DECODER_ONLY, VOCAB_SIZE, wide_heads

ROWS = 90
WINDOWS: dict[str, dict[str, object]] = {
    "mixtral": {"sliding_window": 21},
    "qwen3_moe": {"sliding_window": 21, "use_sliding_window": True},
    "gpt_oss": {"sliding_window": 21},
}


pytestmark = pytest.mark.usefixtures("native")


def tokens_of(seed: int, count: int = ROWS) -> list[int]:
    return torch.randint(4, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: RaggedModel, chunks: Sequence[int], company: bool) -> torch.Tensor:
    """``[ROWS, vocabulary]`` of one sequence that comes in chunks of these sizes, in turns."""
    store = KVStore(model.layout, 1 << 26)
    tokens, kv = tokens_of(1), store.reserve(ROWS)
    beside = [(tokens_of(2 + n, 4 * ROWS), store.reserve(4 * ROWS), rows) for n, rows in enumerate((1, 19, 40))]
    found = []
    for turn in range(ROWS):
        rows = min(chunks[turn % len(chunks)], ROWS - kv.length)
        if not rows:
            break
        own = Chunk(0, tokens[kv.length : kv.length + rows], kv, rows > 1, True, rows)
        others = [
            Chunk(1 + n, words[their.length : their.length + count], their, count > 1, False)
            for n, (words, their, count) in enumerate(beside if company else ())
            if their.length + count <= 4 * ROWS
        ]
        step = [*others[: turn % 3], own, *others[turn % 3 :]]
        found.append(model.forward(step))
        for chunk in step:
            chunk.kv.commit(len(chunk.tokens))
    return torch.cat(found)


def ragged(pairs: Pairs, family: str, **changes: object) -> Iterator[RaggedModel]:
    pair = pairs.get(family, "bfloat16", products="auto", **wide_heads(family), **changes)
    model = RaggedModel(pair.loaded.model, native=pair.loaded.native)
    model.source = pair.source
    try:
        assert model.native is not None
        with model.native.without_limits():
            yield model
    finally:
        model.restore()


@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("family", DECODER_ONLY)
def test_a_text_does_not_change_with_company(pairs: Pairs, family: str, windows: bool) -> None:
    if windows and family not in WINDOWS:
        pytest.skip("it has no windows")
    for model in ragged(pairs, family, **(WINDOWS[family] if windows else {})):
        whole = logits_of(model, [ROWS], company=False)
        assert whole.isfinite().all()
        for chunks in ([1], [16], [7, 33, 1], [64]):
            for company in (False, True):
                found = logits_of(model, chunks, company)
                assert torch.equal(found, whole), f"chunks of {chunks}, {company=}"
