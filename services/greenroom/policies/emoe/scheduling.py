"""eMoE's request scheduling: section 3.5, Algorithm 1, mended, and as it is printed.

docs/architecture/scheduling.md says what it does and what becomes of odd input; docs/decisions/0018-emoe.md why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.array_types import Mask
from greenroom.policies.emoe.admission import Indices, Queue, Round, Rules, Site, sort_out
from greenroom.policies.placement.latency_estimate import ESTIMATORS, Printed
from greenroom.policies.placement.placement_policy import PlacementDecision, PlacementPolicy, PlacementState

PATIENCE_S = 30.0
LATE_SHARE = 0.125


class EmoePlacement(PlacementPolicy):
    """Whoever is placed spoils no SLO of those that are on the worker.

    In order of slack to the first token, higher ``priority`` before lower; those without SLOs, and those that would not
    meet theirs, behind the others in order of arrival. Each goes to the worker with the least ΔE where there is room
    and where everyone that would meet its end-to-end SLO still does with it; where there is none it waits and the next
    is looked at. An empty worker takes the first that fits. What is placed runs: workers' own queues are not used.

    ``estimator``: ``eq3`` or ``processor-sharing``. ``patience_s``: of those that have waited longer, the one that
    arrived first goes before everyone and may spoil what it spoils, one of them at a time on a worker; if it fits on
    none, a worker takes nobody else until it does. None: nothing bounds how long one waits but its deadline.
    ``margin``: what estimates are multiplied by, for safety. ``late_share``: one that would miss its own SLO anyway
    goes only where less than this share of the places is taken (an empty worker always takes it), else a batch fills up
    with those that nothing can be spoiled for, and is slow for all that come and could have met theirs. 1: no bound.
    """

    def __init__(
        self,
        *,
        estimator: str = "eq3",
        patience_s: float | None = PATIENCE_S,
        margin: float = 1.0,
        late_share: float = LATE_SHARE,
    ) -> None:
        if estimator not in ESTIMATORS:
            raise UnknownName("estimator", estimator, ESTIMATORS)
        if patience_s is not None and not patience_s >= 0:
            raise InvalidConfig("patience_s", patience_s, "it is a number of seconds from 0, or null for no bound")
        if not 0 < margin < math.inf:
            raise InvalidConfig("margin", margin, "it is a number above 0; 1 takes the estimates as they are")
        if not 0 <= late_share <= 1:
            raise InvalidConfig("late_share", late_share, "it is a share from 0 to 1; 1 keeps no room")
        self._rules = Rules(ESTIMATORS[estimator], margin=margin, late_share=late_share)
        self._patience_ms = math.inf if patience_s is None else patience_s * 1000.0

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        queue, shed = sort_out(state, now_ms)
        round_ = Round(queue, [Site(view, queue, self._rules, now_ms) for view in state.workers])
        free = self._place_impatient(round_)
        if len(queue) and any(site.room > 0 for site in free):
            who, late = _order(queue, free)
            round_.place_in_order(who, late, free)
        return PlacementDecision(place=tuple(round_.place), shed=shed)

    def _place_impatient(self, round_: Round) -> list[Site]:
        """The workers that others may be placed on, too."""
        queue, free = round_.queue, list(round_.sites)
        impatient = np.flatnonzero(queue.waited >= self._patience_ms)
        longest = impatient[np.argsort(queue.rank[impatient])][: len(free)]
        for position, index in enumerate(longest.tolist()):
            turn = [site for site in free if site.could_hold(index) and site.is_turn_of(index, self._patience_ms)]
            able = [site for site in turn if site.fits(index)]
            if able:
                round_.put(index, able)
            elif turn and position == 0:
                free.remove(min(turn, key=lambda site: (-site.view.kv_total, site.view.worker)))
        return free


def _order(queue: Queue, sites: Sequence[Site]) -> tuple[Indices, Mask]:
    """Places in the queue, and whether each comes as one that need not meet its SLOs. Who has SLOs comes twice:
    whether they can be met shows only when it is its turn."""
    soonest = np.min([site.alone_ms for site in sites], axis=0)
    token_ms = min(site.generated_ms(1) for site in sites)
    slack = np.minimum(queue.slo_ttft, queue.slo_e2e - queue.left * token_ms) - queue.waited - soonest
    demanding = np.flatnonzero(np.isfinite(slack))
    by_slack = demanding[np.lexsort((queue.rank[demanding], slack[demanding]))]
    who: Indices = np.concatenate((by_slack, queue.by_arrival))
    late = np.arange(len(who)) >= len(demanding)
    order = np.argsort(-queue.priority[who], kind="stable")
    return who[order], late[order]


class EmoeLiteralPlacement(PlacementPolicy):
    """Algorithm 1 as it is printed, its slips mended: a row to compare with, not to serve with.

    In order of the SLO to the first token, or else to the end; none last. A request is placed unless one that is on the
    worker would miss its SLO then by Eq. 3 as printed, or does anyway. The wait in the queue is not counted, nor what
    was placed just before, and nothing bounds how long one waits but its deadline.
    """

    def __init__(self) -> None:
        self._rules = Rules(Printed(), from_arrival=False, sums_up=False, heeds_lost=True)

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        queue, shed = sort_out(state, now_ms)
        round_ = Round(queue, [Site(view, queue, self._rules, now_ms) for view in state.workers])
        stringency = np.where(np.isfinite(queue.slo_ttft), queue.slo_ttft, queue.slo_e2e)
        who = np.lexsort((queue.rank, stringency))
        round_.place_in_order(who, np.ones(len(who), dtype=bool), round_.sites)
        return PlacementDecision(place=tuple(round_.place), shed=shed)
