"""What a request changes in its logits before a token is picked: bias, penalties, and ends that come too early."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.core.generation import SamplingParams
from greenroom.moe.kernels.device_copies import to_device


class InvalidLogits(GreenroomError):
    """There are no usable logits for a request's row (a NaN, or no finite maximum)."""


class UnusableChanges(InvalidLogits):
    """What a request changes in its logits leaves no usable ones: it can not be served as it stands."""


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated.

    It grows with each token, so a step costs nothing but its look-up, however long the sequence is.
    """

    __slots__ = ("_ids", "_places", "_times")

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        """The tokens of the prompt count as generated 0 times."""
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._times = np.zeros(len(self._places), dtype=np.float32)

    def add(self, token_id: int) -> None:
        """The token was generated."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            more = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
            self._times = np.concatenate([self._times, np.zeros(more, dtype=np.float32)])
        self._ids[place] = token_id
        self._times[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """``[m]``, in order of appearance."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """``[m]``: how often each of ``ids`` was generated."""
        return self._times[: len(self._places)]


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is sampled. ``position``: how many tokens precede it, prompt included.

    ``counts``: of the tokens that penalties fall on, the prompt's only where ``repetition_penalty`` asks for them;
    None: there are no penalties. ``banned``: tokens that can not be picked now.
    """

    params: SamplingParams
    key: int
    position: int
    counts: TokenCounts | None = None
    banned: tuple[int, ...] = ()

    @property
    def changes_logits(self) -> bool:
        return self.counts is not None or bool(self.banned) or bool(self.params.logit_bias)


def token_counts(params: SamplingParams, prompt_ids: Sequence[int], generated: Iterable[int]) -> TokenCounts | None:
    """Of a sequence with these tokens. None: the request asks for no penalty."""
    if not params.penalises:
        return None
    counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())
    for token_id in generated:
        counts.add(token_id)
    return counts


def changed_logits(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """``logits[n, vocabulary]`` in float32 with the changes that each row's draw asks for; see SamplingParams.

    A new tensor. Nothing is read from the device. The numbers are those of transformers' processors to the bit: each
    step is one operation in float32.
    """
    vocabulary = logits.shape[1]
    scores = logits.to(torch.float32, copy=True)
    flat = scores.view(-1)
    starts = [row * vocabulary for row in range(len(draws))]
    biased = [np.array(draw.params.logit_bias, dtype=np.float64).reshape(-1, 2) for draw in draws]
    counted = [draw.counts for draw in draws]
    seen = [_NONE if counts is None else counts.ids for counts in counted]
    banned = [np.array([token for token in draw.banned if token < vocabulary], dtype=np.int64) for draw in draws]
    at = [_places([pairs[:, 0].astype(np.int64) for pairs in biased], starts), _places(seen, starts)]
    at.append(_places(banned, starts))
    bias = np.concatenate([pairs[:, 1] for pairs in biased])
    divisors = np.repeat([draw.params.repetition_penalty for draw in draws], [len(ids) for ids in seen])
    lessened = np.concatenate([_lessened(draw) for draw in draws])
    where = torch.split(to_device(torch.from_numpy(np.concatenate(at)), logits.device), [len(part) for part in at])
    values = torch.from_numpy(np.concatenate([bias, divisors, lessened]).astype(np.float32))
    add, divisor, less = torch.split(to_device(values, logits.device), [len(bias), len(divisors), len(lessened)])
    if len(add):
        flat.index_copy_(0, where[0], flat[where[0]] + add)
    if len(divisor):
        found = flat[where[1]]
        found = torch.where(found < 0, found * divisor, found / divisor)
        flat.index_copy_(0, where[1], found - less)
    if len(at[2]):
        flat.index_fill_(0, where[2], -torch.inf)
    return scores


_NONE = np.zeros(0, dtype=np.int64)


def _places(ids: Sequence[NDArray[np.int64]], starts: Sequence[int]) -> NDArray[np.int64]:
    """In the logits of all rows, one row behind the other."""
    return np.concatenate([part + start for part, start in zip(ids, starts, strict=True)])


def _lessened(draw: Draw) -> NDArray[np.float64]:
    if draw.counts is None:
        return np.zeros(0)
    times, params = draw.counts.times.astype(np.float64), draw.params
    return params.frequency_penalty * times + params.presence_penalty * (times > 0)


def invalid(best: float, draw: Draw) -> InvalidLogits | None:
    """Why no token can be sampled from a row whose largest logit is ``best``. None: one can."""
    if math.isfinite(best):
        return None
    return InvalidLogits(f"the model computed {best} as the largest logit of token {draw.position}")


def invalid_changed(best: float, draw: Draw) -> UnusableChanges | None:
    """The same of logits that the request has changed."""
    if math.isfinite(best):
        return None
    return UnusableChanges(
        f"the request's penalties, logit_bias and min_tokens make {best} the largest logit of token {draw.position}"
    )
