"""What the pipeline adds to a request's latency and processor time, at half the rate that saturates it."""

from __future__ import annotations

from benchmarks.harness.reporting.progress import each
from benchmarks.pipeline.arms import BothArms
from benchmarks.pipeline.figures import added, processor_time
from benchmarks.pipeline.pinning import cpu_seconds
from benchmarks.pipeline.schedule import Measured, poisson


def measure(both: BothArms, rate: float) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """Both arms get the same requests at the same times, Poisson at ``rate`` a second.

    Each round's ``added``, and the pipeline's processor time as ``processor_time`` has it.
    """
    effort = both.effort
    measured: list[dict[str, float]] = []
    pids = {process.name.rstrip("0"): process.pid for process in both.cluster.processes.values()}
    pids["broker"] = both.broker.pid
    spent = dict.fromkeys(pids, 0.0)
    generated = answered = 0
    for number in each(range(effort.rounds), "latency"):
        plan = poisson(both.texts, rate, effort.seconds, effort.tokens, seed=number)
        results: dict[str, list[Measured]] = {}
        for name, arm in both.arms(number):
            before = {process: cpu_seconds(pid) for process, pid in pids.items()}
            results[name] = arm.run(plan)
            if name == "pipeline":
                for process, pid in pids.items():
                    spent[process] += cpu_seconds(pid) - before[process]
        generated += sum(one.tokens for one in results["pipeline"])
        answered += sum(not one.refused for one in results["pipeline"])
        row = added(results["engine"], results["pipeline"])
        measured.append(row)
        both.rows.append({"stage": "latency", "round": number, "rate": rate, **row})
    return measured, *processor_time(spent, generated, answered)
