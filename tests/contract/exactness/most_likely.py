"""How often the most likely token is that of a reference, over prompts of the bundled model with their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from greenroom.demo.tasks import TASKS, samples
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel


class Agreement(NamedTuple):
    """``apart``: the largest difference of two logits."""

    same: int
    positions: int
    apart: float

    def __str__(self) -> str:
        share = self.same / self.positions
        return f"{self.same} of {self.positions} positions ({share:.2%}), logits differ by at most {self.apart:.3f}"


def agreement(ragged: RaggedModel, reference: Any, folder: Path) -> Agreement:
    """With transformers' model ``reference``, where answers are generated: prompts have words that nobody can foretell.
    ``folder``: has the tokenizer.
    """
    same = positions = 0
    apart = 0.0
    with torch.inference_mode():
        for tokens, begin in _texts(folder):
            ours, theirs = _logits_of(ragged, tokens), reference(torch.tensor([tokens])).logits[0]
            agree = ours.argmax(dim=-1) == theirs.argmax(dim=-1)
            same, positions = same + int(agree[begin - 1 :].sum()), positions + len(tokens) - begin + 1
            apart = max(apart, float((ours - theirs).abs().max()))
    return Agreement(same, positions, apart)


def _texts(folder: Path) -> list[tuple[list[int], int]]:
    """Held-out prompts with their answers, and where these begin."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for one in (one for task in TASKS for one in samples(task, 5, seed=77)):
        user = [{"role": "user", "content": one.prompt}]
        prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"]
        found.append(([*prompt, *answer], len(prompt)))
    return found


def _logits_of(ragged: RaggedModel, tokens: list[int]) -> torch.Tensor:
    """Of every position."""
    store = KVStore(ragged.layout, ragged.layout.nbytes(len(tokens)))
    chunk = Chunk(0, tokens, store.reserve(len(tokens)), prefill=True, wants_logits=True, logit_rows=len(tokens))
    return ragged.forward([chunk]).float().clone()
