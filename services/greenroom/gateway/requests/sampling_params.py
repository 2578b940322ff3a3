"""A body's sampling parameters, for each choice."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import MAX_SEED, SamplingParams, ServedModel
from greenroom.gateway.requests.bodies import ChatBody, GenerationBody
from greenroom.text.sampling_defaults import SamplingDefaults

MAX_STOP_TOKEN_IDS = 256
_TOKEN_ID = re.compile("[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How many of the most likely tokens are told beside each of the answer's and the prompt's; None: nothing is."""

    answer: int | None
    prompt: int | None = None


def sampling_params(
    body: GenerationBody,
    logprobs: Logprobs,
    max_tokens: int,
    model: ServedModel,
    choice: int,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """Of the choice with that index. ``defaults``: where the body does not say. Raises InvalidRequest, naming the
    field."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_token_ids = tuple(body.stop_token_ids or ())
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS or not all(0 <= stop < model.vocab_size for stop in stop_token_ids):
        raise InvalidRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids from 0 to {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    try:
        given = {field: getattr(body, field) for field in _WITH_DEFAULTS if getattr(body, field) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return SamplingParams(
            **{**defaults.said(), **given},
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body.logit_bias or {}, model),
            min_tokens=body.min_tokens or 0,
            seed=_seed(body.seed, choice),
            stop=stop,
            stop_token_ids=stop_token_ids,
            max_tokens=max_tokens,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs.answer,
            prompt_logprobs=logprobs.prompt,
        )
    except InvalidRequest as error:
        if error.param == "logprobs" and isinstance(body, ChatBody):
            raise InvalidRequest(f"top_{error}", param="top_logprobs") from error
        raise


_WITH_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _logit_bias(bias: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    """In order of token ids, so that two bodies that mean the same are the same."""
    pairs = []
    for token, value in bias.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) >= model.vocab_size:
            raise InvalidRequest(
                f"logit_bias has the token id {token!r:.32}; the model's are 0 to {model.vocab_size - 1}",
                param="logit_bias",
            )
        pairs.append((int(token), value))
    return tuple(sorted(pairs))


def _seed(seed: int | None, choice: int) -> int | None:
    """The first choice has the request's own seed, so it is what n=1 gives. The others derive theirs from it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED
