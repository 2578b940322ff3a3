"""What each change to the paper's prefill is worth: the policy without it, beside the whole one, in the same rounds.

That a slot is filled again as soon as its expert has run is the engine's doing for all policies. It can not be taken
out by itself: without it nothing streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.duoserve.engine.prompt_times import answered
from benchmarks.duoserve.engine.served import Widened
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns
from greenroom.core.errors import GreenroomError
from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import LayerRouting, Reason, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.batching.phases import PhasesBatching
from greenroom.policies.duoserve.policy import DuoServe

FULL: Final = "duoserve"


class ClaimsRoomForAll(DuoServe):
    """A layer claims room for all that it misses, as other policies' do, in decoding too."""

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        return False


class PassedLeaveFirst(DuoServe):
    """What has run in a layer that streams makes room for the next, as in the paper's two buffers; residents stay."""

    _passing: Keys = NO_KEYS

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._passing = NO_KEYS
        super().on_layer_routed(routing)

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        self._passing = missing
        return super().streams(routing, missing)

    def victims(self, request: VictimRequest) -> Keys:
        if request.reason is not Reason.ON_DEMAND or request.tier is not Tier.DEVICE:
            return super().victims(request)
        worth, tie = self.retention.worth(request.tier)
        passed = np.array(worth, dtype=np.float64)
        passed[self._passing] = -1.0  # those of them that may leave have run
        return lowest(self.catalogue, request, passed, tie)


class NothingAheadOfPrompts(DuoServe):
    """In a step with prompts nothing is fetched before its layer asks for it."""

    def _want_later(self, layer: int) -> None:
        if not self._has_prompts:
            super()._want_later(layer)
        elif self._wants_any:
            self._want(np.zeros(self.catalogue.size, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Without(Kind):
    """A variant of `duoserve` that no registry knows."""

    made: type[DuoServe] = DuoServe

    def create(self, catalogue: Catalogue, **more: Any) -> ExpertPolicy:
        return self.made(catalogue, **{**self.options, **more})


VARIANTS: Final = (
    Without("no streaming", "duoserve", made=ClaimsRoomForAll),
    Without("what has passed leaves first", "duoserve", made=PassedLeaveFirst),
    Without("nothing ahead in prompts", "duoserve", made=NothingAheadOfPrompts),
)
PHASES: Final = Kind("batching phases", "duoserve")


@dataclass(frozen=True, slots=True)
class Measured:
    """``prompt``: seconds a prompt. ``one``, ``many``: tokens/s one and several at a time."""

    prompt: float
    one: float
    many: float


def run(
    served: Widened, *, rows: int, prefills: int, asks: int, at_once: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Every arm in turns: its prompts' time, and its tokens a second."""
    prompts, fillers = served.of_rows(rows, prefills), served.asks(prefills)
    few, many = served.asks(asks), served.asks(2 * asks)
    kinds = (Kind(FULL, "duoserve"), *VARIANTS, PHASES)
    found: dict[str, dict[int, Measured]] = {kind.name: {} for kind in kinds}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        arms: list[EngineArm] = []
        for kind in kinds:
            try:
                batching = PhasesBatching() if kind is PHASES else None
                arms.append(stack.enter_context(served.arm(kind, batching=batching)))
            except GreenroomError as error:
                failed[kind.name] = str(error)
        with progress((rounds + 1) * len(arms), "each change", "turn") as bar:
            for round_, arm in in_turns(arms, rounds, seconds):
                if not round_:
                    arm.run(few[:2], 1)
                    bar.update()
                    continue
                prefilled = answered(arm, prompts, fillers)
                one, batch = arm.run(few, 1), arm.run(many, at_once)
                found[arm.kind.name][round_] = Measured(
                    sum(prefilled.seconds) / prefills, one.tokens / one.seconds, batch.tokens / batch.seconds
                )
                bar.update()
        served.shared.detach()
    return {
        "rows": {name: relative(own, found[FULL]) for name, own in found.items() if own},
        "failed": failed,
        "settings": {"prompt_rows": rows, "prefills": prefills, "asks": asks, "at_once": at_once},
        "rounds": len(found[FULL]),
    }


def relative(own: Mapping[int, Measured], full: Mapping[int, Measured]) -> dict[str, Any]:
    """``prompt``, ``one``, ``many``: over the whole policy's of the same round."""
    return {
        "prompt": spread_json(Spread.of([each.prompt / full[number].prompt for number, each in own.items()]), 3),
        "one": spread_json(Spread.of([each.one / full[number].one for number, each in own.items()]), 3),
        "many": spread_json(Spread.of([each.many / full[number].many for number, each in own.items()]), 3),
        "prompt_seconds": spread_json(Spread.of([each.prompt for each in own.values()]), 3),
        "one_tokens_per_s": spread_json(Spread.of([each.one for each in own.values()]), 2),
        "many_tokens_per_s": spread_json(Spread.of([each.many for each in own.values()]), 2),
    }
