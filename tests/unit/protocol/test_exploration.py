"""Exactly one outcome, whatever goes wrong: the protocol's state machines under random faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from greenroom.core.generation import FinishReason, Slo
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import Claim, JournalRecord, Lost, Outcome
from greenroom.gateway.pipeline.stream_book import StreamBook
from greenroom.policies.emoe.scheduling import EmoePlacement
from greenroom.policies.placement.placement_policy import Costs
from greenroom.scheduler.pool import Pool
from greenroom.scheduler.pool_workers import Capacity
from greenroom.worker.runs import run_table
from greenroom.worker.runs.run_table import Report, RunTable
from tests.unit.protocol.world import EPOCH_MS, GRACE_MS, LENGTH, Client, Faults, World

REQUESTS = 14
COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)
POISON = 3
"""The request that ends every worker which runs it."""
KEYED = (1, POISON, 5, 7, 9, 11)
RETRIED = (1, POISON, 7, 9)
"""Clients of these gateways ask again if they are told that their request is unknown. Clients of the others do not."""
ALL_CAME_MS = 5_500
"""By then all clients that ask again have done so."""
HARSH = Faults(
    lose=0.05,
    slow=0.05,
    crash=0.02,
    pause=0.02,
    lose_append=0.08,
    slow_append=0.05,
    refuse=0.1,
    hand_over=0.02,
    hush=0.02,
)
KINDS = {
    "calm": Faults(),
    "messages": Faults(lose=0.1, slow=0.1),
    "crashes": Faults(crash=0.04),
    "pauses": Faults(pause=0.06, slow=0.02),
    "appends": Faults(lose_append=0.3, hand_over=0.05),
    "long appends": Faults(slow_append=0.4, hand_over=0.02),
    "refused appends": Faults(refuse=0.5, lose_append=0.1, slow_append=0.1, crash=0.01),
    "silence": Faults(hush=0.1, crash=0.01, slow=0.05),
    "all": HARSH,
}


def explore(seed: int, faults: Faults, change: Callable[[World], None] = lambda world: None) -> World:
    """Two seconds of requests, cancels and faults, then calm until every deadline has passed."""
    world = World(seed, faults)
    change(world)
    world.begin()
    choose = random.Random(seed)

    def leave(client: Client) -> None:
        if client.gateway.alive:
            client.gateway.cancel(client)

    def retry(client: Client) -> None:
        gateways = [gateway for gateway in world.gateways if gateway.alive]
        if gateways:
            choose.choice(gateways).retry(client)

    def arrive(number: int) -> None:
        gateways = [gateway for gateway in world.gateways if gateway.alive]
        if not gateways:
            world.at(world.now + 50, lambda: arrive(number))
            return
        poison = number == POISON and faults is not KINDS["calm"]
        client = world.request(choose.choice(gateways), f"r{number}", poison=poison, keyed=number in KEYED)
        if number in RETRIED:
            world.at(world.now + choose.uniform(60, 3_000), lambda: retry(client))
        if choose.random() < 0.15:
            world.at(
                world.now + choose.uniform(0, 120),
                lambda: client.gateway.cancel(client) if client.gateway.alive else None,
            )

    for number in range(REQUESTS):
        world.at(EPOCH_MS + choose.uniform(0, 2_000), lambda number=number: arrive(number))  # type: ignore[misc]
    world.run(EPOCH_MS + 3_500)
    world.calm()
    while world.now < EPOCH_MS + 60_000 and not settled(world):
        world.run(world.now + 500)
    world.run(world.now + 2 * GRACE_MS)
    return world


def settled(world: World) -> bool:
    if world.now < EPOCH_MS + ALL_CAME_MS:
        return False
    return world.committed == len(world.tasks) and all(client.end is not None for client in world.clients)


def outcomes_of(journal: list[JournalRecord]) -> tuple[dict[str, Outcome], dict[str, set[object]]]:
    """What a reader of the whole journal finds: the outcome and the losses of every request."""
    fold = JournalFold()
    found: dict[str, Outcome] = {}
    losses: dict[str, set[object]] = {}
    for offset, record in enumerate(journal):
        if fold.read(offset, record) is not Verdict.COUNTS:
            continue
        if isinstance(record, Outcome):
            found.setdefault(record.request_id, record)
        elif isinstance(record, Lost) and not record.unsure:
            for request_id, attempt in record.attempts:
                losses.setdefault(request_id, set()).add(attempt)
    return found, losses


def check(world: World) -> None:
    outcomes, losses = outcomes_of(world.journal)
    for client in world.clients:
        request_id = client.request.request_id
        if client.accepted:
            assert request_id in outcomes, f"{request_id} was accepted and has no outcome"
        assert client.end is not None, f"the client of {request_id} hangs"
        outcome = outcomes.get(request_id)
        if outcome is None or client.end not in {reason.value for reason in FinishReason}:
            continue
        assert client.end == outcome.reason.value
        if outcome.reason in COMPLETED:
            assert tuple(client.tokens) == outcome.token_ids, f"{request_id}: its client had another text"
            assert len(outcome.token_ids) == LENGTH
        if outcome.reason is FinishReason.FAILED and world.too_large.get(request_id):
            assert not outcome.token_ids
        elif outcome.reason is FinishReason.FAILED:
            assert len(losses[request_id]) >= 3, f"{request_id} failed after {losses.get(request_id)}"
            assert request_id in world.dead_letters
        if outcome.reason is FinishReason.CANCELLED:
            assert not client.request.keyed, f"{request_id} was ended, though a retry may come"
            assert client.cancelled or client.request.reply_to in world.given_up
    for request_id, outcome in outcomes.items():
        assert outcome.reason is not FinishReason.EXPIRED, f"{request_id} held its seat until its deadline"
    for request_id, too_large in world.too_large.items():
        if too_large and request_id in outcomes:
            assert outcomes[request_id].reason not in COMPLETED
    for client in world.clients:
        if client.request.model == "poison" and client.request.request_id in outcomes:
            assert outcomes[client.request.request_id].reason not in COMPLETED
    assert world.committed == len(world.tasks), "every task is finished, and committed"
    for worker in world.workers:
        assert not worker.table.runs, f"{worker.name} still has {list(worker.table.runs)}"


def seeds(first: int, count: int, often: int) -> pytest.MarkDecorator:
    """So many ``often``, the others in the full suite."""
    chosen = range(first, first + often)
    return pytest.mark.parametrize(
        "seed",
        [pytest.param(one, marks=() if one in chosen else pytest.mark.full) for one in range(first, first + count)],
    )


@pytest.mark.parametrize("kind", KINDS)
@seeds(0, 20, often=5)
def test_every_accepted_request_has_one_outcome_and_its_client_that_text(kind: str, seed: int) -> None:
    check(explore(seed, KINDS[kind]))


def _by_slo(world: World) -> None:
    """With a policy that lets requests wait though there is room, and passes some by."""
    world.make_policy = lambda: EmoePlacement(patience_s=0.3)
    world.costs = Costs(token_ms=4.0, prefill_token_ms=1.0, load_ms_by_task={"unknown": 5.0})
    world.slos = (Slo(), Slo(e2e_ms=60.0), Slo(ttft_ms=40.0), Slo(ttft_ms=1.0, e2e_ms=300.0))


@pytest.mark.parametrize("kind", KINDS)
@seeds(500, 4, often=2)
def test_so_it_is_where_requests_are_placed_by_their_slos(kind: str, seed: int) -> None:
    check(explore(seed, KINDS[kind], _by_slo))


def _many_at_once(world: World) -> None:
    """Workers that take all that there is and execute two at a time."""
    world.arranges = True
    world.capacity = Capacity(max_running=50, max_queued=0, kv_tokens=10_000)
    world.make_table = lambda: RunTable(grace_ms=GRACE_MS, max_runs=60)


def check_losses(world: World) -> None:
    """A loss that is sure counts for a request that its worker has named, or that was there by itself."""
    fold = JournalFold()
    for offset, record in enumerate(world.journal):
        if fold.read(offset, record) is Verdict.COUNTS and isinstance(record, Lost) and not record.unsure:
            unnamed = [name for name, _ in record.attempts if name not in world.named.get(record.worker, ())]
            assert not unnamed or len(record.attempts) == 1, f"{unnamed} waited on {record.worker}"


@pytest.mark.parametrize("kind", KINDS)
@seeds(700, 4, often=2)
def test_so_it_is_where_workers_arrange_many_requests_themselves(kind: str, seed: int) -> None:
    world = explore(seed, KINDS[kind], _many_at_once)
    check(world)
    check_losses(world)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_of_those_that_arrange(kind: str) -> None:
    for seed in range(3_000, 3_150):
        try:
            world = explore(seed, KINDS[kind], _many_at_once)
            check(world)
            check_losses(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_of_those(kind: str) -> None:
    for seed in range(2_000, 2_100):
        try:
            check(explore(seed, KINDS[kind], _by_slo))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", range(6))
def test_many_more_of_them(kind: str, block: int) -> None:
    for seed in range(1_000 + 100 * block, 1_100 + 100 * block):
        try:
            check(explore(seed, KINDS[kind]))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_clients_of_a_gateway_that_is_not_heard_are_told_that_it_was_given_up() -> None:
    """Their requests are ended though they are still there: one outcome all the same, and they get it."""
    told = 0
    for seed in range(20):
        world = explore(seed, KINDS["silence"])
        check(world)
        told += sum(client.end == "cancelled" and not client.cancelled for client in world.clients)
    assert told > 0


def test_when_nothing_goes_wrong_nothing_is_done_twice() -> None:
    world = explore(1, KINDS["calm"])
    check(world)
    assert set(world.starts.values()) == {1}
    assert not [record for record in world.journal if isinstance(record, Lost)]


# What the exploration is for: each of these takes one rule away, and must be found out.


class _AnyClaimStands(JournalFold):
    def _claim(self, offset: int, claim: Claim) -> Verdict:
        self.epoch, self.holder = offset, claim.scheduler
        return Verdict.COUNTS


class _AnyoneMayAdd(StreamBook):
    def add(self, request_id, stream, tokens):  # type: ignore[no-untyped-def]
        delivery = self._deliveries.get(request_id)
        if delivery is not None:
            delivery.stream = stream
        return super().add(request_id, stream, tokens)


class _NeedsNoLease(RunTable):
    def renew(self, epoch, until, now):  # type: ignore[no-untyped-def]
        return super().renew(epoch, until + 1e9, now)


class _DoesNotBeginAnew(RunTable):
    """Goes on with what it has generated, whatever the client has had."""

    def opened(self, request_id, attempt, delivered, now):  # type: ignore[no-untyped-def]
        run = self.runs.get(request_id)
        own = delivered if run is None else tuple(run.tokens[: len(delivered)])
        return super().opened(request_id, attempt, own, now)


class _ReportsBeforeTheAnswer(RunTable):
    """Tells the scheduler its result without asking what the client has had."""

    def _report(self, run):  # type: ignore[no-untyped-def]
        if run.finished is None:
            return []
        run.reported = run.wanted = True
        return [Report(run.number, run.request_id, run.attempt, run.finished, tuple(run.tokens))]


class _EmitsBeforeTheAnswer(RunTable):
    """Takes a stream for open as soon as it has asked for it."""

    def token(self, number, token, now):  # type: ignore[no-untyped-def]
        run = self._by_number.get(number)
        if run is not None and run.stream is run_table._Stream.OPENING:
            run.stream, run.wanted = run_table._Stream.OPEN, True
        return super().token(number, token, now)


class _AnUnknownKeyHasEnded(StreamBook):
    """Of a keyed request whose append was not acknowledged the worker is told that it is over."""

    def disown(self, request_id):  # type: ignore[no-untyped-def]
        super().disown(request_id)
        self._over[request_id] = None


def _an_unknown_key_has_ended(world: World) -> None:
    world.make_book = _AnUnknownKeyHasEnded


def _any_claim_stands(world: World) -> None:
    world.make_fold = _AnyClaimStands


def _anyone_may_add_at_any_time(world: World) -> None:
    """Each of the two alone is made good by the other."""
    world.make_book = _AnyoneMayAdd
    world.make_table = lambda: _NeedsNoLease(grace_ms=GRACE_MS, max_runs=6)


class _TriesWhatIsRefused(Pool):
    """Takes a refusal for an append that was lost."""

    def append_ended(self, record, now, *, refused=False):  # type: ignore[no-untyped-def]
        return super().append_ended(record, now)


class _DoesNotWaitForAppends(Pool):
    """Appends again though an append of it is on its way."""

    def tick(self, now):  # type: ignore[no-untyped-def]
        for entry in self.entries.values():
            entry.appending = None
        return super().tick(now)


class _CountsForAll(Pool):
    """Takes all that a lost worker had for what it was executing."""

    def beat(self, name, state, now):  # type: ignore[no-untyped-def]
        placed = self.workers[name].placed if name in self.workers else ()
        return super().beat(name, replace(state, executing=frozenset(placed)), now)


def test_counting_a_loss_for_what_waits_is_found_out() -> None:
    def change(world: World) -> None:
        _many_at_once(world)
        world.make_pool = _CountsForAll

    for seed in range(40, 140):
        try:
            check_losses(explore(seed, HARSH, change))
        except AssertionError:
            return
    pytest.fail("100 explorations found nothing wrong")


def _tries_what_is_refused(world: World) -> None:
    world.make_pool = _TriesWhatIsRefused


def _does_not_wait_for_appends(world: World) -> None:
    world.make_pool = _DoesNotWaitForAppends


def _does_not_begin_anew(world: World) -> None:
    world.make_table = lambda: _DoesNotBeginAnew(grace_ms=GRACE_MS, max_runs=6)


def _reports_before_the_answer(world: World) -> None:
    world.make_table = lambda: _ReportsBeforeTheAnswer(grace_ms=GRACE_MS, max_runs=6)


def _emits_before_the_answer(world: World) -> None:
    world.make_table = lambda: _EmitsBeforeTheAnswer(grace_ms=GRACE_MS, max_runs=6)


@pytest.mark.parametrize(
    "change",
    [
        _any_claim_stands,
        _anyone_may_add_at_any_time,
        _does_not_begin_anew,
        _reports_before_the_answer,
        _emits_before_the_answer,
        _tries_what_is_refused,
        _does_not_wait_for_appends,
        _an_unknown_key_has_ended,
    ],
)
def test_a_missing_rule_is_found_out(change: Callable[[World], None]) -> None:
    for seed in range(40, 440):
        try:
            check(explore(seed, HARSH, change))
        except AssertionError:
            return
    pytest.fail("400 explorations found nothing wrong")
