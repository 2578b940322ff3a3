"""What stands around a worker's service in its tests: an engine that follows a script, gateways, a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import numpy as np

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.attempts import Attempt
from greenroom.core.errors import InvalidConfig, InvalidRequest
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.core.messages import Member, MemberKind, ModelCard, Request, Task, encode
from greenroom.core.model_profile import ModelProfile
from greenroom.fabric.log import Topic
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.fabric.rpc import Dialer, GrpcDialer, LocalDialer, LocalServer, Server, ServerConfig
from greenroom.fabric.wire import from_token_run, to_token_run
from greenroom.gateway.pipeline.stream_book import Gap, StreamBook, Unwanted
from greenroom.gateway.pipeline.tokens_service import _WHY
from greenroom.policies.base.events import Prediction
from greenroom.v1 import common_pb2, tokens_pb2, tokens_pb2_grpc, worker_pb2, worker_pb2_grpc
from greenroom.worker.generation_engine import ArtifactVersion, EngineState, Events, GenerationEngine, RecordedRouting
from greenroom.worker.inference_engine import InferenceEngine
from greenroom.worker.service import WorkerService
from greenroom.worker.service_config import ServiceConfig
from greenroom.worker.servicer import WorkerServicer
from tests.waiting import DEADLINE_S
from tests.waiting import until as until

SCHEDULER = "scheduler"
LEASE_MS = 3_600_000
MODEL_LIMIT = 1000

CARD = ModelCard(name="scripted", digest="d", text_digest="t", max_model_len=MODEL_LIMIT, vocab_size=1000)


def answer(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What the script says to ``prompt``."""
    return tuple((sum(prompt) * 31 + 7 * place) % 1000 for place in range(count))


def task_of(
    request_id: str,
    *,
    reply_to: str | None = "gateway",
    length: int = 6,
    prompt: Sequence[int] = (1, 2, 3),
    task_type: str = "converse",
    text: str = "",
) -> Task:
    request = Request(
        request_id=request_id,
        pool=0,
        model="scripted",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=length, temperature=0.0),
        accepted_ms=1,
        deadline_ms=10**13,
        reply_to=reply_to,
        prompt=text,
    )
    return Task(request=request, task_type=task_type)


def run_request(task: Task, worker: str, *, epoch: int, n: int) -> worker_pb2.RunRequest:
    attempt = common_pb2.Attempt(epoch=epoch, n=n)
    return worker_pb2.RunRequest(epoch=epoch, worker=worker, attempt=attempt, task=encode(task), scheduler=SCHEDULER)


async def lease_messages(
    grants: asyncio.Queue[worker_pb2.LeaseFromScheduler],
    worker: str,
    *,
    epoch: int,
    lease_ms: int,
    scheduler: str = SCHEDULER,
) -> AsyncIterator[worker_pb2.LeaseFromScheduler]:
    """A scheduler's side of a lease: hello, then the grants as they come."""
    hello = worker_pb2.LeaseHello(epoch=epoch, scheduler=scheduler, worker=worker, lease_ms=lease_ms)
    yield worker_pb2.LeaseFromScheduler(hello=hello)
    while True:
        yield await grants.get()


