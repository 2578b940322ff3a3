"""A model whose dense layers stay as they are stored: its texts, its start and its card."""

from __future__ import annotations

from pathlib import Path

import torch

from greenroom import LLM, SamplingParams
from greenroom.moe.native.rows import NativeRows
from greenroom.worker.model.card import card_of
from tests.compiled import native as native
from tests.fp8_checkpoints import to_fp8
from tests.random_checkpoints import save_random


def test_texts_are_the_same_at_any_budget_and_the_card_is_another(native: NativeRows, tmp_path: Path) -> None:
    plain = save_random(
        "qwen3_moe", tmp_path / "plain", dtype=torch.bfloat16, tokenizer=True, hidden_size=128, head_dim=32
    )
    folder = to_fp8(plain, tmp_path / "model")
    prompts = [[(7 * n + 3 * i) % 250 + 4 for i in range(5 + 9 * n)] for n in range(4)]
    texts, digests = {}, {}
    for budget, dense_as in (("100%", "stored"), ("33%", "auto"), ("100%", "expanded")):
        with LLM(
            str(folder), cache_dir=tmp_path, expert_memory=budget, dense_as=dense_as, compiled_rows="512",
            policy="lru", warm_start=False, progress=False,
        ) as llm:  # fmt: skip
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            texts[budget, dense_as] = [one.token_ids for one in found]
            digests[budget, dense_as] = card_of(llm.worker).digest
            assert ("dense layers as fp8-blocks" in llm.worker.describe()) == (dense_as != "expanded")
            assert (llm.worker.experts.counters.evictions > 0) == (budget == "33%")
    assert texts["100%", "stored"] == texts["33%", "auto"]
    assert len({token for text in texts["33%", "auto"] for token in text}) > 3, "a model that says one thing"
    assert digests["100%", "stored"] == digests["33%", "auto"] != digests["100%", "expanded"]
