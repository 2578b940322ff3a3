"""Simulated hardware: links with a speed, memory without bytes, a clock that only moves when told to.

The engine on top is the real one. So are the movers' queues and the carriers' division of records into reads. There
are no threads, sleeps or locks, so a simulated second takes only as long as its bookkeeping.
"""

from __future__ import annotations

import heapq
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import format_bytes, parse_bytes
from greenroom.experts.copying.arena import NOTHING, Arena
from greenroom.experts.copying.mover import Begun, Carrier, Job, Landing, MovedBytes, Mover, Outbox
from greenroom.experts.pack.direct_io import ReadSettings, page_aligned
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout

_LINK = re.compile(r"\s*([0-9.]+\s*[A-Za-z]+)/s\s*(?:,\s*([0-9.]+)\s*(us|µs|ms|s)\s*)?")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link that moves ``bytes_per_s``, one read after the other. A record that finds it idle takes ``latency_s``
    longer; behind other records that time is hidden. Raises InvalidConfig.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise InvalidConfig("bytes_per_s", self.bytes_per_s, "more than 0")
        if not self.latency_s >= 0:
            raise InvalidConfig("latency_s", self.latency_s, "0 or more")

    @classmethod
    def parse(cls, text: str, *, field: str = "link") -> LinkProfile:
        """``1.5GiB/s`` or ``1.5GiB/s,0.2ms``. Raises InvalidConfig, naming ``field``."""
        match = _LINK.fullmatch(text)
        if match is None:
            raise InvalidConfig(field, text, "write a speed and, if it is known, a latency: 1.5GiB/s,0.2ms")
        latency = parse_seconds(match[2] + match[3], field=field) if match[2] else 0.0
        return cls(parse_bytes(match[1], field=field), latency)

    def describe(self) -> str:
        return f"{format_bytes(self.bytes_per_s)}/s, {1e3 * self.latency_s:.3g} ms"


def parse_seconds(text: str, *, field: str) -> float:
    """``0.3ms`` as 0.0003. Raises InvalidConfig, naming ``field``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|µs|ms|s)\s*", text)
    if match is None:
        raise InvalidConfig(field, text, "write a time such as 0.3ms or 200us")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start."""

    now: float = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True)
class SimulatedHardware:
    """The hardware of one engine. Its outbox waits for the movers that it makes.

    ``disk``: the link to the lowest tier. ``upload``: that from the host tier to the device, where there is one.
    """

    disk: LinkProfile
    upload: LinkProfile | None = None
    reads: ReadSettings = field(default_factory=ReadSettings)
    clock: VirtualClock = field(default_factory=VirtualClock)
    accelerator: None = None
    _movers: list[SimulatedMover] = field(default_factory=list)

    def arena(self, slot_bytes: Sequence[int], layouts: Sequence[RecordLayout]) -> Arena:
        return SimulatedArena(slot_bytes)

    def outbox(self) -> Outbox:
        return SimulatedOutbox(self.clock, self._movers)

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        """Raises InvalidConfig for a link whose speed was not given."""
        link = self.disk if name == "disk" else self.upload
        if link is None:
            raise InvalidConfig("upload", None, f"the speed of the link {name!r}, since there is a host tier")
        if not isinstance(outbox, SimulatedOutbox):
            raise TypeError("simulated movers post to the outbox of their own hardware")
        self._movers.append(SimulatedMover(name, carrier, outbox, link, self.clock))
        return self._movers[-1]

    def now(self) -> float:
        return self.clock.now

    def settle(self) -> None:
        """Carry out everything that is due by now."""
        for mover in self._movers:
            mover.settle()

    def change_disk(self, link: LinkProfile) -> None:
        """Transfers that the disk's mover begins from now on move at this speed."""
        self.settle()
        self.disk = link
        for mover in self._movers:
            if mover.name == "disk":
                mover.link = link


class SimulatedArena(Arena):
    """Slots without memory: one buffer stands for all, and is never written to."""

    def __init__(self, slot_bytes: Sequence[int]) -> None:
        self.slots = len(slot_bytes)
        self.slot_bytes = slot_bytes
        self.contents = np.full(self.slots, NOTHING, dtype=np.int64)
        self._unlock = None
        self._fresh = None
        self._region = page_aligned(max(slot_bytes))
        self._nothing = torch.empty(0, dtype=torch.uint8)

    def take_pages(self, slots: int) -> None:
        pass

    def buffer(self, slot: int) -> memoryview:
        return self._region

    def record(self, slot: int) -> torch.Tensor:
        return self._nothing

    def weights(self, slot: int, layer: int) -> ExpertWeights:
        return ()


