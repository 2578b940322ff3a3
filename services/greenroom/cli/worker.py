"""``greenroom worker``: one model of a pool, for schedulers to run requests on."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.coe_options import coe_options, refuse_coe_options, serving_config
from greenroom.cli.forecast_options import (
    artifact_every_option,
    forecast_predictor,
    forecast_predictor_option,
    trace_tokens_option,
)
from greenroom.cli.model_options import model_options, worker_config
from greenroom.cli.scheduling_options import scheduling_options
from greenroom.cli.seconds import above_0
from greenroom.cli.service_options import (
    dialer_from,
    dialer_options,
    endpoint_from,
    listen_options,
    log_config_from,
    log_options,
    process_options,
    refuse_taken,
    split_address,
    traces_from,
)
from greenroom.core.errors import InvalidConfig
from greenroom.policies.registry import EXECUTOR_SCHEDULINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log
    from greenroom.worker.model.config import WorkerConfig
    from greenroom.worker.model.model_runtime import ModelRuntime
    from greenroom.worker.service_config import ServiceConfig


@click.command()
@model_options
@coe_options
@scheduling_options("With --coe: how executors get their requests.", EXECUTOR_SCHEDULINGS, EXECUTOR_SCHEDULINGS[0])
@click.option("--served-model-name", help="The model's name.  [default: as --model has it]")
@click.option("--pool", type=int, default=0, show_default=True, help="The pool that it belongs to: one model's number.")
@click.option("--max-queued", type=int, default=8, show_default=True, help="Requests that wait here for a free place.")
@click.option(
    "--grace",
    type=float,
    callback=above_0(most=3600),
    default=120.0,
    show_default=True,
    help="Seconds that requests go on, and results are kept, while no scheduler asks for them.",
)
@click.option(
    "--slow-gateway",
    type=float,
    callback=above_0(most=3600),
    default=5.0,
    show_default=True,
    help="Seconds after which a gateway that takes no tokens loses its call.",
)
@click.option(
    "--traces",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Publish where finished sequences were routed, which predictors learn from; auto: unless all experts fit.",
)
@click.option("--trace-rows", type=int, default=1024, show_default=True, help="Tokens of a sequence that are traced.")
@trace_tokens_option
@click.option(
    "--forecast-every",
    type=int,
    default=40,
    show_default=True,
    help="Prompts between two forecasts; 0 for none, as where all experts fit.",
)
@click.option(
    "--forecast-timeout",
    type=float,
    callback=above_0(most=3600),
    default=1.0,
    show_default=True,
    help="Seconds that a forecast may take.",
)
@forecast_predictor_option
@artifact_every_option
@click.option("--predictor", help="host:port of the predictor.  [default: the one that has announced itself]")
@listen_options
@log_options
@dialer_options
@process_options
def worker(**options: Any) -> None:
    """Run a model as a worker of a pool, behind gateways and a scheduler that share a Kafka log with it.

    Without --model it is the bundled one. The expert pack is made at first use. SIGTERM or Ctrl-C: nothing new is
    taken, what runs may end within --drain-timeout, the rest goes on at other workers, and the resident experts are
    remembered for the next start.

    \b
    Examples:
      greenroom worker --expert-memory 33%
      greenroom worker --model ./checkpoint --pools 2 --pool 1 --brokers kafka:9092 --listen 0.0.0.0:7001 --insecure-rpc
      greenroom worker --policy popularity --forecast-every 20 --probe-host 0.0.0.0 --probe-port 9100
      greenroom worker --expert-memory 33% --batching phases:hold=0.25
      greenroom worker --coe board.toml --pools 2 --pool 1 --expert-memory 2GiB --executors 2
      greenroom worker --policy emoe --fidelity sensitive --profile profile.json --expert-memory 60%
    """
    if options["coe"] is not None:
        sys.exit(_collaboration(options))
    refuse_coe_options(options)
    for name in ("scheduling", "scheduling_options"):
        options.pop(name)
    config = worker_config(options)
    _service_config("worker", config, options, all_fit=False)
    _refuse_wrong(options)

    # Imports torch, which takes seconds. What can be refused without it has been refused.
    from greenroom.worker.model.model_runtime import ModelRuntime
    from greenroom.worker.process import share_interpreter

    share_interpreter()
    with ModelRuntime(config) as model:
        code = _live(model, options)
    sys.exit(code)


def _collaboration(options: dict[str, Any]) -> int:
    from greenroom.worker.faults import VARIABLE
    from greenroom.worker.inference_engine import INPUT_COPIES, TAKES_AT_ONCE
    from greenroom.worker.service_config import ServiceConfig, StreamConfig

    collaboration = serving_config(options)

    def service_config(instance: str) -> ServiceConfig:
        return ServiceConfig(
            instance=instance,
            pool=options["pool"],
            max_running=TAKES_AT_ONCE,
            max_queued=options["max_queued"],
            grace_ms=options["grace"] * 1000.0,
            streams=StreamConfig(slow_gateway_ms=options["slow_gateway"] * 1000.0),
            fault=os.environ.get(VARIABLE),
        )

    _refuse_wrong(options)
    most = service_config("worker").max_runs
    # Imports torch, which takes seconds. What can be refused without it has been refused.
    from greenroom.cli.service_process import live, say
    from greenroom.coe.serving.memory_plan import plan_inputs
    from greenroom.coe.serving.runtime import CollaborationRuntime
    from greenroom.fabric.lifecycle import Entered
    from greenroom.fabric.members import Directory
    from greenroom.fabric.members.metrics import MembersCollector
    from greenroom.worker.collaboration.card import card_of
    from greenroom.worker.collaboration.collaboration_engine import CollaborationEngine, most_requests
    from greenroom.worker.collaboration.metrics import CollaborationCollector
    from greenroom.worker.process import share_interpreter, worker_parts
    from greenroom.worker.service import WorkerService
    from greenroom.worker.service_counters import ServiceCollector
    from greenroom.worker.usable_memory import memory

    share_interpreter()
    available = memory().available
    with CollaborationRuntime(
        collaboration,
        available_bytes=available,
        input_bytes=plan_inputs(available),
        most_requests=most_requests(most),
    ) as runtime:

        def make(log: Log, registry: CollectorRegistry, instance: str) -> Sequence[Service]:
            say(runtime.describe(), options["log_format"])
            dialer, directory = dialer_from(options), Directory(log)
            card = card_of(runtime, options["served_model_name"])
            engine = CollaborationEngine(runtime)
            own = replace(service_config(instance), max_input_bytes=runtime.plan.inputs // INPUT_COPIES)
            service = WorkerService(own, engine, card, log, dialer, directory)
            registry.register(CollaborationCollector(runtime))
            registry.register(ServiceCollector(service.counters, service.gauges))
            registry.register(MembersCollector(directory))
            around = [Entered("dialer", dialer), Entered("directory", directory)]
            return [*around, *worker_parts(service, log, endpoint_from(options))]

        return live("worker", options, make)


def _refuse_wrong(options: dict[str, Any]) -> None:
    """Raises InvalidConfig."""
    endpoint_from(options)
    log_config_from(options)
    traces_from(options, "worker", "")
    refuse_taken("listen", *split_address("listen", options["listen"]))
    refuse_taken("probe_port", options["probe_host"], options["probe_port"])


def _live(model: ModelRuntime, options: dict[str, Any]) -> int:
    from greenroom.cli.service_process import live, say
    from greenroom.fabric.lifecycle import Entered
    from greenroom.fabric.members import Directory
    from greenroom.fabric.members.metrics import MembersCollector
    from greenroom.worker.faults import fault_of
    from greenroom.worker.model.card import card_of
    from greenroom.worker.model.metrics import WorkerCollector
    from greenroom.worker.model.model_engine import ModelEngine
    from greenroom.worker.process import worker_parts
    from greenroom.worker.service import WorkerService
    from greenroom.worker.service_counters import ServiceCollector
    from greenroom.worker.traces.routing import RoutingRecorder

    def make(log: Log, registry: CollectorRegistry, instance: str) -> Sequence[Service]:
        say(model.describe(), options["log_format"])
        all_fit = model.experts.device.slots == model.experts.catalogue.size
        config = _service_config(instance, model.config, options, all_fit=all_fit)
        recorder = None
        if config.records_routing:
            recorder = RoutingRecorder(
                model.experts.catalogue, most_rows=config.traces.rows, tokens=config.traces.tells_tokens
            )
        engine = ModelEngine(model, recorder, fault=fault_of(config.fault))
        dialer, directory = dialer_from(options), Directory(log)
        service = WorkerService(config, engine, card_of(model), log, dialer, directory, profile=model.profile)
        registry.register(WorkerCollector(model))
        registry.register(ServiceCollector(service.counters, service.gauges))
        registry.register(MembersCollector(directory))
        around = [Entered("dialer", dialer), Entered("directory", directory)]
        return [*around, *worker_parts(service, log, endpoint_from(options))]

    return live("worker", options, make)


def _service_config(instance: str, model: WorkerConfig, options: dict[str, Any], *, all_fit: bool) -> ServiceConfig:
    """``all_fit``: every expert is in memory; then recording costs most and serves no one."""
    from greenroom.worker.faults import VARIABLE
    from greenroom.worker.service_config import ArtifactConfig, ForecastConfig, ServiceConfig, StreamConfig, TraceConfig

    if options["trace_tokens"] and options["traces"] == "off":
        raise InvalidConfig("trace_tokens", True, "--traces on or auto beside it, as tokens are a part of traces")
    traced = options["traces"] == "on" or (options["traces"] == "auto" and not all_fit)
    return ServiceConfig(
        instance=instance,
        pool=options["pool"],
        max_running=model.max_running,
        max_queued=options["max_queued"],
        grace_ms=options["grace"] * 1000.0,
        streams=StreamConfig(slow_gateway_ms=options["slow_gateway"] * 1000.0),
        traces=TraceConfig(enabled=traced, rows=options["trace_rows"], tokens=options["trace_tokens"]),
        forecasts=ForecastConfig(
            every=0 if all_fit else options["forecast_every"],
            timeout_ms=options["forecast_timeout"] * 1000.0,
            address=options["predictor"],
            predictor=forecast_predictor(options["forecast_predictor"], model.policy, all_fit=all_fit),
        ),
        artifacts=ArtifactConfig(
            every_ms=0.0 if all_fit else options["artifact_every"] * 1000.0, address=options["predictor"]
        ),
        fault=os.environ.get(VARIABLE),
    )
