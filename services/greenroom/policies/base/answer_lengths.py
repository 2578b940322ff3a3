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

NOTABLE: Final = 1 / 8
"""By what share a mean has to move before those that wait are estimated anew."""

LONGER: Final = 1.5
"""An answer that is longer than was expected is expected to be so many times as long."""

_LEAST_UNKNOWN, _MOST_UNKNOWN, _OF_CONTEXT = 64, 256, 16


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    seen: int = 0
    noted: float | None = None
    """As it was known when it had last moved notably."""

    def add(self, tokens: int) -> bool:
        """Whether it is known now for the first time, or has moved notably."""
        self.seen = min(self.seen + 1, MEMORY)
        self.value += (tokens - self.value) / self.seen
        known, noted = self.known, self.noted
        if known is None or (noted is not None and abs(known - noted) <= NOTABLE * noted):
            return False
        self.noted = known
        return True

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
        self.changes = 0
        """How often a mean became known, or moved by the share NOTABLE."""
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

    def held_mean(self, task: str) -> float | None:
        """As ``mean``, for memory: what was seen of the task type counts where it is longer than the profile says. One
        that expects too little would have the same rows run again and again.
        """
        mean, seen = self.mean(task), self._by_task.get(task)
        known = None if seen is None else seen.known
        return mean if known is None or (mean is not None and mean >= known) else known

    def held_tokens(self, task: str, prompt: int, limit: int, generated: int = 0) -> int:
        """For how many tokens of an answer memory is expected to be needed, from 1 to ``limit``. ``generated``: what is
        there of it.
        """
        mean = self.held_mean(task)
        return expected_length(unknown_tokens(prompt, limit) if mean is None else mean, generated, limit)

    def finished(self, task: str, tokens: int, *, cut: bool = False) -> None:
        """An answer has ended. ``cut``: at its limit, so it would have been longer. That says something only where it
        is as long as was expected. Else requests for a single token would teach that all answers are short.
        """
        if cut and tokens < self._expected(task):
            return
        self.changes += self._all.add(tokens)
        if task in self._by_task or len(self._by_task) < MOST_TASKS:
            self.changes += self._by_task.setdefault(task, _Mean()).add(tokens)

    def give_up_profile(self) -> None:
        """It is of another model. From now on what is seen counts."""
        self.profile = None
        self.changes += 1

    def _expected(self, task: str) -> float:
        mean = self.mean(task)
        return _LEAST_UNKNOWN if mean is None else mean


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
