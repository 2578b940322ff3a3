"""One of two workers loses a thread that moves experts, or its device. It ends with a failure, and its requests go on
at the other. `make test` has the same of a worker by itself: tests/pipeline/worker/test_troubled_model.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from greenroom.demo.tasks import TASKS, samples
from tests.integration.cluster import Cluster, running
from tests.integration.pipeline.load import Clients, check
from tests.kafka.broker import Broker

MODEL = "greenroom-understudy"
PROMPTS = [sample.prompt for task in TASKS for sample in samples(task, 2, seed=13)]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("policy", "fault", "why"),
    [
        ("moe-infinity", "mover", "a mover has died"),
        ("reuse", "mover", "a mover has died"),
        ("reuse", "device", "the device computes nothing any more"),
    ],
)
async def test_no_request_is_lost_and_none_gets_another_answer(
    kafka_broker: Broker, prefix: str, cache: Path, tmp_path: Path, policy: str, fault: str, why: str
) -> None:
    options = {"worker": ["--dtype", "float32", "--expert-memory", "25%", "--max-running", "8", "--policy", policy]}
    cluster = Cluster(tmp_path, kafka_broker.address, prefix=prefix, cache=cache, workers=2, options=options)
    with running(cluster):
        async with Clients(cluster.urls, cluster.grpc_addresses, max_tokens=24, model=MODEL) as clients:
            undisturbed = await clients.poisson(PROMPTS, 20.0, seed=1)
            expected = {call.prompt: call.text for call in undisturbed}
            check(undisturbed, expected)
            ill = cluster["worker0"]
            await asyncio.to_thread(ill.kill)
            ill.start(GREENROOM_FAULT=f"worker:{fault}:30")
            await asyncio.to_thread(ill.wait_ready)
            calls = await clients.poisson(PROMPTS, 6.0, seed=2, enough=lambda sent: not ill.running)
        assert ill.wait_end() == 1, ill.log()[-4000:]
        assert why in ill.log()
        check(calls, expected)
        assert cluster["worker1"].metric("greenroom_worker_runs_total") > 0
