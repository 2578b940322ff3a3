"""How long an answer is expected to be: from a profile, else from the answers that were seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from greenroom.core.model_profile import ModelProfile

ENOUGH: Final = 8
"""How many answers of a task type must be seen before their mean is trusted."""
MEMORY: Final = 512
"""About how many of the last answers a mean covers."""
MOST_TASKS: Final = 1024
"""How many task types are told apart. Answers of further types count among all answers only."""

LONGER: Final = 1.5
"""An answer that is longer than was expected is expected to be so many times as long."""

_LEAST_UNKNOWN, _MOST_UNKNOWN, _OF_CONTEXT = 64, 256, 16


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    seen: int = 0

    def add(self, tokens: int) -> None:
        self.seen = min(self.seen + 1, MEMORY)
        self.value += (tokens - self.value) / self.seen

    @property
    def known(self) -> float | None:
        return self.value if self.seen >= ENOUGH else None


class AnswerLengths:
    """Means that follow the last ``MEMORY`` answers. Equal histories give equal means: there is no clock in it and no
    chance.

    ``profile``: its means are preferred to what was seen. A task type that it does not name has the mean of its answers
    so far, as every type has without a profile.
    """

    def __init__(self, profile: ModelProfile | None = None) -> None:
        self.profile = profile
        self._by_task: dict[str, _Mean] = {}
        self._all = _Mean()

    def mean(self, task: str) -> float | None:
        """Of the profile, else of answers of the task type, else of all answers. None where nothing is known."""
        if self.profile is not None and task in self.profile.tasks:
            return self.profile.expected_tokens(task)
        seen = self._by_task.get(task)
        if seen is not None and seen.known is not None:
            return seen.known
        return self._all.known if self.profile is None else self.profile.expected_tokens(task)

    def finished(self, task: str, tokens: int) -> None:
        """An answer came to its own end."""
        self._all.add(tokens)
        if task in self._by_task or len(self._by_task) < MOST_TASKS:
            self._by_task.setdefault(task, _Mean()).add(tokens)


def unknown_tokens(prompt: int, limit: int) -> int:
    """How long an answer is expected to be where nothing is known: a sixteenth of what prompt and answer may have
    together, from 64 to 256 tokens, and at most ``limit``.

    Without ``max_tokens`` they may have the whole context. Answers of chats have some 200 tokens in the mean
    (LMSYS-Chat-1M, Zheng et al., 2024, table 1), and models with a short context are small ones that give short
    answers.
    """
    return min(limit, max(_LEAST_UNKNOWN, min(_MOST_UNKNOWN, (prompt + limit) // _OF_CONTEXT)))


def expected_length(first: float, generated: int, limit: int) -> int:
    """How many tokens an answer is expected to have in all, from 1 to ``limit``.

    ``first``: how many before it began. Each time it has ``generated`` as many as were expected, it is expected to be
    LONGER.
    """
    expected = max(1.0, first)
    while generated >= expected and expected < limit:
        expected = expected * LONGER + 1
    return max(1, min(limit, math.ceil(expected)))
