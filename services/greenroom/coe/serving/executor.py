"""An executor on a CPU: a thread that computes batches. It decides nothing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from greenroom.coe.computing.expert_computer import Computed
from greenroom.coe.computing.inputs import Input
from greenroom.coe.dispatch.base import Run
from greenroom.core.errors import ExpertFailed
from greenroom.experts.copying.device_errors import raise_if_fatal
from greenroom.experts.pack.layout import ExpertWeights

log = logging.getLogger(__name__)

_LOOKS_S = 1.0


class Computer(Protocol):
    """What an ExpertComputer does."""

    def compute(self, expert: int, inputs: Sequence[Input], weights: ExpertWeights) -> list[Computed]: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """``weights``: of the run's expert, which is held until the batch has ended."""

    run: Run
    inputs: Sequence[Input] = field(repr=False)
    weights: ExpertWeights = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """``computed``: what became of each request of the run, in its order."""

    run: Run
    computed: Sequence[Computed]
    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """The thread has ended for this, and computes no more."""

    executor: str
    error: BaseException


class Executor:
    """One batch at a time. ``post``: called on its thread, with what has become of each batch."""

    def __init__(
        self, name: str, computer: Computer, post: Callable[[Ended | Died], object], threads: int | None = None
    ) -> None:
        """``threads``: cores for one operation; None: as torch has it."""
        self.name = name
        self.begun_s: float | None = None
        """Since when it has the batch that it has now, by ``time.monotonic``."""
        self._computer = computer
        self._post = post
        self._threads = threads
        self._stopping = False
        self._batches: queue.Queue[Batch | None] = queue.Queue(maxsize=2)  # a batch, and the word to stop
        self._thread = threading.Thread(target=self._run, name=f"coe-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def give(self, batch: Batch) -> None:
        """It has none now. Does not wait."""
        self.begun_s = time.monotonic()
        self._batches.put_nowait(batch)

    def stop(self) -> None:
        """After the batch that it has. Does not wait."""
        if self._thread.is_alive() and not self._stopping:
            self._stopping = True
            self._batches.put_nowait(None)

    def join(self, timeout_s: float) -> bool:
        """False: it has not ended in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while True:
                try:
                    batch = self._batches.get(timeout=_LOOKS_S)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                begun = time.perf_counter()
                computed = self._compute(batch)
                self._post(Ended(batch.run, computed, time.perf_counter() - begun))
                del batch, computed  # the next one may be long in coming
        except BaseException as error:
            self._post(Died(self.name, error))

    def _compute(self, batch: Batch) -> list[Computed]:
        """If a batch fails as a whole, each of its inputs is computed alone: only those at fault fail."""
        expert = batch.run.expert
        try:
            return self._computer.compute(expert, batch.inputs, batch.weights)
        except Exception as error:
            raise_if_fatal(error)
            log.exception("a batch of %d through expert %d has failed", len(batch.inputs), expert)
            if len(batch.inputs) == 1:
                return [_defect(error)]
        return [self._alone(expert, one, batch.weights) for one in batch.inputs]

    def _alone(self, expert: int, given: Input, weights: ExpertWeights) -> Computed:
        try:
            return self._computer.compute(expert, [given], weights)[0]
        except Exception as error:
            raise_if_fatal(error)
            return _defect(error)


def _defect(error: Exception) -> ExpertFailed:
    return ExpertFailed(f"the expert could not compute this input: {type(error).__name__}: {error!s:.200}")
