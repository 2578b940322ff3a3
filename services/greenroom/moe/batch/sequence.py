"""One request on its way through the batch loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from greenroom.core.generation import Event, FinishReason, GenerationRequest, SamplingParams, Token, TokenLogprobs
from greenroom.moe.attention.kv_cache import SequenceKV
from greenroom.moe.batch.logit_changes import Draw, token_counts
from greenroom.moe.batch.sampling import SampledToken, sampling_key
from greenroom.policies.base.events import UNKNOWN_TASK, SequenceInfo

OnEvent = Callable[[Event], None]
"""Takes a request's events on the loop's thread. It must not block. If it raises, the request is cancelled."""


class StopChecker(Protocol):
    """Finds stop strings in the text of the tokens pushed so far."""

    def push(self, token_id: int) -> bool:
        """Take the next generated token. True: a stop string is complete."""
        ...


StopCheckerFactory = Callable[[SamplingParams], StopChecker]
"""Makes the checker of a request that has stop strings."""


class Sequence:
    """A request's tokens: the prompt, the answer's settled prefix, then generated ones.

    ``kv`` is None while it waits. The first ``kv.length`` tokens have been through the model. The last generated token
    goes through it in the next step.
    """

    __slots__ = (
        "_banned",
        "_checker",
        "_counts",
        "_prompt_logprobs",
        "expected_answer",
        "info",
        "key",
        "kv",
        "limit",
        "on_event",
        "preempted",
        "prompt_tokens",
        "ran",
        "request",
        "settled",
        "settled_end",
        "started_at",
        "stop_token_ids",
        "submitted_at",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        on_event: OnEvent,
        *,
        limit: int,
        eos_token_ids: frozenset[int],
        checker: StopChecker | None,
        now: float,
    ) -> None:
        self.request = request
        self.on_event = on_event
        self.prompt_tokens = len(request.prompt_ids)
        self.tokens = [*request.prompt_ids, *(token.token_id for token in request.prefix)]
        self.settled = len(self.tokens)
        """Tokens that are given when it starts and run: the prompt and the prefix; once preempted, all that it had by
        then. Of an answer that has ended with its prefix, the tokens whose successors in the prompt are to be scored.
        """
        self.settled_end: FinishReason | None = None
        """Why the answer has ended with its prefix, where the prompt is still to be scored."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.limit = limit
        """The limit of its answer in tokens, prefix included."""
        self.expected_answer = limit
        """How many tokens its answer is expected to have. At most ``limit``."""
        self.preempted = 0
        """How often it has given up its KV and waited again."""
        self.ran = 0
        """Rows that ran before it was preempted last. They run again."""
        self.kv: SequenceKV | None = None
        self.key = sampling_key(request.sampling.seed, request.request_id)
        own = frozenset(request.sampling.stop_token_ids)
        self.stop_token_ids = own if request.sampling.ignore_eos else own | eos_token_ids
        self._banned = tuple(sorted(own | eos_token_ids)) if request.sampling.min_tokens else ()
        """Not to be picked before ``min_tokens`` tokens."""
        self._counts = token_counts(request.sampling, request.prompt_ids, self.tokens[self.prompt_tokens :])
        left = max(0, limit - len(request.prefix))
        self.info = SequenceInfo(number, request.task_type or UNKNOWN_TASK, self.prompt_tokens, left)
        self.submitted_at = now
        self.started_at: float | None = None
        self._checker = checker

    @property
    def number(self) -> int:
        return self.info.sequence

    @property
    def generated(self) -> int:
        """Tokens of the answer so far, prefix included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def kv_rows(self) -> int:
        """The rows that it may ever need: all its tokens except the last, which no token follows."""
        return self.prompt_tokens + self.limit - 1

    @property
    def scored_rows(self) -> int:
        """How many rows of the prompt have a successor in it whose log-probability is asked for."""
        return 0 if self.request.sampling.prompt_logprobs is None else self.prompt_tokens - 1

    @property
    def scores_left(self) -> int:
        """Rows of the prompt that are still to be scored."""
        return self.scored_rows - len(self._prompt_logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """All of the prompt's tokens from the second on, once they are there. None: they were not asked for."""
        return None if self.request.sampling.prompt_logprobs is None else tuple(self._prompt_logprobs)

    @property
    def scores_from(self) -> int:
        """The first row that is still to be scored. Rows that run again, since memory was short, are not."""
        return len(self._prompt_logprobs)

    def score(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Of the tokens behind the rows from ``scores_from`` on."""
        self._prompt_logprobs += logprobs

    @property
    def prefill_left(self) -> int:
        """Of the settled tokens those that have not been through the model."""
        return max(0, self.settled - (self.kv.length if self.kv else 0))

    @property
    def prefilled(self) -> int:
        """Rows of the prompt and the prefix that have been through the model, each counted once."""
        ran = max(self.ran, self.kv.length if self.kv else 0)
        return min(ran, self.prompt_tokens + len(self.request.prefix))

    def next_draw(self) -> Draw:
        sampling = self.request.sampling
        banned = self._banned if self.generated < sampling.min_tokens else ()
        return Draw(sampling, self.key, len(self.tokens), self._counts, banned)

    def settle(self) -> FinishReason | None:
        """Why the answer has already ended with its prefix, if it has. To be called once, before anything is generated.

        With ``settled_end`` the prompt runs all the same, to be scored. Raises what the stop checker raises.
        """
        reason = FinishReason.LENGTH if self.generated >= self.limit else None
        if any(self._ends_with(token_id) for token_id in self.tokens[self.prompt_tokens :]):
            reason = FinishReason.STOP
        if reason is not None and self.scored_rows:
            self.settled_end, self.settled = reason, self.scored_rows
        return reason

    def preempt(self) -> None:
        """Give up what has been through the model. What is there of the answer is settled: it is not checked for stops
        again, and the next token is drawn as it would have been.
        """
        if self.kv is not None:
            self.ran = max(self.ran, self.kv.length)
        self.kv = None
        if self.settled_end is None:
            self.settled = len(self.tokens)
        self.preempted += 1

    def accept(self, picked: SampledToken) -> tuple[Token, FinishReason | None]:
        """Append the token. Returns its event, and why the request ends with it, if it does.

        Raises what the stop checker raises; the token was then not appended.
        """
        token = Token(self.generated, picked.token_id, picked.logprobs)
        reason = None
        if self._ends_with(picked.token_id):
            reason = FinishReason.STOP
        elif self.generated + 1 >= self.limit:
            reason = FinishReason.LENGTH
        self.tokens.append(picked.token_id)
        if self._counts is not None:
            self._counts.add(picked.token_id)
        return token, reason

    def _ends_with(self, token_id: int) -> bool:
        return token_id in self.stop_token_ids or (self._checker is not None and self._checker.push(token_id))
