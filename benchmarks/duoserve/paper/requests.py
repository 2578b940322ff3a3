"""Single requests, each timed by itself."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.inputs.shared_model import Ask


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of its steps, how long of that layers waited, and what was moved meanwhile."""

    seconds: float
    stall_seconds: float
    bytes_moved: int

    @classmethod
    def until_now(cls, arm: EngineArm, name: str) -> Phase:
        counters = arm.experts.refresh_counters().phases[name]
        moved = sum(link.total for link in counters.bytes_by_link.values())
        return cls(counters.seconds, counters.stall_seconds, moved)

    def since(self, before: Phase) -> Phase:
        return Phase(
            self.seconds - before.seconds,
            self.stall_seconds - before.stall_seconds,
            self.bytes_moved - before.bytes_moved,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """``seconds``: until its last token. ``prefill`` ends with its first one, so it is the time to that.

    ``link_seconds``: how long the link was busy; ``bytes_moved``: by it.
    """

    tokens: int
    ids: tuple[int, ...]
    seconds: float
    prefill: Phase
    decode: Phase
    link_seconds: float
    bytes_moved: int

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return self.tokens - 1


def asked(arm: EngineArm, ask: Ask) -> Request:
    """One request, alone."""
    (mover,) = arm.experts.movers
    before = Phase.until_now(arm, "prefill"), Phase.until_now(arm, "decode")
    busy, moved = mover.busy_seconds, mover.bytes_moved
    turn = arm.run([ask], 1)
    return Request(
        tokens=turn.tokens,
        ids=tuple(turn.ids[0]),
        seconds=turn.request_seconds[0],
        prefill=Phase.until_now(arm, "prefill").since(before[0]),
        decode=Phase.until_now(arm, "decode").since(before[1]),
        link_seconds=mover.busy_seconds - busy,
        bytes_moved=mover.bytes_moved - moved,
    )
