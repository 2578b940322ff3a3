"""greenroom's arms: expert engines on one loaded model, each with its budget and its policy.

Experts are read past the page cache into an arena of the budget's size: nothing else of them is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.arms.routing_record import RoutingRecord
from benchmarks.harness.inputs.shared_model import KV_BYTES, Ask, SharedModel, run_at_once
from benchmarks.moe_infinity.engine.arms.compared_policies import Kind
from benchmarks.moe_infinity.engine.arms.policy_clock import PolicyClock
from benchmarks.moe_infinity.engine.arms.served_turn import ServedTurn
from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.policies.base.events import Artifact
from greenroom.policies.registry import create_policy
from greenroom.policies.replacement.belady import Future
from greenroom.worker.model.warm_start import first_residents

MOST_AT_ONCE = 64
_COUNTED = (
    "lookups", "hits", "on_demand_fetches", "prefetches", "prefetches_used", "prefetches_wasted", "steps",
    "stall_seconds",
)  # fmt: skip


class EngineArm:
    """``share``: of all experts, in the budget. Raises GreenroomError if it can not be opened."""

    def __init__(
        self,
        kind: Kind,
        shared: SharedModel,
        share: float,
        artifacts: Iterable[Artifact] = (),
        future: Future | None = None,
    ) -> None:
        self.kind = kind
        self.share = share
        self._shared = shared
        catalogue = shared.catalogue
        self.slots = min(catalogue.size, max(int(share * catalogue.size), int(catalogue.top_k.max())))
        options: dict[str, Any] = dict(kind.options) | ({} if future is None else {"future": future})
        self.policy = create_policy(kind.policy, catalogue=catalogue, options=options)
        for artifact in artifacts:
            self.policy.on_artifact_swapped(artifact)
        self.experts = ExpertEngine(
            shared.pack, catalogue, self.policy, EngineConfig(self.slots), hardware=shared.hardware
        )  # fmt: skip
        try:
            batch = BatchConfig(KV_BYTES, max_running=MOST_AT_ONCE, prefill_chunk=256)
            self._batch = BatchEngine(
                shared.model, batch, eos_token_ids=shared.loaded.eos_token_ids, observer=self.experts
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
        self._shared.attach(self.experts)
        before = self._counts()
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

    def close(self) -> None:
        self.experts.close()
