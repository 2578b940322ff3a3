"""Converts between the RPCs' messages and greenroom's own types."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason, Token, TokenLogprobs
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.core.messages.journal import TokenLogprobArrays
from greenroom.v1 import common_pb2, worker_pb2

_REASONS = {
    FinishReason.STOP: common_pb2.END_REASON_STOP,
    FinishReason.LENGTH: common_pb2.END_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.END_REASON_CANCELLED,
    FinishReason.FAILED: common_pb2.END_REASON_FAILED,
    FinishReason.EXPIRED: common_pb2.END_REASON_EXPIRED,
    FinishReason.SHED: common_pb2.END_REASON_SHED,
}
_FROM_WIRE = {number: reason for reason, number in _REASONS.items()}


def to_end_reason(reason: FinishReason) -> common_pb2.EndReason.ValueType:
    return _REASONS[reason]


def from_end_reason(number: common_pb2.EndReason.ValueType) -> FinishReason:
    """A reason that this version does not know is a failure."""
    return _FROM_WIRE.get(number, FinishReason.FAILED)


def to_attempt(attempt: Attempt) -> common_pb2.Attempt:
    return common_pb2.Attempt(epoch=attempt.epoch, n=attempt.n)


def from_attempt(attempt: common_pb2.Attempt) -> Attempt:
    return Attempt(attempt.epoch, attempt.n)


def to_token_run(tokens: Sequence[Token]) -> common_pb2.TokenRun:
    """Consecutive tokens."""
    if not tokens:
        return common_pb2.TokenRun()
    run = common_pb2.TokenRun(start=tokens[0].index, ids=[token.token_id for token in tokens])
    if tokens[0].logprobs is not None:
        run.logprobs.extend(to_logprobs(token.logprobs) for token in tokens if token.logprobs is not None)
    return run


def from_token_run(run: common_pb2.TokenRun) -> list[Token]:
    """Raises ValueError where log-probabilities are there for some of the tokens only."""
    if not run.logprobs:
        return [Token(run.start + i, token_id) for i, token_id in enumerate(run.ids)]
    return [
        Token(run.start + i, token_id, _from_logprobs(logprobs))
        for i, (token_id, logprobs) in enumerate(zip(run.ids, run.logprobs, strict=True))
    ]


def to_logprobs(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=logprobs.chosen, top_ids=[i for i, _ in logprobs.top], top=[value for _, value in logprobs.top]
    )


def _from_logprobs(logprobs: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(logprobs.chosen, tuple(zip(logprobs.top_ids, logprobs.top, strict=True)))


def to_run_result(
    reason: FinishReason,
    message: str,
    prompt_tokens: int,
    token_ids: Sequence[int],
    logprobs: TokenLogprobArrays | None,
    approximated: float = 0.0,
    *,
    outputs: InferenceOutputs | None = None,
    invalid: bool = False,
    prompt_logprobs: TokenLogprobArrays | None = None,
) -> worker_pb2.RunResult:
    result = worker_pb2.RunResult(
        reason=to_end_reason(reason),
        message=message,
        prompt_tokens=prompt_tokens,
        token_ids=token_ids,
        approximated=approximated,
        outputs=b"" if outputs is None else msgspec.msgpack.encode(outputs),
        invalid=invalid,
    )
    if logprobs is not None:
        result.logprobs_chosen, result.logprobs_top_ids = logprobs.chosen, logprobs.top_ids
        result.logprobs_top, result.logprobs_k = logprobs.top, logprobs.k
    if prompt_logprobs is not None:
        result.prompt_logprobs_chosen, result.prompt_logprobs_top_ids = prompt_logprobs.chosen, prompt_logprobs.top_ids
        result.prompt_logprobs_top, result.prompt_logprobs_k = prompt_logprobs.top, prompt_logprobs.k
    return result


def logprobs_of(result: worker_pb2.RunResult) -> TokenLogprobArrays | None:
    if not result.logprobs_chosen:
        return None
    return TokenLogprobArrays(
        chosen=result.logprobs_chosen, top_ids=result.logprobs_top_ids, top=result.logprobs_top, k=result.logprobs_k
    )


def prompt_logprobs_of(result: worker_pb2.RunResult) -> TokenLogprobArrays | None:
    if not result.prompt_logprobs_chosen:
        return None
    return TokenLogprobArrays(
        chosen=result.prompt_logprobs_chosen,
        top_ids=result.prompt_logprobs_top_ids,
        top=result.prompt_logprobs_top,
        k=result.prompt_logprobs_k,
    )


def outputs_of(result: worker_pb2.RunResult) -> InferenceOutputs | None:
    """Raises msgspec.MsgspecError for what no worker writes."""
    return msgspec.msgpack.decode(result.outputs, type=InferenceOutputs) if result.outputs else None


def from_share(number: float) -> float:
    """A share from 0 to 1, rounded to six digits: 32 bits hold no more. NaN is 0."""
    return 0.0 if math.isnan(number) else round(min(max(number, 0.0), 1.0), 6)
