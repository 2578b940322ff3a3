"""An observer of a batch engine that notes what it is told."""

from __future__ import annotations

from typing import Any

from greenroom.policies.base.events import SequenceEnd, SequenceInfo


class Recorder:
    def __init__(self, fail: bool = False) -> None:
        self.told: list[Any] = []
        self.fail = fail

    def _tell(self, *what: Any) -> None:
        self.told.append(what)
        if self.fail:
            raise KeyError("an observer's own fault")

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self._tell("queued", sequence)

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self._tell("started", sequence)

    def sequence_preempted(self, sequence: SequenceInfo) -> None:
        self._tell("preempted", sequence)

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self._tell("ended", sequence, end)

    def approximated(self, sequence: int, rows: int) -> float:
        return 0.0

    def idle(self) -> bool:
        return False

    def audit_idle(self) -> None:
        pass
