"""The newest artifacts that the expert policy predicts by, fetched from the predictor service while serving."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import grpc
import xxhash

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged
from greenroom.fabric.rpc import Dialer
from greenroom.fabric.rpc.calls import reading
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from greenroom.worker.generation_engine import GenerationEngine
from greenroom.worker.predictions.predictor_calls import Predictors, address_of, said
from greenroom.worker.service_config import ArtifactConfig
from greenroom.worker.service_counters import ServiceCounters

log = logging.getLogger(__name__)


class _Published(NamedTuple):
    """A version as the predictor has it. Two predictors may give the same number to different versions."""

    version: int
    created_ms: int


class ArtifactFollower:
    """Asks, at the start and every ``every_ms``, which version of each kind that the policy takes is served, and has
    the engine swap to a new one. Asking also tells the predictor that the kind is wanted.

    An artifact that the worker began with, from a file, gives way to a newer one only. From then on the served version
    is taken, also an older one after a rollback. A version that can not be used (of another model, damaged, too large)
    is logged and passed over until another is served. A predictor that is not there, or fails, is asked again after
    ``retry_ms``, then after twice as long, up to ``every_ms``; nothing waits for it.
    """

    def __init__(
        self,
        dialer: Dialer,
        members: Predictors,
        config: ArtifactConfig,
        counters: ServiceCounters,
        engine: GenerationEngine,
        *,
        model: str,
    ) -> None:
        self._dialer = dialer
        self._members = members
        self._config = config
        self._counters = counters
        self._engine = engine
        self._model = model
        self._known: dict[str, _Published] = {}
        """By kind, the version that was taken or passed over last."""
        self._failing = False

    async def run(self) -> None:
        """Until it is cancelled."""
        pause_ms = self._config.retry_ms
        while True:
            failures = self._counters.artifacts_failed
            for kind in self._engine.artifacts:
                await self._follow(kind)
            if self._counters.artifacts_failed == failures:
                pause_ms = self._config.retry_ms
                await asyncio.sleep(self._config.every_ms / 1000.0)
            else:
                pause_ms = min(pause_ms, self._config.every_ms)
                await asyncio.sleep(pause_ms / 1000.0)
                pause_ms *= 2

    async def _follow(self, kind: str) -> None:
        try:
            address = address_of(self._config.address, self._members)
            stub: predictor_pb2_grpc.PredictorStub = self._dialer.stub(predictor_pb2_grpc.PredictorStub, address)
            served = await self._served(stub, kind)
            if served is not None and self._is_news(kind, _published(served)):
                await self._take(stub, kind, served)
            self._failing = False
        except (grpc.RpcError, TimeoutError, LookupError) as error:
            self._counters.artifacts_failed += 1
            level = logging.INFO if isinstance(error, LookupError) else logging.WARNING
            log.log(
                logging.DEBUG if self._failing else level,
                "%s: no newer version, the expert policy goes on with what it has: %s", kind, said(error),
            )  # fmt: skip
            self._failing = True

    async def _served(self, stub: predictor_pb2_grpc.PredictorStub, kind: str) -> predictor_pb2.Artifact | None:
        timeout_s = self._config.timeout_ms / 1000.0
        request = predictor_pb2.ListArtifactsRequest(model=self._model, kind=kind)
        async with asyncio.timeout(timeout_s):
            listed = await stub.ListArtifacts(request, timeout=timeout_s)
        return next((one for one in listed.artifacts if one.version == listed.serving), None)

    def _is_news(self, kind: str, published: _Published) -> bool:
        known = self._known.get(kind)
        if known is not None:
            return published != known
        here = self._engine.artifacts[kind]
        return here is None or published.created_ms > here.created_ms

    async def _take(self, stub: predictor_pb2_grpc.PredictorStub, kind: str, served: predictor_pb2.Artifact) -> None:
        """Swap to the version, or pass it over where it can not be used. Raises what the call raises."""
        try:
            data, checksum = await self._fetch(stub, kind, served)
            await self._use(kind, data, checksum)
        except (Damaged, InvalidConfig) as error:
            self._counters.artifacts_refused += 1
            log.warning("%s: version %d is passed over: %s", kind, served.version, error)
        else:
            self._counters.artifacts += 1
            log.info("%s: version %d of the predictor is used from the next step on, made of %d sequences",
                     kind, served.version, served.sequences)  # fmt: skip
        self._known[kind] = _published(served)

    async def _use(self, kind: str, data: bytes, checksum: str) -> None:
        """Swap to it. Raises Damaged, InvalidConfig: whatever a file from elsewhere makes go wrong is the file's fault,
        and ends no worker."""
        try:
            file = await asyncio.to_thread(_parsed, kind, data, checksum)
            await asyncio.to_thread(self._engine.swap, file)
        except (Damaged, InvalidConfig):
            raise
        except Exception as error:
            log.exception("%s: a version can not be used", kind)
            raise Damaged(f"it can not be used: {type(error).__name__}") from error

    async def _fetch(
        self, stub: predictor_pb2_grpc.PredictorStub, kind: str, served: predictor_pb2.Artifact
    ) -> tuple[bytes, str]:
        """The file and its checksum. Raises Damaged where it is larger than it may be."""
        timeout_s, most = self._config.fetch_ms / 1000.0, self._config.max_bytes
        request = predictor_pb2.GetArtifactRequest(model=self._model, kind=kind, version=served.version)
        data, checksum = bytearray(), ""
        async with asyncio.timeout(timeout_s), reading(stub.GetArtifact(request, timeout=timeout_s)) as parts:
            async for part in parts:
                checksum = part.artifact.checksum or checksum
                data += part.data
                if len(data) > most:
                    raise Damaged(f"it has more than {most} bytes")
        return bytes(data), checksum


def _published(artifact: predictor_pb2.Artifact) -> _Published:
    return _Published(artifact.version, artifact.created_ms)


def _parsed(kind: str, data: bytes, checksum: str) -> ArtifactFile:
    """Raises Damaged."""
    if checksum and xxhash.xxh3_128_hexdigest(data) != checksum:
        raise Damaged("its checksum is not that of the file")
    return ARTIFACT_FILES[kind].parse(data)
