"""One service of the pipeline as a process: log, topics, telemetry and probes around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.service_options import instance_from, log_from, traces_from

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log_monitor import MonitoredLog
    from greenroom.fabric.telemetry import TelemetryConfig

_LOG = logging.getLogger(__name__)
Make = Callable[["MonitoredLog", "CollectorRegistry", str], "Sequence[Service]"]
"""From the log, the registry of its metrics and its instance's name: what the process runs, in order."""


def named(kind: str, options: dict[str, Any]) -> tuple[str, TelemetryConfig | None]:
    """Its instance's name, which log lines bear from now on, and where its traces go, if anywhere. Reads the options of
    ``telemetry_options``. Raises InvalidConfig."""
    from greenroom.fabric.lifecycle import configure_logs, name_process

    instance = instance_from(options, kind)
    configure_logs(click.get_current_context().find_root().params.get("log_level", "info"), options["log_format"])
    name_process(kind, instance)
    return instance, traces_from(options, kind, instance)


def say(text: str, log_format: str) -> None:
    """To whoever has started the process: a line of its own, or one of the log where that is for machines."""
    if log_format == "json":
        _LOG.info(text)
    else:
        click.echo(text, err=True)


def live(kind: str, options: dict[str, Any], make: Make) -> int:
    """Until a signal or a failure; the exit code. Takes the options of ``log_options`` and ``process_options``.
    ``make`` is called on the event loop. Raises InvalidConfig."""
    from greenroom.fabric.lifecycle import run_loop

    return run_loop(_live(kind, options, make))


async def _live(kind: str, options: dict[str, Any], make: Make) -> int:
    from greenroom.fabric import telemetry
    from greenroom.fabric.lifecycle import Entered, LifeConfig, Part, ProbesConfig, StartIsKept, run_service
    from greenroom.fabric.log_monitor import LogMonitor, MonitoredLog
    from greenroom.fabric.telemetry.registry import new_registry
    from greenroom.fabric.topics import Topics, all_topics

    instance, traces = named(kind, options)
    topics = all_topics(Topics(pools=options["pools"]))
    log = MonitoredLog(log_from(options))
    registry = new_registry()
    services = make(log, registry, instance)

    class Ensured(Part):
        async def start(self) -> None:
            await log.ensure(topics)

    probes = None  # where a service has /health of its own
    if "probe_port" in options:
        probes = ProbesConfig(host=options["probe_host"], port=options["probe_port"])
    if traces is not None:
        telemetry.start(traces)
    try:
        return await run_service(
            [Entered("log", log), Ensured("topics"), LogMonitor(log, instance), *services, StartIsKept()],
            LifeConfig(drain_timeout_s=options["drain_timeout"]),
            probes=probes,
            registry=registry,
        )
    finally:
        await telemetry.stop()
