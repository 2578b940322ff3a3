"""eMoE's task-aware expert loading (section 3.4): the experts that the requests here are expected to send tokens to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.allocation import Allocation, Shares
from greenroom.policies.base.array_types import NO_KEYS, Ids, Keys, Mask
from greenroom.policies.base.events import (
    UNKNOWN_TASK,
    LayerRouting,
    Prediction,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target
from greenroom.policies.base.fidelity import FIDELITIES
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.task_shares import SENSITIVITIES, TaskShares
from greenroom.policies.base.victim_selection import Worth, just_enough, lowest
from greenroom.policies.emoe.demand import Outlook, Prompts, expected_tokens
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.policies.prefetching.prefetching_policy import RETENTIONS

_MOST_REPORTED = 16


class Emoe(RankingPolicy):
    """Keeps on the device the experts that the requests here will send most tokens to, and fetches the missing ones.

    When requests were queued or a forecast came, Eq. 2 is computed before the next step. For task q, layer l and expert
    i: N = (Σ W + |R| · Wo) · s · f. W are the input tokens of the task's requests R that wait or run here, Wo the
    tokens that one of them is expected to generate, s the sensitivity, f the share of the layer's tokens. N is summed
    over the tasks, and the places go to the largest sums (``Allocation``). That set is the target. f is the newest
    forecast; before the first, what ``profile`` has; without a profile, what was seen.

    s is 0 where the task is insensitive. Elsewhere it is 1, as in the paper ("binary"), or what a pick is worth by the
    profile ("graded"): what the task's answers lose without the expert, over its share of the tokens. So places go to
    the experts whose absence would cost answers most.

    For an expert of the target another one leaves, and for a miss any one: that of the least worth to ``retention``. A
    member of the target that left for a miss is wanted again when requests are next queued; at once, every miss would
    move two experts. With ``fidelity`` "paper" there are no misses: the expert that expects the fewest tokens leaves
    first, and with a profile the policy ignores layer events. With "paper" and "sensitive", where rows go to resident
    experts, the last k of a layer leave for the target only where there are no others.
    """

    only_ahead = True

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        profile: ModelProfile | None = None,
        fidelity: str = "exact",
        retention: str = "next-use",
        sensitivity: str = "graded",
    ) -> None:
        """Raises UnknownName for an unknown retention or sensitivity, InvalidConfig for an unknown fidelity and for a
        profile of other experts.
        """
        if retention not in RETENTIONS:
            raise UnknownName("retention", retention, RETENTIONS)
        if sensitivity not in SENSITIVITIES:
            raise UnknownName("sensitivity", sensitivity, SENSITIVITIES)
        if fidelity not in FIDELITIES:
            raise InvalidConfig("fidelity", fidelity, f"allowed: {', '.join(FIDELITIES)}")
        super().__init__(catalogue)
        self._profile = profile
        self._shares = TaskShares(catalogue, profile, graded=sensitivity == "graded")
        self._allocation = Allocation(catalogue)
        self._retention = None if fidelity == "paper" else RETENTIONS[retention](catalogue)
        self._spares_layers = fidelity != "exact"
        if self._retention is None and profile is not None:
            self.hooks = self.hooks - {"on_layer_routed"}
        self._places = self._allocation.sizes.places(0)
        self._here: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        self._sequences: dict[int, SequenceInfo] = {}
        self._new: set[int] = set()
        self._due = False
        self._tokens: NDArray[np.float64] = np.zeros(catalogue.size)
        self._wanted: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        self._rows: tuple[Step, list[str], Ids] | None = None
        self._prompts = Prompts(profile)
        self._reported: dict[str, Shares] = {}
        self._outdated = False
        self._outlook: Outlook | None = None
        self._answered: tuple[Outlook | None, Mapping[str, int]] = None, {}

    # -- requests and forecasts ------------------------------------------------------------------------------------

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        self._sequences[sequence.sequence] = sequence
        self._new.add(sequence.sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        if self._sequences.pop(sequence, None) is not None:
            self._new.discard(sequence)
            self._outdated = True
            self._look_out(idle=True)

    def on_prediction(self, prediction: Prediction) -> None:
        asked, values = prediction.request, prediction.values
        if asked.kind == POPULARITY and asked.task is not None and values.shape == (self.catalogue.size,):
            self._shares.foresee(asked.task, values)
            self._due = True

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        sizes = self._allocation.sizes
        places = sizes.places(sizes.within(budget_bytes))
        if tier is Tier.DEVICE and not np.array_equal(places, self._places):
            self._places = places
            self._due = True
            if self._profile is not None and self.target is None:
                self._decide()
                self._look_out(idle=True)

    def on_step_started(self, step: Step) -> None:
        if self._new or self._due:
            for sequence in self._new:
                self._prompts.add(self._sequences[sequence])
            self._new.clear()
            self._due = False
            self._decide()
        self._look_out(idle=False)

    # -- routing and movements -------------------------------------------------------------------------------------

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if self._retention is not None:
            self._retention.on_layer_routed(routing)
        if self._profile is None:
            self._shares.saw(routing, *self._tasks_of(routing.step))

    def on_transfer_done(self, transfer: Transfer) -> None:
        if transfer.target is Tier.DEVICE:
            self._here[transfer.expert] = True
            self._outdated = True
            self._look_out(idle=True)
        if self._retention is not None:
            self._retention.on_transfer_done(transfer)

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        if tier is not Tier.DEVICE or not len(experts):
            return
        self._here[experts] = False
        self._outdated = True
        if self._wanted[experts].any():
            wanted = self._wanted.copy()
            wanted[experts] = False
            self._want(wanted)

    # -- decisions -------------------------------------------------------------------------------------------------

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        if self._retention is None:
            return self._tokens, self._shares.popularity
        return self._retention.worth(tier)

    def victims(self, request: VictimRequest) -> Keys:
        worth, tie = self.worth(request.tier)
        if request.tier is not Tier.DEVICE or (request.reason is Reason.ON_DEMAND and self._retention is not None):
            return lowest(self.catalogue, request, worth, tie)
        span = 1.0 + worth.max() - worth.min()
        worth = worth + 2 * span * self._wanted
        if not self._spares_layers or request.bytes_needed <= 0:
            return lowest(self.catalogue, request, worth, tie)
        return self._sparing_layers(request, worth, span, tie)

    def _sparing_layers(self, request: VictimRequest, worth: Worth, span: float, tie: Worth | None) -> Keys:
        """As ``lowest``, but the last k of a layer leave only where there are no others: rows can be confined to them.

        In ``worth`` wanted experts are at least ``span`` above the others.
        """
        catalogue = self.catalogue
        bytes_of, needed = catalogue.bytes_of, request.bytes_needed
        if needed > int(bytes_of[request.evictable].sum()):
            return NO_KEYS
        evictable, ranked = request.evictable.copy(), list[int]()
        held = np.add.reduceat(request.resident.astype(np.int64), catalogue.first[:-1])
        while needed > 0:
            last = (held <= catalogue.top_k)[catalogue.layer_of] & ~self._wanted
            single = replace(request, bytes_needed=1, evictable=evictable)
            victim = int(lowest(catalogue, single, worth + span * last, tie)[0])
            evictable[victim] = False
            held[catalogue.layer_of[victim]] -= 1
            ranked.append(victim)
            needed -= int(bytes_of[victim])
        return just_enough(bytes_of, request.bytes_needed, np.array(ranked, dtype=np.int64))

    def loads_by_task(self) -> Mapping[str, int]:
        """As of the last step's start, or the last request's end."""
        outlook, (asked, loads) = self._outlook, self._answered
        if outlook is not None and outlook is not asked:
            loads = outlook.loads(self._allocation)
            self._answered = outlook, loads
        return loads

    def _decide(self) -> None:
        """Eq. 2 over the requests that are here; before the first request, over all profiled tasks alike."""
        weights = self._prompts.weights(self._sequences.values())
        if not weights and self.target is None and self._profile is not None:
            weights = dict.fromkeys(self._profile.tasks, 1.0)
        shares = {task: of for task in weights if (of := self._shares.of(task)) is not None}
        if shares:
            self._tokens = expected_tokens(weights, shares)
            popularity = self._shares.popularity
            self._want(self._allocation.choose(self._tokens, self._places, here=self._here, popularity=popularity))
        tasks = dict.fromkeys((*weights, *self._shares.tasks))
        self._reported = {task: of for task in [*tasks][:_MOST_REPORTED] if (of := self._shares.of(task)) is not None}
        self._outdated = True

    def _want(self, wanted: Mask) -> None:
        self._wanted = wanted
        if self.target is None or not np.array_equal(wanted, self.target.wanted):
            self.target = Target(0 if self.target is None else self.target.generation + 1, wanted)

    def _tasks_of(self, step: Step) -> tuple[list[str], Ids]:
        """The tasks of the step's rows, and ``[T]``: each row's index among them."""
        if self._rows is None or self._rows[0] is not step:
            here = [self._sequences.get(sequence) for sequence in step.sequences.tolist()]
            tasks = [UNKNOWN_TASK if one is None else one.task for one in here]
            places = {task: place for place, task in enumerate(dict.fromkeys(tasks))}
            of_sequence = np.array([places[task] for task in tasks], dtype=np.int64)
            self._rows = step, list(places), of_sequence[step.sequence_of_row]
        return self._rows[1:]

    def _look_out(self, *, idle: bool) -> None:
        """Publish a new outlook for other threads. ``idle``: only if no request is here, when no step would do it."""
        if self._outdated and not (idle and self._sequences):
            self._outdated = False
            weights = self._prompts.weights(self._sequences.values())
            self._outlook = Outlook(
                weights=weights,
                one_more={task: self._prompts.expected(task) for task in self._reported},
                shares=self._reported,
                here=self._here.copy(),
                wanted=self._wanted,
                popularity=self._shares.popularity,
                places=self._places,
            )
