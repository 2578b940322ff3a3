"""The predictor service with its gRPC endpoint and its announcement."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.messages import Member, MemberKind
from greenroom.fabric.announced_server import AnnouncedServer, ServedEndpoint
from greenroom.fabric.lifecycle import Service
from greenroom.fabric.log import Log
from greenroom.fabric.rpc import Endpoint
from greenroom.predictor.config import PredictorConfig
from greenroom.predictor.service import PredictorService
from greenroom.predictor.servicer import PredictorServicer

TTL_MS = 15_000


def predictor_parts(
    service: PredictorService, config: PredictorConfig, log: Log, endpoint: Endpoint, instance: str
) -> Sequence[Service]:
    """In the order of their start, after the log. Calls are served only while the service runs."""

    def say() -> Member:
        return Member(member=MemberKind.PREDICTOR, instance=instance, address="", ttl_ms=TTL_MS)

    calls = ServedEndpoint("predictor calls", endpoint, [PredictorServicer(service, config.part_bytes)])
    return [service, calls, AnnouncedServer(log, calls, say)]
