"""A lost worker's requests run again (rule 5): first the loss is in the journal, then the next attempt is made.

A request that was there when ``alone_after`` workers were lost is a suspect and runs alone on its worker. One that was
there when ``max_losses`` were lost is given up: it goes to the dead letters and fails.

A worker that has many requests and arranges them itself says which of them it is executing. Its loss counts for those
that it named last. The others wait again at once, without a loss. If it had named none of those that are still there,
one of them may have ended it and nobody knows which: an *unsure* loss of all of them. Only ``max_losses`` of these
make a suspect, and none is given up for them. A request that was there by itself is no unsure case.
"""

from __future__ import annotations

from collections.abc import Collection

from greenroom.core.generation import FinishReason
from greenroom.core.messages import Lost
from greenroom.scheduler.effects import Append, Disconnect, Effect, WriteDeadLetter
from greenroom.scheduler.outcomes import end
from greenroom.scheduler.pool_state import PoolState
from greenroom.scheduler.request_entries import Entry, RequestStage


def lose(pool: PoolState, name: str, now: float) -> list[Effect]:
    """The worker is lost: its lease has run out, it left, or another instance is at its address."""
    worker = pool.workers.pop(name, None)
    if worker is None:
        return []
    effects: list[Effect] = [Disconnect(name)]
    placed = [entry for entry in worker.placed.values() if entry.stage is RequestStage.PLACED]
    lost, unsure = _counts_for(placed, worker.state.executing)
    for entry in worker.placed.values():
        entry.again_at = None
    for entry in lost:
        entry.stage, entry.loses_unsure = RequestStage.LOSING, unsure
        pool.watch(entry)
    if placed:
        pool.count("worker_lost")
    if lost:
        effects += append_lost(pool, name, lost, now)
    if len(lost) < len(placed):
        spared = [entry for entry in placed if entry.stage is RequestStage.PLACED]
        for entry in spared:
            entry.begun = True  # it has waited there too, and is not to be shed for that
        pool.wait_all(spared)
    return effects


def _counts_for(placed: list[Entry], executing: frozenset[str] | None) -> tuple[list[Entry], bool]:
    """The requests for which a worker's loss counts, and whether it is unsure."""
    if executing is None or len(placed) < 2:
        return placed, False
    named = [entry for entry in placed if entry.request_id in executing]
    return (named, False) if named else (placed, True)


def append_lost(pool: PoolState, worker: str, entries: Collection[Entry], now: float) -> list[Effect]:
    """Write to the journal that the worker was lost under these requests: sure and unsure losses apart."""
    effects: list[Effect] = []
    for unsure in (False, True):
        alike = [entry for entry in entries if entry.loses_unsure is unsure]
        attempts = [(entry.request_id, entry.attempt) for entry in alike if entry.attempt is not None]
        if attempts:
            lost = Lost(epoch=pool.epoch, worker=worker, attempts=tuple(attempts), unsure=unsure)
            for entry in alike:
                entry.asked_ms, entry.appending = now, lost
            effects.append(Append(lost))
    return effects


def lost_append_ended(pool: PoolState, lost: Lost, now: float) -> list[Effect]:
    """The append has ended. Where the epoch has changed meanwhile, the loss is written again under the present one."""
    entries = [pool.entries.get(request_id) for request_id, _ in lost.attempts]
    waiting = [entry for entry in entries if entry is not None and entry.appending is lost]
    for entry in waiting:
        entry.appending, entry.asked_ms = None, now
        pool.watch(entry)
    losing = [entry for entry in waiting if entry.stage is RequestStage.LOSING]
    if losing and lost.epoch != pool.epoch:
        return append_lost(pool, lost.worker, losing, now)
    return []


def loss_read(pool: PoolState, lost: Lost) -> list[Effect]:
    """The journal has the loss: each of its requests waits to run again, or is given up."""
    effects: list[Effect] = []
    again: list[Entry] = []
    early = pool.early_unsure if lost.unsure else pool.early_losses
    for request_id, attempt in lost.attempts:
        entry = pool.entries.get(request_id)
        if entry is None:
            if request_id not in pool.finished:  # after a restart: its task has not been read yet
                early.setdefault(request_id, set()).add(attempt)
            continue
        (entry.unsure if lost.unsure else entry.losses).add(attempt)
        if entry.stage is RequestStage.LOSING and entry.attempt == attempt:
            entry.begun, entry.appending = True, None
            if hopeless(pool, entry):
                effects += give_up(pool, entry)
            else:
                again.append(entry)
    pool.wait_all(again)
    return effects


def suspect(pool: PoolState, entry: Entry) -> bool:
    """Whether the request runs alone on its worker, so that it takes no other request with it."""
    return len(entry.losses) >= pool.config.alone_after or len(entry.unsure) >= pool.config.max_losses


def hopeless(pool: PoolState, entry: Entry) -> bool:
    """Whether the request seems to end every worker that it meets."""
    return len(entry.losses) >= pool.config.max_losses


def give_up(pool: PoolState, entry: Entry) -> list[Effect]:
    """The dead letter comes first: once there is an outcome, no scheduler looks at the request again."""
    assert entry.task is not None
    pool.unplace(entry)
    entry.stage = RequestStage.GIVING_UP
    return [WriteDeadLetter(entry.request_id, entry.task, _given_up(entry))]


def dead_letter_written(pool: PoolState, request_id: str, now: float) -> list[Effect]:
    """Its dead letter was acknowledged."""
    entry = pool.entries.get(request_id)
    if entry is None or entry.stage is not RequestStage.GIVING_UP:
        return []
    return end(pool, entry, FinishReason.FAILED, now, message=_given_up(entry))


def _given_up(entry: Entry) -> str:
    return f"given up after {len(entry.losses)} workers were lost while they ran it"
