"""``python -m benchmarks.pipeline``: what Kafka, gRPC and the services cost.

Two arms take turns on the same model and the same requests: the engine called in its own process, and the pipeline over
a real broker through its HTTP API. In both the process that the engine is in, a worker's in the pipeline, has core 0 to
itself and everything else, the client included, shares core 1. Then both at saturation, then the gateway's ceiling with
a worker that has no model, then three times the saturating rate. Ends with one JSON object.

``--pin thread`` leaves core 0 to the engine's thread alone. Then the worker's event loop shares core 1 with the other
processes, and whenever one of them takes its place while it holds the interpreter's lock, the engine waits on an idle
core: that measures two cores, not the pipeline.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.aims import Aim
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.progress import each
from benchmarks.harness.results import write_result
from benchmarks.harness.statistics import percentile
from benchmarks.pipeline import http_arm
from benchmarks.pipeline.figures import added, processor_time, spreads, throughput
from benchmarks.pipeline.pinning import cpu_seconds, pin, resident_bytes, thread_seconds
from benchmarks.pipeline.schedule import Measured, Planned, closed, poisson, prompts
from benchmarks.pipeline.stub_worker import MODEL
from tests.integration.cluster import Cluster, running
from tests.kafka.broker import JarBroker

ENGINE_CORE, OTHERS = 0, (1,)
AIMS = {
    "ttft_added_p50_ms": Aim(15.0, at_least=False),
    "ttft_added_p99_ms": Aim(50.0, at_least=False),
    "itl_added_p50_ms": Aim(2.0, at_least=False),
    "throughput_ratio": Aim(0.9, at_least=True),
}


class EngineArm:
    """The child process of ``engine_arm``."""

    def __init__(self, max_running: int) -> None:
        from greenroom.demo import bundled_model_path

        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline.engine_arm", str(bundled_model_path()), str(max_running)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.pid = self._process.pid

    def run(self, plan: Sequence[Planned], at_once: int = 0) -> list[Measured]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"plan": [[one.at, one.prompt, one.tokens] for one in plan], "at_once": at_once}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return [Measured(*row) for row in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def pin_all(
    arm: EngineArm, cluster: Cluster, broker: JarBroker, warm_up: Sequence[Planned], *, thread_only: bool
) -> None:
    """Both arms work once, so that it shows which of their threads is the engine's. ``thread_only``: core 0 is for
    that thread, not for its process."""
    others = OTHERS if thread_only else (ENGINE_CORE,)
    before = thread_seconds(arm.pid)
    arm.run(warm_up, at_once=8)
    pin(arm.pid, others, busiest_on=ENGINE_CORE, since=before)
    worker = cluster["worker0"].pid
    before = thread_seconds(worker)
    asyncio.run(http_arm.run(cluster.urls[0], MODEL, warm_up, at_once=8))
    pin(worker, others, busiest_on=ENGINE_CORE, since=before)
    for process in cluster.processes.values():
        if process.pid != worker:
            pin(process.pid, OTHERS)
    pin(broker.pid, OTHERS)
    pin(os.getpid(), OTHERS)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each comparison.")
@click.option("--seconds", default=20.0, show_default=True, help="Of each arm in a round.")
@click.option("--tokens", type=click.IntRange(min=2), default=32, show_default=True, help="Generated for each request.")
@click.option("--max-running", default=16, show_default=True, help="Requests that generate at once, in both arms.")
@click.option("--overload-seconds", default=60.0, show_default=True, help="At three times the saturating rate.")
@click.option(
    "--pin",
    "pinned",
    type=click.Choice(["process", "thread"]),
    default="process",
    show_default=True,
    help="What has core 0 to itself: the process that the engine is in, or the engine's thread.",
)
@click.option("--quick", is_flag=True, help="All of it in about two minutes; its figures say little.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("artifacts/bench-pipeline"), show_default=True)
def main(
    rounds: int,
    seconds: float,
    tokens: int,
    max_running: int,
    overload_seconds: float,
    pinned: str,
    quick: bool,
    out: Path,
) -> None:
    """Measure and print."""
    if quick:
        rounds, seconds, overload_seconds = 2, 4.0, 8.0
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as temporary:
        folder = Path(temporary)
        broker = JarBroker(folder / "broker")
        try:
            broker.start()
            document = _measure(
                broker, folder, rounds, seconds, tokens, max_running, overload_seconds, thread_only=pinned == "thread"
            )
        finally:
            broker.remove()
    document |= {"machine": describe_machine(cache_folder()), "quick": quick}
    _print(document)
    print(write_result(document, out / "pipeline.json"))


def _measure(
    broker: JarBroker,
    folder: Path,
    rounds: int,
    seconds: float,
    tokens: int,
    max_running: int,
    overload_s: float,
    *,
    thread_only: bool,
) -> dict[str, Any]:
    texts = prompts(200)
    options = {
        "worker": ["--max-running", str(max_running), "--cold-start"],
        "scheduler": ["--max-waiting", "64", "--max-queue-wait", "10"],
    }
    cluster = Cluster(folder, broker.address, prefix="bench.", cache=cache_folder(), options=options)
    rows: list[dict[str, Any]] = []
    arm = EngineArm(max_running)
    try:
        with running(cluster):
            pin_all(arm, cluster, broker, closed(texts, 60, tokens), thread_only=thread_only)
            saturated = _saturation(arm, cluster, texts, rounds, seconds, tokens, max_running, rows)
            rate = saturated["requests_per_s"] / 2
            latency, cpu, cpu_of = _latency(arm, cluster, broker, texts, rounds, seconds, tokens, rate, rows)
            overload = _overload(cluster, texts, tokens, saturated["requests_per_s"], overload_s, rows)
    finally:
        arm.close()
    ceiling = _ceiling(broker, folder, texts, seconds, tokens, rounds, rows)
    added_rounds = spreads(latency)
    figures = {
        name: added_rounds[name]["median"] for name in ("ttft_added_p50_ms", "ttft_added_p99_ms", "itl_added_p50_ms")
    }
    return {
        **figures,
        "throughput_ratio": saturated["ratio"]["median"],
        "cpu_s_per_1000_tokens_outside_worker": cpu["outside_worker"],
        "gateway_tokens_per_s": ceiling["tokens_per_s"]["median"],
        "spread": {**added_rounds, "throughput_ratio": saturated["ratio"]},
        "rate_per_s": round(rate, 2),
        "saturation": saturated,
        "cpu_s_per_1000_tokens": cpu,
        "cpu_ms_per_request": cpu_of,
        "ceiling": ceiling,
        "overload": overload,
        "settings": {
            "rounds": rounds,
            "seconds": seconds,
            "tokens": tokens,
            "max_running": max_running,
            "pin": "thread" if thread_only else "process",
        },
        "rows": rows,
    }


def _saturation(
    arm: EngineArm,
    cluster: Cluster,
    texts: Sequence[str],
    rounds: int,
    seconds: float,
    tokens: int,
    max_running: int,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """Both arms with as many clients as twice what may run, each sending its next request when its last has ended."""
    at_once = 2 * max_running
    trial = closed(texts, 4 * at_once, tokens)
    began = time.perf_counter()
    arm.run(trial, at_once)
    count = max(at_once, int(len(trial) * seconds / 2 / (time.perf_counter() - began)))
    plan = closed(texts, count, tokens)
    measured: list[dict[str, float]] = []
    for number in each(range(rounds), "saturation"):
        speeds: dict[str, float] = {}
        for name in ("engine", "pipeline")[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            if name == "engine":
                results = arm.run(plan, at_once)
            else:
                results = asyncio.run(http_arm.run(cluster.urls[0], MODEL, plan, at_once=at_once))
            speeds[name] = throughput(results, time.perf_counter() - began)
        row = {**speeds, "ratio": speeds["pipeline"] / speeds["engine"]}
        measured.append(row)
        rows.append({"stage": "saturation", "round": number, "requests": count, **row})
    summary = spreads(measured)
    return {**summary, "requests_per_s": summary["pipeline"]["median"] / tokens}


def _latency(
    arm: EngineArm,
    cluster: Cluster,
    broker: JarBroker,
    texts: Sequence[str],
    rounds: int,
    seconds: float,
    tokens: int,
    rate: float,
    rows: list[dict[str, Any]],
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """Both arms at half the saturating rate, Poisson, the same requests at the same times: what was measured, and
    the pipeline's processor time as ``processor_time`` has it."""
    measured: list[dict[str, float]] = []
    pids = {process.name.rstrip("0"): process.pid for process in cluster.processes.values()} | {"broker": broker.pid}
    spent = dict.fromkeys(pids, 0.0)
    generated = answered = 0
    for number in each(range(rounds), "latency"):
        plan = poisson(texts, rate, seconds, tokens, seed=number)
        results: dict[str, list[Measured]] = {}
        for name in ("engine", "pipeline")[:: 1 if number % 2 else -1]:
            if name == "engine":
                results[name] = arm.run(plan)
                continue
            before = {process: cpu_seconds(pid) for process, pid in pids.items()}
            results[name] = asyncio.run(http_arm.run(cluster.urls[0], MODEL, plan))
            for process, pid in pids.items():
                spent[process] += cpu_seconds(pid) - before[process]
            generated += sum(one.tokens for one in results[name])
            answered += sum(not one.refused for one in results[name])
        row = added(results["engine"], results["pipeline"])
        measured.append(row)
        rows.append({"stage": "latency", "round": number, "rate": rate, **row})
    return measured, *processor_time(spent, generated, answered)


