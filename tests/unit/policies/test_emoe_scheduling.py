"""eMoE's scheduling: against its decision written out, and what it promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.emoe.scheduling import EmoeLiteralPlacement, EmoePlacement
from greenroom.policies.placement.latency_estimate import ESTIMATORS
from greenroom.policies.placement.placement_policy import (
    Costs,
    PendingRequest,
    PlacedRequest,
    Placement,
    PlacementPolicy,
    PlacementState,
    Shed,
    WorkerView,
)
from greenroom.policies.registry import create_placement_policy
from tests.examples import examples
from tests.unit.policies.placement_states import by_the_book, sites_of, situations

Situation = tuple[PlacementState, float]


def request(name: str, **more: Any) -> PendingRequest:
    fields = {"arrived_ms": 0.0, "input_tokens": 10, "kv_need": 30, "expected_tokens": 20, "deadline_ms": 1e9}
    return PendingRequest(name, **{**fields, **more})


def placed(name: str, *, left: int = 20, started: float = 0.0, generated: int = 1, **more: Any) -> PlacedRequest:
    return PlacedRequest(request(name, **more), started, generated, left)


def worker(name: str = "w", *running: PlacedRequest, costs: Costs = Costs(token_ms=1.0), **more: Any) -> WorkerView:  # noqa: B008
    fields = {"max_running": 8, "max_queued": 4, "kv_total": 1000, "kv_free": 1000}
    return WorkerView(name, running, (), **{**fields, **more}, costs=costs)


def where(
    pending: Sequence[PendingRequest], *workers: WorkerView, now: float = 0.0, policy: PlacementPolicy | None = None
) -> dict[str, str]:
    decision = (policy or EmoePlacement()).decide(PlacementState(tuple(pending), workers), now)
    return {placement.request_id: placement.worker for placement in decision.place}


# -- as it is written out


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None, max_examples=examples(120))
@given(
    situation=situations(),
    patience_s=st.none() | st.sampled_from([0.0, 1.0, 2.5]),
    late_share=st.sampled_from([0.0, 0.125, 0.5, 1.0]),
)
def test_it_decides_as_the_rules_written_out_do(
    estimator: str, situation: Situation, patience_s: float | None, late_share: float
) -> None:
    state, now = situation
    policy = EmoePlacement(estimator=estimator, patience_s=patience_s, late_share=late_share)

    patience_ms = math.inf if patience_s is None else patience_s * 1000.0
    assert list(policy.decide(state, now).place) == by_the_book(state, now, estimator, patience_ms, late_share)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(deadline=None, max_examples=examples(60))
@given(situation=situations())
def test_a_placement_spoils_no_slo_that_would_be_met_and_memory_holds(estimator: str, situation: Situation) -> None:
    state, now = situation
    decision = EmoePlacement(estimator=estimator, patience_s=None).decide(state, now)

    pending = {request.request_id: request for request in state.pending}
    sites = {site.view.worker: site for site in sites_of(state.workers, now)}
    before = {name: site.latencies(None, now, estimator) for name, site in sites.items()}
    for placement in decision.place:
        sites[placement.worker].take(pending[placement.request_id], now)
    for name, site in sites.items():
        after = site.latencies(None, now, estimator)
        for other in site.there:
            limit, name_of = other.request.slo_e2e_ms, other.request.request_id
            if limit is not None and before[name].get(name_of, math.inf) <= limit:
                assert after[name_of] <= limit
        came = sum(placement.worker == name for placement in decision.place)
        assert not came or sum(other.held for other in site.there) <= site.view.kv_total
        assert not came or len(site.there) <= site.view.max_running
        assert site.kv_free >= 0


@settings(deadline=None, max_examples=examples(60))
@given(situation=situations())
def test_an_empty_worker_takes_the_first_that_fits_whatever_its_slo(situation: Situation) -> None:
    state, now = situation
    empty = worker("empty", max_running=1, costs=Costs(token_ms=50.0))
    alone = PlacementState(state.pending, (empty,))

    decision = EmoePlacement(patience_s=None).decide(alone, now)

    assert len(decision.place) == bool(state.pending)


# -- single rules


def test_slack_to_the_first_token_decides_and_those_without_slo_come_last() -> None:
    one_place = worker(max_running=1)
    pending = [
        request("none"),
        request("late in the day", slo_ttft_ms=900.0),
        request("soon", slo_ttft_ms=500.0),
        request("end", slo_e2e_ms=510.0),  # 20 tokens before the end is 490
    ]
    order = []
    while pending:
        [name] = where(pending, one_place)
        order.append(name)
        pending = [other for other in pending if other.request_id != name]
    assert order == ["end", "soon", "late in the day", "none"]


def test_requests_that_can_not_be_in_time_go_behind_those_that_can() -> None:
    lost, can, none = request("lost", slo_e2e_ms=25.0), request("can", slo_e2e_ms=5000.0), request("none")
    assert list(where([lost, none, can], worker(max_running=32))) == ["can", "lost", "none"]


def test_requests_that_can_not_be_in_time_leave_room_for_new_ones() -> None:
    lost, none = request("lost", slo_e2e_ms=25.0), request("none")
    half_empty = worker("w", placed("one"), placed("two"), max_running=16)
    assert where([lost, none], half_empty) == {"none": "w"}
    assert where([lost, none], half_empty, policy=EmoePlacement(late_share=1.0)) == {"lost": "w", "none": "w"}
    assert where([lost, none], worker("w", placed("one"), max_running=16)) == {"lost": "w", "none": "w"}


def test_a_margin_makes_estimates_longer_and_not_what_has_passed() -> None:
    there = placed("there", left=20, slo_e2e_ms=170.0)  # with r 10 + 2 · 20 = 50 ms are left of it
    assert where([request("r")], worker("w", there), now=120.0) == {"r": "w"}
    assert where([request("r")], worker("w", there), now=121.0) == {}
    doubled = EmoePlacement(margin=2.0)
    assert where([request("r")], worker("w", there), now=70.0, policy=doubled) == {"r": "w"}
    assert where([request("r")], worker("w", there), now=71.0, policy=doubled) == {}


def test_one_that_would_spoil_an_slo_waits_and_does_not_stop_the_others() -> None:
    there = placed("there", left=20, slo_e2e_ms=70.0)
    large, small = request("large", input_tokens=60, slo_ttft_ms=100.0), request("small", input_tokens=20)
    assert where([large, small], worker("w", there)) == {"small": "w"}


def test_a_request_that_misses_its_slo_anyway_keeps_others_out_only_in_the_literal_form() -> None:
    lost = worker("w", placed("lost", left=20, slo_e2e_ms=10.0), max_running=2)
    assert where([request("r")], lost) == {"r": "w"}
    assert where([request("r", input_tokens=20)], lost, now=1.0, policy=EmoeLiteralPlacement()) == {}


def test_those_placed_before_it_in_the_same_decision_count() -> None:
    pending = [request(f"r{n}", slo_e2e_ms=100.0, expected_tokens=20) for n in range(6)]
    assert len(where(pending, worker(max_running=6))) == 3  # 3 · (10 + 20) = 90 ms, 4 · 30 = 120


def test_prompts_that_have_not_been_read_yet_count_in_the_next_decision_too() -> None:
    there = [placed(f"t{n}", left=20, generated=0, slo_e2e_ms=100.0) for n in range(3)]
    assert where([request("r")], worker("w", *there)) == {}
    read = [replace(other, generated_tokens=1) for other in there]
    assert where([request("r")], worker("w", *read)) == {"r": "w"}


def test_it_goes_where_the_fewest_experts_are_to_be_loaded() -> None:
    far = worker("a", costs=Costs(1.0, load_ms_by_task={"code": 50.0}))
    near = worker("b", placed("there"), costs=Costs(1.0, load_ms_by_task={"code": 5.0}))
    assert where([request("r", task="code")], far, near) == {"r": "b"}
    assert where([request("r", task="never heard of")], far, near) == {"r": "a"}, "then the one with fewer requests"
    assert where([request("r", task="x")], worker("b"), worker("a")) == {"r": "a"}, "then the name"


def test_experts_of_a_task_come_once_for_several_of_its_requests() -> None:
    there = placed("there", left=20, slo_e2e_ms=200.0)
    costs = Costs(1.0, load_ms_by_task={"code": 100.0})
    pending = [request("one", task="code"), request("two", task="code")]
    assert where(pending, worker("w", there, costs=costs)) == {"one": "w", "two": "w"}


def test_workers_own_queues_are_left_alone() -> None:
    assert where([request("r")], worker("w", placed("there"), max_running=1, max_queued=8)) == {}


def test_priority_comes_before_slack() -> None:
    pending = [request("tight", slo_ttft_ms=50.0), request("urgent", priority=1)]
    assert list(where(pending, worker(max_running=1))) == ["urgent"]


# -- patience


def test_the_one_that_has_waited_too_long_goes_first_and_spoils_what_it_spoils() -> None:
    there = placed("there", left=20, arrived_ms=30_000.0, slo_e2e_ms=70.0, started=30_000.0)
    old, fresh = request("old", input_tokens=60), request("fresh", slo_ttft_ms=100.0, arrived_ms=30_000.0)
    view = worker("w", there, max_running=2)
    assert where([old, fresh], view, now=29_999.0)["fresh"] == "w"
    assert where([old, fresh], view, now=30_000.0) == {"old": "w"}
    assert where([old, fresh], view, now=30_000.0, policy=EmoePlacement(patience_s=None)) == {"fresh": "w"}


def test_only_one_of_them_at_a_time_on_a_worker() -> None:
    there = [
        placed("there", left=20, arrived_ms=40_000.0, slo_e2e_ms=70.0, started=40_000.0),
        placed("waited", left=100, arrived_ms=0.0, started=39_000.0),
    ]
    old = request("old", input_tokens=60, arrived_ms=1.0)
    assert where([old], worker("w", *there), now=40_000.0) == {}
    assert where([old], worker("w", there[0]), now=40_000.0) == {"old": "w"}


def test_where_it_fits_nowhere_a_worker_is_emptied_for_it() -> None:
    old, small = request("old", kv_need=700, arrived_ms=0.0), request("small", arrived_ms=39_000.0)
    full = worker("full", placed("there"), kv_free=300)
    small_one = worker("small one", kv_total=500, kv_free=500)
    assert where([old, small], full, now=40_000.0) == {}
    assert where([old, small], full, small_one, now=40_000.0) == {"small": "small one"}


@pytest.mark.parametrize("needs", [{"kv_need": 700}, {"kv_need": 30, "most_tokens": 691}], ids=["surely", "maybe"])
def test_a_worker_that_could_never_hold_it_is_not_emptied_for_it(needs: dict[str, int]) -> None:
    """On the large one it is not its turn: a request that had waited as long is there."""
    old, small = request("old", **needs, arrived_ms=5.0), request("small", arrived_ms=39_000.0)
    large = worker("large", placed("waited", arrived_ms=0.0, started=31_000.0), kv_free=20)
    small_one = worker("small one", kv_total=500, kv_free=500)
    assert where([old, small], large, small_one, now=40_000.0) == {"small": "small one"}


# -- the printed one


def test_the_printed_algorithm_looks_at_stringency_not_at_slack() -> None:
    pending = [
        request("loose", slo_ttft_ms=900.0, arrived_ms=0.0),
        request("tight", slo_ttft_ms=800.0, arrived_ms=500.0),
    ]
    one = worker(max_running=1)
    assert list(where(pending, one, now=600.0, policy=EmoeLiteralPlacement())) == ["tight"]
    assert list(where(pending, one, now=600.0)) == ["loose"]


def test_the_printed_algorithm_counts_neither_the_wait_nor_what_it_has_just_placed() -> None:
    pending = [request(f"r{n}", slo_e2e_ms=100.0) for n in range(6)]
    assert len(where(pending, worker(max_running=6), now=1e6, policy=EmoeLiteralPlacement())) == 6


# -- odd input: docs/architecture/scheduling.md has the outcomes

ODD_SLOS = [None, 0.0, -1e9, 1e-300, 1e300, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("name", ["emoe", "emoe-literal"])
@pytest.mark.parametrize("ttft", ODD_SLOS)
@pytest.mark.parametrize("e2e", ODD_SLOS)
def test_whatever_the_slos_an_empty_worker_takes_it(name: str, ttft: float | None, e2e: float | None) -> None:
    odd = request("odd", slo_ttft_ms=ttft, slo_e2e_ms=e2e)
    assert where([odd], worker(), now=5.0, policy=create_placement_policy(name)) == {"odd": "w"}
    beside = worker("w", PlacedRequest(odd, 0.0, 3, 5))
    assert where([request("r")], beside, now=1e6, policy=EmoePlacement(patience_s=None)) == {"r": "w"}


@pytest.mark.parametrize("slo", [0.0, -5.0, 1.0])
def test_an_slo_that_is_over_from_the_start_delays_its_own_request_alone(slo: float) -> None:
    past, other = request("past", slo_ttft_ms=slo), request("other", slo_ttft_ms=5000.0)
    assert list(where([past, other], worker(max_running=1), now=10.0)) == ["other"]


@pytest.mark.parametrize("name", ["emoe", "emoe-literal"])
def test_input_above_every_memory_is_refused_at_once_and_blocks_nothing(name: str) -> None:
    huge = request("huge", input_tokens=10**30, kv_need=10**30, slo_ttft_ms=1.0)
    lying = request("lying", input_tokens=1001, kv_need=1)
    decision = create_placement_policy(name).decide(PlacementState((huge, lying, request("r")), (worker(),)), 0.0)
    assert decision.place == (Placement("r", "w"),)
    assert decision.shed == (Shed("huge", "unservable"), Shed("lying", "unservable"))


def test_expected_tokens_that_lie_change_the_order_and_nothing_else() -> None:
    lying = request("lying", expected_tokens=10**30, slo_e2e_ms=1000.0)
    assert list(where([lying, request("other", slo_e2e_ms=1000.0)], worker(max_running=32))) == ["other", "lying"]


def test_what_is_past_its_deadline_is_shed() -> None:
    decision = EmoePlacement().decide(PlacementState((request("r", deadline_ms=5.0),), ()), 5.0)
    assert decision.shed == (Shed("r", "expired"),)


def test_a_worker_of_which_nothing_is_known_takes_what_it_has_room_for() -> None:
    blank = worker("w", placed("there", slo_e2e_ms=50.0), costs=Costs(), max_running=3)
    assert where([request(f"r{n}") for n in range(4)], blank, now=20.0) == {"r0": "w", "r1": "w"}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"estimator": "crystal ball"}, UnknownName, "eq3"),
        ({"patience_s": -1.0}, InvalidConfig, "seconds from 0"),
        ({"patience_s": math.nan}, InvalidConfig, "seconds from 0"),
        ({"patience_s": "long"}, InvalidConfig, "a number"),
        ({"margin": 0.0}, InvalidConfig, "above 0"),
        ({"late_share": 1.5}, InvalidConfig, "from 0 to 1"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        create_placement_policy("emoe", options=options)


# -- starvation


_SERVICE_MS = 400.0


def flooded(
    patience_s: float | None, seed: int, *, until_ms: float
) -> tuple[dict[str, PendingRequest], dict[str, float]]:
    """One worker of four places; always more than enough requests that are ahead of the victims by slack, and small
    enough to pass where a victim does not. The victims, and when each that did began."""
    choose = random.Random(seed)
    policy = EmoePlacement(patience_s=patience_s)
    costs = Costs(token_ms=1.0)
    victims = {f"v{n}": request(f"v{n}", arrived_ms=50.0 * n, input_tokens=80, kv_need=400) for n in range(5)}
    victims["v4"] = replace(victims["v4"], priority=-100)
    waiting: list[PendingRequest] = list(victims.values())
    running: list[tuple[float, PlacedRequest]] = []
    begun: dict[str, float] = {}
    now, number = 200.0, 0
    while len(begun) < len(victims) and now < until_ms:
        while sum(other.priority == 100 for other in waiting) < 12:
            number += 1
            waiting.append(
                request(
                    f"f{number}", arrived_ms=now, slo_ttft_ms=choose.uniform(200, 400), slo_e2e_ms=500.0, priority=100
                )
            )
        running = [(end, other) for end, other in running if end > now]
        view = worker("w", *(other for _, other in running), costs=costs, max_running=4, kv_total=500,
                      kv_free=500 - sum(other.request.kv_need for _, other in running))  # fmt: skip
        for placement in policy.decide(PlacementState(tuple(waiting), (view,)), now).place:
            [chosen] = [other for other in waiting if other.request_id == placement.request_id]
            waiting.remove(chosen)
            running.append((now + choose.uniform(0.5, 1.0) * _SERVICE_MS, PlacedRequest(chosen, now, 1, 20)))
            if chosen.request_id in victims:
                begun[chosen.request_id] = now
        waiting = [other for other in waiting if other.request_id in victims or now - other.arrived_ms < 1000.0]
        now += 20.0
    return victims, begun


@pytest.mark.parametrize("seed", range(4))
def test_no_request_starves_under_a_flood_made_to_starve_it(seed: int) -> None:
    """Each victim is served within the bound that the docs give."""
    patience = 2.0
    victims, begun = flooded(patience, seed, until_ms=60_000.0)
    assert set(begun) == set(victims), "each of them began"
    for ahead, name in enumerate(sorted(victims)):
        bound = patience * 1000.0 + 2 * (ahead + 1) * _SERVICE_MS + 20.0 * (ahead + 2)
        assert begun[name] - victims[name].arrived_ms <= bound, f"{name} waited too long"


@pytest.mark.parametrize("seed", range(4))
def test_without_patience_the_same_flood_starves_them(seed: int) -> None:
    """So that the test above can fail."""
    victims, begun = flooded(None, seed, until_ms=12_000.0)
    assert set(begun) < set(victims)
