"""eMoE's request scheduling (section 3.5, Algorithm 1): corrected, and as printed.

docs/architecture/scheduling.md describes it; docs/decisions/0018-emoe.md gives the reasons.
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
    """Places a request where it makes no other miss its SLO.

    Requests are taken in order of slack to the first token, higher ``priority`` before lower. Those without SLOs, and
    those that would miss theirs, come after the others in order of arrival. A request goes to the worker with the least
    ΔE that has room and on which every request that would meet its end-to-end SLO still does. Where there is none it
    waits, and the next is looked at. An empty worker takes the first that fits. Placed requests run at once: workers'
    own queues are not used.

    ``estimator``: ``eq3`` or ``processor-sharing``. ``patience_s``: of the requests that have waited longer, the first
    to arrive goes before all others, whatever SLOs it breaks, one such request at a time on a worker. If it fits on no
    worker, one takes no other request until it does. None: only its deadline bounds a request's wait. ``margin``:
    safety factor on all estimates. ``late_share``: a request that would miss its own SLO anyway is placed only where
    less than this share of the places is taken, or on an empty worker. Otherwise late requests would fill the batch and
    slow down those that can be in time. 1: no bound.
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
            order, late = _order(queue, free)
            round_.place_in_order(order, late, free)
        return PlacementDecision(place=tuple(round_.place), shed=shed)

    def _place_impatient(self, round_: Round) -> list[Site]:
        """Place requests that have waited too long. Returns the workers that may take others, too."""
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
    """Places in the queue, and whether each need not meet its SLOs. A request with SLOs occurs twice: whether they can
    be met shows only at its turn."""
    soonest = np.min([site.alone_ms for site in sites], axis=0)
    token_ms = min(site.generated_ms(1) for site in sites)
    slack = np.minimum(queue.slo_ttft, queue.slo_e2e - queue.left * token_ms) - queue.waited - soonest
    demanding = np.flatnonzero(np.isfinite(slack))
    by_slack = demanding[np.lexsort((queue.rank[demanding], slack[demanding]))]
    places: Indices = np.concatenate((by_slack, queue.by_arrival))
    late = np.arange(len(places)) >= len(demanding)
    order = np.argsort(-queue.priority[places], kind="stable")
    return places[order], late[order]


class EmoeLiteralPlacement(PlacementPolicy):
    """Algorithm 1 as printed, slips corrected: for comparison, not for serving.

    Requests are taken in order of the SLO to the first token, or else to the end; those without come last. A request is
    placed unless one on the worker would then miss its SLO by Eq. 3 as printed, or misses it anyway. The wait in the
    queue does not count, nor do requests placed just before. Only its deadline bounds a request's wait.
    """

    def __init__(self) -> None:
        self._rules = Rules(Printed(), from_arrival=False, sums_up=False, heeds_lost=True)

    def decide(self, state: PlacementState, now_ms: float) -> PlacementDecision:
        queue, shed = sort_out(state, now_ms)
        round_ = Round(queue, [Site(view, queue, self._rules, now_ms) for view in state.workers])
        stringency = np.where(np.isfinite(queue.slo_ttft), queue.slo_ttft, queue.slo_e2e)
        order = np.lexsort((queue.rank, stringency))
        round_.place_in_order(order, np.ones(len(order), dtype=bool), round_.sites)
        return PlacementDecision(place=tuple(round_.place), shed=shed)
