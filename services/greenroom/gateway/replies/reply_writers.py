"""From the parts of choices to the replies of both APIs, whole and in parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from greenroom.core.generation import FinishReason, TokenLogprobs
from greenroom.gateway.replies.choices import Delta
from greenroom.gateway.replies.reply_bodies import (
    AlternativeToken,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChosenToken,
    CompletionChoice,
    CompletionLogprobs,
    FinishWord,
    ReplyMessage,
    TextCompletion,
    Usage,
)
from greenroom.gateway.replies.token_records import TokenRecord
from greenroom.text import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_FINISH: Mapping[FinishReason, FinishWord] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


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
    """Where a stream tells its usage. ``at_end``: in a part of its own, which has no choices; the other parts then have
    ``usage: null``. ``in_parts``: in every part of a choice, of that choice so far."""

    at_end: bool = False
    in_parts: bool = False


class ReplyWriter(Protocol):
    """How one of the APIs writes its replies."""

    def opening(self, index: int) -> Struct | None:
        """The part that comes before the first one of a choice, None where there is none."""
        ...

    def part(self, delta: Delta) -> Struct: ...

    def closing(self, delta: Delta) -> Struct:
        """The last part of a choice, behind its last text."""
        ...

    def usage(self, tally: Tally) -> Struct:
        """The part of its own that ``stream_options.include_usage`` asks for."""
        ...

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> Struct: ...


class Tally:
    """What the choices of one reply took, added up as they end. ``prompt_tokens``: of all prompts, each once however
    many choices it has. ``prompts``: the length of each choice's prompt, in tokens."""

    def __init__(self, prompt_tokens: int, prompts: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts = prompts
        self._generated = 0
        self._rows = 0
        self._approximated_rows: float | None = 0.0  # None: of one choice it is not known

    def add(self, end: Delta) -> None:
        """The last part of a choice. Its last token is never run, so that token has no routing."""
        rows = max(0, self._prompts[end.index] + end.generated - 1)
        self._generated += end.generated
        self._rows += rows
        if self._approximated_rows is not None:
            share = end.approximated
            self._approximated_rows = None if share is None else self._approximated_rows + rows * share

    def usage(self) -> Usage:
        return _usage(self._prompt_tokens, self._generated)

    def approximated(self) -> float | UnsetType:
        """The share of all rows' routing; left out of the reply where it is not known. It is no field of ``usage``:
        clients add up over requests what they find there."""
        if self._approximated_rows is None:
            return UNSET
        return round(self._approximated_rows / max(1, self._rows), 6)


class _PartUsage:
    """The field ``usage`` of the parts of a stream. ``prompts``: the length of each choice's prompt, in tokens."""

    def __init__(self, usage: StreamUsage, prompts: Sequence[int]) -> None:
        self._prompts = prompts if usage.in_parts else None
        self._fixed: UnsetType | None = None if usage.at_end else UNSET

    def of(self, index: int, generated: int) -> Usage | UnsetType | None:
        return self._fixed if self._prompts is None else _usage(self._prompts[index], generated)


class ChatWriter:
    """chat.completion and chat.completion.chunk. ``prompts``: the length of each choice's prompt, in tokens."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, usage: StreamUsage, prompts: Sequence[int], logprobs: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage = _PartUsage(usage, prompts)

    def opening(self, index: int) -> ChatCompletionChunk:
        return self._part(index, ChatDelta(role="assistant", content=""), 0)

    def part(self, delta: Delta) -> ChatCompletionChunk:
        content = ChatDelta(content=delta.text)
        return self._part(delta.index, content, delta.generated, self._logprobs_of(delta.records))

    def closing(self, delta: Delta) -> ChatCompletionChunk:
        assert delta.finish is not None
        return self._part(delta.index, ChatDelta(), delta.generated, finish=_FINISH[delta.finish])

    def usage(self, tally: Tally) -> ChatCompletionChunk:
        return self._chunk([], tally.usage(), tally.approximated())

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=result.index,
                message=ReplyMessage(role="assistant", content=result.text, refusal=None),
                logprobs=self._logprobs_of(result.records),
                finish_reason=_FINISH[result.finish],
            )
            for result in results
        ]
        return ChatCompletion(
            id=self._head.reply_id,
            object="chat.completion",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            usage=tally.usage(),
            approximated=tally.approximated(),
        )

    def _part(
        self,
        index: int,
        delta: ChatDelta,
        generated: int,
        logprobs: ChatLogprobs | None = None,
        finish: FinishWord | None = None,
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._chunk([choice], self._usage.of(index, generated))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        approximated: float | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._head.reply_id,
            object="chat.completion.chunk",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            usage=usage,
            approximated=approximated,
        )

    def _logprobs_of(self, records: Iterable[TokenRecord]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[self._chosen(record) for record in records], refusal=None)

    def _chosen(self, record: TokenRecord) -> ChosenToken:
        assert record.logprobs is not None, "a chat has no echo"
        raw = self._tokenizer.token_bytes(record.token_id)
        return ChosenToken(
            token=token_text(raw),
            logprob=_finite(record.logprobs.chosen),
            bytes=list(raw),
            top_logprobs=[self._alternative(token_id, logprob) for token_id, logprob in record.logprobs.top],
        )

    def _alternative(self, token_id: int, logprob: float) -> AlternativeToken:
        raw = self._tokenizer.token_bytes(token_id)
        return AlternativeToken(token=token_text(raw), logprob=_finite(logprob), bytes=list(raw))


class CompletionWriter:
    """text_completion, whole and in parts. ``prompts``: the length of each choice's prompt, in tokens."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, *, usage: StreamUsage, prompts: Sequence[int], logprobs: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage = _PartUsage(usage, prompts)

    def opening(self, index: int) -> None:
        """There is none."""

    def part(self, delta: Delta) -> TextCompletion:
        return self._part(delta, delta.text, delta.records, None)

    def closing(self, delta: Delta) -> TextCompletion:
        return self._part(delta, "", (), delta.finish)

    def usage(self, tally: Tally) -> TextCompletion:
        return self._reply([], tally.usage(), tally.approximated())

    def whole(self, results: Iterable[ChoiceResult], tally: Tally) -> TextCompletion:
        choices = [self._choice(result.index, result.text, result.records, result.finish) for result in results]
        return self._reply(choices, tally.usage(), tally.approximated())

    def _part(
        self, delta: Delta, text: str, records: Iterable[TokenRecord], finish: FinishReason | None
    ) -> TextCompletion:
        choice = self._choice(delta.index, text, records, finish)
        return self._reply([choice], self._usage.of(delta.index, delta.generated))

    def _reply(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        approximated: float | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            id=self._head.reply_id,
            object="text_completion",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.fingerprint,
            choices=choices,
            usage=usage,
            approximated=approximated,
        )

    def _choice(
        self, index: int, text: str, records: Iterable[TokenRecord], finish: FinishReason | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs_of(list(records)) if self._logprobs else None,
            finish_reason=None if finish is None else _FINISH[finish],
        )

    def _logprobs_of(self, records: Sequence[TokenRecord]) -> CompletionLogprobs:
        pairs = [(record.token_id, record.logprobs) for record in records]
        return CompletionLogprobs(
            tokens=[self._text(record.token_id) for record in records],
            token_logprobs=[None if own is None else _finite(own.chosen) for _, own in pairs],
            top_logprobs=[None if own is None else self._top(token_id, own) for token_id, own in pairs],
            text_offset=[record.offset for record in records],
        )

    def _top(self, chosen: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens by their text, best first, and the chosen one in any case."""
        top: dict[str, float] = {}
        for token_id, logprob in (*logprobs.top, (chosen, logprobs.chosen)):
            top.setdefault(self._text(token_id), _finite(logprob))
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def token_text(raw: bytes) -> str:
    """A token by itself. One that is only part of a character is written as OpenAI does, ``bytes:\\xe6\\x97``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _usage(prompt_tokens: int, generated: int) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=generated, total_tokens=prompt_tokens + generated)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
