"""``greenroom serve``: the whole pipeline in one process, behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.coe_options import coe_options, refuse_coe_options, serving_config
from greenroom.cli.forecast_options import (
    artifact_every_option,
    artifacts_taken,
    forecast_predictor,
    forecast_predictor_option,
    trace_tokens_option,
)
from greenroom.cli.gateway_options import gateway_config, gateway_options
from greenroom.cli.model_options import expert_policy, model_options, worker_config
from greenroom.cli.scheduling_options import parse_scheduling_options, scheduling_options
from greenroom.cli.service_options import drain_option, refuse_taken, telemetry_options
from greenroom.cli.service_process import named, say
from greenroom.core.errors import InvalidConfig
from greenroom.policies.registry import EXECUTOR_SCHEDULINGS, PLACEMENT_POLICIES

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from greenroom.core.messages import ModelCard
    from greenroom.core.model_profile import ModelProfile
    from greenroom.embedded import EmbeddedConfig
    from greenroom.fabric.telemetry import TelemetryConfig
    from greenroom.gateway import GatewayConfig
    from greenroom.text import TextProcessor
    from greenroom.worker.generation_engine import GenerationEngine
    from greenroom.worker.inference_engine import InferenceEngine
    from greenroom.worker.model.model_runtime import ModelRuntime


@click.command()
@model_options
@click.option("--served-model-name", help="The model's name in the API.  [default: as --model has it]")
@coe_options
@scheduling_options(
    "Which request goes first. With --coe: how executors get their requests: pull (the default then), coserve or fcfs.",
    {*PLACEMENT_POLICIES, *EXECUTOR_SCHEDULINGS},
)
@click.option(
    "--max-queue-wait", type=float, default=120.0, show_default=True, help="Seconds that one waits at most to begin."
)
@click.option(
    "--task-type-extractor",
    type=click.Choice(("linear", "keywords")),
    default="linear",
    show_default=True,
    help="What finds out what kind of task a prompt describes.",
)
@click.option(
    "--forecast-every",
    type=int,
    help="Prompts between two forecasts of the experts to come; 0: none.  [default: 40 with --policy emoe unless all "
    "experts fit, else 0]",
)
@forecast_predictor_option
@artifact_every_option
@trace_tokens_option
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where is kept what was learnt of the use of experts.  [default: in memory, until it ends]",
)
@gateway_options(grpc_port="none", linger_s=2.0)
@telemetry_options
@drain_option
def serve(max_queue_wait: float, drain_timeout: float, **options: Any) -> None:
    """Serve a model at http://HOST:PORT with an OpenAI-compatible API, and over gRPC where --grpc-port says so.

    Gateway, task-type extraction, scheduler and worker run in this process; no broker is needed. Without --model it is
    the bundled one. The expert pack is made at first use. SIGTERM or Ctrl-C: nothing new is taken, running requests are
    finished, and the experts that are resident are remembered for the next start.

    \b
    Examples:
      greenroom serve --expert-memory 33%
      greenroom serve --model mistralai/Mixtral-8x7B-Instruct-v0.1 --expert-memory 16GiB --policy lfu
      greenroom serve --policy emoe --fidelity paper --profile profile.json --expert-memory 60% --scheduling emoe
      greenroom serve --expert-memory 33% --batching phases --tokens-per-step auto
      greenroom serve --policy moe-infinity --expert-memory 33% --state-dir ./state
      greenroom serve --coe board.toml --expert-memory 2GiB
      greenroom serve --coe demo --expert-memory 33% --scheduling coserve --policy coserve --executors 2
      greenroom serve --model ./checkpoint --host 0.0.0.0 --keys-file keys.json --served-model-name mixtral
    """
    from greenroom.embedded import EmbeddedConfig
    from greenroom.fabric.lifecycle import run_loop
    from greenroom.predictor import PredictorConfig
    from greenroom.text.hub import hub_id
    from greenroom.worker.service_config import ForecastConfig

    _, traces = named("serve", options)
    if options["coe"] is not None:
        sys.exit(_serve_collaboration(max_queue_wait, drain_timeout, traces, options))
    refuse_coe_options(options)
    front = gateway_config(options, drain_timeout_s=drain_timeout, model_root=hub_id(options["model"]))
    (policy, own), every = expert_policy(options), options["forecast_every"]
    assert policy is not None, "it has a default"
    scheduling, scheduling_kwargs = parse_scheduling_options(options)
    config = EmbeddedConfig(
        task_type_extractor=options["task_type_extractor"],
        scheduling=scheduling,
        scheduling_options=scheduling_kwargs,
        max_waiting=options["max_waiting"],
        max_queue_wait_s=max_queue_wait,
        max_running=options["max_running"],
        forecast_every=(ForecastConfig().every if policy == "emoe" else 0) if every is None else every,
        forecast_predictor=forecast_predictor(options["forecast_predictor"], policy),
        artifact_every_s=options["artifact_every"] if artifacts_taken(policy, own, options["batching"]) else 0.0,
        trace_tokens=options["trace_tokens"],
        predictor=PredictorConfig(state_dir=options["state_dir"]),
    )
    if config.trace_tokens and not config.predicts:
        raise InvalidConfig(
            "trace_tokens", True, "a policy that predicts by artifacts, or --forecast-every: else nothing is traced"
        )
    refuse_taken("port", front.host, front.port)
    refuse_taken("grpc_port", front.host, front.grpc_port)
    model = worker_config(options)

    # Imports torch, which takes seconds. What can be refused without it has been refused.
    from greenroom.worker.model.model_runtime import ModelRuntime

    with ModelRuntime(model) as worker:
        say(worker.describe(), options["log_format"])
        if worker.experts.device.slots == worker.experts.catalogue.size:
            config = replace(config, forecast_every=every or 0, artifact_every_s=0.0)
        code = run_loop(_serve(_model(worker, config), config, front, traces, options["log_format"]))
    sys.exit(code)


def _serve_collaboration(
    max_queue_wait: float, drain_timeout: float, traces: TelemetryConfig | None, options: dict[str, Any]
) -> int:
    from greenroom.embedded import EmbeddedConfig
    from greenroom.fabric.lifecycle import run_loop

    front = gateway_config(options, drain_timeout_s=drain_timeout)
    config = EmbeddedConfig(max_waiting=options["max_waiting"], max_queue_wait_s=max_queue_wait)
    collaboration = serving_config(options)
    refuse_taken("port", front.host, front.port)
    refuse_taken("grpc_port", front.host, front.grpc_port)

    # Imports torch, which takes seconds. What can be refused without it has been refused.
    from greenroom.coe.serving.memory_plan import plan_inputs
    from greenroom.coe.serving.runtime import CollaborationRuntime
    from greenroom.worker.collaboration.card import card_of
    from greenroom.worker.collaboration.collaboration_engine import CollaborationEngine
    from greenroom.worker.collaboration.metrics import CollaborationCollector
    from greenroom.worker.inference_engine import INPUT_COPIES
    from greenroom.worker.usable_memory import memory

    available = memory().available
    with CollaborationRuntime(collaboration, available_bytes=available, input_bytes=plan_inputs(available)) as runtime:
        say(runtime.describe(), options["log_format"])
        config = replace(config, max_input_bytes=runtime.plan.inputs // INPUT_COPIES)
        card = card_of(runtime, options["served_model_name"])
        served = Served(CollaborationEngine(runtime), card, CollaborationCollector(runtime))
        return run_loop(_serve(served, config, front, traces, options["log_format"]))


@dataclass(frozen=True, slots=True)
class Served:
    """What the worker of the process serves. ``collector``: its metrics. ``text``: None where it is a collaboration."""

    engine: GenerationEngine | InferenceEngine
    card: ModelCard
    collector: Collector
    text: TextProcessor | None = None
    profile: ModelProfile | None = None


def _model(worker: ModelRuntime, config: EmbeddedConfig) -> Served:
    from greenroom.worker.model.card import card_of
    from greenroom.worker.model.metrics import WorkerCollector
    from greenroom.worker.model.model_engine import ModelEngine
    from greenroom.worker.traces.routing import RoutingRecorder

    recorder = None
    if config.predicts:
        recorder = RoutingRecorder(worker.experts.catalogue, most_rows=1024, tokens=config.trace_tokens)
    engine = ModelEngine(worker, recorder)
    return Served(engine, card_of(worker), WorkerCollector(worker), worker.text, worker.profile)


async def _serve(
    served: Served,
    config: EmbeddedConfig,
    front: GatewayConfig,
    traces: TelemetryConfig | None,
    log_format: str,
) -> int:
    from greenroom.embedded import embedded_parts
    from greenroom.fabric import telemetry
    from greenroom.fabric.lifecycle import LifeConfig, Part, StartIsKept, run_service
    from greenroom.fabric.telemetry.registry import new_registry

    registry = new_registry()
    registry.register(served.collector)
    gateway, parts = embedded_parts(
        config,
        front,
        engine=served.engine,
        card=served.card,
        text=served.text,
        registry=registry,
        profile=served.profile,
    )

    class Told(Part):
        async def start(self) -> None:
            # The members have to come round first; readiness is of several parts, none of which tells of a change.
            while gateway.unready is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            host = f"[{front.host}]" if ":" in front.host else front.host
            say(f"ready: http://{host}:{gateway.port}  (model {served.card.name})", log_format)

        async def drain(self, timeout_s: float) -> None:
            say("stopping: no new requests; running ones are finished", log_format)

    logging.getLogger("greenroom.fabric").setLevel(logging.WARNING)
    logging.getLogger("greenroom.scheduler").setLevel(logging.WARNING)
    # Gateway and worker stop together: that one of them goes is no news.
    logging.getLogger("greenroom.worker.gateways.gateway_connection").setLevel(logging.WARNING)
    if traces is not None:
        telemetry.start(traces)
    try:
        return await run_service(
            [*parts, Told("ready"), StartIsKept()], LifeConfig(drain_timeout_s=front.drain_timeout_s), registry=registry
        )
    finally:
        await telemetry.stop()
