"""The outcomes that a retry under an idempotency key may ask for, in bounded memory. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from greenroom.core.generation import FinishReason
from greenroom.core.messages import Outcome, decode, encode

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
"""The ends of requests that have an answer."""
_ENDS_SHARE = 8


@dataclass(frozen=True, slots=True)
class KeptOutcome:
    """``answer_dropped``: its tokens were dropped to make room."""

    outcome: Outcome
    answer_dropped: bool


@dataclass(slots=True)
class _Bounded:
    """Encoded outcomes by request, the oldest first. ``size``: bytes of all."""

    by_id: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    size: int = 0

    def add(self, request_id: str, data: bytes) -> None:
        self.by_id[request_id] = data
        self.size += len(data)

    def take(self, request_id: str) -> None:
        self.size -= len(self.by_id.pop(request_id, b""))

    def take_oldest(self) -> tuple[str, bytes]:
        request_id, data = self.by_id.popitem(last=False)
        self.size -= len(data)
        return request_id, data


@dataclass(slots=True)
class _Age:
    """``answers``: whole outcomes. ``ends``: outcomes whose tokens were dropped."""

    answers: _Bounded = field(default_factory=_Bounded)
    ends: _Bounded = field(default_factory=_Bounded)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.answers.by_id or request_id in self.ends.by_id


class KeptOutcomes:
    """Outcomes of keyed requests, wherever the requests came from: the first one of each (rule 10).

    An outcome that was written without its task is kept too: a cancel came before its request, or the task could not be
    read. It can not say whether there is a key, and whatever comes under that id has ended (rule 9).

    ``keep_bytes``: how much is kept. When there is no more room the oldest outcomes lose their answers, and how they
    ended is kept in an eighth of the room. When that is full the oldest go, and nothing is known of them.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._ends_bytes = keep_bytes // _ENDS_SHARE
        self._answers_bytes = keep_bytes - self._ends_bytes
        self._older = _Age()
        """From before the journal was followed: the first to go."""
        self._later = _Age()
        self.answers_dropped = 0
        self.ends_dropped = 0

    def add(self, outcome: Outcome) -> None:
        """An outcome that counts, in the journal's order."""
        known = outcome.request_id in self._older or outcome.request_id in self._later
        if _may_be_asked_for(outcome) and not known:
            self._keep(outcome, self._later)

    def add_older(self, outcome: Outcome) -> None:
        """An outcome that counts, older than all that ``add`` is told, in the journal's order."""
        if not _may_be_asked_for(outcome) or outcome.request_id in self._older:
            return
        self._later.answers.take(outcome.request_id)
        self._later.ends.take(outcome.request_id)
        self._keep(outcome, self._older)

    def get(self, request_id: str) -> KeptOutcome | None:
        for age in (self._older, self._later):
            for kept in (age.answers, age.ends):
                data = kept.by_id.get(request_id)
                if data is not None:
                    outcome: Outcome = decode(data, Outcome)
                    return KeptOutcome(outcome, answer_dropped=kept is age.ends and outcome.reason in COMPLETED)
        return None

    def _keep(self, outcome: Outcome, age: _Age) -> None:
        age.answers.add(outcome.request_id, encode(outcome))
        while self._older.answers.size + self._later.answers.size > self._answers_bytes:
            full = self._older if self._older.answers.by_id else self._later
            request_id, data = full.answers.take_oldest()
            whole: Outcome = decode(data, Outcome)
            bare = msgspec.structs.replace(whole, token_ids=(), logprobs=None, outputs=None, prompt_logprobs=None)
            full.ends.add(request_id, encode(bare))
            self.answers_dropped += whole.reason in COMPLETED
        while self._older.ends.size + self._later.ends.size > self._ends_bytes:
            (self._older if self._older.ends.by_id else self._later).ends.take_oldest()
            self.ends_dropped += 1


def _may_be_asked_for(outcome: Outcome) -> bool:
    """Every task has a type, so an outcome without one came without its task."""
    return outcome.keyed or not outcome.task_type
