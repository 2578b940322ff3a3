"""What becomes of one record of ``requests``. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.messages import (
    Cancel,
    DeadLetter,
    Inference,
    Rejected,
    RequestRecord,
    Task,
    Undecodable,
    decode,
    encode,
)
from greenroom.fabric.log import Record
from greenroom.tasktype.extractor import UNKNOWN, Extractor

SERVICE = "tasktype"
MAX_TASK_TYPE = 64
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Forward:
    """To ``tasks``, on the partition of the pool, under the record's own key.

    ``source``: ``client``, or the extractor's name. It and ``task_type`` None: a cancel, which goes on as it came.
    """

    partition: int
    value: bytes
    request_id: str
    task_type: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Bury:
    """To ``dead-letters``; and where its client can be told, ``rejected`` to ``tasks`` after it (rule 11)."""

    letter: DeadLetter
    rejected: Rejected | None


def decide(record: Record, extractor: Extractor, pools: int) -> Forward | Bury:
    """``pools``: how many partitions ``tasks`` has."""
    if record.value is None:
        return bury(record, "a record without a value", pools)
    try:
        request: RequestRecord = decode(record.value, RequestRecord)
    except Undecodable as error:
        return bury(record, str(error), pools, request_id=error.request_id, pool=error.pool)
    if request.pool >= pools:
        reason = f"pool {request.pool} has no partition: `tasks` has {pools}, from 0"
        return bury(record, reason, pools, request_id=request.request_id)
    if isinstance(request, Cancel):
        return Forward(request.pool, record.value, request.request_id)
    if isinstance(request, Inference):
        task = Task(request=request, task_type=_type_of(request), source="client")
    elif request.task_type is not None:
        task = Task(request=request, task_type=request.task_type, source="client")
    else:
        # On the wire every extractor is "keywords": another value would be one that readers of version 1 refuse.
        task = Task(request=request, task_type=extractor.extract(request.prompt).task_type, source="keywords")
    source = "client" if task.source == "client" else extractor.name
    return Forward(request.pool, encode(task), request.request_id, task.task_type, source)


def _type_of(inference: Inference) -> str:
    """The router's value is what kind of task it is. Where a model routes nothing is known yet."""
    return (inference.parameter or UNKNOWN)[:MAX_TASK_TYPE]


def bury(
    record: Record,
    reason: str,
    pools: int,
    *,
    told: str | None = None,
    request_id: str | None = None,
    pool: int | None = None,
) -> Bury:
    """``told``: the reason for its client, where that is another. ``request_id``, ``pool``: as far as they could be
    read."""
    reason = reason[:MAX_REASON_CHARS]
    letter = DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=reason,
        service=SERVICE,
        key=record.key,
        payload=record.value,
        request_id=request_id or "",
    )
    rejected = None
    if request_id is not None and pool is not None and 0 <= pool < pools:
        rejected = Rejected(request_id=request_id, pool=pool, reason=reason if told is None else told)
    return Bury(letter, rejected)
