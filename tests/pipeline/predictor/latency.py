"""How long forecasts take: python -m tests.pipeline.predictor.latency

Percentiles in milliseconds, of the computation alone and of calls over gRPC on loopback, one after the other.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
from prometheus_client import CollectorRegistry

from greenroom.fabric.log.memory.memory_log import MemoryLog
from greenroom.fabric.rpc import GrpcDialer, Server, ServerConfig, join_address
from greenroom.predictor import (
    PredictorConfig,
    PredictorMetrics,
    PredictorService,
    PredictorServicer,
)
from greenroom.predictor.kinds.statistics.library import Library
from greenroom.predictor.kinds.statistics.served import Served
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.traces.counts import count
from greenroom.v1 import predictor_pb2, predictor_pb2_grpc
from tests.unit.predictor.worlds import trace

CALLS = 2000
SHAPES = ((24, 32, 4), (48, 128, 8))
"""Layers, experts of each, picks of a row."""


async def main() -> None:
    for layers, experts, picks in SHAPES:
        random = np.random.default_rng(0)
        library = Library(max_bytes=2**28, half_life_sequences=500.0, seen_window=2**14)
        counting = []
        for number in range(20):
            chosen = random.integers(0, experts, (300, layers, picks))
            one = trace(chosen, experts, request_id=str(number), task_type="abcde"[number % 5])
            began = time.perf_counter()
            library.learn(one, count(one))
            counting.append(time.perf_counter() - began)
        print(f"{layers} x {experts}: learning from 300 rows {_percentiles(counting)}")  # noqa: T201
        snapshot = library.snapshot("m")
        served = Served(snapshot)
        previous = random.random((layers, experts)).astype("<f4").tobytes()
        for name, given in (("of a task type", b""), ("after a prompt", previous)):
            taken = []
            for _ in range(CALLS):
                began = time.perf_counter()
                served.forecast("a", given)
                taken.append(time.perf_counter() - began)
            print(f"  {name}: alone {_percentiles(taken)}; by gRPC {_percentiles(await _calls(snapshot, given))}")  # noqa: T201


async def _calls(snapshot: Snapshot, previous: bytes) -> list[float]:
    metrics = PredictorMetrics(CollectorRegistry())
    service = PredictorService(PredictorConfig(), MemoryLog(), metrics)
    await service.registry("").publish(snapshot)
    server = Server(ServerConfig(), [PredictorServicer(service, 2**18)])
    address = join_address("127.0.0.1", await server.start())
    request = predictor_pb2.ForecastRequest(model="m", task_type="a", previous=previous)
    taken = []
    async with GrpcDialer() as dialer:
        stub = dialer.stub(predictor_pb2_grpc.PredictorStub, address)
        for _ in range(CALLS):
            began = time.perf_counter()
            await stub.Forecast(request, timeout=10)
            taken.append(time.perf_counter() - began)
    await server.stop(0.0)
    return taken


def _percentiles(seconds: list[float]) -> str:
    p50, p99 = np.percentile(np.asarray(seconds) * 1000, (50, 99))
    return f"p50 {p50:.3f} p99 {p99:.3f} ms"


if __name__ == "__main__":
    asyncio.run(main())
