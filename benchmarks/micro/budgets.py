"""Tokens/s of the widened bundled model by expert budget: resident, at a third, at the least that runs.

    python -m benchmarks.budgets [--rounds 3] [--policy lru --policy lfu]

All engines are open at once and take turns within every round. The pack is read past the page cache. Prints a table
and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import click

from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from benchmarks.harness.reporting.progress import each
from greenroom.core.generation import SamplingParams
from greenroom.core.units import format_bytes
from greenroom.demo.tasks import TASKS, sample
from greenroom.llm import LLM

MAX_TOKENS = 32
PROMPTS = [sample(TASKS[n % len(TASKS)], seed=5, index=n).prompt for n in range(10)]


@dataclass
class Arm:
    """One engine, and what it did in each round."""

    budget: str
    policy: str
    concurrency: int
    llm: LLM
    tokens_per_s: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    hits: int = 0
    lookups: int = 0

    def run(self) -> None:
        counters = self.llm.worker.experts.refresh_counters()
        hits, lookups, read = counters.hits, counters.lookups, sum(counters.bytes_by_link.values())
        begin, tokens = time.perf_counter(), 0
        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for first in range(0, len(PROMPTS), self.concurrency):
            batch = [[{"role": "user", "content": text}] for text in PROMPTS[first : first + self.concurrency]]
            tokens += sum(len(answer.token_ids) for answer in self.llm.chat(batch, sampling, progress=False))
        seconds = time.perf_counter() - begin
        counters = self.llm.worker.experts.refresh_counters()
        self.tokens_per_s.append(tokens / seconds)
        self.bytes_per_token.append((sum(counters.bytes_by_link.values()) - read) / tokens)
        self.hits += counters.hits - hits
        self.lookups += counters.lookups - lookups

    def row(self) -> dict[str, object]:
        plan = self.llm.worker.plan
        return {
            "budget": self.budget,
            "policy": self.policy,
            "concurrency": self.concurrency,
            "experts_resident": plan.device_slots,
            "experts": plan.experts,
            "expert_memory_bytes": plan.expert_memory,
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 2),
            "tokens_per_s_min": round(min(self.tokens_per_s), 2),
            "tokens_per_s_max": round(max(self.tokens_per_s), 2),
            "hit_rate": round(self.hits / self.lookups, 4),
            "mib_read_per_token": round(statistics.median(self.bytes_per_token) / 2**20, 1),
        }


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Measured rounds, after one that warms up.")
@click.option("--policy", "policies", multiple=True, default=("lru", "lfu"), show_default=True)
@click.option("--expert-mib", default=EXPERT_MIB, show_default=True, help="Size of an expert at least.")
@click.option("--concurrency", multiple=True, type=int, default=(1, 8), show_default=True)
def main(rounds: int, policies: tuple[str, ...], expert_mib: float, concurrency: tuple[int, ...]) -> None:
    """Measure and print."""
    model = widened(expert_mib)
    with ExitStack() as stack:
        arms: list[Arm] = []
        budgets = [("100%", policies[0]), *(("33%", policy) for policy in policies), ("least", policies[0])]
        for budget, policy in budgets:
            memory = budget if budget != "least" else str(_least_bytes(arms[0].llm))
            llm = stack.enter_context(LLM(str(model), expert_memory=memory, policy=policy, warm_start=False))
            arms += [Arm(budget, policy, at_once, llm) for at_once in concurrency]
        for round_ in each(range(rounds + 1), "rounds"):
            for arm in arms:
                arm.run()
            if round_ == 0:
                for arm in arms:
                    arm.tokens_per_s.clear()
                    arm.bytes_per_token.clear()
                    arm.hits = arm.lookups = 0
        rows = [arm.row() for arm in arms]
        expert = arms[0].llm.worker.plan.mean_expert_bytes
    _print(rows, expert)
    print(json.dumps({"cores": os.cpu_count(), "machine": platform.machine(), "rounds": rounds, "rows": rows}))


def _least_bytes(llm: LLM) -> int:
    sizes = llm.worker.plan.slot_sizes
    return sizes.nbytes(sizes.least)


def _print(rows: list[dict[str, object]], expert: int) -> None:
    print(f"{len(PROMPTS)} prompts of five tasks, up to {MAX_TOKENS} tokens each; experts of {format_bytes(expert)}")
    titles = ("budget", "policy", "at once", "resident", "tok/s", "(min-max)", "hits", "MiB/token")
    print("{:<8}{:<8}{:>8}{:>12}{:>9}{:>18}{:>8}{:>11}".format(*titles))
    for row in rows:
        resident = f"{row['experts_resident']}/{row['experts']}"
        spread = f"({row['tokens_per_s_min']}-{row['tokens_per_s_max']})"
        print(
            f"{row['budget']:<8}{row['policy']:<8}{row['concurrency']:>8}{resident:>12}{row['tokens_per_s']:>9}"
            f"{spread:>18}{row['hit_rate']:>8.1%}{row['mib_read_per_token']:>11}"
        )


if __name__ == "__main__":
    main()
