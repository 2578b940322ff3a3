"""A body's sampling parameters, for each choice."""

from __future__ import annotations

import hashlib

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import MAX_SEED, SamplingParams, ServedModel
from greenroom.gateway.requests.bodies import ChatBody, GenerationBody

MAX_STOP_TOKEN_IDS = 256


def sampling_params(
    body: GenerationBody, logprobs: int | None, max_tokens: int, model: ServedModel, choice: int
) -> SamplingParams:
    """Of the choice with that index. Raises InvalidRequest, naming the field."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_token_ids = tuple(body.stop_token_ids or ())
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS or not all(0 <= stop < model.vocab_size for stop in stop_token_ids):
        raise InvalidRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids from 0 to {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=0 if body.top_k in (None, -1) else body.top_k,
            seed=_seed(body.seed, choice),
            stop=stop,
            stop_token_ids=stop_token_ids,
            max_tokens=max_tokens,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
        )
    except InvalidRequest as error:
        if error.param == "logprobs" and isinstance(body, ChatBody):
            raise InvalidRequest(f"top_{error}", param="top_logprobs") from error
        raise


def _seed(seed: int | None, choice: int) -> int | None:
    """The first choice has the request's own seed, so it is what n=1 gives. The others derive theirs from it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED
