"""The token streams that every arm of a benchmark is given: prompts, and how many tokens follow each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from greenroom.demo.tasks import TASKS, sample
from greenroom.text import TextProcessor

SEED = 5
SPECIAL_IDS = 4
"""Ids below this are the bundled tokenizer's special tokens."""


@dataclass(frozen=True)
class Stream:
    """``prompts``: token ids. ``lengths``: how many tokens are generated after each, greedily, whatever they are."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens to be generated in all."""
        return sum(self.lengths)

    def first(self, count: int) -> Stream:
        """Only the first ``count`` prompts."""
        return Stream(self.prompts[:count], self.lengths[:count])

    def as_arguments(self) -> dict[str, Any]:
        """As a child process takes it."""
        return {"prompts": [list(prompt) for prompt in self.prompts], "lengths": list(self.lengths)}


def task_stream(model: Path, count: int) -> Stream:
    """Held-out prompts of the bundled model's five tasks in turn, each answered at the length of its right answer.

    So the routing is that of the work the model was trained for.
    """
    text = TextProcessor.from_folder(model)
    prompts, lengths = [], []
    for number in range(count):
        wanted = sample(TASKS[number % len(TASKS)], seed=SEED, index=number)
        rendered = text.chat.render([{"role": "user", "content": wanted.prompt}])
        prompts.append(tuple(text.tokenizer.encode(rendered, add_special_tokens=False)))
        lengths.append(len(text.tokenizer.encode(wanted.answer, add_special_tokens=False)) + 1)  # and its end of turn
    return Stream(tuple(prompts), tuple(lengths))


def random_stream(vocabulary: int, count: int, *, prompt_tokens: int = 24, tokens: int = 16) -> Stream:
    """Prompts of random tokens, for a model of random weights."""
    random = Random(SEED)
    prompts = tuple(
        tuple(random.randrange(SPECIAL_IDS, vocabulary) for _ in range(prompt_tokens)) for _ in range(count)
    )
    return Stream(prompts, (tokens,) * count)
