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
    """With transformers' model ``reference``. ``folder``: has the tokenizer."""
    same = positions = 0
    apart = 0.0
    with torch.inference_mode():
        for tokens in texts(folder):
            ours = logits_of(ragged, tokens)
            theirs = reference(torch.tensor([tokens])).logits[0]
            same += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
            positions += len(tokens)
            apart = max(apart, float((ours - theirs).abs().max()))
    return Agreement(same, positions, apart)


def texts(folder: Path) -> list[list[int]]:
    """Held-out prompts with their answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for task in TASKS:
        for one in samples(task, 8, seed=77):
            chat = [{"role": "user", "content": one.prompt}, {"role": "assistant", "content": one.answer}]
            found.append(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
    return found


def logits_of(ragged: RaggedModel, tokens: list[int]) -> torch.Tensor:
    """Of every position, a row a step behind the first one: as decoding computes them."""
    store = KVStore(ragged.layout, ragged.layout.nbytes(len(tokens)))
    kv, found = store.reserve(len(tokens)), []
    for token in tokens:
        found.append(ragged.forward([Chunk(0, [token], kv, prefill=False, wants_logits=True)]).float().clone())
        kv.commit(1)
    return torch.cat(found)
