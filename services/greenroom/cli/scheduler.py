"""``greenroom scheduler``: requests onto workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.scheduling_options import parse_scheduling_options, scheduling_options
from greenroom.cli.seconds import above_0
from greenroom.cli.service_options import dialer_from, dialer_options, log_options, process_options

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log


@click.command()
@scheduling_options("Which request goes where, and when.")
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What `greenroom profile` measured of the model: lengths by task type, what tokens and expert loads cost.",
)
@click.option("--max-waiting", type=int, default=1024, show_default=True, help="Requests that wait at most.")
@click.option(
    "--max-queue-wait",
    type=float,
    callback=above_0(),
    default=120.0,
    show_default=True,
    help="Seconds that one waits at most to begin.",
)
@click.option(
    "--lease",
    type=float,
    callback=above_0(),
    default=3.0,
    show_default=True,
    help="Seconds of silence after which a worker is lost, and its requests go on elsewhere.",
)
@log_options
@dialer_options
@process_options
def scheduler(
    profile: Path | None,
    max_waiting: int,
    max_queue_wait: float,
    lease: float,
    **options: Any,
) -> None:
    """Place the requests of the pools on their workers, with exactly one outcome for each.

    One scheduler is active for a pool; others stand by and take over when it dies. SIGTERM or Ctrl-C: it hands over.
    Requests that run go on at their workers meanwhile.

    \b
    Examples:
      greenroom scheduler --brokers kafka:9092 --probe-port 9100
      greenroom scheduler --scheduling edf --max-waiting 256 --max-queue-wait 10
      greenroom scheduler --scheduling emoe --profile profile.json --scheduling-options '{"patience_s": 10}'
    """
    from greenroom.cli.service_process import live
    from greenroom.core.model_profile import load_model_profile
    from greenroom.fabric.lifecycle import Entered
    from greenroom.fabric.members import Directory
    from greenroom.fabric.members.metrics import MembersCollector
    from greenroom.scheduler.config import PoolConfig, SchedulerConfig
    from greenroom.scheduler.metrics import SchedulerCollector
    from greenroom.scheduler.service import SchedulerService

    pool = PoolConfig(max_waiting=max_waiting, max_queue_wait_ms=max_queue_wait * 1000, lease_ms=lease * 1000)
    policy, policy_options = parse_scheduling_options(options)
    config = SchedulerConfig(pool=pool, policy=policy, policy_options=policy_options)
    known = None if profile is None else load_model_profile(profile)
    dialer = dialer_from(options)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> list[Service]:
        directory = Directory(log)
        service = SchedulerService(
            config,
            instance=instance,
            log=log,
            dialer=dialer,
            directory=directory,
            policy=config.make_policy,
            profile=known,
        )
        registry.register(SchedulerCollector(service))
        registry.register(MembersCollector(directory))
        return [Entered("dialer", dialer), Entered("directory", directory), service]

    sys.exit(live("scheduler", options, make))
