"""A process: its parts start in order, readiness, signals, a bounded end; its tasks, its logs, its probes."""

from greenroom.fabric.lifecycle.event_loop import run_loop
from greenroom.fabric.lifecycle.garbage import StartIsKept
from greenroom.fabric.lifecycle.logs import configure_logs, name_process
from greenroom.fabric.lifecycle.probes import Probes, ProbesConfig
from greenroom.fabric.lifecycle.run import Life, LifeConfig, run_service
from greenroom.fabric.lifecycle.service import Entered, Part, Runner, Service
from greenroom.fabric.lifecycle.tasks import Ended, Tasks, reached

__all__ = [
    "Ended",
    "Entered",
    "Life",
    "LifeConfig",
    "Part",
    "Probes",
    "ProbesConfig",
    "Runner",
    "Service",
    "StartIsKept",
    "Tasks",
    "configure_logs",
    "name_process",
    "reached",
    "run_loop",
    "run_service",
]
