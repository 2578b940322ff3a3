"""The gRPC side of the predictor: ``greenroom.v1.Predictor``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import xxhash

from greenroom.core.errors import GreenroomError
from greenroom.fabric.rpc import Context, Refused
from greenroom.predictor.service import PredictorService
from greenroom.predictor.versions.artifact import ArtifactInfo
from greenroom.predictor.versions.store import NotKept
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc


class PredictorServicer(predictor_pb2_grpc.PredictorServicer):
    """Forecasts from statistics are made on the event loop, within a millisecond or two. Learned ones are made, and
    files read, in threads."""

    def __init__(self, service: PredictorService, part_bytes: int) -> None:
        self._service = service
        self._part_bytes = part_bytes

    async def Forecast(
        self,
        request: predictor_pb2.ForecastRequest,
        context: Context,
    ) -> predictor_pb2.ForecastResponse:
        left_s = context.time_remaining()
        forecast = await self._service.forecast(
            request.model,
            request.task_type,
            request.previous,
            request.predictor,
            within_s=math.inf if left_s is None else left_s,
        )
        layers, experts = forecast.distribution.shape
        return predictor_pb2.ForecastResponse(
            version=forecast.version,
            layers=layers,
            experts=experts,
            distribution=forecast.distribution.astype("<f4", copy=False).tobytes(),
            source=forecast.source,
            sequences=forecast.sequences,
        )

    async def ListArtifacts(
        self,
        request: predictor_pb2.ListArtifactsRequest,
        context: Context,
    ) -> predictor_pb2.ListArtifactsResponse:
        infos, serving = self._service.registry(request.kind).artifacts(request.model)
        self._service.artifacts_asked(request.model, request.kind)
        return predictor_pb2.ListArtifactsResponse(artifacts=map(_artifact, infos), serving=serving)

    async def GetArtifact(
        self,
        request: predictor_pb2.GetArtifactRequest,
        context: Context,
    ) -> AsyncIterator[predictor_pb2.ArtifactPart]:
        """The first part describes the artifact as well."""
        try:
            info, data = await self._service.registry(request.kind).read(request.model, request.version)
        except NotKept as error:
            raise _not_found(error) from error
        described = _artifact(info)
        described.checksum = await asyncio.to_thread(xxhash.xxh3_128_hexdigest, data)
        for start in range(0, len(data), self._part_bytes):
            part = data[start : start + self._part_bytes]
            yield predictor_pb2.ArtifactPart(artifact=None if start else described, data=part)

    async def RollBack(
        self,
        request: predictor_pb2.RollBackRequest,
        context: Context,
    ) -> predictor_pb2.RollBackResponse:
        try:
            info = await self._service.registry(request.kind).roll_back(request.model, request.version)
        except NotKept as error:
            raise _not_found(error) from error
        return predictor_pb2.RollBackResponse(serving=_artifact(info))


def _not_found(error: GreenroomError) -> Refused:
    return Refused(grpc.StatusCode.NOT_FOUND, str(error), word="artifact_not_found")


def _artifact(info: ArtifactInfo) -> predictor_pb2.Artifact:
    return predictor_pb2.Artifact(
        version=info.version,
        model=info.model,
        kind=info.kind,
        created_ms=info.created_ms,
        bytes=info.bytes,
        sequences=info.sequences,
    )
