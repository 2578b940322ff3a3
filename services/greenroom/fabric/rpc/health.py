"""The standard gRPC health service, for probes and load balancers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from greenroom.fabric.rpc.metadata import Context

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_MAX_WATCHERS = 64


class Health(health_pb2_grpc.HealthServicer):
    """The health of the server as a whole, under the empty name, and of each of its services. At first not serving."""

    def __init__(self, services: Iterable[str]) -> None:
        self._serving = dict.fromkeys(["", *services], False)
        self._changed: set[asyncio.Event] = set()
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether someone is told of changes."""
        return bool(self._changed)

    def set(self, serving: bool, service: str | None = None) -> None:
        """``service`` None: the whole and all services. Raises KeyError for an unknown service."""
        for name in self._serving if service is None else (service,):
            if name not in self._serving:
                raise KeyError(name)
            self._serving[name] = serving
        self._tell()

    def close(self) -> None:
        """Nothing is served any more, and the watchers' calls end."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        for changed in self._changed:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> object:
        serving = self._serving.get(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known here: {', '.join(filter(None, self._serving))}")
        return health_pb2.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[object]:
        if len(self._changed) >= _MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MAX_WATCHERS} watch already")
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            told = None
            while True:
                changed.clear()
                serving = self._serving.get(request.service)
                status = _UNKNOWN if serving is None else _SERVING if serving else _NOT_SERVING
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                if self._closed:
                    return
                await changed.wait()
        finally:
            self._changed.discard(changed)
