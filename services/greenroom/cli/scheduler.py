"""``greenroom scheduler``: requests onto workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.service_options import dialer_from, dialer_options, log_options, process_options
from greenroom.policies.registry import PLACEMENT_POLICIES, create_placement_policy

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log


@click.command()
@click.option(
    "--scheduling",
    type=click.Choice(sorted(PLACEMENT_POLICIES)),
    default="fcfs",
    show_default=True,
    help="Which request goes where, and when.",
)
@click.option("--max-waiting", type=int, default=1024, show_default=True, help="Requests that wait at most.")
@click.option(
    "--max-queue-wait", type=float, default=120.0, show_default=True, help="Seconds that one waits at most to begin."
)
@click.option(
    "--lease",
    type=float,
    default=3.0,
    show_default=True,
    help="Seconds of silence after which a worker is lost, and its requests go on elsewhere.",
)
@log_options
@dialer_options
@process_options
def scheduler(scheduling: str, max_waiting: int, max_queue_wait: float, lease: float, **options: Any) -> None:
    """Place the requests of the pools on their workers, with exactly one outcome for each.

    One scheduler is active for a pool; others stand by and take over when it dies. SIGTERM or Ctrl-C: it hands over.
    Requests that run go on at their workers meanwhile.

    \b
    Examples:
      greenroom scheduler --brokers kafka:9092 --probe-port 9100
      greenroom scheduler --scheduling edf --max-waiting 256 --max-queue-wait 10
    """
    from greenroom.cli.service_process import live
    from greenroom.fabric.lifecycle import Entered
    from greenroom.fabric.members import Directory
    from greenroom.fabric.telemetry.members import MembersCollector
    from greenroom.scheduler.config import PoolConfig, SchedulerConfig
    from greenroom.scheduler.metrics import SchedulerCollector
    from greenroom.scheduler.service import SchedulerService

    pool = PoolConfig(max_waiting=max_waiting, max_queue_wait_ms=max_queue_wait * 1000, lease_ms=lease * 1000)
    config = SchedulerConfig(pool=pool, policy=scheduling)
    dialer = dialer_from(options)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> list[Service]:
        directory = Directory(log)
        service = SchedulerService(
            config,
            instance=instance,
            log=log,
            dialer=dialer,
            directory=directory,
            policy=lambda: create_placement_policy(scheduling),
        )
        registry.register(SchedulerCollector(service))
        registry.register(MembersCollector(directory))
        return [Entered("dialer", dialer), Entered("directory", directory), service]

    sys.exit(live("scheduler", options, make))
