"""The seam between the service and whatever finds out what kind of task a prompt describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

UNKNOWN: Final = "unknown"
"""The answer where a prompt describes no kind of task, or none that can be told."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """``task_type``: one of the extractor's names, or ``unknown``. ``scores``: what speaks for each type, in the
    extractor's own measure (matches, or probabilities); types without any may be left out."""

    task_type: str
    scores: Mapping[str, float]


class Extractor(Protocol):
    """Finds the task type of a prompt. The same prompt has the same answer, always, in any instance.

    ``name``: how the extractor is chosen, and what metrics call it. ``names``: the task types that it tells apart,
    without ``unknown``.
    """

    name: str
    names: tuple[str, ...]

    def extract(self, prompt: str) -> Extraction:
        """Any text has an answer. Takes bounded time however long the prompt is."""
        ...
