"""Every proven family computes on packed experts what transformers computes on its own: to the bit with torch's
products, up to rounding with the compiled ones.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows
from tests.contract.families.pairs import Pairs, logits, prompts
from tests.matrices import matrix
from tests.random_checkpoints import FAMILIES, VOCAB_SIZE

families = pytest.mark.parametrize("family", FAMILIES)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@families
@dtypes
def test_logits_are_those_of_the_eager_model(pairs: Pairs, family: str, dtype: str) -> None:
    pair = pairs.get(family, dtype)
    for ids in (prompts(3, 17), prompts(1, 5, seed=1), prompts(1, 1, seed=2)):
        assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))


@families
def test_compiled_products_differ_by_rounding_alone(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family, "bfloat16", products="auto")
    off = []
    for ids in (prompts(3, 17), prompts(1, 5, seed=1), prompts(1, 1, seed=2)):
        ours, theirs = logits(pair, pair.loaded.model, ids).float(), logits(pair, pair.eager, ids).float()
        off.append(((ours - theirs).square().mean(-1).sqrt() / theirs.std(-1)).flatten())
    rows = torch.cat(off)
    # Of 57 rows a few may pick another expert: in random models some are equally good up to rounding.
    assert (rows < 0.03).float().mean() > 0.9
    assert rows.median() < 0.02
    if pair.loaded.native is None:
        assert rows.max() == 0


def test_which_families_the_compiled_products_know(pairs: Pairs) -> None:
    """Where a change of transformers or of greenroom loses one, its speed would be lost without a word."""
    need_compiled()
    known = {family for family in FAMILIES if pairs.get(family, "bfloat16", products="auto").loaded.native}
    assert known == {family for family in FAMILIES if family != "switch_transformers"}
    assert pairs.get("mixtral", products="auto").loaded.native is None, "float32 is torch's"


def need_compiled() -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@matrix(2, dtype=("float32", "bfloat16"), family=FAMILIES.keys(), products=("torch", "auto"))
def test_the_order_of_arrival_changes_nothing(pairs: Pairs, family: str, dtype: str, products: str) -> None:
    """With four picks a row, where the family can: of two, the sum is the same in either order."""
    changes = {} if family in ("phimoe", "switch_transformers") else {"num_experts_per_tok": 4}
    pair = pairs.get(family, dtype, products=products, **changes)
    ids = prompts(3, 17)
    ascending = logits(pair, pair.loaded.model, ids)
    for seed in range(3):
        pair.source.order = random.Random(seed)
        assert torch.equal(logits(pair, pair.loaded.model, ids), ascending)


@families
@dtypes
def test_generate_gives_the_same_tokens(pairs: Pairs, family: str, dtype: str) -> None:
    pair = pairs.get(family, dtype)
    pair.source.order = random.Random(0)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = prompts(2, 9, seed=3)
    own = pair.loaded.model.generate(ids, **settings)
    assert torch.equal(own, pair.eager.generate(ids, **settings))
    assert len(set(own[:, -12:].flatten().tolist())) > 2, "a model that says one thing proves little"


@families
def test_layers_are_numbered_as_they_run(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    expected = FAMILIES[family]
    logits(pair, pair.loaded.model, prompts(2, 5))
    assert pair.source.events == [(what, n) for n in range(expected.moe_layers) for what in ("entered", "routed")]
    assert [(layer.experts, layer.top_k) for layer in pair.loaded.layers] == [
        (expected.experts, expected.top_k)
    ] * expected.moe_layers
    for picks in pair.source.picks.values():
        assert picks[0].shape[1] == expected.top_k


@families
def test_no_expert_is_left_in_the_model(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    held = sum(parameter.numel() for parameter in pair.loaded.model.parameters())
    whole = sum(parameter.numel() for parameter in pair.eager.parameters())
    experts = sum(
        layer.experts * torch.Size(tensor.shape).numel() for layer in pair.loaded.layers for tensor in layer.tensors
    )
    assert held == whole - experts
    assert not any(parameter.is_meta for parameter in pair.loaded.model.parameters())


def test_float32_of_a_bfloat16_checkpoint(pairs: Pairs, tmp_path: Any) -> None:
    from tests.contract.families.pairs import make_pair

    stored = pairs.get("mixtral", "bfloat16").checkpoint.folder
    pair = make_pair(stored, tmp_path, "float32")
    ids = prompts(2, 9)
    assert pair.loaded.dtype == torch.float32
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_the_callers_choice(pairs: Pairs, attention: str) -> None:
    from greenroom.moe.loading.load_model import load

    loaded = load(pairs.get("mixtral").checkpoint, attn_implementation=attention)
    assert loaded.model.config._attn_implementation == attention


def test_what_a_caller_must_know_of_a_model(pairs: Pairs) -> None:
    loaded = pairs.get("mixtral").loaded
    assert (loaded.eos_token_ids, loaded.max_model_len, loaded.vocab_size) == ((2,), 256, VOCAB_SIZE)
    assert loaded.decoder_only
    assert not pairs.get("switch_transformers").loaded.decoder_only
