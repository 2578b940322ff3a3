"""From the events of one generation to the parts of one choice of a reply. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from greenroom.core.errors import GreenroomError
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, Token, TokenLogprobs
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.gateway.replies.echo import Echo
from greenroom.gateway.replies.token_records import TokenRecord
from greenroom.text import TextStream, Tokenizer

_WHY = {
    FinishReason.CANCELLED: "the generation was cancelled",
    FinishReason.FAILED: "the generation failed",
    FinishReason.EXPIRED: "the request's time was over before it was finished",
    FinishReason.SHED: "the request was given up before it began: there was no room for it in time",
}


_NO_LOGPROBS = "log-probabilities were asked for and did not come"


class GenerationFailed(GreenroomError):
    """A generation that was not completed: ``reason`` is neither STOP nor LENGTH. ``invalid``: the request is at fault,
    as no worker can serve it."""

    def __init__(self, message: str, reason: FinishReason, *, invalid: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.invalid = invalid


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate, the ``index``-th choice of the reply. ``behind_text``: it continues the prompt's text,
    so its first word keeps the space before it. ``keep_stop``: a stop string stays in the text. ``echo``: the prompt is
    told before the answer."""

    index: int
    request: GenerationRequest
    behind_text: bool = False
    keep_stop: bool = False
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained. ``tokens``: only where they were asked for. ``generated``: the choice's tokens so far.

    The last part of a choice has ``finish`` and ``approximated`` (see Finished; None: not known), and
    ``prompt_logprobs`` where they were asked for. An inference has no other part, and ``outputs`` in place of text.
    """

    index: int
    text: str
    records: tuple[TokenRecord, ...] = ()
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    generated: int = 0
    approximated: float | None = None
    outputs: InferenceOutputs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class ChoiceAssembler:
    """Detokenises, applies stop strings and keeps the log-probabilities of one choice.

    The text of a token that ends the generation (EOS, or one of ``stop_token_ids``) is left out. Its log-probability is
    kept: there is one for every token that usage counts. ``tokens``: the parts carry the tokens themselves too.

    The generator applies stop strings too. If it goes on behind one all the same, the choice ends here, and how much
    was approximated is not known.

    The prompt that is echoed comes with the first part. Its log-probabilities come with the generation's end, so where
    they are asked for the whole choice is one part.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, eos_token_ids: Collection[int], *, tokens: bool = False) -> None:
        sampling = job.request.sampling
        self._index = job.index
        self._text = TextStream(
            tokenizer,
            sampling.stop,
            keep_match=job.keep_stop,
            behind_text=job.behind_text,
            min_tokens=sampling.min_tokens,
        )
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._wants_logprobs = sampling.logprobs is not None
        self._wants_tokens = tokens
        self._generated = 0
        self._echo = job.echo
        self._echo_length = 0 if job.echo is None else len(job.echo.text)
        self._prompt_tokens = len(job.request.prompt_ids)
        self._scores = sampling.prompt_logprobs is not None
        self._held: list[tuple[str, tuple[TokenRecord, ...]]] = []
        self.finish: FinishReason | None = None
        """Why it ended, None until then."""

    def push(self, event: Event) -> Delta | None:
        """What ``event`` adds, None if nothing. Raises GenerationFailed."""
        if isinstance(event, Finished):
            return self._end(event)
        if self._text.matched is not None:
            return None if self._scores else self._last(self._echoed(""), FinishReason.STOP)
        self._generated += 1
        offset = self._text.length + self._echo_length
        text = "" if event.token_id in self._ends else self._text.push(event.token_id)
        records = (_record(event, offset),) if self._wants_logprobs else ()
        if self._echo is not None and self._scores:
            self._held.append((text, records))
            return None
        text = self._echoed(text)
        if self._wants_tokens:
            return Delta(self._index, text, records, (event,), generated=self._generated)
        if records or text:
            return Delta(self._index, text, records, generated=self._generated)
        return None

    def _end(self, finished: Finished) -> Delta:
        if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise failure_of(finished)
        scores = self._scores_of(finished)
        text = self._text.finish()
        finish = finished.reason if self._text.matched is None else FinishReason.STOP
        if self._echo is None or scores is None:
            return self._last(self._echoed(text), finish, finished.approximated, scores=scores)
        records = [*self._echo.records(scores), *(record for _, own in self._held for record in own)]
        text = "".join([self._echo.text, *(part for part, _ in self._held), text])
        return self._last(text, finish, finished.approximated, records=tuple(records), scores=scores)

    def _scores_of(self, finished: Finished) -> tuple[TokenLogprobs, ...] | None:
        if not self._scores:
            return None
        scores = finished.prompt_logprobs or ()
        if len(scores) != self._prompt_tokens - 1:
            raise GenerationFailed(_NO_LOGPROBS, FinishReason.FAILED)
        return scores

    def _echoed(self, text: str) -> str:
        """``text``, behind the prompt if that is still to be told."""
        if self._echo is None:
            return text
        text, self._echo = self._echo.text + text, None
        return text

    def _last(
        self,
        text: str,
        finish: FinishReason,
        approximated: float | None = None,
        *,
        records: tuple[TokenRecord, ...] = (),
        scores: tuple[TokenLogprobs, ...] | None = None,
    ) -> Delta:
        self.finish = finish
        return Delta(
            self._index,
            text,
            records,
            finish=finish,
            generated=self._generated,
            approximated=approximated,
            prompt_logprobs=scores,
        )


def failure_of(finished: Finished) -> GenerationFailed:
    """Why a sequence or an inference was not completed."""
    return GenerationFailed(finished.error or _WHY[finished.reason], finished.reason, invalid=finished.invalid)


def _record(token: Token, offset: int) -> TokenRecord:
    if token.logprobs is None:
        raise GenerationFailed(_NO_LOGPROBS, FinishReason.FAILED)
    return TokenRecord(token.token_id, offset, token.logprobs)
