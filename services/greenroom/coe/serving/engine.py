"""A collaboration that runs: requests in, outcomes out, on one thread that decides."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.coe.computing.expert_computer import Computed
from greenroom.coe.computing.expert_result import ExpertResult, Stage
from greenroom.coe.computing.inputs import Input
from greenroom.coe.dispatch.base import Dispatcher
from greenroom.coe.graph.expert_graph import END, ExpertGraph
from greenroom.coe.serving.executor import Batch, Died, Ended, Executor
from greenroom.coe.serving.outcomes import InFlight, Outcome
from greenroom.coe.serving.request_table import NO_DEADLINE, RequestsHere
from greenroom.core.errors import DeadlinePassed, ExpertFailed, GreenroomError, InvalidRequest, ModelBroken
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.experts.model_memory import TRANSFER_TIMEOUT_S, ModelMemory
from greenroom.policies.placement.placement_policy import PendingRequest

log = logging.getLogger(__name__)

MOST_REQUESTS = 8192
"""Here at once, if whoever submits them does not say how many it does."""
BATCH_TIMEOUT_S = 600.0
"""A batch that takes longer will never end: the engine ends instead."""
_TICK_S = 1.0
_STILL_S = 30.0
_IDLE_AUDIT_S = 10.0


class Wake:
    """Ends the deciding thread's wait. From any thread; made before the link, which sets it when a read has ended."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> None:
        self._event.wait(timeout_s)
        self._event.clear()


@dataclass(slots=True)
class ServingCounters:
    """Written by the deciding thread.

    ``requests``: that have come. ``ended``: whose outcome was told; ``failed``: those of them that have no answer.
    ``left``: that are here no more; others than ``ended`` were cancelled. ``stage_wait_s`` and ``stage_run_s``: of all
    stages together, until they were given to an executor, and until that had computed their batch. ``decide_s``: of the
    deciding thread's own work. ``batch_sizes``: batches by requests.
    """

    requests: int = 0
    ended: int = 0
    failed: int = 0
    left: int = 0
    stages: int = 0
    stage_wait_s: float = 0.0
    stage_run_s: float = 0.0
    compute_s: float = 0.0
    decide_s: float = 0.0
    failed_audits: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)


