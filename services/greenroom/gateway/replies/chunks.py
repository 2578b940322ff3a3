"""The shapes of replies, whole and in parts, of both APIs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from greenroom.core.generation import FinishReason
from greenroom.gateway.replies.choices import Delta, TokenRecord
from greenroom.text import Tokenizer

Json = dict[str, Any]
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in all parts of one reply."""

    reply_id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One choice as a whole."""

    index: int
    text: str
    records: Sequence[TokenRecord]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Where a stream tells its usage. ``at_end``: in a part of its own, which has no choices; the others then have
    ``usage: null``. ``in_parts``: in every part of a choice, of that choice so far."""

    at_end: bool = False
    in_parts: bool = False


class ReplyStyle(Protocol):
    """How one of the APIs writes its replies."""

    def opening(self, index: int) -> Json | None:
        """The part that comes before the first one of a choice, None where there is none."""
        ...

    def part(self, delta: Delta) -> Json: ...

    def closing(self, delta: Delta) -> Json:
        """The last part of a choice, behind its last text."""
        ...

    def usage(self, tally: Tally) -> Json:
        """The part of its own that ``stream_options.include_usage`` asks for."""
        ...

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> Json: ...


class Tally:
    """What the choices of one reply took, as they end. ``prompt_tokens``: a prompt once, however many choices it has;
    ``prompts``: how long the prompt of each choice is."""

    def __init__(self, prompt_tokens: int, prompts: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts = prompts
        self._generated = 0
        self._rows = 0
        self._approximated_rows: float | None = 0.0  # None: of one choice it is not known

    def add(self, end: Delta) -> None:
        """The last part of a choice. Its last token is never run, so that it has no routing."""
        rows = max(0, self._prompts[end.index] + end.generated - 1)
        self._generated += end.generated
        self._rows += rows
        if self._approximated_rows is not None:
            share = end.approximated
            self._approximated_rows = None if share is None else self._approximated_rows + rows * share

    def as_json(self) -> Json:
        """Fields of a reply. The share is not in ``usage``: clients add up over requests what they find there. Where it
        is not known nothing is said of it."""
        usage = _usage(self._prompt_tokens, self._generated)
        if self._approximated_rows is None:
            return {"usage": usage}
        return {"usage": usage, "approximated": round(self._approximated_rows / max(1, self._rows), 6)}


class _PartUsage:
    """The field ``usage`` of the parts of a stream. ``prompts``: how long the prompt of each choice is."""

    def __init__(self, usage: StreamUsage, prompts: Sequence[int]) -> None:
        self._prompts = prompts if usage.in_parts else None
        self._fixed: Json = {"usage": None} if usage.at_end else {}

    def of(self, index: int, generated: int) -> Json:
        return self._fixed if self._prompts is None else {"usage": _usage(self._prompts[index], generated)}


class ChatStyle:
    """chat.completion and chat.completion.chunk. ``prompts``: how long the prompt of each choice is."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, usage: StreamUsage, prompts: Sequence[int], logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._whole = _envelope(head, "chat.completion")
        self._chunk = _envelope(head, "chat.completion.chunk")
        self._usage = _PartUsage(usage, prompts)

    def opening(self, index: int) -> Json | None:
        return self._part(index, {"role": "assistant", "content": ""}, 0)

    def part(self, delta: Delta) -> Json:
        content = {"content": delta.text}
        return self._part(delta.index, content, delta.generated, self._logprobs_of(delta.records))

    def closing(self, delta: Delta) -> Json:
        assert delta.finish is not None
        return self._part(delta.index, {}, delta.generated, finish=delta.finish)

    def usage(self, tally: Tally) -> Json:
        return {**self._chunk, "choices": [], **tally.as_json()}

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> Json:
        choices = [
            {
                "index": result.index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._logprobs_of(result.records),
                "finish_reason": result.finish.value,
            }
            for result in results
        ]
        return {**self._whole, "choices": choices, **tally.as_json()}

    def _part(
        self,
        index: int,
        delta: Json,
        generated: int,
        logprobs: Json | None = None,
        finish: FinishReason | None = None,
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish and finish.value}
        return {**self._chunk, "choices": [choice], **self._usage.of(index, generated)}

    def _logprobs_of(self, records: Iterable[TokenRecord]) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._token(record.token_id, record.logprobs.chosen),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in record.logprobs.top],
            }
            for record in records
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionStyle:
    """text_completion, whole and in parts. ``prompts``: how long the prompt of each choice is."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, usage: StreamUsage, prompts: Sequence[int], logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._head = _envelope(head, "text_completion")
        self._usage = _PartUsage(usage, prompts)

    def opening(self, index: int) -> Json | None:
        return None

    def part(self, delta: Delta) -> Json:
        return self._part(delta, delta.text, delta.records, None)

    def closing(self, delta: Delta) -> Json:
        return self._part(delta, "", (), delta.finish)

    def usage(self, tally: Tally) -> Json:
        return {**self._head, "choices": [], **tally.as_json()}

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> Json:
        choices = [self._choice(result.index, result.text, result.records, result.finish) for result in results]
        return {**self._head, "choices": choices, **tally.as_json()}

    def _part(self, delta: Delta, text: str, records: Iterable[TokenRecord], finish: FinishReason | None) -> Json:
        choice = self._choice(delta.index, text, records, finish)
        return {**self._head, "choices": [choice], **self._usage.of(delta.index, delta.generated)}

    def _choice(self, index: int, text: str, records: Iterable[TokenRecord], finish: FinishReason | None) -> Json:
        logprobs = self._logprobs_of(list(records)) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish and finish.value}

    def _logprobs_of(self, records: Sequence[TokenRecord]) -> Json:
        return {
            "tokens": [self._text(record.token_id) for record in records],
            "token_logprobs": [_finite(record.logprobs.chosen) for record in records],
            "top_logprobs": [self._top(record) for record in records],
            "text_offset": [record.offset for record in records],
        }

    def _top(self, record: TokenRecord) -> dict[str, float]:
        """The most likely by their text, best first, and the chosen one in any case."""
        top: dict[str, float] = {}
        for token_id, logprob in (*record.logprobs.top, (record.token_id, record.logprobs.chosen)):
            top.setdefault(self._text(token_id), _finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def token_text(raw: bytes) -> str:
    """A token by itself; one that is only part of a character is written as OpenAI does, ``bytes:\\xe6\\x97``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _usage(prompt_tokens: int, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def _envelope(head: Head, kind: str) -> Json:
    return {
        "id": head.reply_id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
