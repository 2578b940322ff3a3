"""What an expert engine has done since it started."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from greenroom.experts.bookkeeping.prefetch_use import PrefetchUse
from greenroom.experts.copying.mover import MovedBytes, Mover
from greenroom.policies.base.events import Step


@dataclass(slots=True)
class PhaseCounters:
    """What was done in the steps of one phase, or between steps.

    A *look-up* is one distinct expert that one layer of one step needs. A *hit* is a look-up whose expert was resident.
    ``seconds``: from the beginnings of steps to their ends, on the thread that owns the engine. ``stall_seconds``: of
    these, how long layers waited for transfers. ``bytes_by_link``: moved in these steps, whatever for. A part of a
    record counts where its last byte moved, even if a step of another phase asked for it.
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    lookups: int = 0
    hits: int = 0
    on_demand_fetches: int = 0
    stall_seconds: float = 0.0
    bytes_by_link: dict[str, MovedBytes] = field(default_factory=dict)


class Counters:
    """Written by the thread that owns the engine. A reader elsewhere may see values from different moments.

    Everything that belongs to a phase is counted once, by ``running``: in ``prefill`` during a step with a prompt row,
    in ``decode`` during any other step, in ``between`` while no step runs (the first fill, prefetches that go on). A
    step that fails counts too. Totals are sums of these.

    A prefetch counts once it begins, or waits and is not taken back. It is *used* when a look-up meets it, arrived or
    still on its way. It is *wasted* when the expert is evicted unused.

    ``host_prefetches`` go no further than the host tier; ``prefetches`` are all others. A host prefetch is used when
    the expert goes on to the device, arrived or still on its way. It is wasted when the expert leaves the host before.
    """

    __slots__ = (
        "_began", "_booked", "_lock", "_movers", "between", "decode", "device_use", "evictions", "failed_transfers",
        "host_use", "prefill", "running",
    )  # fmt: skip

    def __init__(self, device_use: PrefetchUse, host_use: PrefetchUse, movers: Sequence[Mover]) -> None:
        self.device_use: Final = device_use
        self.host_use: Final = host_use
        self.evictions = 0
        self.failed_transfers = 0
        self._movers = tuple(movers)
        self._booked = {mover.name: mover.moved() for mover in movers}
        self.prefill: Final = PhaseCounters(bytes_by_link=dict(self._booked))
        self.decode: Final = PhaseCounters(bytes_by_link=dict(self._booked))
        self.between: Final = PhaseCounters(bytes_by_link=dict(self._booked))
        self.running = self.between
        self._began = 0.0
        self._lock = threading.Lock()  # readers on other threads book bytes too

    def step_began(self, step: Step, now: float) -> None:
        """``now``: seconds, of the clock that ``step_ended`` is told."""
        part = self.prefill if step.has_prompt_rows else self.decode
        self._turn_to(part)
        part.steps += 1
        part.rows += step.rows
        self._began = now

    def step_ended(self, now: float) -> None:
        self.running.seconds += now - self._began
        self._turn_to(self.between)

    def book_bytes(self) -> None:
        """Book what the links have moved since the last call. Any thread may call it."""
        with self._lock:
            bytes_by_link = self.running.bytes_by_link
            for mover in self._movers:
                moved, booked = mover.moved(), self._booked[mover.name]
                self._booked[mover.name] = moved
                before = bytes_by_link[mover.name]
                bytes_by_link[mover.name] = MovedBytes(
                    before.on_demand + moved.on_demand - booked.on_demand,
                    before.prefetched + moved.prefetched - booked.prefetched,
                )

    @property
    def phases(self) -> dict[str, PhaseCounters]:
        """By the phase of steps."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self._parts())

    @property
    def lookups(self) -> int:
        return sum(part.lookups for part in self._parts())

    @property
    def hits(self) -> int:
        return sum(part.hits for part in self._parts())

    @property
    def on_demand_fetches(self) -> int:
        return sum(part.on_demand_fetches for part in self._parts())

    @property
    def stall_seconds(self) -> float:
        return sum(part.stall_seconds for part in self._parts())

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """As of the last ``book_bytes``, or the last beginning or end of a step."""
        return {link: sum(part.bytes_by_link[link].total for part in self._parts()) for link in self._booked}

    @property
    def prefetches(self) -> int:
        return self.device_use.begun

    @property
    def prefetches_used(self) -> int:
        return self.device_use.used

    @property
    def prefetches_wasted(self) -> int:
        return self.device_use.wasted

    @property
    def host_prefetches(self) -> int:
        return self.host_use.begun

    @property
    def host_prefetches_used(self) -> int:
        return self.host_use.used

    @property
    def host_prefetches_wasted(self) -> int:
        return self.host_use.wasted

    def _parts(self) -> Iterable[PhaseCounters]:
        return self.prefill, self.decode, self.between

    def _turn_to(self, part: PhaseCounters) -> None:
        for mover in self._movers:
            if mover.moved() is not self._booked[mover.name]:
                self.book_bytes()
                break
        self.running = part
