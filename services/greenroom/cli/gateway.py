"""``greenroom gateway``: the front door of a pipeline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.gateway_options import gateway_config, gateway_options
from greenroom.cli.service_options import (
    dialer_options,
    drain_option,
    endpoint_from,
    listen_options,
    log_options,
    telemetry_options,
)
from greenroom.demo import bundled_model_path

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log_monitor import MonitoredLog


@click.command()
@click.option(
    "--model",
    help="A folder, a GGUF file, or a model id on the hub, whose tokenizer and chat template are used: the workers' "
    "model.  [default: the bundled model]",
)
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--offline", is_flag=True, help="Use only what was downloaded before; no network.")
@click.option(
    "--coe",
    is_flag=True,
    help="The pool serves a collaboration of experts, so there are inferences and no tokenizer.",
)
@click.option("--pool", type=int, default=0, show_default=True, help="The pool whose model it serves.")
@gateway_options(grpc_port="8001", linger_s=6.0)
@listen_options
@log_options
@dialer_options
@telemetry_options
@drain_option
def gateway(model: str | None, revision: str | None, offline: bool, coe: bool, pool: int, **options: Any) -> None:
    """Serve a pool's model over HTTP (OpenAI's API; /v2 with --coe) and gRPC, by way of a Kafka log.

    Several of these may stand side by side; each ends the streams of its own clients. SIGTERM or Ctrl-C: nothing new
    is taken, running requests may end within --drain-timeout.

    \b
    Examples:
      greenroom gateway --brokers kafka:9092
      greenroom gateway --host 0.0.0.0 --keys-file keys.json --rpc-ca ca.pem --rpc-cert gateway-1.pem \\
        --rpc-key gateway-1.key --listen 0.0.0.0:7000 --advertise gateway-1:7000
      greenroom gateway --model mistralai/Mixtral-8x7B-Instruct-v0.1 --pools 2 --pool 1 --port 9000 --grpc-port none
      greenroom gateway --coe --pools 2 --pool 1 --port 9001
    """
    from greenroom.cli.service_process import live
    from greenroom.core.errors import InvalidConfig
    from greenroom.fabric.lifecycle import Entered
    from greenroom.fabric.members import Directory
    from greenroom.fabric.members.metrics import MembersCollector
    from greenroom.gateway import Gateway
    from greenroom.gateway.pipeline.config import PipelineConfig
    from greenroom.gateway.pipeline.metrics import PipelineCollector
    from greenroom.gateway.pipeline.pipeline import Pipeline
    from greenroom.gateway.service import GatewayService, tokens_endpoint
    from greenroom.text import TextProcessor
    from greenroom.text.digest import text_digest
    from greenroom.text.hub import hub_id, model_folder

    if coe and model is not None:
        raise InvalidConfig("model", model, "with --coe there is no tokenizer to read; leave one of them out")
    config = gateway_config(options, drain_timeout_s=options["drain_timeout"], model_root=hub_id(model))
    text: TextProcessor | None = None
    digest: str | None = None
    if not coe:
        folder = bundled_model_path() if model is None else model_folder(model, revision=revision, offline=offline)
        text, digest = TextProcessor.from_folder(folder), text_digest(Path(folder))
    endpoint = endpoint_from(options)

    def make(log: MonitoredLog, registry: CollectorRegistry, instance: str) -> list[Service]:
        directory = Directory(log)
        flow = PipelineConfig(
            pool=pool,
            default_timeout_s=config.request_timeout_s,
            max_timeout_s=config.max_request_timeout_s,
            max_keyed=config.max_in_flight,
        )
        pipeline = Pipeline(
            flow,
            instance=instance,
            log=log,
            directory=directory,
            text_digest=digest,
            health=log.health,
        )
        tokens = tokens_endpoint(pipeline, endpoint)
        service = GatewayService(Gateway(config, pipeline, text, registry))
        registry.register(PipelineCollector(pipeline))
        registry.register(MembersCollector(directory))
        return [Entered("directory", directory), tokens, pipeline, service]

    sys.exit(live("gateway", options, make))