class ServingEngine:
    """Until it is closed nobody else may use executors, memories, link and dispatcher; ``start`` begins.

    ``submit``, ``cancel``, ``executing`` and the figures are for any thread. Outcomes are told on the deciding thread,
    once each. A request that was cancelled has none; nor has one that is here when the engine ends.

    Invariants: every request that was taken is in ``_requests`` until it leaves; a stage of it waits in the dispatcher
    or runs on one executor; an expert is held from a run's begin to its end.
    """

    def __init__(
        self,
        graph: ExpertGraph,
        dispatcher: Dispatcher,
        executors: Sequence[Executor],
        memories: Mapping[str, ModelMemory],
        wake: Wake,
        *,
        inbox: deque[Ended | Died],
        most_requests: int = MOST_REQUESTS,
        batch_timeout_s: float = BATCH_TIMEOUT_S,
        read_timeout_s: float = TRANSFER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``memories``: by executor; one may be that of several. ``inbox``: what executors post into, before they
        ``wake``. ``read_timeout_s``: reads of which none ends in that time never will: the engine ends instead."""
        self.counters = ServingCounters()
        self.waiting = 0
        """Stages that no executor has."""
        self.resident = 0
        """Experts in memory, as often as they are there."""
        self.failure: BaseException | None = None
        self.on_changed: Callable[[], object] = lambda: None
        """Called on the deciding thread when ``executing`` has changed, before the batch is given away, and when
        ``alive`` has."""
        self._graph = graph
        self._dispatcher = dispatcher
        self._executors = {executor.name: executor for executor in executors}
        self._memory_of = memories
        self._memories = list({id(memory): memory for memory in memories.values()}.values())
        self._wake = wake
        self._ended = inbox
        self._batch_timeout_s = batch_timeout_s
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self._requests = RequestsHere(most_requests)
        self._new: dict[str, PendingRequest] = {}  # by number: stages that the dispatcher does not know yet
        self._running: dict[str, tuple[InFlight, ...]] = {}
        self._executing: frozenset[str] = frozenset()
        self._moved_s = self._landed_s = time.monotonic()
        self._audited_s = 0.0
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="coe-decides", daemon=True)

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        for executor in self._executors.values():
            executor.start()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it serves. Once it does not, what is here never ends."""
        return self._thread.is_alive() and self.failure is None and not self._closing

    def submit(
        self,
        request_id: str,
        given: Input,
        value: str = "",
        *,
        on_end: Callable[[Outcome], object],
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> None:
        """``value``: the router's parameter. ``deadline_s``: on the engine's clock (``now``); None: none.

        Raises InvalidRequest for an unknown value and an id that is here; Saturated if there are too many;
        ModelBroken if the engine has ended.
        """
        first = self.first_expert(value)
        if not self.alive:
            raise ModelBroken("the collaboration has ended") from self.failure
        deadline_ms = NO_DEADLINE if deadline_s is None else deadline_s * 1000.0
        now_ms = self._now_ms()
        self._requests.add(
            request_id,
            given,
            value,
            deadline_ms=deadline_ms,
            priority=priority,
            on_end=on_end,
            first_stage=lambda request: _stage(request, first, 0, now_ms),
        )
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Its outcome is not told any more. The id may be used again at once."""
        if self._requests.withdraw(request_id):
            self._wake.set()

    def executing(self) -> frozenset[str]:
        """The ids of the requests that executors have."""
        return self._executing

    def first_expert(self, value: str) -> int:
        """Raises InvalidRequest for a value that the router does not know."""
        try:
            return self._graph.first(value)
        except LookupError:
            raise InvalidRequest(
                f"{value!r} is no value of the router; known: {_some(self._graph.values)}",
                param="value",
                code="unknown_value",
            ) from None

    def now(self) -> float:
        """Seconds, on the clock of deadlines."""
        return self._clock()

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends all threads, after the batches that are under way. Memories and link are the caller's to close then.

        Raises TimeoutError if one does not end in time.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for executor in self._executors.values():
            executor.stop()
        ended = [executor.join(max(0.0, deadline - time.monotonic())) for executor in self._executors.values()]
        if self._thread.is_alive() or not all(ended):
            raise TimeoutError(f"the collaboration's threads have not ended within {timeout_s:g} s")
        self._closed = True

    # -- the deciding thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(self._wait_s())
                begun = time.thread_time()  # what executors keep it waiting for is not its own
                self._take_in()
                self._collect()
                self._expire()
                self._begin()
                self._look()
                self.counters.decide_s += time.thread_time() - begun
        except BaseException as error:
            log.exception("the collaboration has ended: none of its requests can be served any more")
            self.failure = error
            self.on_changed()

    def _take_in(self) -> None:
        """What was asked, and what executors have computed."""
        asked = self._requests.asked
        while asked:
            request = asked.popleft()
            if not request.entered:
                request.entered = True
                self._requests.enter(request)
                self.counters.requests += 1
                assert request.pending is not None
                self._new[request.number] = request.pending
            elif self._requests.has(request) and not request.runs:
                self._leave(request)
                self._forget(request)
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, Died):
                raise ModelBroken(f"the executor {ended.executor} has died") from ended.error
            self._finish(ended)

    def _finish(self, ended: Ended) -> None:
        run, now_ms = ended.run, self._now_ms()
        self._executors[run.executor].begun_s = None
        self._dispatcher.finished(run.executor, now_ms)
        requests = self._running.pop(run.executor)
        self.counters.compute_s += ended.seconds
        self.counters.stage_run_s += ended.seconds * len(requests)
        for request, computed in zip(requests, ended.computed, strict=True):
            request.runs = False
            if request.cancelled:
                self._forget(request)
            else:
                self._go_on(request, run.expert, computed, now_ms)
        self._tell_executing()

    def _go_on(self, request: InFlight, expert: int, computed: Computed, now_ms: float) -> None:
        """To the next expert, or to its end."""
        if not isinstance(computed, ExpertResult):
            self._end(request, computed)
            return
        request.stages.append(Stage(self._graph.names[expert], computed))
        try:
            following = self._graph.after(expert, computed.label, computed.score)
        except LookupError as error:
            self._end(request, ExpertFailed(str(error)))
            return
        if following is END:
            self._end(request)
        else:
            request.pending = _stage(request, following, len(request.stages), now_ms)
            self._new[request.number] = request.pending

    def _collect(self) -> None:
        """What the link has brought, and what it could not bring."""
        for memory in self._memories:
            for expert, error in memory.collect():
                self._landed_s = time.monotonic()
                if error is None:
                    continue
                log.error("expert %s could not be loaded: %s", self._graph.names[expert], error)
                for pending in self._dispatcher.failed(memory, expert):
                    self._end(self._requests.of(pending.request_id), error)

    def _expire(self) -> None:
        for request in self._requests.overdue(self._now_ms()):
            if self._tell(request, _expired()) and not request.runs:  # else the batch's result is for no one
                self._leave(request)
                self._forget(request)

    def _begin(self) -> None:
        """Tell the dispatcher what is new, and carry out what it answers."""
        now_ms = self._now_ms()
        if self._new:
            new, self._new = self._new, {}
            for shed in self._dispatcher.arrived(list(new.values()), now_ms):
                self._end(self._requests.of(shed.request_id), _expired())
        runs = self._dispatcher.next_runs(now_ms)
        for run in runs:
            requests = tuple(self._requests.of(one.request_id) for one in run.requests)
            for request, pending in zip(requests, run.requests, strict=True):
                request.runs = True
                self.counters.stage_wait_s += (now_ms - pending.arrived_ms) / 1000.0
            self._running[run.executor] = requests
            self.counters.stages += len(requests)
            self.counters.batch_sizes[len(requests)] += 1
        if runs:
            self._tell_executing()
        for run in runs:
            weights = self._memory_of[run.executor].weights(run.expert)
            inputs = [request.given for request in self._running[run.executor]]
            self._executors[run.executor].give(Batch(run, inputs, weights))

    def _look(self) -> None:
        """Is all well? Raises ModelBroken if it can not go on."""
        self.waiting = self._dispatcher.waiting
        self.resident = sum(len(memory.residents) for memory in self._memories)
        now_s = time.monotonic()
        for executor in self._executors.values():
            if not executor.alive and not self._ended:
                raise ModelBroken(f"the executor {executor.name} has died")
            if executor.begun_s is not None and now_s - executor.begun_s > self._batch_timeout_s:
                raise ModelBroken(f"the executor {executor.name} is at one batch for over {self._batch_timeout_s:g} s")
        loading = sum(memory.loading for memory in self._memories)
        if not loading:
            self._landed_s = now_s
        if now_s - self._landed_s > self._read_timeout_s:
            raise ModelBroken(f"{loading} reads have not ended for {self._read_timeout_s:g} s: the disk gives nothing")
        if self._running or loading or not self.waiting:
            self._moved_s = now_s
        if now_s - self._moved_s > _STILL_S:
            raise ModelBroken(f"{self.waiting} requests wait, and nothing moves: a defect of the dispatcher")
        if not len(self._requests) and now_s - self._audited_s >= _IDLE_AUDIT_S:
            self._audited_s = now_s
            self._audit()

    def _audit(self) -> None:
        try:
            for memory in self._memories:
                memory.audit()
            if self.waiting or self._running:
                raise LedgerError("nobody is here, and requests wait or run")
        except LedgerError:
            self.counters.failed_audits += 1
            log.exception("an audit has found a defect")

    # -- a request's end ----------------------------------------------------------------------------------------------

    def _leave(self, request: InFlight) -> None:
        """The dispatcher is to know nothing of its stage."""
        pending = request.pending
        assert pending is not None
        if not self._dispatcher.cancel(pending):
            self._new.pop(pending.request_id, None)

    def _end(self, request: InFlight, error: GreenroomError | None = None) -> None:
        self._tell(request, error)
        self._forget(request)

    def _tell(self, request: InFlight, error: GreenroomError | None) -> bool:
        told = self._requests.tell(request, error)
        self.counters.ended += told
        self.counters.failed += told and error is not None
        return told

    def _forget(self, request: InFlight) -> None:
        self.counters.left += 1
        self._requests.forget(request)

    # -- small things -------------------------------------------------------------------------------------------------

    def _tell_executing(self) -> None:
        self._executing = frozenset(one.request_id for requests in self._running.values() for one in requests)
        self.on_changed()

    def _wait_s(self) -> float:
        return min(_TICK_S, max(0.0, (self._requests.next_deadline_ms - self._now_ms()) / 1000.0))

    def _now_ms(self) -> float:
        return self._clock() * 1000.0


def _stage(request: InFlight, expert: int, stage: int, now_ms: float) -> PendingRequest:
    """A stage waits since it can run, not since its request has come."""
    return PendingRequest(
        request.number, now_ms, 1, 1, 1, request.deadline_ms, priority=request.priority, expert=expert, stage=stage
    )


def _expired() -> GreenroomError:
    return DeadlinePassed("the request's time was over before it was served")


def _some(values: Sequence[str], most: int = 20) -> str:
    shown = ", ".join(values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"