def _overload(
    cluster: Cluster, texts: Sequence[str], tokens: int, saturating: float, seconds: float, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Three times what it can carry: memory, what the accepted wait, what the others are told, and how soon all is as
    before."""
    url, pids = cluster.urls[0], [process.pid for process in cluster.processes.values()]
    window = max(3.0, seconds / 6)

    def calm(seed: int) -> float:
        results = asyncio.run(http_arm.run(url, MODEL, poisson(texts, saturating / 2, window, tokens, seed)))
        return percentile([one.ttft for one in results if not one.refused], 0.5)

    before = [calm(100 + number) for number in range(3)]
    memory_before = resident_bytes(pids)
    plan = poisson(texts, 3 * saturating, seconds, tokens, seed=77)
    results = asyncio.run(http_arm.run(url, MODEL, plan))
    memory_after = resident_bytes(pids)
    time.sleep(10)  # what the measure says: ten seconds after it
    after = calm(200)
    accepted = [one for one in results if not one.refused]
    refused = Counter(one.refused for one in results if one.refused)
    outcome = {
        "requests": len(results),
        "accepted": len(accepted),
        "refused": dict(refused),
        "accepted_ttft_p50_ms": round(1e3 * percentile([one.ttft for one in accepted], 0.5), 1),
        "accepted_ttft_max_ms": round(1e3 * max(one.ttft for one in accepted), 1),
        "queue_wait_bound_ms": 10_000.0,
        "resident_bytes_before": memory_before,
        "resident_bytes_after": memory_after,
        "ttft_p50_before_ms": [round(1e3 * one, 1) for one in before],
        "ttft_p50_after_ms": round(1e3 * after, 1),
    }
    rows.append({"stage": "overload", "rate": 3 * saturating, **outcome})
    return outcome


def _ceiling(
    broker: JarBroker,
    folder: Path,
    texts: Sequence[str],
    seconds: float,
    tokens: int,
    rounds: int,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """Everything but the model, on core 1: the stub has core 0."""
    stub_folder = folder / "stub"
    stub_folder.mkdir()
    cluster = Cluster(stub_folder, broker.address, prefix="stub.", cache=cache_folder(), workers=0, predictors=0)
    for process in cluster.processes.values():
        process.start()
    stub = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pipeline.stub_worker", broker.address, "stub."],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for process in cluster.processes.values():
            process.wait_ready()
        pin(stub.pid, {ENGINE_CORE})
        for process in cluster.processes.values():
            pin(process.pid, OTHERS)
        measured: list[dict[str, float]] = []
        plan = closed(texts, 64, tokens)
        asyncio.run(http_arm.run(cluster.urls[0], MODEL, plan, at_once=32))
        for number in each(range(rounds), "ceiling"):
            began = time.perf_counter()
            results: list[Measured] = []
            while time.perf_counter() - began < seconds / 2:
                results += asyncio.run(http_arm.run(cluster.urls[0], MODEL, plan, at_once=64))
            took = time.perf_counter() - began
            good = [one for one in results if not one.refused]
            row = {"tokens_per_s": throughput(good, took), "requests_per_s": len(good) / took}
            measured.append(row)
            rows.append({"stage": "ceiling", "round": number, **row, "refused": len(results) - len(good)})
        return spreads(measured)
    finally:
        stub.kill()
        stub.wait(30)
        cluster.close()


def _print(document: dict[str, Any]) -> None:
    print(
        f"\nat {document['rate_per_s']} requests/s, half of what saturates the pipeline; medians of rounds (least-most)"
    )
    for name, aim in AIMS.items():
        row = document["spread"][name]
        print(
            f"  {name:<22}{row['median']:>9.2f}  ({row['min']:.2f}-{row['max']:.2f})  aim {aim}, "
            f"{aim.verdict(row['median'])}"
        )
    row = document["spread"]
    print(
        f"  TTFT {row['ttft_engine_p50_ms']['median']:.1f} → {row['ttft_pipeline_p50_ms']['median']:.1f} ms "
        f"(× {row['ttft_ratio_p50']['median']:.2f}), between tokens {row['itl_engine_p50_ms']['median']:.2f} → "
        f"{row['itl_pipeline_p50_ms']['median']:.2f} ms (× {row['itl_ratio_p50']['median']:.2f})"
    )
    cpu = document["cpu_s_per_1000_tokens"]
    print(
        f"  CPU seconds for 1000 tokens: services {cpu['services']:.3f}, broker {cpu['broker']:.3f}, worker "
        f"{cpu['worker']:.3f}"
    )
    each = ", ".join(f"{name} {spent:.1f}" for name, spent in document["cpu_ms_per_request"].items())
    print(f"  CPU milliseconds for a request of {document['settings']['tokens']} tokens: {each}")
    ceiling = document["ceiling"]
    print(
        f"  without a model: {ceiling['requests_per_s']['median']:.0f} requests/s, "
        f"{ceiling['tokens_per_s']['median']:.0f} tokens/s"
    )
    over = document["overload"]
    memory = f"{over['resident_bytes_before'] >> 20} → {over['resident_bytes_after'] >> 20} MiB"
    print(
        f"  overload: {over['accepted']} of {over['requests']} accepted, TTFT at most "
        f"{over['accepted_ttft_max_ms']:.0f} ms (bound {over['queue_wait_bound_ms']:.0f}), refused {over['refused']}, "
        f"memory {memory}, p50 after {over['ttft_p50_after_ms']} ms (before {over['ttft_p50_before_ms']})"
    )
