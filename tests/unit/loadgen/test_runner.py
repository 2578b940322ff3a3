"""Runs against a server without a network: which requests are sent when, and how each ends."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom_load import runner as runner_module
from greenroom_load.arrivals import AtOnce, Constant, Poisson
from greenroom_load.mix import ShiftingMix, TaskMix
from greenroom_load.plan import Bounds, Plan
from greenroom_load.reply_record import Exchange, Failure, FailureKind, Refused, clock
from greenroom_load.runner import Outcome, Runner, WarmupFailed
from tests.unit.loadgen.fakes import DEADLINE_S, FakeServer, after, plan, reply


async def run(plan: Plan, server: FakeServer) -> Outcome:
    async with asyncio.timeout(DEADLINE_S):
        return await Runner(plan, server, "m").run()


async def never(exchange: Exchange) -> None:
    await asyncio.Event().wait()


def kinds(outcome: Outcome) -> list[str]:
    return [record.failure.label if record.failure else "ok" for record in outcome.records]


async def test_the_open_loop_keeps_to_its_times_however_slow_the_server_is() -> None:
    """The server answers when all requests have come. A loop that waits for a reply first would wait for ever."""
    all_there = asyncio.Event()

    async def held_back(exchange: Exchange) -> None:
        if server.running == 20:
            all_there.set()
        await all_there.wait()
        await reply(exchange)

    server = FakeServer(held_back)
    outcome = await run(plan(Constant(100.0), num_requests=20), server)

    assert [record.index for record in outcome.records] == list(range(20))
    assert [record.intended_s for record in outcome.records] == pytest.approx([n / 100 for n in range(20)])
    assert all(record.late_s is not None and record.late_s >= -0.0001 for record in outcome.records)
    assert outcome.peak_in_flight == 20
    assert kinds(outcome) == ["ok"] * 20


async def test_records_say_what_was_heard() -> None:
    async def three(exchange: Exchange) -> None:
        start = clock()
        for number, text in enumerate(("a", "b", "c")):
            exchange.heard(text, start + 0.010 * (number + 1))
        exchange.used(7, 5)
        exchange.ended("length", start + 0.050)

    (found,) = (await run(plan(num_requests=1), FakeServer(three))).records

    assert found.ok
    assert (found.text, found.finish, found.prompt_tokens, found.output_tokens) == ("abc", "length", 7, 5)
    assert list(found.gaps_s) == pytest.approx([0.010, 0.010])
    assert found.ttft_s is not None
    assert 0.010 <= found.ttft_s < 0.3
    assert found.tpot_s == pytest.approx(0.040 / 4)
    assert not found.tokens_counted


async def test_without_a_count_parts_are_counted_and_it_is_said() -> None:
    async def two(exchange: Exchange) -> None:
        exchange.heard("a", clock())
        exchange.heard("b", clock())
        exchange.ended("stop", clock())

    (found,) = (await run(plan(num_requests=1), FakeServer(two))).records

    assert (found.output_tokens, found.tokens_counted, found.prompt_tokens) == (2, True, None)


async def test_the_closed_loop_keeps_so_many_in_flight() -> None:
    server = FakeServer(after(0.01))
    outcome = await run(plan(AtOnce(), num_requests=30, max_concurrency=4), server)

    assert server.most_running == 4
    assert kinds(outcome) == ["ok"] * 30
    assert all(record.late_s == 0 for record in outcome.records), "none was due sooner"


async def test_a_closed_loop_of_some_seconds_ends_by_itself() -> None:
    outcome = await run(plan(AtOnce(), duration_s=0.2, max_concurrency=2), FakeServer(after(0.02)))

    assert 2 <= len(outcome.records) <= 24
    assert outcome.sending_s <= 0.2 + 0.3


async def test_requests_held_back_by_a_bound_count_from_when_they_were_due() -> None:
    """One at a time, each 50 ms, due every 10 ms: the tenth is sent 360 ms late."""
    outcome = await run(plan(Constant(100.0), num_requests=10, max_concurrency=1), FakeServer(after(0.05)))
    last = outcome.records[-1]

    assert last.late_s is not None
    assert last.late_s > 0.3
    assert last.e2e_intended_s is not None
    assert last.e2e_s is not None
    assert last.e2e_intended_s == pytest.approx(last.e2e_s + last.late_s)


async def test_those_that_never_got_their_turn_are_recorded_as_not_sent() -> None:
    given = plan(Constant(100.0), duration_s=0.2, max_concurrency=1, drain_timeout_s=0.1)
    outcome = await run(given, FakeServer(never))

    assert kinds(outcome) == ["unfinished"] + ["not sent: max_concurrency"] * 19
    assert all(record.sent_s is None for record in outcome.records[1:])


async def test_beyond_its_own_bound_the_open_loop_sends_no_more_and_says_so() -> None:
    outcome = await run(
        plan(Constant(200.0), num_requests=9, max_outstanding=3, drain_timeout_s=0.1), FakeServer(never)
    )

    assert kinds(outcome) == ["unfinished"] * 3 + ["not sent: max_outstanding"] * 6


async def test_what_is_not_answered_in_time_is_given_up() -> None:
    server = FakeServer(never)
    outcome = await run(plan(num_requests=3, request_timeout_s=0.05), server)

    assert kinds(outcome) == ["timeout: after 0.05 s"] * 3
    assert server.cancelled == 3
    assert all(record.e2e_s is not None and record.e2e_s >= 0.05 for record in outcome.records)


async def test_failures_are_recorded_with_their_reasons_and_delay_no_other_request() -> None:
    count = 0

    async def refusing(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise Refused(Failure(FailureKind.LIMITED, "saturated", "full", "429", 1.0))
        if count == 3:
            raise RuntimeError("a defect")
        await reply(exchange)

    outcome = await run(plan(num_requests=4), FakeServer(refusing))

    assert kinds(outcome) == ["ok", "429: saturated", "client defect: RuntimeError", "ok"]
    assert outcome.records[1].failure == Failure(FailureKind.LIMITED, "saturated", "full", "429", 1.0)


async def test_stopping_keeps_what_there_is() -> None:
    async def first_five_then_none(exchange: Exchange) -> None:
        if runner.meter.sent <= 5:
            return await reply(exchange)
        if runner.meter.in_flight == 2:
            runner.stopping.set()
        return await never(exchange)

    server = FakeServer(first_five_then_none)
    runner = Runner(plan(Constant(50.0), num_requests=100_000), server, "m")
    async with asyncio.timeout(DEADLINE_S):
        outcome = await runner.run()

    assert outcome.interrupted
    assert kinds(outcome) == ["ok"] * 5 + ["unfinished"] * 2
    assert server.running == 0


async def test_a_warm_up_goes_first_and_is_not_counted() -> None:
    server = FakeServer()
    outcome = await run(plan(num_requests=3, warmup_requests=6), server)
    names = [name for _, name in server.sent]

    assert len(outcome.records) == 3
    assert ["warm-up" in name for name in names] == [True] * 6 + [False] * 3
    assert len(set(names)) == 9


async def test_a_server_that_fails_every_warm_up_is_not_measured() -> None:
    async def refuse(exchange: Exchange) -> None:
        raise Refused(Failure(FailureKind.REFUSED, "404 model_not_found", "no such model"))

    with pytest.raises(WarmupFailed, match=r"none of the 4 .*404 model_not_found: no such model.*--warmup-requests 0"):
        await run(plan(warmup_requests=4), FakeServer(refuse))


async def test_the_runs_own_lag_is_seen() -> None:
    async def block(exchange: Exchange) -> None:
        end = clock() + 0.05
        while clock() < end:
            pass
        await reply(exchange)

    quick = await run(plan(num_requests=5), FakeServer(after(0.3)))
    slow = await run(plan(num_requests=5), FakeServer(block))

    assert max(slow.lags_s) > 0.04
    assert sorted(quick.lags_s)[len(quick.lags_s) // 2] < max(slow.lags_s)
    assert slow.cpu_share > quick.cpu_share


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    def asked(seed: int) -> list[object]:
        return [(one.at_s, one.ask) for one in plan(Poisson(3), num_requests=20, seed=seed).requests()]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_changing_the_mix_leaves_the_arrivals_as_they_were() -> None:
    mixes = [ShiftingMix(TaskMix({"question": 1.0, "compare": other})) for other in (0.0, 1.0)]
    times = [[each.at_s for each in plan(Poisson(3), num_requests=20, mix=mix).requests()] for mix in mixes]

    assert times[0] == times[1]
    assert all(a is not None and b is not None and a < b for a, b in pairwise(times[0]))


def test_a_mix_moves_over_the_run() -> None:
    mix = ShiftingMix(TaskMix({"question": 1.0}), TaskMix({"compare": 1.0}))
    for bounds in ({"num_requests": 200}, {"duration_s": 2.0}):
        tasks = [one.ask.prompt.task for one in plan(Constant(100.0), mix=mix, **bounds).requests()]
        assert tasks[:60].count("question") > 40
        assert tasks[-60:].count("compare") > 40


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("num_requests", {}),
        ("num_requests", {"num_requests": 0}),
        ("duration_s", {"duration_s": 0.0}),
        ("drain_timeout_s", {"num_requests": 1, "drain_timeout_s": float("inf")}),
        ("max_concurrency", {"num_requests": 1, "max_concurrency": 0}),
    ],
)
def test_bounds_that_are_none_are_refused(field: str, given: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match=field):
        Bounds(**given)  # type: ignore[arg-type]


def test_a_closed_loop_without_any_bound_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max-concurrency"):
        plan(AtOnce(), duration_s=1.0)


async def test_requests_that_are_made_as_it_goes_are_all_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them ready in advance has a bound, behind which none may be lost."""
    monkeypatch.setattr(runner_module, "_AHEAD", 4)
    outcome = await run(plan(Constant(500.0), num_requests=11), FakeServer())

    assert [record.index for record in outcome.records] == list(range(11))
