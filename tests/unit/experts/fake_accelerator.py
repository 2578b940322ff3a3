"""An accelerator whose queues do everything as late as they may. Then only the order that was asked for holds.

Work is executed when it is waited for: by a thread on a mark, or by the other queue. A copy that did not wait for the
reads of its target then really overwrites what is yet to be read, a read that did not wait for its copy really finds
what lay there before, and RAM that is reused too early really gives its new content to the device.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from greenroom.experts.copying.accelerator import Mark


@dataclass(frozen=True, slots=True)
class Point:
    """Reached when the first ``position`` works of ``queue`` are done."""

    accelerator: FakeAccelerator
    queue: str
    position: int

    def reached(self) -> bool:
        self.accelerator.polled(self)
        return self.accelerator.done[self.queue] >= self.position

    def wait(self) -> None:
        self.accelerator.waiting_threads.add(threading.get_ident())
        self.accelerator.put_off()
        self.accelerator.run(self.queue, self.position)


class FakeAccelerator:
    """``eagerness``: how often, after a piece of work was queued, one of the ``eager`` queues catches up by itself.

    ``patience_s``: how long a thread that waits for a mark is kept waiting, so that others come first.
    """

    def __init__(
        self,
        *,
        eagerness: float = 0.0,
        eager: tuple[str, ...] = ("compute", "copy"),
        seed: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        self.device = torch.device("cpu")
        self.waiting_threads: set[int] = set()
        self.wrong: list[str] = []
        self.done = {"compute": 0, "copy": 0, "prediction": 0}
        self.locked: dict[int, int] = {}  # first address: bytes
        self._queues: dict[str, list[Callable[[], None]]] = {"compute": [], "copy": [], "prediction": []}
        self._lock = threading.RLock()
        self._eagerness = eagerness
        self._eager = eager
        self._patience_s = patience_s
        self._never = threading.Event()
        self._random = random.Random(seed)

    # -- Accelerator ---------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that was in use before. The last work on it is still queued."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)

        def last_work() -> None:
            memory.fill_(0xEE)

        self._queue("compute", last_work)
        return memory

    def lock_pages(self, region: memoryview) -> Callable[[], None]:
        address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
        self.locked[address] = len(region)
        return lambda: self.unlock(address)

    def unlock(self, address: int) -> None:
        if self.done["copy"] < len(self._queues["copy"]):
            self.wrong.append("pages were given free while copies from RAM were queued")
        del self.locked[address]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        address = source.data_ptr()
        if not any(start <= address and address + source.nbytes <= start + n for start, n in self.locked.items()):
            self.wrong.append("a copy from pageable memory makes its thread wait")

        def work() -> None:
            if after is not None:
                assert isinstance(after, Point)
                self.run(after.queue, after.position)
            target.copy_(source)

        return self._queue("copy", work)

    def mark(self) -> Mark:
        with self._lock:
            return Point(self, "compute", len(self._queues["compute"]))

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, Point)
        self._queue("compute", lambda: self.run(mark.queue, mark.position))

    def beside(self, work: Callable[[], None]) -> Mark:
        return self._queue("prediction", work)

    # -- the test's ----------------------------------------------------------------------------------------------

    def expect(self, tensor: torch.Tensor, value: float) -> None:
        """Queue a computation that reads ``tensor``; what it finds other than ``value`` is noted in ``wrong``."""

        def work() -> None:
            if not bool((tensor == value).all()):
                self.wrong.append(f"found {tensor.flatten()[0].item()} in place of {value}")

        self._queue("compute", work)

    def polled(self, point: Point) -> None:
        """A thread asks whether a mark is reached, and goes on."""

    def put_off(self) -> None:
        if self._patience_s:
            self._never.wait(self._patience_s)

    def run(self, queue: str, until: int | None = None) -> None:
        """Do the work of a queue up to a point, or all of it."""
        with self._lock:
            works = self._queues[queue]
            until = len(works) if until is None else until
            while self.done[queue] < until:
                work = works[self.done[queue]]
                work()
                self.done[queue] += 1

    def _queue(self, queue: str, work: Callable[[], None]) -> Mark:
        with self._lock:
            self._queues[queue].append(work)
            mark = Point(self, queue, len(self._queues[queue]))
            if self._random.random() < self._eagerness:
                self.run(self._random.choice(self._eager))
            return mark
