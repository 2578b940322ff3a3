"""Sampling on a device: all rows of a batch together, with one copy of the result to RAM.

On the CPU ``sampling`` goes row by row, where reading a number costs nothing and excluded tokens need no work. On a
device every read of a number waits for all work queued before. Here nothing is read until the tokens of all rows are
known, and excluded tokens get the weight 0. The tokens are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from greenroom.core.generation import TokenLogprobs
from greenroom.moe.batch.logit_changes import Draw, InvalidLogits, changed_logits, invalid, invalid_changed
from greenroom.moe.batch.sampling import NUCLEUS_TRY, SampledToken, uniform
from greenroom.moe.kernels.device_copies import to_device


def sample_together(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | InvalidLogits]:
    """As ``sampling.sample``. Waits for the device once, and once more if a nucleus is wider than most."""
    answers = _Answers(logits, draws, NUCLEUS_TRY)
    (found,) = _look([answers.tensors])
    picked = [answers.picked(found, row) for row in range(len(draws))]
    wider = [row for row, (_, more) in zip(answers.drawing, found.get("drawn", ()), strict=False) if more]
    if wider:
        alone = [_Answers(logits[row : row + 1], [draws[row]], logits.shape[1]) for row in wider]
        for row, one, found in zip(wider, alone, _look([one.tensors for one in alone]), strict=True):
            picked[row] = one.picked(found, 0)
    return picked


_Found = dict[str, list[list[float]]]


class _Answers:
    """The results of all rows, still on the device: ``tensors`` by name, in float64, which holds token ids exactly.

    ``width``: how many of a row's likeliest tokens are searched for those that top-k and top-p leave.
    """

    def __init__(self, logits: torch.Tensor, draws: Sequence[Draw], width: int) -> None:
        self._draws = draws
        self.drawing = [row for row, draw in enumerate(draws) if not draw.params.greedy]
        self._asking = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
        tokens = logits.argmax(dim=-1, keepdim=True)  # a NaN counts as the largest
        self.tensors = {"greedy": torch.cat([tokens.double(), logits.gather(-1, tokens).double()], dim=1)}
        scores = _scores(logits, draws)
        if scores is not logits:
            tokens = scores.argmax(dim=-1, keepdim=True)
            self.tensors["changed"] = torch.cat([tokens.double(), scores.gather(-1, tokens).double()], dim=1)
        if self.drawing:
            drawn, more = _draw(scores, [draws[row] for row in self.drawing], self.drawing, width)
            self.tensors["drawn"] = torch.cat([drawn.double(), more.double()], dim=1)
            every = len(self.drawing) == len(draws)
            tokens = drawn if every else tokens.index_copy(0, _numbers(self.drawing, logits.device), drawn)
        if self._asking:
            logprobs = _rows(logits, self._asking).float().log_softmax(dim=-1)
            self.tensors["chosen"] = logprobs.gather(1, _rows(tokens, self._asking)).double()
            for top in {draws[row].params.logprobs or 0 for row in self._asking} - {0}:
                best = logprobs.topk(min(top, logprobs.shape[1]), dim=1)
                self.tensors[f"top {top}"] = torch.cat([best.indices.double(), best.values.double()], dim=1)

    def picked(self, found: _Found, row: int) -> SampledToken | InvalidLogits:
        """The row's token. ``found``: the tensors in RAM."""
        draw = self._draws[row]
        token, best = found["greedy"][row]
        if (why := invalid(best, draw)) is not None:
            return why
        if draw.changes_logits:
            token, best = found["changed"][row]
            if (why := invalid_changed(best, draw)) is not None:
                return why
        top = draw.params.logprobs
        if not draw.params.greedy:
            token = found["drawn"][self.drawing.index(row)][0]
        if top is None:
            return SampledToken(int(token))
        place = self._asking.index(row)
        (chosen,) = found["chosen"][place]
        if top == 0:
            return SampledToken(int(token), TokenLogprobs(chosen))
        both = found[f"top {top}"][place]
        ids, values = both[: len(both) // 2], both[len(both) // 2 :]
        pairs = tuple((int(one), value) for one, value in zip(ids, values, strict=True))
        return SampledToken(int(token), TokenLogprobs(chosen, pairs))


def _scores(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """What tokens are picked by: the logits, with the changes that some of the rows ask for."""
    rows = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not rows:
        return logits
    changed = changed_logits(_rows(logits, rows), [draws[row] for row in rows])
    if len(rows) == len(draws):
        return changed
    return logits.float().index_copy(0, _numbers(rows, logits.device), changed)


def _look(answers: Sequence[Mapping[str, torch.Tensor]]) -> list[_Found]:
    """All tensors in RAM, by one copy."""
    tensors = [tensor for one in answers for tensor in one.values()]
    if len(tensors) == 1:
        return [dict.fromkeys(answers[0], tensors[0].tolist())]
    numbers = iter(torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist())
    return [{name: _matrix(numbers, *tensor.shape) for name, tensor in one.items()} for one in answers]


def _matrix(numbers: Iterator[float], rows: int, columns: int) -> list[list[float]]:
    return [list(itertools.islice(numbers, columns)) for _ in range(rows)]


def _numbers(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(rows), device)


def _rows(matrix: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return matrix if len(rows) == len(matrix) else matrix[_numbers(rows, matrix.device)]


def _draw(
    logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each of the ``rows``, ``[m, 1]``, and whether more than ``width`` tokens have to be searched.

    Computed in float64, so that a device's order of summation does not matter. That is cheap compared with one read.
    """
    vocabulary = logits.shape[1]
    cut = [n for n, draw in enumerate(draws) if draw.params.top_p < 1 or 0 < draw.params.top_k < vocabulary]
    whole = sorted(set(range(len(draws))) - set(cut))
    knobs = to_device(torch.tensor([_knobs(draw, vocabulary) for draw in draws], dtype=torch.float64), logits.device)
    from_all = partial(_draw_from_all, any(draws[n].params.min_p > 0 for n in whole))
    chosen = [
        function(_rows(logits, [rows[n] for n in group]), _rows(knobs, group))
        for group, function in ((whole, from_all), (cut, partial(_draw_from_likeliest, draws, cut, width)))
        if group
    ]
    if len(chosen) == 1:
        return chosen[0]
    back = _numbers(sorted(range(len(draws)), key=[*whole, *cut].__getitem__), logits.device)
    tokens, more = (torch.cat(tensors)[back] for tensors in zip(*chosen, strict=True))
    return tokens, more


def _knobs(draw: Draw, vocabulary: int) -> tuple[float, ...]:
    params = draw.params
    top_k = params.top_k if 0 < params.top_k < vocabulary else vocabulary
    return params.temperature, uniform(draw.key, draw.position), top_k, params.top_p, params.min_p


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return logits.double().sub_(largest).div_(temperature).exp_()


def _draw_from_all(min_p_asked: bool, logits: torch.Tensor, knobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    temperature, number, min_p = knobs[:, 0:1], knobs[:, 1:2], knobs[:, 4:5]
    weights = _weights(logits, logits.amax(dim=1, keepdim=True), temperature)
    if min_p_asked:
        weights.masked_fill_(weights < min_p, 0)
    tokens = _drawn(weights.cumsum_(1), number)
    return tokens, torch.zeros_like(tokens)


def _drawn(below: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The inverse of the distribution functions ``below[m, n]`` at ``number[m, 1]``, as places ``[m, 1]``."""
    places = torch.searchsorted(below, below[:, -1:] * number, right=True)
    last = torch.searchsorted(below, below[:, -1:].contiguous())  # only excluded tokens follow
    return torch.minimum(places, last).clamp_(max=below.shape[1] - 1)


def _draw_from_likeliest(
    draws: Sequence[Draw], cut: Sequence[int], width: int, logits: torch.Tensor, knobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the tokens that top-k, then top-p, then min-p leave of the ``width`` likeliest."""
    temperature, number, top_k, top_p, min_p = (knobs[:, n : n + 1] for n in range(5))
    vocabulary = logits.shape[1]
    width = min(width, vocabulary)
    values, ids = logits.topk(width, dim=1)
    weights = _weights(values, values[:, :1], temperature)
    limited = top_k < vocabulary
    least = values.gather(1, top_k.long().clamp_(max=width) - 1)
    kept = (values >= least) | ~limited
    weights = weights.masked_fill_(~kept, 0)
    more = limited & ((top_k > width) | (values[:, -1:] >= least))
    if any(draws[n].params.top_p < 1 for n in cut):
        total = weights.sum(dim=1, keepdim=True)
        if any(not 0 < draws[n].params.top_k < vocabulary for n in cut):
            everything = _weights(logits, values[:, :1], temperature).sum(dim=1, keepdim=True)
            total = torch.where(limited, total, everything)
        share = top_p * total
        before = weights.cumsum(1) - weights
        inside = ((before < share) & kept).sum(dim=1, keepdim=True)
        edge = weights.gather(1, (inside - 1).clamp_(min=0))
        open_ended = (top_p < 1) & ~limited & ((weights.sum(dim=1, keepdim=True) < share) | (weights[:, -1:] >= edge))
        more = more | open_ended
        weights = weights.masked_fill_((weights < edge) & (top_p < 1), 0)
    weights.masked_fill_(weights < min_p, 0)
    ids, order = ids.sort(dim=1)
    place = _drawn(weights.gather(1, order).cumsum_(1), number)
    return ids.gather(1, place), (more & (width < vocabulary)).long()
