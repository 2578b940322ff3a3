"""What a step costs while rows use only resident experts, against a step with all experts resident.

    python -m benchmarks.confined_step [--share 0.6] [--rows 1 --rows 8] [--every 24] [--swapped 0.15]

Three engines on one model take turns, block by block. ``resident`` has all experts. ``steady`` has a fixed share of
them. ``moving`` has such a share, and exchanges some of it every so many steps. Both go with fidelity ``paper``. The
ratios are of successive blocks. The processor time is that of the computing thread: with one thread it is the step
without the time of other processes. Prints a table, and one JSON object on its last line.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from benchmarks.harness.inputs.shared_model import KV_BYTES, SharedModel
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.results import write_result
from benchmarks.harness.rounds import rotated
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import Step, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Target
from greenroom.policies.base.fidelity import Fidelity
from greenroom.policies.base.victim_selection import lowest

ARMS = ("resident", "steady", "moving")
PROMPT_TOKENS = 16


class Swapping(ExpertPolicy):
    """A target of ``slots`` experts; every ``every`` steps a share ``swapped`` is exchanged for others of the same
    layers."""

    def __init__(self, catalogue: Catalogue, *, slots: int, every: int, swapped: float) -> None:
        super().__init__(catalogue)
        self._random = np.random.default_rng(0)
        self._every = every
        self._swapped = swapped
        self._wanted: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        shares = np.array_split(np.arange(slots), catalogue.layers)
        for span, share in zip(catalogue.spans, shares, strict=True):
            self._wanted[self._random.permutation(np.arange(span.start, span.stop))[: len(share)]] = True
        self._steps = 0

    def first(self) -> list[int]:
        return np.flatnonzero(self._wanted).tolist()

    def on_step_started(self, step: Step) -> None:
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self._swap()

    def _swap(self) -> None:
        wanted = self._wanted.copy()
        for span in self.catalogue.spans:
            here, absent = (np.flatnonzero(self._wanted[span] == there) + span.start for there in (True, False))
            count = min(round(self._swapped * len(here)), len(absent))
            wanted[self._random.choice(here, count, replace=False)] = False
            wanted[self._random.choice(absent, count, replace=False)] = True
        self._wanted = wanted
        self.target = Target(self._steps, wanted)

    def victims(self, request: VictimRequest) -> Keys:
        return lowest(self.catalogue, request, self._wanted.astype(np.int64))


@dataclass
class Arm:
    """One engine and the requests on it. ``block_ms``: mean step of each block, ``cpu_ms``: its processor time."""

    name: str
    experts: ExpertEngine
    batch: BatchEngine
    block_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    moved: int = 0

    def run(self, shared: SharedModel, rows: int, steps: int, warmup: int) -> None:
        """A block: ``rows`` requests through their prompts, a few steps, then ``steps`` that are timed."""
        shared.attach(self.experts)
        random = np.random.default_rng(len(self.block_ms))
        sampling = SamplingParams(temperature=0, max_tokens=warmup + steps + 2, ignore_eos=True)
        for number in range(rows):
            prompt = tuple(random.integers(4, shared.model.vocab_size, PROMPT_TOKENS).tolist())
            request = GenerationRequest(f"{len(self.block_ms)}-{number}", prompt, sampling, task_type="bench")
            self.batch.add(self.batch.new_sequence(request, lambda event: None))
        for _ in range(1 + warmup):
            self.batch.step()
        before = self.bytes_moved()
        begun, worked = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            self.batch.step()
        self.block_ms.append(1e3 * (time.perf_counter() - begun) / steps)
        self.cpu_ms.append(1e3 * (time.thread_time() - worked) / steps)
        self.moved += self.bytes_moved() - before
        self.batch.abort("the block is over")

    def bytes_moved(self) -> int:
        return int(sum(self.experts.refresh_counters().bytes_by_link.values()))


def measure(
    shared: SharedModel, rows: int, share: float, rounds: int, steps: int, every: int, swapped: float
) -> dict[str, Any]:
    catalogue = shared.catalogue
    some = max(int(share * catalogue.size), int(catalogue.top_k.max()) * catalogue.layers)
    arms: list[Arm] = []
    try:
        for name in ARMS:
            slots = catalogue.size if name == "resident" else some
            policy = Swapping(catalogue, slots=slots, every=every if name == "moving" else 0, swapped=swapped)
            fidelity = Fidelity("exact" if name == "resident" else "paper")
            config = EngineConfig(slots, fidelity=fidelity)
            experts = ExpertEngine(shared.pack, catalogue, policy, config, hardware=shared.hardware)
            batch = BatchEngine(shared.model, BatchConfig(KV_BYTES), observer=experts)
            arms.append(Arm(name, experts, batch))
            experts.preload(policy.first())
        bar = progress((rounds + 1) * len(arms), f"{rows} rows", "block")
        with bar:
            for round_ in range(rounds + 1):
                for arm in rotated(arms, round_):
                    arm.run(shared, rows, steps, warmup=2)
                    bar.update()
        return _result(arms, rows, steps)
    finally:
        for arm in arms:
            arm.experts.close()
        shared.detach()


def _result(arms: list[Arm], rows: int, steps: int) -> dict[str, Any]:
    """The first round is warm-up."""
    resident, resident_cpu = arms[0].block_ms[1:], arms[0].cpu_ms[1:]
    found: dict[str, Any] = {"rows": rows, "threads": torch.get_num_threads(), "arms": {}}
    for arm in arms:
        ratios = sorted(own / there for own, there in zip(arm.block_ms[1:], resident, strict=True))
        cpu = [own / there for own, there in zip(arm.cpu_ms[1:], resident_cpu, strict=True)]
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        counters = arm.experts.counters
        found["arms"][arm.name] = {
            "step_ms": round(statistics.median(arm.block_ms[1:]), 3),
            "ratio": round(statistics.median(ratios), 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "ratio_of_sums": round(sum(arm.block_ms[1:]) / sum(resident), 4),
            "cpu_ms": round(statistics.median(arm.cpu_ms[1:]), 3),
            "cpu_ratio": round(statistics.median(cpu), 4),
            "mib_a_step": round(arm.moved / (steps * len(arm.block_ms)) / 2**20, 2),
            "on_demand": counters.on_demand_fetches,
        }
    return found


@click.command()
@click.option("--expert-mib", type=float, default=EXPERT_MIB, show_default=True, help="0: the bundled model.")
@click.option("--share", type=click.FloatRange(0, 1), default=0.6, show_default=True)
@click.option("--rows", "all_rows", multiple=True, type=click.IntRange(min=1), default=(1, 8), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=48, show_default=True, help="In a block.")
@click.option("--every", type=click.IntRange(min=1), default=24, show_default=True, help="Steps between changes.")
@click.option("--swapped", type=click.FloatRange(0, 1), default=0.15, show_default=True, help="Share of the slots.")
@click.option("--threads", type=click.IntRange(min=1), help="To compute with.  [default: torch's]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A file for the JSON.")
def main(
    expert_mib: float,
    share: float,
    all_rows: tuple[int, ...],
    rounds: int,
    steps: int,
    every: int,
    swapped: float,
    threads: int | None,
    out: Path | None,
) -> None:
    """What a step costs while rows use only resident experts, against a step with all experts resident."""
    if threads:
        torch.set_num_threads(threads)
    folder = widened(expert_mib) if expert_mib else bundled_model_path()
    with SharedModel(folder) as shared:
        results = [measure(shared, rows, share, rounds, steps, every, swapped) for rows in all_rows]
    print(
        "| rows | | ms a step | of resident | quartiles | processor ms | of resident | MiB moved a step | on demand |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for result in results:
        for name, arm in result["arms"].items():
            low, high = arm["quartiles"]
            print(
                f"| {result['rows']} | {name} | {arm['step_ms']:.2f} | {arm['ratio']:.3f} | {low:.3f} to {high:.3f} "
                f"| {arm['cpu_ms']:.2f} | {arm['cpu_ratio']:.3f} | {arm['mib_a_step']:.1f} | {arm['on_demand']} |"
            )
    print(write_result({"machine": describe_machine(cache_folder()), "share": share, "results": results}, out))


if __name__ == "__main__":
    main()
