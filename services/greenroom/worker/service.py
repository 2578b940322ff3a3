"""A worker as a service: carries out what its run table decides, between schedulers, gateways and an engine.

docs/architecture/worker.md has the whole; docs/architecture/protocol.md the rules, which the comments here name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from greenroom.core.attempts import Attempt
from greenroom.core.clock import SteadyClock
from greenroom.core.errors import GreenroomError, InvalidRequest
from greenroom.core.generation import Finished, FinishReason, Token
from greenroom.core.machine import machine_name
from greenroom.core.messages import Member, MemberKind, ModelCard, Request, Task
from greenroom.core.model_profile import ModelProfile
from greenroom.fabric.lifecycle import Part
from greenroom.fabric.log import Log
from greenroom.fabric.rpc import Dialer
from greenroom.fabric.topics import TRACES
from greenroom.v1 import worker_pb2
from greenroom.worker.clock import monotonic_ms
from greenroom.worker.faults import fault_of
from greenroom.worker.gateways.stream_edges import Members, StreamEdges
from greenroom.worker.gateways.token_streams import TokenStreams
from greenroom.worker.generation_engine import Events, GenerationEngine, RecordedRouting
from greenroom.worker.inference_engine import InferenceEngine
from greenroom.worker.predictions.artifact_updates import ArtifactFollower
from greenroom.worker.predictions.forecasts import Forecaster
from greenroom.worker.predictions.last_prompts import LastPrompts
from greenroom.worker.predictions.predictor_calls import Predictors
from greenroom.worker.runs import run_table
from greenroom.worker.runs.leases import Leases
from greenroom.worker.runs.results import closed, refused, reported
from greenroom.worker.runs.run_table import RunRefused, RunTable
from greenroom.worker.runs.task_engines import Generating, Inferring, TaskEngine
from greenroom.worker.runs.waiting_calls import WaitingCalls
from greenroom.worker.service_config import ServiceConfig
from greenroom.worker.service_counters import ServiceCounters
from greenroom.worker.traces.trace_writer import TraceWriter

log = logging.getLogger(__name__)

_MODEL_FAILED = "the model can not generate any more; its requests go on elsewhere"
_TICK_S = 0.05
_ANSWERS_S = 2.0
_STREAMS_S = 1.0
_TRACES_S = 2.0


class WorkerFailed(GreenroomError):
    """The engine can not generate any more. The process is to end, and other workers take its requests over."""


class Directory(Members, Predictors, Protocol):
    """The instances that are here; fabric's directory."""


@dataclass(frozen=True, slots=True)
class _End:
    """What was generated for a task. ``prefilled``: rows of its prompt and prefix; ``routed``: where it was routed."""

    task: Task
    prefilled: int
    routed: RecordedRouting | None


