"""What time brings: deadlines and waits that end requests, and appends and calls that are made again."""

from __future__ import annotations

from greenroom.core.generation import FinishReason
from greenroom.scheduler.effects import Effect
from greenroom.scheduler.lost_workers import append_lost, lose
from greenroom.scheduler.outcomes import append_outcome, end
from greenroom.scheduler.pool_state import PoolState
from greenroom.scheduler.request_entries import Entry, RequestStage


def expire(pool: PoolState, now: float) -> list[Effect]:
    """Workers whose lease has run out are lost; then everything that is due of the requests, in their order."""
    effects: list[Effect] = []
    for name in [worker.name for worker in pool.workers.values() if now >= worker.lease_until]:
        effects += lose(pool, name, now)
    late: dict[str, list[Entry]] = {}
    due = [entry for one in pool.due.take(now) if (entry := pool.entries.get(one)) is not None]
    for entry in sorted(due, key=lambda entry: entry.order):
        overdue = entry.appending is None and now - entry.asked_ms >= pool.config.retry_ms
        match entry.stage:
            case RequestStage.ENDING:
                if overdue:
                    effects += append_outcome(pool, entry, now)
            case RequestStage.GIVING_UP:
                pass  # the writer of dead letters tries until it is written
            case RequestStage.LOSING:
                if overdue and entry.worker is not None:
                    late.setdefault(entry.worker, []).append(entry)
            case RequestStage.WAITING | RequestStage.PLACED:
                effects += _timely(pool, entry, now)
    for name, entries in late.items():
        effects += append_lost(pool, name, entries, now)
    for entry in due:
        pool.watch(entry)
    return effects


def _timely(pool: PoolState, entry: Entry, now: float) -> list[Effect]:
    if entry.task is None:
        return []
    request = entry.task.request
    if now >= request.deadline_ms:
        return end(pool, entry, FinishReason.EXPIRED, now, message="it was not finished by its deadline")
    waited = now - request.accepted_ms
    if entry.stage is RequestStage.WAITING and not entry.begun and waited >= pool.config.max_queue_wait_ms:
        message = f"it has waited {waited / 1000:.1f} s, longer than is allowed here"
        return end(pool, entry, FinishReason.SHED, now, message=message)
    worker = pool.workers.get(entry.worker) if entry.worker is not None else None
    if entry.again_at is not None and now >= entry.again_at and worker is not None:
        return pool.run(entry, worker)
    return []
