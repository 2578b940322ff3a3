"""The thread that owns the model, and the access to it from other threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from greenroom.core.errors import GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import GenerationRequest
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_stats import BatchStats
from greenroom.moe.batch.sequence import OnEvent, Sequence

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 30.0
_BACKGROUND_WAIT_S = 0.02
_STALL_WAIT_S = 0.02


class LoopStopped(GreenroomError):
    """The batch loop does not run, or not any more: it takes no request."""


class BatchLoop:
    """Runs a BatchEngine on one thread. Requests join and leave between its steps.

    All methods may be called from any thread. At most ``max_running + max_waiting`` requests are unfinished at any
    time: submitted, waiting, running, or being cancelled. Events are delivered on the loop's thread. When a request's
    Finished is delivered, its id is free again.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        """What ended the thread, if ``stop`` did not."""
        self.between_steps: Callable[[], None] | None = None
        """Called on the loop's thread before and after each step, between forwards that were planned together, and at
        the end. The events since the last call belong together. It must not block, and if it raises, the loop ends. Set
        it before anything is submitted."""
        self._limit = engine.config.max_running + engine.config.max_waiting
        self._changed = threading.Condition()
        self._active: dict[str, Sequence] = {}
        self._inbox: list[Sequence] = []
        self._cancelled: set[int] = set()
        self._drain_until: float | None = None
        self._idle = False
        self._thread = threading.Thread(target=self._serve, name="batch-loop", daemon=True)
        engine.on_ended = self._forget
        engine.between_forwards = self._between_forwards

    # -- from other threads --------------------------------------------------------------------------------------

    def start(self) -> BatchLoop:
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether the thread runs. After its end every request has had its Finished."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether it is its thread that asks."""
        return threading.current_thread() is self._thread

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.alive and self._drain_until is None

    @property
    def unfinished(self) -> int:
        """Requests that have had no Finished yet."""
        with self._changed:
            return len(self._active)

    def submit(self, request: GenerationRequest, on_event: OnEvent, *, wait_s: float = 0.0) -> int:
        """Take a request. Returns its sequence number, by which it can be cancelled.

        ``on_event`` is then called on the loop's thread, with each Token and one Finished. Waits up to ``wait_s`` for
        room. Raises InvalidRequest if the request can never be served or its id is in use, Saturated if there was no
        room in time, and LoopStopped if no requests are taken any more. Then nothing has changed.
        """
        sequence = self.engine.new_sequence(request, on_event)
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._admissible(request) and len(self._active) >= self._limit:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Saturated(f"{len(self._active)} requests wait or run, and there is room for {self._limit}")
                self._changed.wait(left)
            self._active[request.request_id] = sequence
            self._inbox.append(sequence)
            self._idle = False
            self._changed.notify_all()
        return sequence.number

    def _admissible(self, request: GenerationRequest) -> bool:
        if not self.ready:
            raise LoopStopped("the model is shutting down" if self.failure is None else "the model has failed")
        if request.request_id in self._active:
            raise InvalidRequest(f"request {request.request_id!r} is running already", code="duplicate_request")
        return True

    def cancel(self, number: int) -> None:
        """End the request with this sequence number as cancelled before the next step. Does not wait for it.

        Does nothing if the request has ended.
        """
        with self._changed:
            if any(sequence.number == number for sequence in self._active.values()):
                self._cancelled.add(number)
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request waits or runs and the loop has audited itself. False: it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle or not self.alive, timeout_s)

    def stats(self) -> BatchStats:
        """What the loop has counted. Requests that it has not looked at yet count as waiting."""
        stats = self.engine.snapshot()
        with self._changed:
            stats.waiting += len(self._inbox)
        return stats

    def stop(self, drain_s: float = 0.0, *, join_s: float = 60.0) -> None:
        """Take no more requests, let the others run for ``drain_s``, cancel the rest, and end the thread.

        Raises TimeoutError if the thread does not end within ``join_s`` after that, because a forward hangs. Raises the
        error that has ended the thread early, if there is one.
        """
        with self._changed:
            if self._drain_until is None:
                self._drain_until = time.monotonic() + drain_s
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(drain_s + join_s)
            if self.alive:
                raise TimeoutError(f"the batch loop is still in a step {join_s} s after it was told to end")
        if self.failure is not None:
            raise self.failure

    # -- on the loop's thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._take_messages():
                self._pause()
                moved = self.engine.step()
                self._pause()
                if not moved and self.engine.busy:
                    self._wait_for_policy()
        except BaseException as error:
            log.critical("the batch loop has failed; all its requests fail with it", exc_info=error)
            self.failure = error
        finally:
            self._close()

    def _take_messages(self) -> bool:
        """Wait for something to do, and take over what came. False: the loop is to end."""
        with self._changed:
            if not (self._inbox or self._cancelled or self.engine.busy):
                self._rest()
            draining = self._drain_until
        self._take_over()
        if draining is None:
            return True
        return self.engine.busy and time.monotonic() < draining

    def _take_over(self) -> None:
        """Let those that came wait for admission, and end those that are cancelled."""
        with self._changed:
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, set()
        for sequence in arrived:
            self.engine.add(sequence)
        for number in cancelled:
            self.engine.cancel(number)

    def _between_forwards(self) -> None:
        self._pause()
        self._take_over()
        self._pause()

    def _pause(self) -> None:
        if self.between_steps is not None:
            self.between_steps()

    def _rest(self) -> None:
        """Audit, then wait until there is something to do."""
        try:
            self.engine.stats.audits += 1
            self.engine.rest()
        except GreenroomError:
            self.engine.stats.audit_failures += 1
            log.exception("the idle batch loop found itself inconsistent")
        self._idle = True
        self._changed.notify_all()
        while not (self._inbox or self._cancelled or self._drain_until is not None):
            self._changed.wait(_BACKGROUND_WAIT_S if self.engine.idle() else _IDLE_WAIT_S)
        self._idle = False

    def _wait_for_policy(self) -> None:
        """The policy runs nothing although it could: it waits for a prediction, or it has a defect."""
        with self._changed:
            self._changed.wait(_STALL_WAIT_S)

    def _forget(self, sequence: Sequence) -> None:
        with self._changed:
            self._active.pop(sequence.request.request_id, None)
            self._changed.notify_all()

    def _close(self) -> None:
        """Give each request that was taken its Finished."""
        with self._changed:
            self._drain_until = self._drain_until or time.monotonic()
            arrived, self._inbox = self._inbox, []
        for sequence in arrived:
            self.engine.add(sequence)
        if self.failure is None:
            for number in [*self.engine.waiting, *self.engine.running]:
                self.engine.cancel(number)
        else:
            self.engine.abort("the model has failed")
        try:
            self._pause()
        except Exception:
            log.exception("what is told of the batch loop's pauses failed at its end")
        with self._changed:
            self._changed.notify_all()