class WorkerService(Part):
    """One worker of a pool, on one event loop. ``servicer.WorkerServicer`` is its gRPC side.

    ``card``: the model that ``engine`` generates or judges with; ``profile``: what was measured of it. ``changed`` is
    called when ``member`` returns something else than before. Routing, forecasts and artifacts are those of an
    engine that generates.

    Nothing here waits for a gateway, the log or the predictor. The engine gets a request at once. Nothing is emitted,
    reported or learnt of it before its gateway has said what the client has had, or is certainly not there.
    """

    def __init__(
        self,
        config: ServiceConfig,
        engine: GenerationEngine | InferenceEngine,
        card: ModelCard,
        to: Log,
        dialer: Dialer,
        members: Directory,
        *,
        profile: ModelProfile | None = None,
        clock: Callable[[], float] = monotonic_ms,
        unix_ms: Callable[[], float] | None = None,
    ) -> None:
        super().__init__("worker")
        self.config = config
        self.card = card
        self.counters = ServiceCounters()
        self.table = RunTable(
            grace_ms=config.grace_ms,
            max_runs=config.max_runs,
            max_bytes=config.max_input_bytes,
        )
        self.leases = Leases(self)
        self.streams = TokenStreams(StreamEdges(dialer, members, self, config.streams, self.counters, clock))
        self.changed: Callable[[], None] = lambda: None
        generating = None if isinstance(engine, InferenceEngine) else engine
        self._engine: TaskEngine = Inferring(engine) if isinstance(engine, InferenceEngine) else Generating(engine)
        self._generating = generating
        self._members = members
        self._clock = clock
        self._unix_ms = unix_ms or SteadyClock()
        self._tasks_of: dict[int, Task] = {}
        """Of what the engine generates, by number."""
        self._ends: dict[int, _End] = {}
        """Of what has come to its end and was not reported yet."""
        self._unheard: set[int] = set()
        """What was stopped for nothing and has not come to its end."""
        self._calls = WaitingCalls()
        self._empty = asyncio.Event()
        self._empty.set()
        self._fault = fault_of(config.fault)
        self._failing: asyncio.Queue[BaseException] = asyncio.Queue()
        self._lapsed = True
        self._stating = asyncio.Lock()
        self._traces = (
            TraceWriter(
                to, TRACES, config.traces, self.counters, pool=config.pool, model=card.name, worker=config.instance
            )
            if config.traces.enabled and generating is not None
            else None
        )
        self._last_prompts = LastPrompts(profile) if config.forecasts.by_previous else None
        self._forecaster: Forecaster | None = None
        self._follower: ArtifactFollower | None = None
        if generating is None:
            return
        self._forecaster = Forecaster(
            dialer,
            members,
            config.forecasts,
            self.counters,
            model=card.name,
            experts=generating.state().experts,
            running=self._mix,
            foresee=generating.foresee,
            sensitive=lambda task: profile is None or profile.insensitive_layers(task) < profile.layers,
            previous=lambda task: bytes if self._last_prompts is None else self._last_prompts.now(task),
        )
        if config.artifacts.every_ms and generating.artifacts:
            self._follower = ArtifactFollower(
                dialer, members, config.artifacts, self.counters, generating, model=card.name
            )

    # -- its life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._engine.listen(self._took, self.leases.changed)
        self.tasks.start(self._tick(), name="tick", forever=True)
        self.tasks.start(self._watch(), name="model")
        if self._forecaster is not None:
            self.tasks.start(self._forecaster.run(), name="forecasts", forever=True)
        if self._follower is not None:
            self.tasks.start(self._follower.run(), name="artifacts", forever=True)
        if self._traces is not None:
            self.tasks.start(self._traces.run(), name="traces", forever=True)

    @property
    def unready(self) -> str | None:
        if not self._engine.alive:
            return "the model has failed"
        return "draining" if self.table.draining else None

    async def _watch(self) -> None:
        raise await self._failing.get()

    def _fail(self, error: BaseException) -> None:
        if self._failing.empty():
            self._failing.put_nowait(error)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new runs, let the others end within ``timeout_s``, give back what is left then (rule 5)."""
        self.table.draining = True
        self.changed()
        self.leases.changed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            self._give_back()
        await _within(_ANSWERS_S, self._calls.all_answered.wait())

    def _give_back(self) -> None:
        unfinished = sum(run.finished is None for run in self.table.runs.values())
        if unfinished:
            log.warning("%d requests did not end in time and are given back, for another worker", unfinished)
            self.counters.given_back += unfinished
        self._do(self.table.give_back())

    async def stop(self) -> None:
        """End everything. What still runs is given back, and its calls are answered within a short time.

        Where the model has failed nothing is given back. The runs count as losses, since the same request may make the
        next worker fail too.
        """
        if self._engine.alive:
            self._give_back()
            await _within(_ANSWERS_S, self._calls.all_answered.wait())
        self.leases.close()
        await self.streams.stop(_STREAMS_S)
        if self._traces is not None:
            await _within(_TRACES_S, self._traces.flush())
        await super().stop()

    # -- what it says of itself ----------------------------------------------------------------------------------

    @property
    def instance(self) -> str:
        return self.config.instance

    @property
    def epoch(self) -> int:
        return self.table.epoch

    def now(self) -> float:
        return self._clock()

    def member(self) -> Member:
        """What is announced of it; the announcer adds the address."""
        return Member(
            member=MemberKind.WORKER,
            instance=self.instance,
            address="",
            ttl_ms=self.config.ttl_ms,
            pool=self.config.pool,
            draining=self.table.draining,
            model=self.card,
            machine=machine_name()[:256],
        )

    async def state(self) -> worker_pb2.WorkerState:
        """What a scheduler is told with every request for the lease."""
        async with self._stating:
            engine = await asyncio.to_thread(self._engine.state)
        executing = self._engine.executing()
        artifacts = {} if self._generating is None else self._generating.artifacts
        runs = self.table.runs.values() if executing is None else ()
        return worker_pb2.WorkerState(
            worker=self.instance,
            draining=self.table.draining,
            max_running=self.config.max_running,
            max_queued=self.config.max_queued,
            kv_tokens=engine.kv_tokens,
            kv_tokens_free=engine.kv_tokens_free,
            running=engine.running,
            waiting=engine.waiting,
            resident_experts=engine.resident_experts,
            experts=engine.experts,
            expert_load_ms=engine.expert_load_ms,
            token_ms=engine.token_ms,
            load_ms_by_task=engine.load_ms_by_task,
            artifacts={kind: str(one.version) for kind, one in artifacts.items() if one is not None},
            runs=[
                worker_pb2.RunProgress(request_id=run.request_id, generated=len(run.tokens) if run.wanted else 0)
                for run in runs
            ],
            arranges=executing is not None,
            executing=executing or (),
        )

    def gauges(self) -> Iterable[tuple[str, str, float]]:
        yield "runs_here", "Runs here, finished ones that nobody has released included.", len(self.table.runs)
        yield "input_bytes", "Bytes of the inputs of runs here.", self.table.input_bytes
        yield "calls_waiting", "Calls of schedulers that wait for an end.", len(self._calls)
        yield "gateways", "Gateways that there is a call to.", self.streams.gateways
        yield "gateways_ending", "Idle calls whose gateways have not ended them yet.", self.streams.ending
        yield "tokens_pending", "Tokens that wait to be sent to gateways.", self.streams.pending
        yield "lease", "Whether the worker may send tokens.", self.table.holds_lease(self._clock())
        yield "epoch", "The scheduler's epoch that the worker serves.", self.table.epoch
        yield "traces_waiting", "Routing traces that wait to be written.", self._traces.waiting if self._traces else 0

    def _mix(self) -> Mapping[str, int]:
        return Counter(run.task.task_type for run in self.table.runs.values() if run.finished is None)

    # -- schedulers ----------------------------------------------------------------------------------------------

    def meet(self, epoch: int, scheduler: str, journal: str) -> None:
        """A scheduler calls. Raises RunRefused where its epoch is over, or is not known to be its own."""
        member = self._members.get(scheduler) if scheduler else None
        named = member is not None and member.member == MemberKind.SCHEDULER and member.pool == self.config.pool
        self._do(self.table.meet(run_table.Caller(epoch, scheduler, journal, named), self._clock()))

    def renew(self, epoch: int, until: float) -> None:
        """Raises RunRefused for an epoch that is over."""
        self._do(self.table.renew(epoch, until, self._clock()))
        self.counters.lease_renewals += 1
        self._lapsed = False
        self.streams.flush()

    async def run(self, epoch: int, attempt: Attempt, task: Task) -> worker_pb2.RunResponse:
        """Start a run, or attach to it, and wait for its end (rule 3). Where the call is cancelled the run goes on for
        the grace period. Raises RunRefused.
        """
        request_id = task.request.request_id
        here = request_id in self.table.runs
        if not here:
            try:
                self._engine.check(task)
            except InvalidRequest as error:
                self.counters.refused += 1
                return refused(worker_pb2.RunRefused.WHY_INVALID, str(error))
        answer = self._calls.begin(request_id, attempt)
        try:
            self._do(self.table.call(epoch, attempt, task))
            self._empty.clear()
            if here:
                self.counters.attached += 1
            else:
                self.counters.runs += 1
                if self._forecaster is not None:
                    self._forecaster.prompt_begun()
            return await answer
        except RunRefused:
            self.counters.refused += 1
            raise
        finally:
            if self._calls.end(request_id, attempt, answer):
                # The result is kept for as long too: it may be lost on its way, and be asked for again.
                self.table.hung_up(request_id, attempt, self._clock())
            self._look_empty()

    def cancel(self, request_id: str, attempt: Attempt) -> None:
        """End the run, or release its result, if it is of this attempt or a lower one."""
        self._do(self.table.cancel(request_id, attempt))

    # -- gateways (StreamListener) -------------------------------------------------------------------------------

    def stream_opened(self, request_id: str, attempt: Attempt, delivered: tuple[Token, ...]) -> None:
        self._do(self.table.opened(request_id, attempt, delivered, self._clock()))
        self.counters.tokens = self.table.generated

    def stream_unwanted(self, request_id: str, attempt: Attempt) -> None:
        self._do(self.table.unwanted(request_id, attempt))

    def no_stream(self, request_id: str, attempt: Attempt) -> None:
        self._do(self.table.no_stream(request_id, attempt))
        self.counters.tokens = self.table.generated

    def stream_broken(self, request_id: str, attempt: Attempt) -> None:
        self._do(self.table.stream_broken(request_id, attempt))

    def may_emit(self) -> bool:
        return self.table.holds_lease(self._clock())

    # -- the engine ----------------------------------------------------------------------------------------------

    def _took(self, events: Events) -> None:
        """The engine's events of one step."""
        if not self._engine.alive:
            self._fail(WorkerFailed(_MODEL_FAILED))
            return  # its events are no ends: the next worker goes on behind what was sent
        try:
            self._take_in(events)
        except Exception as error:  # the engine has gone on, so the run table no longer agrees with it
            self._fail(error)

    def _take_in(self, events: Events) -> None:
        now = self._clock()
        token, emit = self.table.token, self.streams.emit
        count = 0
        for number, event in events:
            if type(event) is Token:
                count += 1
                effect = token(number, event, now)
                if effect is not None:
                    emit(effect.request_id, effect.attempt, effect.tokens)
            elif isinstance(event, Finished):
                self._ended(number, event, now)
        self.streams.flush()
        self.counters.tokens = self.table.generated
        if self._fault is not None:
            self._fault.tokens(count)

    def _ended(self, number: int, finished: Finished, now: float) -> None:
        task = self._tasks_of.pop(number, None)
        if task is None:  # it was stopped
            if number in self._unheard:
                self._unheard.discard(number)
                self.counters.prefill_rows_for_nothing += finished.prefilled
            return
        completed = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
        routed = None
        if self._generating is not None and self.config.records_routing and completed:
            routed = self._generating.take_routing(number)
        self._ends[number] = _End(task, finished.prefilled, routed)
        self._do(self.table.ended(number, finished, now))

    def _stopped(self, number: int, *, for_nothing: bool) -> None:
        running, ended = self._tasks_of.pop(number, None), self._ends.pop(number, None)
        if not for_nothing or self._generating is None:
            return
        if running is not None:
            self._unheard.add(number)
        elif ended is not None:
            self.counters.prefill_rows_for_nothing += ended.prefilled

    def _learn(self, number: int) -> None:
        """Its end is told to a scheduler: its routing is worth learning from."""
        end = self._ends.pop(number, None)
        if end is None or end.routed is None:
            return
        if self._traces is not None:
            self._traces.offer(end.task, end.routed)
        if self._last_prompts is not None:
            self._last_prompts.finished(end.task.task_type, end.routed)

    # -- effects -------------------------------------------------------------------------------------------------

    def _do(self, effects: list[run_table.Effect]) -> None:
        for effect in effects:
            match effect:
                case run_table.Emit(request_id, attempt, tokens):
                    self.streams.emit(request_id, attempt, tokens)
                case run_table.Open(request_id, attempt, reply_to):
                    self.streams.open(request_id, attempt, reply_to)
                case run_table.Start(number, task, prefix):
                    if self._fault is not None and isinstance(task.request, Request):
                        self._fault.begins(task.request.prompt)
                    self._tasks_of[number] = task
                    self.counters.prefix_tokens += len(prefix)
                    self._engine.begin(number, task, prefix, self._unix_ms())
                case run_table.Stop(number, for_nothing):
                    self._stopped(number, for_nothing=for_nothing)
                    self._engine.cancel(number)
                case run_table.Report(number, request_id, attempt, finished, tokens):
                    self._learn(number)
                    self.counters.results += 1
                    self._calls.answer(request_id, attempt, reported(finished, tokens))
                case run_table.Close(request_id, attempt, why):
                    self.counters.forgotten += why is run_table.Closing.FORGOTTEN
                    self.streams.close(request_id, attempt)
                    self._calls.answer(request_id, attempt, closed(why))
                    self._look_empty()

    def _look_empty(self) -> None:
        if not self.table.runs:
            self._empty.set()

    # -- time ----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = self._clock()
            self._do(self.table.tick(now))
            self.streams.tick()
            if not self._lapsed and not self.table.holds_lease(now):
                self._lapsed = True
                self.counters.lease_lapses += 1
                log.warning("the lease ran out: nothing is sent until a scheduler renews it")
            if not self._engine.alive:
                self._fail(WorkerFailed(_MODEL_FAILED))


async def _within(timeout_s: float, work: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        log.warning("not all could be ended in %g s", timeout_s)
