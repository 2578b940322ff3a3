"""How a scheduler takes a pool over and loses it again: claims in the journal (rule 2)."""

from __future__ import annotations

import itertools

from greenroom.core.journal import Verdict
from greenroom.core.messages import Claim
from greenroom.scheduler.effects import Append, Deposed, Effect, ListRuns
from greenroom.scheduler.lost_workers import append_lost
from greenroom.scheduler.outcomes import append_outcome
from greenroom.scheduler.pool_state import PoolState, Role
from greenroom.scheduler.request_entries import Entry, RequestStage


def claim(pool: PoolState, now: float) -> list[Effect]:
    """Append a claim with the offset up to which the journal has been read."""
    pool.claimed_at = now
    pool.claim_sent = Claim(scheduler=pool.scheduler, read_to=pool.fold.next_offset)
    return [Append(pool.claim_sent)]


def claim_read(pool: PoolState, offset: int, read: Claim, verdict: Verdict, now: float) -> list[Effect]:
    """A claim is in the journal, ours or another scheduler's. One that stands makes its offset the epoch."""
    mine = read.scheduler == pool.scheduler
    if pool.role is Role.STANDBY:
        return []
    if mine:
        pool.claim_sent = None
    if verdict is not Verdict.COUNTS:
        # Whatever came between has been read now, so the next one stands.
        return claim(pool, now) if mine and pool.role is Role.CLAIMING else []
    if not mine:
        if pool.role is Role.CLAIMING:
            return []  # our own is yet to come: it is void, or was made after this one was read
        pool.stand_by()
        pool.count("deposed")
        return [Deposed(read.scheduler)]
    pool.epoch = offset
    pool.attempts = itertools.count()
    if pool.role is not Role.CLAIMING:
        return _write_again(pool, now)
    pool.role = Role.LISTING
    pool.held_since = now
    pool.listing_until = now + pool.config.lease_ms
    return [ListRuns(worker.name) for worker in pool.workers.values()]


def claim_again(pool: PoolState, now: float) -> list[Effect]:
    """Claim again where that is due: nothing came of the last claim, or it is old."""
    every_ms = pool.config.retry_ms if pool.role is Role.CLAIMING else pool.config.reclaim_ms
    return claim(pool, now) if pool.claim_sent is None and now - pool.claimed_at >= every_ms else []


def begin_if_listed(pool: PoolState, now: float) -> None:
    """Start requests once every worker has said what it runs. One that has not within a lease can emit nothing."""
    known = not pool.expected_workers and all(worker.listed for worker in pool.workers.values())
    if pool.role is Role.LISTING and (known or now >= pool.listing_until):
        pool.role = Role.ACTIVE


def _write_again(pool: PoolState, now: float) -> list[Effect]:
    """Records written under the former epoch will not count. One whose append is still under way follows when that
    has ended."""
    effects: list[Effect] = []
    losing: dict[str, list[Entry]] = {}
    for entry in pool.entries.values():
        if entry.appending is not None:
            continue
        if entry.stage is RequestStage.ENDING:
            effects += append_outcome(pool, entry, now)
        elif entry.stage is RequestStage.LOSING and entry.worker is not None:
            losing.setdefault(entry.worker, []).append(entry)
    for worker, entries in losing.items():
        effects += append_lost(pool, worker, entries, now)
    return effects