class SimulatedOutbox(Outbox):
    """An outbox on the virtual clock: waiting moves the clock to the next arrival."""

    def __init__(self, clock: VirtualClock, movers: Sequence[SimulatedMover]) -> None:
        super().__init__()
        self._clock = clock
        self._movers = movers
        self._arrivals: list[tuple[float, int, Job | Landing]] = []
        self._numbers = itertools.count()
        self.posting_at = 0.0
        """The arrival time of what a mover posts now."""

    def post(self, message: Job | Landing) -> None:
        self._arrivals.append((self.posting_at, next(self._numbers), message))

    def collect(self) -> list[Job | Landing]:
        for mover in self._movers:
            mover.settle()
        arrivals, self._arrivals = sorted(self._arrivals), []
        return [message for _, _, message in arrivals]

    def wait(self, timeout_s: float) -> bool:
        deadline = self._clock.now + timeout_s
        while True:
            for mover in self._movers:
                mover.settle()
            if self._arrivals:
                return True
            soonest = min((mover.next_event for mover in self._movers), default=float("inf"))
            if soonest > deadline:
                self._clock.now = deadline
                return False
            self._clock.now = soonest


class SimulatedMover(Mover):
    """A link whose threads are entries of a heap, by the time when each one's part has moved.

    Only the owner changes the queues. Before each change, and before each look, the mover carries out everything that
    was due by then.
    """

    def __init__(
        self, name: str, carrier: Carrier, outbox: SimulatedOutbox, link: LinkProfile, clock: VirtualClock
    ) -> None:
        super().__init__(name, carrier, outbox)
        self.link = link
        self._clock = clock
        self._posts = outbox
        self._settled = clock.now  # until when everything has come to pass
        self._free_from = clock.now  # when the link has moved all that it was given
        self._flows_from: dict[int, float] = {}  # by expert: when its bytes could flow at the earliest
        self._parts: list[tuple[float, int, _Part]] = []
        self._numbers = itertools.count()
        self._changed_order = False  # since a free thread last looked for something to take

    @property
    def next_event(self) -> float:
        """The time when the next part has moved; infinity where none is moving."""
        return self._parts[0][0] if self._parts else float("inf")

    def settle(self) -> None:
        """Carry out everything that is due by now, in order."""
        now = self._clock.now
        if not self._changed_order and self.next_event > now:
            self._settled = now
            return
        while True:
            self._take_up()
            if self.next_event > now:
                break
            self._settled, _, part = heapq.heappop(self._parts)
            if self._ends(part.begun, part.moved, part.error):
                self._posts.posting_at = self._settled
                self._end(part.begun)
        self._settled = now

    def put(self, job: Job) -> None:
        self.settle()
        self._flows_from[job.expert] = self._clock.now + self.link.latency_s
        super().put(job)
        self._take_up()

    def promote(self, expert: int) -> bool:
        self.settle()
        promoted = super().promote(expert)
        self._take_up()
        return promoted

    def reprioritise(self, expert: int, priority: float) -> None:
        self.settle()
        super().reprioritise(expert, priority)
        self._changed_order = True

    def withdraw(self, expert: int) -> Job | None:
        self.settle()
        self._changed_order = True
        return super().withdraw(expert)

    def least_urgent(self, among: Callable[[int], bool]) -> int | None:
        self.settle()
        return super().least_urgent(among)

    def moved(self) -> MovedBytes:
        self.settle()
        return super().moved()

    @property
    def waiting_prefetches(self) -> int:
        self.settle()
        return super().waiting_prefetches

    def _start(self) -> list[threading.Thread]:
        return []

    def _take_up(self) -> None:
        """Let idle threads begin the waiting parts."""
        self._changed_order = False
        while len(self._parts) < self._carrier.threads and (chosen := self._choose()) is not None:
            begun = self._begin(chosen) if isinstance(chosen, Job) else chosen
            begun.taken += 1
            begun.moving += 1
            moved, error = 0, None
            try:
                moved = self._carrier.move(begun.job, begun.taken - 1)
            except OSError as failure:
                error = failure
            start = max(self._settled, self._flows_from[begun.job.expert], self._free_from)
            self._free_from = start + moved / self.link.bytes_per_s
            heapq.heappush(self._parts, (self._free_from, next(self._numbers), _Part(begun, moved, error)))


@dataclass(frozen=True, slots=True)
class _Part:
    begun: Begun
    moved: int
    error: BaseException | None
