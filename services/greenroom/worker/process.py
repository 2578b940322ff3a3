"""The parts of a worker's process: its server, its service, its announcement among the members."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from greenroom.fabric.announced_server import AnnouncedServer, ServedEndpoint
from greenroom.fabric.lifecycle import Service
from greenroom.fabric.log import Log
from greenroom.fabric.rpc import Endpoint
from greenroom.worker.service import WorkerService
from greenroom.worker.servicer import WorkerServicer

_GRACE_S = 2.0
_SWITCH_INTERVAL_S = 0.0003
"""Python's own is 5 ms, as long as a step of a small model. Decision 0040 has the measurement."""


def share_interpreter() -> None:
    """Have this process's threads pass the interpreter's lock on sooner. The model's thread computes all the time, and
    the event loop would wait for it with each token, request and lease; then the model's thread for the event loop."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def worker_parts(service: WorkerService, log: Log, endpoint: Endpoint) -> Sequence[Service]:
    """In the order of their start, after the log, the dialer and the directory.

    The server stops last: schedulers that wait for a run are told then that it is given back.
    """
    calls = ServedEndpoint("worker calls", endpoint, [WorkerServicer(service)], grace_s=_GRACE_S)
    announced = AnnouncedServer(log, calls, service.member)
    service.changed = announced.changed
    return [calls, service, announced]
