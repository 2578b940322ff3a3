"""Samples of the bundled model's five tasks, whose answers can be checked by exact match.

Everything here follows from the seed: the same `(task, seed, index, split)` is the same sample in every process. The
split is a hash of a sample's content, not of its wording, so no content of `heldout` ever occurs in `train`.

Needs the standard library only: load generators draw their prompts from here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from greenroom.core.errors import UnknownName
from greenroom.demo import wording

Split = Literal["train", "heldout"]

_BUILDERS: Final[dict[str, Callable[[Random], wording.Draft]]] = {
    "summarise": wording.summarise,
    "classify": wording.classify,
    "question": wording.question,
    "compare": wording.compare,
    "converse": wording.converse,
}
#: The task types of the eMoE paper, in its order.
TASKS: Final[tuple[str, ...]] = tuple(_BUILDERS)
_SPLITS: Final[tuple[str, ...]] = ("train", "heldout")
_HELDOUT_ONE_IN: Final = 8


@dataclass(frozen=True)
class Sample:
    """One user message with its only right answer.

    Attributes:
        task: one of `TASKS`.
        kind: the variant within the task, such as "price" of compare.
        prompt: the user's message.
        answer: the exact reply, without the end-of-turn token.
        key: the content that decides the split; two wordings of one content share it.
        facts: what the answer follows from.
    """

    task: str
    kind: str
    prompt: str
    answer: str
    key: str
    facts: Mapping[str, str]


def split_of(task: str, key: str) -> Split:
    """The split that a content belongs to: one content in eight is held out."""
    digest = hashlib.blake2b(f"{task}|{key}".encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % _HELDOUT_ONE_IN == 0 else "train"


def sample(task: str, *, seed: int = 0, index: int = 0, split: Split = "heldout") -> Sample:
    """The sample with this index of the endless sequence that `(task, seed, split)` names.

    Raises:
        UnknownName: if the task or the split is unknown; the message lists the known ones.
    """
    if task not in _BUILDERS:
        raise UnknownName("task", task, TASKS)
    if split not in _SPLITS:
        raise UnknownName("split", split, _SPLITS)
    rng = Random(f"{task}/{seed}/{index}/{split}")
    while True:
        draft = _BUILDERS[task](rng)
        if split_of(task, draft.key) == split:
            return Sample(task, draft.kind, draft.prompt, draft.answer, draft.key, draft.facts)


def samples(task: str, count: int, *, seed: int = 0, split: Split = "heldout") -> Iterator[Sample]:
    """The first `count` samples of that sequence.

    Raises:
        UnknownName: as `sample`, at the first element.
    """
    for index in range(count):
        yield sample(task, seed=seed, index=index, split=split)
