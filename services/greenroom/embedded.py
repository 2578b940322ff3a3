"""All services of the pipeline in one process: the same classes as in many, on a log and calls that stay in it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry

from greenroom.core.artifacts.forecast_kinds import STATISTICS
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.messages import ModelCard
from greenroom.core.model_profile import ModelProfile
from greenroom.core.units import MIB
from greenroom.fabric.lifecycle import Entered, Part, Service
from greenroom.fabric.log import Log
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog
from greenroom.fabric.members import Directory
from greenroom.fabric.members.metrics import MembersCollector
from greenroom.fabric.rpc import LocalDialer, LocalEndpoint
from greenroom.fabric.topics import Topics, all_topics
from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.metrics import PipelineCollector
from greenroom.gateway.pipeline.pipeline import Pipeline
from greenroom.gateway.service import GatewayService, tokens_endpoint
from greenroom.predictor import PredictorConfig, PredictorMetrics, PredictorService
from greenroom.predictor.process import predictor_parts
from greenroom.scheduler.config import PoolConfig, SchedulerConfig
from greenroom.scheduler.metrics import SchedulerCollector
from greenroom.scheduler.service import SchedulerService
from greenroom.tasktype import (
    DEFAULT_EXTRACTOR,
    SHIPPED_EXTRACTORS,
    TaskTypeConfig,
    TaskTypeMetrics,
    TaskTypeService,
    open_extractor,
)
from greenroom.text import TextProcessor
from greenroom.worker.generation_engine import GenerationEngine
from greenroom.worker.inference_engine import TAKES_AT_ONCE, InferenceEngine
from greenroom.worker.process import worker_parts
from greenroom.worker.service import WorkerService
from greenroom.worker.service_config import ArtifactConfig, ForecastConfig, ServiceConfig, TraceConfig
from greenroom.worker.service_counters import ServiceCollector

_LOG_BYTES = 64 * MIB
"""For what is on its way, and for outcomes that a retry may ask for."""
_LOG_BYTES_OF_INPUTS = 512 * MIB
"""Images on their way are larger than prompts."""
_TTL_MS = 3_600_000
"""Who shares a process ends with it. A sleeping laptop or a throttled container stops all of them at once, and none of
them is gone for its silence: hence no end of a worker's lease either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """``task_type_extractor``: what finds out what kind of task a prompt describes, by name. ``scheduling``: the
    placement policy by name, ``scheduling_options`` what its class may be told. ``max_waiting``:
    requests that wait at most, and ``max_queue_wait_s`` how long. ``max_running``: requests that generate at once.
    ``max_input_bytes``: of the inputs of all requests that the worker has, None: any. ``forecast_every``: prompts
    between two forecasts; 0: none. ``forecast_predictor``: see ForecastConfig. ``artifact_every_s``: how often it is
    looked whether there is a newer version of what the expert policy predicts by; 0: never. With neither of the two
    nothing is traced, and there is no predictor. ``trace_tokens``: see TraceConfig. ``predictor``: how that is set up.
    Raises InvalidConfig, naming the field."""

    task_type_extractor: str = DEFAULT_EXTRACTOR
    scheduling: str = "fcfs"
    scheduling_options: Mapping[str, Any] = field(default_factory=dict)
    max_waiting: int = 256
    max_queue_wait_s: float = 120.0
    max_running: int = 32
    max_input_bytes: int | None = None
    forecast_every: int = 0
    forecast_predictor: str = STATISTICS
    artifact_every_s: float = 0.0
    trace_tokens: bool = False
    predictor: PredictorConfig = field(default_factory=PredictorConfig)

    def __post_init__(self) -> None:
        if not 0 < self.max_queue_wait_s < math.inf:  # the scheduler counts in milliseconds, and would name those
            raise InvalidConfig("max_queue_wait_s", self.max_queue_wait_s, "it is a number of seconds above 0")
        if self.forecast_every < 0:
            raise InvalidConfig("forecast_every", self.forecast_every, "it is a number from 1, or 0 for none")
        if not 0 <= self.artifact_every_s < math.inf:
            raise InvalidConfig(
                "artifact_every_s", self.artifact_every_s, "a number of seconds above 0, or 0 for never"
            )
        if self.task_type_extractor not in SHIPPED_EXTRACTORS:
            raise UnknownName("task_type_extractor", self.task_type_extractor, SHIPPED_EXTRACTORS)
        self.scheduler()
        self.worker("embedded")

    @property
    def predicts(self) -> bool:
        """Whether there is a predictor, for which sequences are traced."""
        return self.forecast_every > 0 or self.artifact_every_s > 0

    def scheduler(self) -> SchedulerConfig:
        pool = PoolConfig(
            max_waiting=self.max_waiting, max_queue_wait_ms=self.max_queue_wait_s * 1000, lease_ms=math.inf
        )
        return SchedulerConfig(
            pool=pool, policy=self.scheduling, policy_options=self.scheduling_options, ttl_ms=_TTL_MS
        )

    def worker(self, instance: str) -> ServiceConfig:
        return ServiceConfig(
            instance=instance,
            max_running=self.max_running,
            max_input_bytes=self.max_input_bytes,
            ttl_ms=_TTL_MS,
            traces=TraceConfig(enabled=self.predicts, tokens=self.trace_tokens),
            forecasts=ForecastConfig(every=self.forecast_every, predictor=self.forecast_predictor),
            artifacts=ArtifactConfig(every_ms=self.artifact_every_s * 1000.0),
        )


class _Ensured(Part):
    def __init__(self, log: Log) -> None:
        super().__init__("topics")
        self._log = log

    async def start(self) -> None:
        await self._log.ensure(all_topics(Topics(request_partitions=1, trace_partitions=1)))


def embedded_parts(
    config: EmbeddedConfig,
    front: GatewayConfig,
    *,
    engine: GenerationEngine | InferenceEngine,
    card: ModelCard,
    text: TextProcessor | None,
    registry: CollectorRegistry,
    profile: ModelProfile | None = None,
) -> tuple[GatewayService, list[Service]]:
    """The parts in the order of their start, the gateway among them by itself too. ``text`` is None where ``engine`` is
    a collaboration of experts, which takes as many requests at once as it can arrange. ``profile``: what was measured
    of the model."""
    name = uuid.uuid4().hex[:8]
    bytes_kept = _LOG_BYTES
    if isinstance(engine, InferenceEngine):
        config, bytes_kept = replace(config, max_running=TAKES_AT_ONCE), _LOG_BYTES_OF_INPUTS
    log, dialer = MemoryLog(MemoryBroker(max_bytes=bytes_kept)), LocalDialer()
    directory = Directory(log)
    worker = WorkerService(config.worker(f"worker.{name}"), engine, card, log, dialer, directory, profile=profile)
    registry.register(ServiceCollector(worker.counters, worker.gauges))
    extractor = open_extractor(config.task_type_extractor)
    placing = config.scheduler()
    scheduler = SchedulerService(
        placing,
        instance=f"scheduler.{name}",
        log=log,
        dialer=dialer,
        directory=directory,
        policy=placing.make_policy,
        profile=profile,
    )
    registry.register(SchedulerCollector(scheduler))
    registry.register(MembersCollector(directory))
    flow = PipelineConfig(
        default_timeout_s=front.request_timeout_s,
        max_timeout_s=front.max_request_timeout_s,
        max_keyed=front.max_in_flight,
        ttl_ms=_TTL_MS,
    )
    pipeline = Pipeline(flow, instance=f"gateway.{name}", log=log, directory=directory)
    registry.register(PipelineCollector(pipeline))
    gateway = GatewayService(Gateway(front, pipeline, text, registry))
    parts: list[Service] = [
        Entered("log", log),
        _Ensured(log),
        Entered("dialer", dialer),
        Entered("directory", directory),
        TaskTypeService(TaskTypeConfig(), log, extractor, TaskTypeMetrics(registry, extractor.names, extractor.name)),
        *worker_parts(worker, log, LocalEndpoint(dialer, "worker")),
        scheduler,
    ]
    if config.predicts:
        learning = config.predictor
        predictor = PredictorService(learning, log, PredictorMetrics(registry))
        endpoint = LocalEndpoint(dialer, "predictor")
        parts += predictor_parts(predictor, learning, log, endpoint, f"predictor.{name}")
    tokens = tokens_endpoint(pipeline, LocalEndpoint(dialer, "gateway"))
    return gateway, [*parts, tokens, pipeline, gateway]
