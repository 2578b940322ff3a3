"""What the pipeline adds to a request's latency and processor time, at half the rate that saturates it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness.reporting.progress import each
from benchmarks.pipeline.arms import Arms, Side
from benchmarks.pipeline.figures import added, over_main, processor_time
from benchmarks.pipeline.pinning import cpu_seconds
from benchmarks.pipeline.schedule import Measured, poisson


@dataclass
class Latency:
    """Of one checkout. ``rounds``: each round's ``figures.added``. ``spent``: the pipeline's processor time by process,
    in seconds, over all rounds."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    requests: int = 0

    def processor_time(self) -> tuple[dict[str, float], dict[str, float]]:
        """As ``figures.processor_time`` has it."""
        return processor_time(self.spent, self.tokens, self.requests)


def measure(arms: Arms, rate: float) -> tuple[list[Latency], list[dict[str, float]]]:
    """All arms get the same requests at the same times, Poisson at ``rate`` a second.

    For each of ``arms.sides`` what its pipeline adds to its own engine; and round by round ``figures.over_main`` where
    there are two.
    """
    effort = arms.effort
    found = [Latency() for _ in arms.sides]
    compared: list[dict[str, float]] = []
    for number in each(range(effort.rounds), "latency"):
        plan = poisson(arms.texts, rate, effort.seconds, effort.tokens, seed=number)
        results: dict[tuple[int, str], list[Measured]] = {}
        for side, name, arm in arms.in_turn(number):
            latency = found[arms.sides.index(side)]
            pids = {**side.pids(), "broker": arms.broker.pid} if name == "pipeline" else {}
            before = {process: cpu_seconds(pid) for process, pid in pids.items()}
            results[id(side), name] = arm.run(plan)
            for process, pid in pids.items():
                latency.spent[process] = latency.spent.get(process, 0.0) + cpu_seconds(pid) - before[process]
        for side, latency in zip(arms.sides, found, strict=True):
            _take(arms, side, latency, results, number, rate)
        if len(found) == 2:
            compared.append(over_main(found[0].rounds[-1], found[1].rounds[-1]))
    return found, compared


def _take(
    arms: Arms,
    side: Side,
    latency: Latency,
    results: dict[tuple[int, str], list[Measured]],
    number: int,
    rate: float,
) -> None:
    pipeline = results[id(side), "pipeline"]
    latency.tokens += sum(one.tokens for one in pipeline)
    latency.requests += sum(not one.refused for one in pipeline)
    row = added(results[id(side), "engine"], pipeline)
    latency.rounds.append(row)
    arms.rows.append({"stage": "latency", "commit": side.checkout.commit, "round": number, "rate": rate, **row})
