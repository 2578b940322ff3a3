"""A worker's service with what others call it by."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.fabric.announced_server import Announced, Served
from greenroom.fabric.lifecycle import Service
from greenroom.fabric.log import Log
from greenroom.fabric.rpc import Endpoint
from greenroom.worker.runs.servicer import WorkerServicer
from greenroom.worker.service import WorkerService

_GRACE_S = 2.0


def worker_parts(service: WorkerService, log: Log, endpoint: Endpoint) -> Sequence[Service]:
    """In the order of their start, behind the log, the dialer and the directory.

    It can be called until it has stopped: what still runs then is given back, and schedulers are told.
    """
    calls = Served("worker calls", endpoint, [WorkerServicer(service)], grace_s=_GRACE_S)
    announced = Announced(log, calls, service.member)
    service.changed = announced.changed
    return [calls, service, announced]
