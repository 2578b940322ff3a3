"""The bundled model's tokenizer: byte-level BPE over the tasks' English, with a chat template of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from greenroom.demo.tasks import TASKS, sample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
END: Final = "<|end|>"
ROLES: Final = ("system", "user", "assistant")
#: In the order of their ids, from 0.
SPECIAL_TOKENS: Final = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))
PAD_ID, BOS_ID, END_ID, USER_ID, ASSISTANT_ID = 0, 1, 2, 4, 5

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in plain English.",
    "You are greenroom, a small model that summarises, classifies, answers, compares and talks.",
    "Be polite and precise.",
)


def render(turns: Sequence[tuple[str, str]], *, generation_prompt: bool) -> str:
    """What the chat template makes of `(role, content)` turns (the template itself is checked against this)."""
    body = "".join(f"<|{role}|>{content.strip()}{END}" for role, content in turns)
    return BOS + body + ("<|assistant|>" if generation_prompt else "")


def conversation(rng: Random, sample_seed: int, index: int, task: str) -> list[tuple[str, str]]:
    """One training conversation: the task's sample, sometimes under a system prompt or behind an earlier turn."""
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.25:
        turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
    if rng.random() < 0.07:
        earlier = sample(rng.choice(TASKS), seed=sample_seed + 1, index=index, split="train")
        turns += [("user", earlier.prompt), ("assistant", earlier.answer)]
    last = sample(task, seed=sample_seed, index=index, split="train")
    return [*turns, ("user", last.prompt), ("assistant", last.answer)]


def train_tokenizer(vocab_size: int, *, seed: int, samples_per_task: int = 6000) -> Tokenizer:
    """A byte-level BPE of `vocab_size` tokens, the special ones first; digits stand alone, any input encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, samples_per_task), trainer)
    return tokenizer


def _corpus(seed: int, samples_per_task: int) -> Iterator[str]:
    yield from SYSTEM_PROMPTS
    for task in TASKS:
        for index in range(samples_per_task):
            drawn = sample(task, seed=seed, index=index, split="train")
            yield drawn.prompt
            yield drawn.answer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
    }
    special = {**names, "additional_special_tokens": list(SPECIAL_TOKENS[3:])}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
