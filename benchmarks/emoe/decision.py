"""How long ``--scheduling emoe`` takes to decide: a thousand requests wait, 64 run, and nothing can be placed.

    python -m benchmarks.emoe.decision [--waiting 1000] [--running 64] [--rounds 2000] [--estimator eq3]

The pool is the real one. Timed is all that a scheduler does at an arrival or a completion, which includes making the
state that the policy is shown. One place is free and memory suffices; the SLOs of the running requests keep all others
out. Prints one JSON object on its last line.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import click
import numpy as np

from greenroom.core.generation import SamplingParams, Slo
from greenroom.core.messages import Claim, Request, Task
from greenroom.policies.emoe.scheduling import EmoePlacement
from greenroom.policies.placement.latency_estimate import ESTIMATORS, LatencyEstimator
from greenroom.policies.placement.placement_policy import Costs, PlacementState
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.pool import Pool
from greenroom.scheduler.pool_workers import Capacity, WorkerState

TASKS = ("summarise", "translate", "code", "classify", "converse")
COSTS = Costs(token_ms=0.5, load_ms_by_task=dict.fromkeys(TASKS, 20.0))
START_MS = 1_000_000.0
ROUND_MS = 0.001
TO_SPARE_MS = 21.0
"""Above one load of experts, and below that and the shortest prompt."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Milliseconds of a decision: all of it, and of that the policy's own part."""

    p50: float
    p99: float
    most: float
    policy_p50: float
    policy_p99: float


def empty_pool(places: int, waiting: int, estimator: str) -> Pool:
    """It holds its epoch, and has one worker."""
    config = PoolConfig(max_waiting=waiting, read_ahead=waiting + places)
    pool = Pool("bench", config, EmoePlacement(estimator=estimator))
    pool.take_over(0, 0)
    pool.claim(START_MS)
    pool.journal(0, Claim(scheduler="bench", read_to=0), START_MS)
    pool.worker_reached("worker", Capacity(max_running=places, max_queued=0, kv_tokens=10**9), START_MS)
    pool.beat("worker", WorkerState(costs=COSTS), START_MS)
    pool.listed("worker", [], START_MS)
    pool.tick(START_MS)
    return pool


def add(pool: Pool, number: int, slo: Slo) -> None:
    """One more request, its size drawn by its number."""
    choose = random.Random(number)
    request = Request(
        request_id=f"r{number}",
        pool=0,
        model="model",
        prompt_ids=(1,) * choose.randint(50, 400),
        sampling=SamplingParams(max_tokens=choose.randint(10, 400)),
        accepted_ms=int(START_MS),
        deadline_ms=int(START_MS + 3_600_000),
        slo=slo,
    )
    pool.task(number, Task(request=request, task_type=choose.choice(TASKS)), START_MS)


def latencies_ms(pool: Pool, estimator: LatencyEstimator) -> dict[str, float]:
    """What is expected of those that run."""
    placed = sorted(pool.workers["worker"].view(START_MS).running, key=lambda one: one.expected_left)
    tokens = estimator.among(np.array([one.expected_left for one in placed], dtype=np.float64))
    unread = sum(one.request.input_tokens for one in placed)
    each = COSTS.generated_ms(len(placed))
    return {one.request.request_id: (unread + until) * each for one, until in zip(placed, tokens, strict=True)}


def full_pool(waiting: int, running: int, estimator: str) -> Pool:
    """A worker with one place left. Each running request would just meet its SLO, and would miss it with one more."""
    measured = empty_pool(running, waiting, estimator)
    for number in range(running):
        add(measured, number, Slo())
    slos: Mapping[str, float] = latencies_ms(measured, ESTIMATORS[estimator])
    pool = empty_pool(running + 1, waiting, estimator)
    for number in range(running):
        add(pool, number, Slo(e2e_ms=slos[f"r{number}"] + TO_SPARE_MS))
    choose = random.Random(0)
    for number in range(running, running + waiting):
        ttft = None if number % 3 == 0 else choose.uniform(200, 60_000)
        add(pool, number, Slo(ttft_ms=ttft, e2e_ms=None if number % 5 == 0 else choose.uniform(1_000, 600_000)))
    if (pool.depth.running, pool.depth.waiting) != (running, waiting):
        raise RuntimeError(f"{pool.depth.running} run and {pool.depth.waiting} wait, not {running} and {waiting}")
    return pool


def measure(pool: Pool, rounds: int) -> Decisions:
    whole, policy = [], []
    waiting = tuple(entry.pending for entry in pool.entries.values() if entry.worker is None and entry.pending)
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        now = START_MS + number * ROUND_MS
        began = time.perf_counter()
        effects = pool.schedule(now)
        whole.append(time.perf_counter() - began)
        assert not effects
        state = PlacementState(waiting, (pool.workers["worker"].view(now),))
        began = time.perf_counter()
        pool.policy.decide(state, now)
        policy.append(time.perf_counter() - began)
    gc.unfreeze()
    p50, p99, most = np.percentile(whole, [50, 99, 100]) * 1000.0
    policy_p50, policy_p99 = np.percentile(policy, [50, 99]) * 1000.0
    return Decisions(float(p50), float(p99), float(most), float(policy_p50), float(policy_p99))


def run(waiting: int = 1000, running: int = 64, rounds: int = 2000, estimator: str = "eq3") -> dict[str, float]:
    """The benchmark's figures: ``decision_ms_at_1000`` is the 99th percentile; the others by name."""
    pool = full_pool(waiting, running, estimator)
    measure(pool, min(rounds, 100))
    found = measure(pool, rounds)
    named = {f"decision_{name}_ms": round(value, 4) for name, value in asdict(found).items()}
    return {f"decision_ms_at_{waiting}": round(found.p99, 4), **named}


@click.command()
@click.option("--waiting", type=click.IntRange(1), default=1000, show_default=True, help="Requests that wait.")
@click.option("--running", type=click.IntRange(1), default=64, show_default=True, help="Requests that run.")
@click.option("--rounds", type=click.IntRange(1), default=2000, show_default=True, help="Decisions that are timed.")
@click.option("--estimator", type=click.Choice(sorted(ESTIMATORS)), default="eq3", show_default=True)
def main(waiting: int, running: int, rounds: int, estimator: str) -> None:
    """Time decisions in which nothing can be placed.

    \b
    Example:
      python -m benchmarks.emoe.decision --rounds 5000
    """
    found = run(waiting, running, rounds, estimator)
    click.echo(
        f"{waiting} wait, {running} run: p50 {found['decision_p50_ms']:.2f} ms, p99 {found['decision_p99_ms']:.2f} ms, "
        f"most {found['decision_most_ms']:.2f} ms; of that the policy p50 {found['decision_policy_p50_ms']:.2f} ms, "
        f"p99 {found['decision_policy_p99_ms']:.2f} ms"
    )
    click.echo(json.dumps({**found, "estimator": estimator}))


if __name__ == "__main__":
    main()
