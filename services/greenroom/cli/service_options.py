"""Options that every service's command has, and the life that they describe."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service

F = TypeVar("F", bound=Callable[..., Any])
_NAMES = ("instance", "drain_timeout", "probes_host", "probes_port", "otlp_endpoint", "otlp_protocol")


def service_options(*, probes_port: int | None) -> Callable[[F], F]:
    """Adds them to a command, which passes what it gets on to ``run_process``.

    ``probes_port``: where /live, /health and /metrics are by default; None for a service that has them elsewhere.
    """
    options = [
        click.option("--instance", help="This process's name among its kind.  [default: host name and process id]"),
        click.option(
            "--drain-timeout", type=float, default=30.0, show_default=True,
            help="Seconds that what is under way gets at the end.",
        ),
        click.option(
            "--otlp-endpoint", envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="Collector that traces are sent to, such as http://localhost:4317.  [default: none]",
        ),
        click.option(
            "--otlp-protocol", envvar="OTEL_EXPORTER_OTLP_PROTOCOL", type=click.Choice(["grpc", "http/protobuf"]),
            default="grpc", show_default=True, help="How they are sent.",
        ),
    ]  # fmt: skip
    if probes_port is not None:
        options += [
            click.option(
                "--probes-host", default="127.0.0.1", show_default=True, help="Where /live, /health, /metrics are."
            ),
            click.option(
                "--probes-port", type=int, default=probes_port, show_default=True, help="Their port; 0 takes a free one."
            ),
        ]

    def add(command: F) -> F:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return add


def instance_name(given: str | None) -> str:
    """``given``, or one that no other process has."""
    return given or f"{socket.gethostname()}-{os.getpid()}"


def run_process(name: str, build: Callable[[str, CollectorRegistry], Sequence[Service]], options: dict[str, Any]) -> None:
    """Live as ``name`` until a signal or a failure, then exit.

    ``build`` gets the instance's name and the registry of /metrics, on the event loop. What belongs to
    ``service_options`` is taken out of ``options``.
    """
    own = {key: options.pop(key) for key in _NAMES if key in options}
    sys.exit(asyncio.run(_live(name, build, own)))


async def _live(
    name: str, build: Callable[[str, CollectorRegistry], Sequence[Service]], own: dict[str, Any]
) -> int:
    from greenroom.fabric import telemetry
    from greenroom.fabric.lifecycle import LifeConfig, ProbesConfig, name_process, run_service
    from greenroom.fabric.telemetry.registry import new_registry

    instance = instance_name(own["instance"])
    name_process(name, instance)
    if own["otlp_endpoint"]:
        telemetry.start(
            telemetry.TelemetryConfig(
                endpoint=own["otlp_endpoint"],
                protocol=own["otlp_protocol"],
                service=f"greenroom-{name}",
                instance=instance,
            )
        )
    try:
        registry = new_registry()
        probes = None
        if "probes_port" in own:
            probes = ProbesConfig(host=own["probes_host"], port=own["probes_port"])
        life = LifeConfig(drain_timeout_s=own["drain_timeout"])
        return await run_service(build(instance, registry), life, probes=probes, registry=registry)
    finally:
        await telemetry.stop()
