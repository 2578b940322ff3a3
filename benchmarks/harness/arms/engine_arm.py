"""greenroom's arms: expert engines on one loaded model, each with its budget and its policy.

Experts are read past the page cache into an arena of the budget's size: nothing else of them is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness.arms.policy_clock import PolicyClock
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.arms.routing_record import RoutingRecord
from benchmarks.harness.arms.served_turn import PhaseTurn, ServedTurn
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.shared_model import KV_BYTES, Ask, SharedModel, run_at_once
from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.step_picks import StepPicks
from greenroom.moe.routing.expert_mlp import predictors_for
from greenroom.moe.routing.residual_maps import ResidualMaps
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.replacement.belady import Future
from greenroom.worker.model.expert_moves import EngineMoves
from greenroom.worker.model.warm_start import first_residents

MOST_AT_ONCE = 64
_COUNTED = (
    "lookups", "hits", "on_demand_fetches", "prefetches", "prefetches_used", "prefetches_wasted", "steps",
    "stall_seconds",
)  # fmt: skip


class EngineArm(Closing):
    """``share``: of all experts, in the budget. ``batching`` and ``batch``: which rows form a step, and its limits.
    ``maps``: of the residual stream, in the place of routers that are run ahead. ``paths``: makes what foretells
    routing paths, for its policy.

    Raises GreenroomError if it can not be opened. A context manager.
    """

    def __init__(
        self,
        kind: Kind,
        shared: SharedModel,
        share: float,
        artifacts: Iterable[Artifact] = (),
        future: Future | None = None,
        *,
        batching: BatchPolicy | None = None,
        batch: BatchConfig | None = None,
        maps: ResidualMaps | None = None,
        paths: Callable[[ExpertPolicy], TokenPaths] | None = None,
    ) -> None:
        self.kind = kind
        self.share = share
        self._shared = shared
        self._maps = maps
        catalogue = shared.catalogue
        self.slots = min(catalogue.size, max(int(share * catalogue.size), int(catalogue.top_k.max())))
        self.policy = kind.create(catalogue, **({} if future is None else {"future": future}))
        self.experts = ExpertEngine(
            shared.pack, catalogue, self.policy, EngineConfig(self.slots), hardware=shared.hardware,
            predictors=predictors_for(self.policy),
        )  # fmt: skip
        try:
            for artifact in artifacts:
                self.experts.swapped(self.experts.prepare(artifact))
            picks = StepPicks(catalogue)
            if paths is not None:
                self.experts.also_tell(picks)
            self._batch = BatchEngine(
                shared.model, batch or BatchConfig(KV_BYTES, max_running=MOST_AT_ONCE, prefill_chunk=256), batching,
                eos_token_ids=shared.loaded.eos_token_ids, observer=self.experts, moves=EngineMoves(self.experts, None),
                paths=None if paths is None else paths(self.policy), picks=None if paths is None else picks.take,
            )  # fmt: skip
            self.experts.preload(first_residents(catalogue, [], self.policy.target, self.policy.fill_order()))
        except BaseException:
            self.experts.close()
            raise
        self._requests = 0

    def run(self, asks: Sequence[Ask], at_once: int, *, look_inside: bool = False) -> ServedTurn:
        """Greedy answers of the wanted lengths, ``at_once`` prompts at a time; the next joins when one has ended.

        ``look_inside``: time the policy's calls.
        """
        self._shared.attach(self.experts, self._maps)
        before, phases = self._counts(), self._phases()
        clock = PolicyClock(self.policy) if look_inside else None
        ids: list[list[int]] = [[] for _ in asks]
        taken = [0.0] * len(asks)
        try:
            seconds = run_at_once(
                self._batch, len(asks), at_once, lambda place: self._begin(asks[place], ids[place], taken, place)
            )
        finally:
            if clock is not None:
                clock.remove()
        spent = {name: after - was for (name, after), was in zip(self._counts().items(), before.values(), strict=True)}
        return ServedTurn(
            seconds=seconds,
            tokens=sum(map(len, ids)),
            ids=ids,
            bytes_moved=int(spent["bytes"]),
            look_ups=int(spent["lookups"]),
            hits=int(spent["hits"]),
            on_demand=int(spent["on_demand_fetches"]),
            prefetches=int(spent["prefetches"]),
            prefetches_used=int(spent["prefetches_used"]),
            prefetches_wasted=int(spent["prefetches_wasted"]),
            stall_seconds=spent["stall_seconds"],
            steps=int(spent["steps"]),
            request_seconds=taken,
            policy_seconds={} if clock is None else clock.seconds,
            phases={name: _since(after, phases[name]) for name, after in self._phases().items()},
        )

    def recorded(self, asks: Sequence[Ask], at_once: int) -> tuple[ServedTurn, RoutingRecord]:
        """As ``run``, and what was routed."""
        record = RoutingRecord(self.experts.catalogue)
        self.experts.listener = record
        try:
            return self.run(asks, at_once), record
        finally:
            self.experts.listener = None

    def _begin(self, ask: Ask, ids: list[int], taken: list[float], place: int) -> None:
        began = time.perf_counter()

        def take(event: Event) -> None:
            if isinstance(event, Token):
                ids.append(event.token_id)
                return
            if event.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"a prompt of {ask.task} has no whole answer: {event.error or event.reason}")
            taken[place] = time.perf_counter() - began

        self._requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=len(ask.answer_ids), ignore_eos=True)
        request = GenerationRequest(f"{self.kind.name}-{self._requests}", ask.prompt_ids, sampling, ask.task)
        self._batch.add(self._batch.new_sequence(request, take))

    def _counts(self) -> dict[str, float]:
        counters = self.experts.refresh_counters()
        return {
            **{name: getattr(counters, name) for name in _COUNTED},
            "bytes": sum(counters.bytes_by_link.values()),
        }

    def _phases(self) -> dict[str, PhaseTurn]:
        return {
            name: PhaseTurn(
                part.steps, part.seconds, part.stall_seconds, sum(moved.total for moved in part.bytes_by_link.values())
            )
            for name, part in self.experts.refresh_counters().phases.items()
        }

    @property
    def paths_seconds(self) -> float:
        """What foretelling paths has taken so far."""
        return self._batch.stats.paths_seconds

    def close(self) -> None:
        self.experts.close()


def _since(after: PhaseTurn, before: PhaseTurn) -> PhaseTurn:
    return PhaseTurn(
        after.steps - before.steps,
        after.seconds - before.seconds,
        after.stall_seconds - before.stall_seconds,
        after.bytes_moved - before.bytes_moved,
    )
