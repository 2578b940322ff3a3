"""A worker without a model, to find what the rest can carry: it gives tokens as fast as they are taken.

    python -m benchmarks.pipeline.stub_worker BROKERS PREFIX

Its step takes ``STEP_S`` and gives a token to every running request.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.generation import Finished, FinishReason, GenerationRequest, Token
from greenroom.core.messages import ModelCard
from greenroom.demo import bundled_model_path
from greenroom.fabric.lifecycle import Entered, LifeConfig, run_service
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from greenroom.fabric.members import Directory
from greenroom.fabric.rpc import GrpcDialer, NetworkEndpoint, ServerConfig
from greenroom.policies.base.events import Prediction
from greenroom.text import TextProcessor
from greenroom.text.digest import text_digest
from greenroom.worker.generation_engine import ArtifactVersion, EngineState, Events, RecordedRouting
from greenroom.worker.process import worker_parts
from greenroom.worker.service import WorkerService
from greenroom.worker.service_config import ForecastConfig, ServiceConfig, TraceConfig

STEP_S = 0.002
RUNNING = 64
MODEL = "greenroom-understudy"


class StubEngine:
    """As greenroom.worker.generation_engine.GenerationEngine has it."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._running: dict[int, tuple[GenerationRequest, int]] = {}
        self._take: Callable[[Events], None] = lambda events: None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return True

    def listen(self, take: Callable[[Events], None]) -> None:
        self._take = take

    def admit_check(self, request: GenerationRequest) -> None:
        pass

    def begin(self, number: int, request: GenerationRequest) -> None:
        self._running[number] = (request, len(request.prefix))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STEP_S, self._step)

    def cancel(self, number: int) -> None:
        running = self._running.pop(number, None)
        if running is not None:
            request, given = running
            end: Events = [(number, Finished(FinishReason.CANCELLED, len(request.prompt_ids), given))]
            asyncio.get_running_loop().call_soon(self._take, end)

    def _step(self) -> None:
        self._timer = None
        events: Events = []
        for number, (request, given) in list(self._running.items()):
            events.append((number, Token(given, self._token_id)))
            if given + 1 >= (request.sampling.max_tokens or 1):
                del self._running[number]
                events.append((number, Finished(FinishReason.LENGTH, len(request.prompt_ids), given + 1)))
            else:
                self._running[number] = (request, given + 1)
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(STEP_S, self._step)
        self._take(events)

    def state(self) -> EngineState:
        return EngineState(kv_tokens=1_000_000, kv_tokens_free=1_000_000, running=len(self._running))

    def take_routing(self, number: int) -> RecordedRouting | None:
        return None

    def foresee(self, prediction: Prediction) -> None:
        pass

    @property
    def artifacts(self) -> dict[str, ArtifactVersion | None]:
        return {}

    def swap(self, file: ArtifactFile) -> None:
        pass


async def live(brokers: str, prefix: str) -> int:
    tokenizer = TextProcessor.from_folder(bundled_model_path()).tokenizer
    engine = StubEngine(tokenizer.encode("a", add_special_tokens=False)[0])
    log = KafkaLog(LogConfig(brokers=(brokers,), prefix=prefix))
    dialer, directory = GrpcDialer(), Directory(log)
    card = ModelCard(
        name=MODEL,
        digest="stub",
        text_digest=text_digest(bundled_model_path()),  # else the gateway does not take it for one of its own
        max_model_len=1024,
        vocab_size=tokenizer.vocab_size,
    )
    config = ServiceConfig(
        instance=f"stub.{uuid.uuid4().hex[:8]}",
        max_running=RUNNING,
        traces=TraceConfig(enabled=False),
        forecasts=ForecastConfig(every=0),
    )
    service = WorkerService(config, engine, card, log, dialer, directory)
    around = [Entered("log", log), Entered("dialer", dialer), Entered("directory", directory)]
    endpoint = NetworkEndpoint(ServerConfig(), lambda port: f"127.0.0.1:{port}")
    return await run_service([*around, *worker_parts(service, log, endpoint)], LifeConfig())


if __name__ == "__main__":
    sys.exit(asyncio.run(live(sys.argv[1], sys.argv[2])))
