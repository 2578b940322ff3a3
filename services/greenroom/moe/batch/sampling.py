"""From logits to the next token. A request that runs again draws the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from greenroom.core.generation import SamplingParams, TokenLogprobs
from greenroom.moe.batch.logit_changes import Draw, InvalidLogits, changed_logits, invalid, invalid_changed

NUCLEUS_TRY: Final = 512
"""How many of the likeliest tokens are sorted first. Few nuclei need more."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sampling_key(seed: int | None, request_id: str) -> int:
    """The 128-bit key of all random numbers of a request: from its seed, or else from its id."""
    material = f"request {request_id}" if seed is None else f"seed {seed}"
    return int.from_bytes(hashlib.blake2b(material.encode(), digest_size=16).digest(), "little")


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) that depends on the arguments alone.

    53 bits of block number ``position`` of Philox 4x64-10, a random number generator without state (Salmon et al.,
    "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §3.3).
    """
    return (int(np.random.Philox(key=key, counter=position).random_raw()) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | InvalidLogits]:
    """A token for each row of ``logits[n, vocabulary]``, or the reason why a row has none.

    Greedy rows take the largest logit, and of equal ones the lowest token id, as transformers does. Other rows draw
    from the softmax of logits / temperature, without the tokens that top-k, then top-p, then min-p exclude. Before all
    of this logits are changed as ``logit_changes`` says. A row's token does not depend on other rows. For logits in
    RAM; ``device_sampling`` gives the same tokens on a device.
    """
    tokens = logits.argmax(dim=-1, keepdim=True)  # a NaN counts as the largest
    best: list[float] = logits.gather(-1, tokens).squeeze(-1).tolist()
    greedy: list[int] = tokens.squeeze(-1).tolist()
    return [_pick(logits, i, draw, greedy[i], best[i]) for i, draw in enumerate(draws)]


def _pick(logits: torch.Tensor, number: int, draw: Draw, greedy: int, best: float) -> SampledToken | InvalidLogits:
    if (why := invalid(best, draw)) is not None:
        return why
    params = draw.params
    row = logits[number]
    scores = row
    if draw.changes_logits:
        scores = changed_logits(row[None], [draw])[0]
        greedy = int(scores.argmax())
        if (why := invalid_changed(float(scores[greedy]), draw)) is not None:
            return why
    token = greedy if params.greedy else _draw(scores, params, uniform(draw.key, draw.position))
    return SampledToken(token, None if params.logprobs is None else _logprobs(row, token, params.logprobs))


def _draw(row: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Inverse of the distribution function at ``number``.

    The function runs over token ids, not over ranks. So two tokens whose logits change places by rounding keep their
    shares of [0, 1).
    """
    weights = row.double()
    ids: torch.Tensor | None = None
    if 0 < params.top_k < len(row):
        least = weights.topk(params.top_k).values[-1]
        ids = (weights >= least).nonzero().squeeze(-1)
        weights = weights[ids]
    weights = ((weights - weights.max()) / params.temperature).exp_()
    if params.top_p < 1 or params.min_p > 0:
        edge = _nucleus_edge(weights, params.top_p) if params.top_p < 1 else weights.new_zeros(())
        kept = (weights >= edge.clamp(min=params.min_p)).nonzero().squeeze(-1)  # the largest weight is 1
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    below = weights.cumsum(0)
    drawn = int(torch.searchsorted(below, below[-1] * number, right=True))
    drawn = min(drawn, int(torch.searchsorted(below, below[-1])))  # only tokens of no probability follow
    return drawn if ids is None else int(ids[drawn])


def _nucleus_edge(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest weight in the nucleus: the fewest largest weights that hold ``top_p`` of the sum.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020, §3.1. All weights equal to the smallest
    belong to the nucleus, so that it does not depend on how a sort breaks ties.
    """
    share = top_p * weights.sum()
    likeliest = weights.topk(min(NUCLEUS_TRY, len(weights))).values
    if likeliest.sum() < share:
        likeliest = weights.sort(descending=True).values
    before = likeliest.cumsum(0) - likeliest
    return likeliest[(before < share).nonzero()[-1, 0]]


def _logprobs(row: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    logprobs = row.float().log_softmax(dim=-1)
    if top == 0:
        return TokenLogprobs(float(logprobs[token]))
    best = logprobs.topk(min(top, len(row)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), tuple((int(i), float(value)) for i, value in pairs))
