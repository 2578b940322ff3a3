"""Requests to a model and the events that come back: the types between a gateway and whatever generates."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from greenroom.core.collaboration import CollaborationCard
from greenroom.core.errors import InvalidRequest
from greenroom.core.inference_outputs import InferenceOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"
    """Its deadline passed."""
    SHED = "shed"
    """It was given up before it began: there was no room, or it had waited too long."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is picked and when to end.

    ``temperature`` 0 and ``top_p`` 0 are greedy. ``top_k`` 0 is off. ``max_tokens`` None means up to the model's limit,
    0 that nothing is generated. ``logprobs`` n asks for the chosen token's log-probability and those of the n most
    likely (0: only the chosen), ``prompt_logprobs`` n for the same of the prompt's tokens. Sampling depends on ``seed``
    and the token's position alone, so a request run again gives the same text; with ``seed`` None the request id
    decides.

    Logits are changed in this order, and greedy sampling too is from the changed ones. ``logit_bias`` is added, by
    token id. ``repetition_penalty`` r divides positive logits of the tokens in prompt and answer by r, and multiplies
    the others (Keskar et al., "CTRL", 2019, §4.1, as transformers has it). ``frequency_penalty`` is subtracted as often
    as the token was generated, ``presence_penalty`` once if it was (OpenAI's formula). Before ``min_tokens`` tokens no
    EOS and none of ``stop_token_ids`` can be picked, and no stop string ends the text. Then come temperature, top-k,
    top-p, and ``min_p``, which leaves the tokens that have at least that share of the likeliest one's probability
    (Nguyen et al., "Turning Up the Heat", ICLR 2025, §3). Log-probabilities are those before all of this.

    Raises InvalidRequest, naming the field, where a value is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", tuple(self.logit_bias))
        if not 0 <= self.temperature <= 2:
            raise InvalidRequest(f"temperature must be from 0 to 2, not {self.temperature}", param="temperature")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidRequest(f"{name} must be from 0 to 1, not {getattr(self, name)}", param=name)
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or more, not {self.top_k}", param="top_k")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed must fit in 64 bits", param="seed")
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, not {self.max_tokens}", param="max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be from 0 to {MAX_LOGPROBS}, not {value}", param=name)
        self._check_changes()

    def _check_changes(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                allowed = f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
                raise InvalidRequest(f"{name} must be {allowed}, not {getattr(self, name)}", param=name)
        if not 0 < self.repetition_penalty < math.inf:
            raise InvalidRequest(
                f"repetition_penalty must be above 0, not {self.repetition_penalty}", param="repetition_penalty"
            )
        if len(self.logit_bias) > MAX_BIASED_TOKENS or len({token for token, _ in self.logit_bias}) < len(
            self.logit_bias
        ):
            raise InvalidRequest(f"logit_bias takes at most {MAX_BIASED_TOKENS} tokens, each once", param="logit_bias")
        for token, bias in self.logit_bias:
            if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias takes token ids with numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {token}: {bias}",
                    param="logit_bias",
                )
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            most = "" if self.max_tokens is None else f" and at most max_tokens ({self.max_tokens})"
            raise InvalidRequest(f"min_tokens must be at least 0{most}, not {self.min_tokens}", param="min_tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is picked: always, or since the nucleus holds no other."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits of the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural) of the chosen token, and of the most likely ones, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """The ``index``-th generated token (from 0, without gap)."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A client's service-level objectives in milliseconds from acceptance (``tpot_ms``: between tokens); None: none.

    Raises InvalidRequest, naming the field, where a value is not above 0.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidRequest(f"slo.{name} must be a number of milliseconds above 0, not {value}", param="slo")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, already tokenised. ``request_id`` is unique among the running requests.

    ``prefix``: tokens of the answer that are settled already; generation goes on behind them and gives only what
    follows. ``prompt``: the text that a task type is extracted from where ``task_type`` is None. ``tenant``: the owner
    of the request. ``keyed``: its id comes from an idempotency key; ``digest`` tells whether a second request of that
    id asks for the same. ``priority``: -100 to 100, higher is sooner. ``timeout_s``: from acceptance to the end.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    task_type: str | None = None
    prefix: tuple[Token, ...] = ()
    prompt: str = ""
    tenant: str = ""
    keyed: bool = False
    digest: bytes = b""
    slo: Slo = Slo()
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request; ``error`` says why it failed, else None.

    ``queue_seconds``: how long it waited before it ran; its whole life if it never ran. ``approximated``: of all
    choices of experts for its tokens, one a layer, the share in which the router was kept from its own choice.
    ``outputs``: of an inference that came to its own end. ``invalid``: it failed since it can not be served as it
    stands. ``prefilled``: rows of its prompt and prefix that went through the model. ``prompt_logprobs``: of the
    prompt's tokens from the second on, where the request asked for them and came to its own end.
    """

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    error: str | None = None
    queue_seconds: float = field(default=0.0, compare=False)
    approximated: float = 0.0
    outputs: InferenceOutputs | None = None
    invalid: bool = False
    prefilled: int = field(default=0, compare=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


Event = Token | Finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a gateway must know of the model behind it. Lengths are in tokens. ``collaboration``: it is one of whole
    models, which takes inferences and has no tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int
    collaboration: CollaborationCard | None = None


class Generator(Protocol):
    """Turns a request into tokens: an engine in this process, or a pipeline of services."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Tokens in order, then exactly one Finished.

        The request is taken on the first ``__anext__``, which raises InvalidRequest or Saturated where it can not be.
        After that every end is a Finished, failures included. Closing the iterator cancels the request, whether it
        waits or runs; a request with an idempotency key (``keyed``) may go on.
        """
        ...