class Clock:
    """Milliseconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, milliseconds: float) -> None:
        self.now += milliseconds


class ScriptedEngine:
    """Says ``answer`` to every prompt, a token a ``step``."""

    def __init__(self) -> None:
        self.alive = True
        self.begun: list[tuple[int, GenerationRequest]] = []
        self.running: dict[int, tuple[GenerationRequest, int]] = {}
        self.cancelled: list[int] = []
        self.foreseen: list[Prediction] = []
        self.artifacts: dict[str, ArtifactVersion | None] = {}
        self.experts_per_layer = (3, 3)
        self.swapped: list[ArtifactFile] = []
        self._take: Callable[[Events], None] | None = None

    def listen(self, take: Callable[[Events], None]) -> None:
        self._take = take

    def admit_check(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) >= MODEL_LIMIT:
            raise InvalidRequest("too long", param="prompt")

    def begin(self, number: int, request: GenerationRequest) -> None:
        self.begun.append((number, request))
        self.running[number] = request, len(request.prefix)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        running = self.running.pop(number, None)
        if running is not None:
            request, place = running
            rows = len(request.prompt_ids) + len(request.prefix) if place > len(request.prefix) else 0
            end = Finished(FinishReason.CANCELLED, len(request.prompt_ids), place, prefilled=rows)
            asyncio.get_running_loop().call_soon(self.tell, (number, end))

    def step(self, count: int = 1) -> None:
        """``count`` steps; each gives every request its next token."""
        for _ in range(count):
            events: Events = []
            for number, (request, place) in list(self.running.items()):
                limit = 1 if request.sampling.max_tokens is None else request.sampling.max_tokens
                token_id = answer(request.prompt_ids, place + 1)[place]
                events.append((number, Token(place, token_id)))
                self.running[number] = request, place + 1
                if place + 1 >= limit:
                    del self.running[number]
                    rows = len(request.prompt_ids) + len(request.prefix)
                    end = Finished(FinishReason.LENGTH, len(request.prompt_ids), limit, prefilled=rows)
                    events.append((number, end))
            self.tell(*events)

    def tell(self, *events: tuple[int, Event]) -> None:
        assert self._take is not None
        self._take(list(events))

    def state(self) -> EngineState:
        return EngineState(
            kv_tokens=4096,
            kv_tokens_free=4000,
            running=len(self.running),
            experts=6,
            expert_load_ms=2.0,
            load_ms_by_task={"converse": 6.0, "classify": 0.0},
        )

    def take_routing(self, number: int) -> RecordedRouting | None:
        return RecordedRouting(
            np.arange(12, dtype=np.uint8).reshape(3, 2, 2) % 3, 2, 3, {"prefetch_recall": 0.5}, {"eamc": 7000}
        )

    def foresee(self, prediction: Prediction) -> None:
        self.foreseen.append(prediction)

    def swap(self, file: ArtifactFile) -> None:
        if file.experts_per_layer != self.experts_per_layer:
            raise InvalidConfig(file.KIND, file.shape, "one of this model")
        self.swapped.append(file)
        self.artifacts[file.KIND] = ArtifactVersion.of(file)


class Gateway(tokens_pb2_grpc.TokensServicer):
    """Streams onto a StreamBook, as a gateway has it. ``reading`` cleared: it takes no message; ``answering``: no
    stream is answered. ``says_taken``: it answers when it is asked what it has taken in."""

    def __init__(self, instance: str, net: Net) -> None:
        self.instance = instance
        self.address = ""
        self.book = StreamBook()
        self.got: dict[str, list[int]] = {}
        self.says_taken = True
        self.messages = 0
        self.asked = 0
        self.opened = 0
        self.calls = 0
        self.reading = asyncio.Event()
        self.reading.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self._net = net

    async def serve(self) -> None:
        """At the same address as before."""
        self.address = await self._net.serve(self.instance, self)

    async def kill(self) -> None:
        await self._net.kill(self.instance)

    def expect(self, request_id: str, *delivered: int) -> None:
        self.book.expect(request_id)
        self.got[request_id] = list(delivered)
        if delivered:
            stream = object()
            self.book.open(request_id, Attempt(0, 0), stream)
            self.book.add(request_id, stream, [Token(place, token_id) for place, token_id in enumerate(delivered)])

    async def Deliver(self, request_iterator: AsyncIterator[tokens_pb2.FromWorker], context: Any) -> AsyncIterator[Any]:
        meant = dict(context.invocation_metadata() or ()).get("greenroom-instance")
        if meant != self.instance:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this is {self.instance}")
        self.calls += 1
        streams: dict[int, tuple[str, object]] = {}
        await self.reading.wait()
        async for message in request_iterator:
            self.messages += bool(message.tokens)
            self.asked += message.ask
            replies = []
            for opening in message.open:
                await self.answering.wait()
                self.opened += 1
                replies.append(self._open(opening, streams))
            for tokens in message.tokens:
                reply = self._add(tokens, streams)
                if reply is not None:
                    replies.append(reply)
            taken = message.ask and self.says_taken
            if replies or taken:
                yield tokens_pb2.FromGateway(replies=replies, taken=taken)
            await self.reading.wait()

    def _open(self, opening: tokens_pb2.OpenStream, streams: dict[int, tuple[str, object]]) -> tokens_pb2.StreamReply:
        stream = object()
        had = self.book.open(opening.request_id, Attempt(opening.attempt.epoch, opening.attempt.n), stream)
        reply = tokens_pb2.StreamReply(stream=opening.stream)
        if isinstance(had, Unwanted):
            reply.unwanted.why = _WHY[had]
        else:
            streams[opening.stream] = opening.request_id, stream
            reply.delivered.CopyFrom(to_token_run(had))
        return reply

    def _add(
        self, message: tokens_pb2.StreamTokens, streams: dict[int, tuple[str, object]]
    ) -> tokens_pb2.StreamReply | None:
        request_id, stream = streams[message.stream]
        reply = tokens_pb2.StreamReply(stream=message.stream)
        try:
            new = self.book.add(request_id, stream, from_token_run(message.tokens))
        except Gap:
            reply.gap.SetInParent()
            return reply
        if isinstance(new, Unwanted):
            reply.unwanted.why = _WHY[new]
            return reply
        self.got[request_id] += [token.token_id for token in new]
        return None


class Net(Protocol):
    """Where services are, by name."""

    @property
    def dialer(self) -> Dialer: ...

    async def serve(self, name: str, servicer: object) -> str:
        """Its address, the same one every time."""
        ...

    async def kill(self, name: str) -> None:
        """As if its process had died."""
        ...

    async def close(self) -> None: ...


class LocalNet:
    """All in one process, without gRPC."""

    def __init__(self) -> None:
        self._dialer = LocalDialer()
        self._servers: dict[str, LocalServer] = {}

    @property
    def dialer(self) -> Dialer:
        return self._dialer

    async def serve(self, name: str, servicer: object) -> str:
        address = f"{name}:1"
        self._servers[name] = self._dialer.serve(address, [servicer])
        return address

    async def kill(self, name: str) -> None:
        await self._servers.pop(name).kill()

    async def close(self) -> None:
        for server in self._servers.values():
            await server.stop(0.0)
        await self._dialer.close()


class GrpcNet:
    """Over loopback."""

    def __init__(self) -> None:
        self._dialer = GrpcDialer()
        self._servers: dict[str, Server] = {}
        self._ports: dict[str, int] = {}

    @property
    def dialer(self) -> Dialer:
        return self._dialer

    async def serve(self, name: str, servicer: object) -> str:
        server = self._servers[name] = Server(ServerConfig(port=self._ports.get(name, 0)), [servicer])
        self._ports[name] = await server.start()
        return f"127.0.0.1:{self._ports[name]}"

    async def kill(self, name: str) -> None:
        await self._servers.pop(name).stop(0.0)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.stop(0.0)
        await self._dialer.close()


NETS: dict[str, type[LocalNet | GrpcNet]] = {"local": LocalNet, "grpc": GrpcNet}
chosen = {"net": "local"}
"""Which of them ``staged`` takes."""


class Members:
    """A directory that says what it is told to."""

    def __init__(self) -> None:
        self.here: dict[str, Member] = {}
        self.certainly_gone: set[str] = set()
        self.add(SCHEDULER, "", MemberKind.SCHEDULER)

    def add(self, instance: str, address: str, kind: MemberKind = MemberKind.GATEWAY, pool: int = 0) -> None:
        self.here[instance] = Member(member=kind, instance=instance, address=address, ttl_ms=10_000, pool=pool)

    def get(self, instance: str) -> Member | None:
        return self.here.get(instance)

    def gone(self, instance: str) -> bool:
        return instance in self.certainly_gone

    def of(self, kind: MemberKind, pool: int | None = None) -> list[Member]:
        return [member for member in self.here.values() if member.member is kind]


@dataclass
class Stage:
    """A worker's service and what is around it."""

    net: Net
    log: MemoryLog
    members: Members
    clock: Clock
    generates: GenerationEngine | InferenceEngine
    service: WorkerService
    stub: worker_pb2_grpc.WorkerStub
    epoch: int = 5
    leases: list[Lease] = field(default_factory=list)

    @property
    def engine(self) -> ScriptedEngine:
        assert isinstance(self.generates, ScriptedEngine)
        return self.generates

    async def gateway(self, name: str = "gateway") -> Gateway:
        gateway = Gateway(name, self.net)
        await gateway.serve()
        self.members.add(gateway.instance, gateway.address)
        return gateway

    def task(self, request_id: str, **asked: Any) -> Task:
        return task_of(request_id, **asked)

    def run(self, task: Task, n: int = 0, *, epoch: int | None = None, worker: str | None = None) -> Any:
        """The call, under way."""
        epoch = self.epoch if epoch is None else epoch
        return self.stub.Run(run_request(task, worker or self.service.instance, epoch=epoch, n=n))

    async def lease(
        self, lease_ms: int = LEASE_MS, *, epoch: int | None = None, granted: int | None = None, by: str = SCHEDULER
    ) -> Lease:
        """A scheduler's connection that grants what is asked, the first of it at once. ``granted``: the epoch of its
        grants, where that is not the one of its hello."""
        lease = Lease(self, lease_ms, self.epoch if epoch is None else epoch, granted, by)
        self.leases.append(lease)
        renewals = self.service.counters.lease_renewals
        await until(lambda: self.service.counters.lease_renewals > renewals or lease.ended.done())
        return lease

    async def step(self, count: int = 1) -> None:
        """Steps of the engine, each of whose messages has been sent before the next."""
        for _ in range(count):
            self.engine.step()
            for _ in range(20):
                await asyncio.sleep(0)

    async def traces(self) -> list[bytes]:
        async with self.log.reader("traces", 0) as reader:
            return [record.value or b"" for record in await reader.poll(DEADLINE_S)]


