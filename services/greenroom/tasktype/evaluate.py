"""How well a profile tells labelled prompts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype.extractor import UNKNOWN, Extractor


class LabelledPrompt(msgspec.Struct, frozen=True):
    """One line of a file of labelled prompts; other fields are passed over.

    ``wording``: who or what put it so. Prompts of one wording are alike, so learning never parts them: what is told
    of prompts that were put aside then holds for wordings that were not seen. ``origin``: the data set that it is of.
    """

    prompt: str
    task_type: str
    wording: str = ""
    origin: str = ""


@dataclass(slots=True)
class Evaluation:
    """``confusion[label, answer]``: how many prompts of that label got that answer."""

    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def prompts(self) -> int:
        return sum(self.confusion.values())

    @property
    def accuracy(self) -> float:
        right = sum(count for (label, answer), count in self.confusion.items() if label == answer)
        return right / max(1, self.prompts)

    @property
    def unknown(self) -> float:
        """Share of prompts without an answer."""
        return sum(count for (_, answer), count in self.confusion.items() if answer == UNKNOWN) / max(1, self.prompts)

    def report(self) -> dict[str, Any]:
        labels = sorted({label for label, _ in self.confusion})
        by_label = {
            label: {answer: count for (one, answer), count in sorted(self.confusion.items()) if one == label}
            for label in labels
        }
        return {
            "prompts": self.prompts,
            "accuracy": round(self.accuracy, 4),
            "unknown": round(self.unknown, 4),
            "accuracy_of_answered": round(self.accuracy / max(1e-9, 1 - self.unknown), 4),
            "recall": {
                label: round(answers.get(label, 0) / sum(answers.values()), 4) for label, answers in by_label.items()
            },
            "confusion": by_label,
        }


def evaluate(extractor: Extractor, prompts: Iterable[LabelledPrompt]) -> Evaluation:
    evaluation = Evaluation()
    for prompt in prompts:
        evaluation.confusion[prompt.task_type, extractor.extract(prompt.prompt).task_type] += 1
    return evaluation


def read_labelled(path: Path, *, wording: str = "wording", origin: str = "origin") -> Iterable[LabelledPrompt]:
    """The lines of a JSONL file with ``prompt`` and ``task_type``, and the fields named by ``wording`` and ``origin``.

    Raises InvalidConfig, naming the line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = msgspec.json.decode(line, type=dict[str, Any])
                named = {"wording": fields.get(wording), "origin": fields.get(origin)}
                given = {field: "" if value is None else str(value) for field, value in named.items()}
                yield msgspec.convert({**fields, **given}, LabelledPrompt)
            except msgspec.MsgspecError as error:
                message = f'it must be an object with "prompt" and "task_type": {error}'
                raise InvalidConfig(f"{path}, line {number}", line[:80].decode(errors="replace"), message) from error
