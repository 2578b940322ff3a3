"""The labelled prompts that a model is profiled with: a file of them, or the bundled model's own tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from greenroom.core.errors import InvalidConfig
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.policies.base.events import UNKNOWN_TASK

_DRAWN_FROM: Final = 31_000
"""Added to the seed of the bundled model's tasks, so that no benchmark meets the prompts of a profile by chance."""


class TaskPrompt(msgspec.Struct, frozen=True):
    """One line of the file; other fields are ignored. ``answer``: the only right one, where the task has one."""

    prompt: Annotated[str, Meta(min_length=1)]
    task_type: Annotated[str, Meta(min_length=1, max_length=64)]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """``run``: the prompts that the model answers, in order of arrival. ``labelled``: all prompts with a label.

    ``source``: where they are from, as text.
    """

    run: tuple[TaskPrompt, ...]
    labelled: tuple[TaskPrompt, ...]
    source: str


def of_file(path: Path, per_task: int) -> TaskPrompts:
    """Of a JSONL file; the first ``per_task`` of each type are run. Raises InvalidConfig, naming the line."""
    labelled = tuple(_lines(path))
    if not labelled:
        raise InvalidConfig("tasks", str(path), 'lines such as {"prompt": "...", "task_type": "..."}: it has none')
    return TaskPrompts(_first_of_each(labelled, per_task), labelled, path.name)


def of_bundled_tasks(per_task: int, *, seed: int, labelled_per_task: int) -> TaskPrompts:
    """Held-out samples of the bundled model's five tasks, mixed as their requests would come."""
    count = max(per_task, labelled_per_task)
    drawn = [
        TaskPrompt(one.prompt, one.task, one.answer)
        for task in TASKS
        for one in samples(task, count, seed=_DRAWN_FROM + seed, split="heldout")
    ]
    Random(seed).shuffle(drawn)
    return TaskPrompts(_first_of_each(drawn, per_task), tuple(drawn), f"the bundled model's own tasks, seed {seed}")


def has_bundled_tasks(folder: Path) -> bool:
    """Whether a checkpoint is the bundled model, or one that ``greenroom demo widen`` made of it."""
    try:
        return (folder / "tokenizer.json").read_bytes() == (bundled_model_path() / "tokenizer.json").read_bytes()
    except OSError:
        return False


def _first_of_each(prompts: Sequence[TaskPrompt], per_task: int) -> tuple[TaskPrompt, ...]:
    taken: Counter[str] = Counter()
    chosen = []
    for one in prompts:
        if taken[one.task_type] < per_task:
            taken[one.task_type] += 1
            chosen.append(one)
    return tuple(chosen)


def _lines(path: Path) -> Iterable[TaskPrompt]:
    decoder = msgspec.json.Decoder(TaskPrompt)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                one = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                message = f'it must be an object with "prompt", "task_type" and, if there is one, "answer": {error}'
                raise InvalidConfig(place, line[:80].decode(errors="replace"), message) from error
            if one.task_type == UNKNOWN_TASK:
                raise InvalidConfig(place, UNKNOWN_TASK, "a task type; this name is kept for prompts that have none")
            yield one