class Lease:
    """``granting`` cleared: it grants nothing."""

    def __init__(
        self, stage: Stage, lease_ms: int, epoch: int, granted: int | None = None, by: str = SCHEDULER
    ) -> None:
        self.granting = True
        self.granted = 0
        self.epoch = epoch if granted is None else granted
        self.states: list[worker_pb2.WorkerState] = []
        self._grants: asyncio.Queue[worker_pb2.LeaseFromScheduler] = asyncio.Queue()
        self._messages = lease_messages(
            self._grants, stage.service.instance, epoch=epoch, lease_ms=lease_ms, scheduler=by
        )
        self.ended = asyncio.create_task(self._run(stage))

    async def _run(self, stage: Stage) -> grpc.StatusCode:
        call = stage.stub.Lease(self._messages)
        try:
            async for asked in call:
                self.states.append(asked.state)
                if self.granting:
                    self.grant(asked.sequence)
            return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            call.cancel()

    def grant(self, sequence: int) -> None:
        grant = worker_pb2.LeaseGrant(sequence=sequence, epoch=self.epoch)
        self._grants.put_nowait(worker_pb2.LeaseFromScheduler(grant=grant))
        self.granted += 1

    async def hang_up(self) -> None:
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)


@asynccontextmanager
async def staged(
    engine: GenerationEngine | InferenceEngine | None = None,
    card: ModelCard = CARD,
    *,
    profile: ModelProfile | None = None,
    **config: Any,
) -> AsyncIterator[Stage]:
    """A service that runs, audited at its end; on a script where no engine is given."""
    clock, members = Clock(), Members()
    generates: GenerationEngine | InferenceEngine = engine or ScriptedEngine()
    net: Net = NETS[chosen["net"]]()
    async with MemoryLog(MemoryBroker()) as log:
        await log.ensure([Topic("traces")])
        service = WorkerService(
            ServiceConfig(**{"instance": "worker-1", **config}),
            generates,
            card,
            log,
            net.dialer,
            members,
            profile=profile,
            clock=clock,
        )
        address = await net.serve("worker", WorkerServicer(service))
        await service.start()
        stub: worker_pb2_grpc.WorkerStub = net.dialer.stub(worker_pb2_grpc.WorkerStub, address)
        stage = Stage(net, log, members, clock, generates, service, stub)
        try:
            yield stage
            service.table.audit()
        finally:
            for lease in stage.leases:
                await lease.hang_up()
            await service.stop()
            await net.close()
