"""One run: requests through the batch loop's own engine, on simulated links.

Real are the batch policy, admission by KV and places, chunks, what steps are measured to cost (StepMeter), the expert
policy and the expert engine. Simulated are the links and computing, on a virtual clock. Not modelled: what deciding and
sampling cost, attention over the context, work that goes on beside a step, and how tokens reach clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, cast

from benchmarks.duoserve.serving.arms import Arm, rows_and_slots
from benchmarks.duoserve.serving.machines import EXPERT_BYTES, Machine
from benchmarks.duoserve.serving.open_loop import Answered, serve
from benchmarks.duoserve.serving.requests import Request, Routes
from benchmarks.duoserve.serving.simulated_model import LAYOUT, SimulatedModel
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.experts.copying.disk_calibration import MeasuredLink
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.timed_replay import TimedEngine, TimedReplay
from greenroom.worker.model.expert_moves import EngineMoves
from greenroom.worker.model.warm_start import first_residents

KV_TOKENS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Ran:
    """``balanced_rows``: R* at the end; None: not known, or nothing was missing."""

    answered: list[Answered]
    rows: int
    slots: int
    steps: int
    prompt_steps: int
    moved_bytes: int
    balanced_rows: float | None


@dataclass(frozen=True, slots=True)
class Server:
    """What all runs have in common. ``files``: fitted to other sequences than those of ``routes``."""

    trace: RoutingTrace
    routes: Routes
    files: Sequence[ArtifactFile]
    policy: str = "duoserve"

    def run(
        self,
        machine: Machine,
        arm: Arm,
        requests: Sequence[Request],
        seed: int,
        on_ended: Callable[[], object] = lambda: None,
    ) -> Ran:
        """``requests`` in the order in which they come; equal seeds route them in the same way."""
        setup = TimedReplay(self.trace, EXPERT_BYTES, machine.link, machine.compute)
        catalogue = setup.catalogue()
        policy = create_policy(self.policy, catalogue=catalogue)
        for file in self.files:
            if file.KIND in policy.artifacts:
                policy.on_artifact_swapped(artifact_of(catalogue, file, self.trace.model))
        rows, slots = rows_and_slots(arm, round(machine.share * catalogue.size), max(one.rows for one in requests))
        if machine.share == 1:
            slots = catalogue.size  # memory enough for more rows too
        random = Random(f"routes/{seed}")
        routes = {number: self.routes.rows(one.rows, random) for number, one in enumerate(requests)}
        residents = first_residents(catalogue, [], policy.target, policy.fill_order())[:slots]
        with TimedEngine(setup, policy, slots, residents) as engine:
            batch = BatchEngine(
                cast("Any", SimulatedModel(engine, routes)),
                BatchConfig(
                    LAYOUT.nbytes(KV_TOKENS), tokens_per_step=rows, max_running=arm.config.max_running,
                    max_waiting=len(requests), prefill_chunk=arm.chunk,
                ),
                arm.policy(),
                observer=engine.experts,
                moves=EngineMoves(engine.experts, _measured(machine)),
                clock=engine.now,
            )  # fmt: skip
            answered = serve(batch, [(one.at_s, _asked(number, one)) for number, one in enumerate(requests)], engine,
                             on_ended)  # fmt: skip
            counters = engine.experts.refresh_counters()
            phase = counters.phases["prefill"]
            moved = sum(part.bytes_by_link["disk"].total for part in counters.phases.values())
            return Ran(answered, rows, slots, batch.stats.steps, phase.steps, moved, batch.costs.balanced_rows)


def _measured(machine: Machine) -> MeasuredLink:
    """The link as a worker has it measured: simulated movers know no rate of their own."""
    link = machine.link
    return MeasuredLink(
        ReadSettings(), link.bytes_per_s, link.latency_s, EXPERT_BYTES, "", machine.name, "simulated", ""
    )  # fmt: skip


def _asked(number: int, one: Request) -> GenerationRequest:
    """A client asks for as many tokens as it gets."""
    sampling = SamplingParams(temperature=0.0, max_tokens=one.answer, ignore_eos=True)
    return GenerationRequest(f"r{number}", (0,) * one.prompt, sampling)
