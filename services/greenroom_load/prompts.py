"""What is asked: templated prompts of five task types with known answers, or the lines of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from greenroom.core.errors import InvalidConfig
from greenroom.demo.tasks import TASKS, sample
from greenroom_load.mix import TaskMix
from greenroom_load.targets import Targets


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends with the user's turn.

    ``expected``: the whole right answer, where there is one. ``max_tokens``: this prompt's own limit. ``repeat``: it
    has been asked before in this run, so caches of prompts may know it.
    """

    turns: tuple[Turn, ...]
    task: str | None = None
    name: str | None = None
    expected: str | None = None
    max_tokens: int | None = None
    repeat: bool = False

    @property
    def text(self) -> str:
        """For APIs that complete text: the turns one after the other."""
        return "\n\n".join(turn.content for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is to be sent, whatever the transport. ``targets``: what is hoped for."""

    prompt: Prompt
    max_tokens: int
    targets: Targets | None = None


class Prompts(Protocol):
    """Where prompts come from. Endless."""

    @property
    def mix(self) -> TaskMix:
        """The mix if nothing else is asked for; it names every task type that there is."""
        ...

    def draw(self, task: str, input_tokens: int | None) -> Prompt:
        """The next prompt of this task type, made about ``input_tokens`` long if that is given."""
        ...

    def __str__(self) -> str: ...


class TemplatedPrompts:
    """The bundled model's held-out prompts: correlated text, since each task type has its own words and wordings.

    A longer prompt is made of earlier turns of the same task type with their answers; then the last answer is not
    expected any more, since a small model may follow the earlier turns.
    """

    def __init__(self, seed: int, *, tokens_per_word: float = 1.3) -> None:
        if not 0 < tokens_per_word <= 100:
            raise InvalidConfig("tokens_per_word", tokens_per_word, "a number above 0 up to 100")
        self._seed = seed
        self._tokens_per_word = tokens_per_word
        self._next = dict.fromkeys(TASKS, 0)

    @property
    def mix(self) -> TaskMix:
        return TaskMix(dict.fromkeys(TASKS, 1.0))

    def draw(self, task: str, input_tokens: int | None) -> Prompt:
        number, prompt, answer = self._sample(task)
        name = f"{task}-{number}"
        asked = Turn("user", prompt)
        if input_tokens is None:
            return Prompt((asked,), task, name, answer)
        left = input_tokens / self._tokens_per_word - len(prompt.split())
        turns: list[Turn] = []
        while left > 0:
            _, earlier, reply = self._sample(task)
            left -= len(earlier.split()) + len(reply.split())
            turns += Turn("user", earlier), Turn("assistant", reply)
        return Prompt((*turns, asked), task, name, None if turns else answer)

    def _sample(self, task: str) -> tuple[int, str, str]:
        number = self._next[task]
        self._next[task] += 1
        drawn = sample(task, seed=self._seed, index=number, split="heldout")
        return number, drawn.prompt, drawn.answer

    def __str__(self) -> str:
        return f"templated, seed {self._seed}"


class _Message(msgspec.Struct):
    role: str
    content: str


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    task_type: str | None = None
    task: str | None = None
    id: str | int | None = None
    expected: str | None = None
    answer: str | None = None
    max_tokens: int | None = None


class FilePrompts:
    """A JSONL file's prompts, those of each task type in an order drawn from the seed, over and over.

    Fields of a line: ``prompt`` (text) or ``messages`` (a list of ``role`` and ``content``); if known ``task_type`` (or
    ``task``), ``id``, ``expected`` (or ``answer``: the whole right reply), ``max_tokens``. Others are passed over.
    """

    def __init__(self, path: Path, seed: int, *, field: str = "prompts") -> None:
        self._path = path
        self._by_task = _read(path, field)
        self._rounds = dict.fromkeys(self._by_task, 0)
        self._left: dict[str, list[Prompt]] = {task: [] for task in self._by_task}
        self._rng = {task: Random(f"{seed}/prompts/{task}") for task in self._by_task}

    @property
    def mix(self) -> TaskMix:
        return TaskMix({task: float(len(prompts)) for task, prompts in self._by_task.items()})

    def draw(self, task: str, input_tokens: int | None) -> Prompt:
        left = self._left[task]
        if not left:
            left += self._by_task[task]
            self._rng[task].shuffle(left)
            self._rounds[task] += 1
        prompt = left.pop()
        return prompt if self._rounds[task] == 1 else replace(prompt, repeat=True)

    def __str__(self) -> str:
        return f"{self._path.name} ({sum(map(len, self._by_task.values())):,} prompts)"


def _read(path: Path, field: str) -> Mapping[str, list[Prompt]]:
    decoder = msgspec.json.Decoder(_Line)
    found: dict[str, list[Prompt]] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidConfig(field, str(path), f"a JSONL file that can be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(decoder.decode(line), number)
        except msgspec.MsgspecError as error:
            allowed = f"a JSON object a line with `prompt` or `messages` ({error})"
            raise InvalidConfig(field, f"{path}, line {number}", allowed) from error
        found.setdefault(prompt.task or "", []).append(prompt)
    if not found:
        raise InvalidConfig(field, str(path), "a JSONL file with at least one prompt")
    return found


def _prompt(line: _Line, number: int) -> Prompt:
    if line.messages:
        turns = tuple(Turn(message.role, message.content) for message in line.messages)
    elif line.prompt:
        turns = (Turn("user", line.prompt),)
    else:
        raise msgspec.ValidationError("neither `prompt` nor `messages` says anything")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise msgspec.ValidationError("`max_tokens` is a number from 1")
    return Prompt(
        turns=turns,
        task=line.task_type if line.task_type is not None else line.task,
        name=str(number) if line.id is None else str(line.id),
        expected=line.expected if line.expected is not None else line.answer,
        max_tokens=line.max_tokens,
    )
