"""``greenroom serve``: everything in one process, behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.model_options import model_options, worker_config

if TYPE_CHECKING:
    from greenroom.gateway import GatewayConfig
    from greenroom.worker.worker import Worker


@click.command()
@model_options
@click.option("--served-model-name", help="The model's name in the API.  [default: as --model has it]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--drain-timeout", type=float, default=30.0, show_default=True, help="Seconds that running requests get at the end."
)
def serve(host: str, port: int, drain_timeout: float, **options: Any) -> None:
    """Serve a model at http://HOST:PORT with an OpenAI-compatible API.

    Without --model it is the bundled one. The expert pack is made at first use. SIGTERM or Ctrl-C: nothing new is
    taken, running requests are finished, and the experts that are resident are remembered for the next start.

    \b
    Examples:
      greenroom serve --expert-memory 33%
      greenroom serve --model mistralai/Mixtral-8x7B-Instruct-v0.1 --expert-memory 16GiB --policy lfu
      greenroom serve --model ./checkpoint --host 0.0.0.0 --port 9000 --served-model-name mixtral
    """
    from greenroom.gateway import GatewayConfig
    from greenroom.worker.worker import Worker

    gateway = GatewayConfig(host=host, port=port, drain_timeout_s=drain_timeout)
    with Worker(worker_config(options)) as worker:
        click.echo(worker.describe(), err=True)
        asyncio.run(_serve(worker, gateway))


async def _serve(worker: Worker, config: GatewayConfig) -> None:
    from prometheus_client import (
        CollectorRegistry,
        GCCollector,
        PlatformCollector,
        ProcessCollector,
        disable_created_metrics,
    )

    from greenroom.gateway import Gateway
    from greenroom.worker.metrics import WorkerCollector

    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample for every counter, read by nobody
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(WorkerCollector(worker))
    gateway = Gateway(config, worker.generator(), worker.text, registry)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    port = await gateway.start()
    try:
        host = f"[{config.host}]" if ":" in config.host else config.host
        click.echo(f"ready: http://{host}:{port}  (model {worker.served.name})", err=True)
        await _until(stopping, worker)
    finally:
        click.echo("stopping: no new requests; running ones are finished", err=True)
        await gateway.stop()


async def _until(stopping: asyncio.Event, worker: Worker) -> None:
    """Until a signal came, or the batch loop died: a server that can not generate must not stay up."""
    while worker.loop.alive:
        try:
            await asyncio.wait_for(stopping.wait(), timeout=1.0)
        except TimeoutError:
            continue
        return
