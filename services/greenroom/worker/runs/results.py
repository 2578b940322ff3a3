"""Between the run table and gRPC: what the engine is asked, and what a scheduler is told of a run's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from greenroom.core.generation import Finished, GenerationRequest, Token
from greenroom.core.logprobs import pack, pack_logprobs
from greenroom.core.messages import Request, Task
from greenroom.fabric.wire import to_run_result
from greenroom.v1 import worker_pb2
from greenroom.worker.runs.run_table import Closing, Refusal

REFUSALS = {
    Refusal.STALE: worker_pb2.RunRefused.WHY_STALE,
    Refusal.DRAINING: worker_pb2.RunRefused.WHY_DRAINING,
    Refusal.FULL: worker_pb2.RunRefused.WHY_FULL,
}
CLOSINGS = {
    Closing.SUPERSEDED: worker_pb2.RunClosed.WHY_SUPERSEDED,
    Closing.RELEASED: worker_pb2.RunClosed.WHY_RELEASED,
    Closing.UNWANTED: worker_pb2.RunClosed.WHY_UNWANTED,
    Closing.GIVEN_BACK: worker_pb2.RunClosed.WHY_GIVEN_BACK,
    Closing.FORGOTTEN: worker_pb2.RunClosed.WHY_FORGOTTEN,
}
_LONGEST_MESSAGE = 2000
_LEAST_SLO_MS = 1.0  # an objective that is missed already stays one


def request_of(task: Task, prefix: tuple[Token, ...] = (), *, now_ms: float | None = None) -> GenerationRequest:
    """What is asked of an engine that generates. ``now_ms``: Unix time; of the SLO on the first token it gets what is
    left then. Raises TypeError for an inference."""
    request = task.request
    if not isinstance(request, Request):
        raise TypeError(f"{request.request_id} has no prompt")
    slo = request.slo
    if slo.ttft_ms is not None and now_ms is not None:
        age_ms = max(0.0, now_ms - request.accepted_ms)
        slo = replace(slo, ttft_ms=max(_LEAST_SLO_MS, slo.ttft_ms - age_ms))
    return GenerationRequest(
        request.request_id, request.prompt_ids, request.sampling, task_type=task.task_type, prefix=prefix, slo=slo
    )


def refused(why: worker_pb2.RunRefused.Why.ValueType, message: str) -> worker_pb2.RunResponse:
    return worker_pb2.RunResponse(refused=worker_pb2.RunRefused(why=why, message=message[:_LONGEST_MESSAGE]))


def closed(why: Closing) -> worker_pb2.RunResponse:
    return worker_pb2.RunResponse(closed=worker_pb2.RunClosed(why=CLOSINGS[why]))


def reported(finished: Finished, tokens: Sequence[Token]) -> worker_pb2.RunResponse:
    """``tokens``: the whole answer, with the prefix that was settled before the run began here."""
    result = to_run_result(
        finished.reason,
        (finished.error or "")[:_LONGEST_MESSAGE],
        finished.prompt_tokens,
        [token.token_id for token in tokens],
        pack_logprobs(tokens),
        finished.approximated,
        outputs=finished.outputs,
        invalid=finished.invalid,
        prompt_logprobs=pack(finished.prompt_logprobs or ()),
    )
    return worker_pb2.RunResponse(result=result)
