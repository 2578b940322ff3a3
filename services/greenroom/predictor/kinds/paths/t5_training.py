"""The form ``t5`` out of recorded routing (ExpertFlow, sections 3.1.2 and 5.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import FIRST_TOKEN, T5, UNKNOWN, T5Shape
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.predictor.kinds.paths.t5 import T5PathNetwork
from greenroom.predictor.kinds.paths.t5_start import Start, counted_start
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace

LEAST_TOKENS: Final = 500
"""Fewer say less of a token than chance does."""
_MEASURED: Final = 4000
"""Held-out tokens that recall is measured on after an epoch."""
_CHUNK: Final = 8192
"""Tokens that are counted together."""
_MOST_COUNTED: Final = 2**26
"""Known tokens × experts: what each token picked is counted before training."""

Progress = Callable[[float], object]
"""Is told which share of the training is done."""


@dataclass(frozen=True, slots=True)
class T5Options:
    """``batch``, ``learning_rate`` and ``weight_decay`` are the paper's. Sequences are cut into pieces of ``piece``
    tokens, elsewhere in each epoch; a batch has ``batch`` of them. ``unknown``: this share of the tokens is learnt from
    as if it were not known. ``held_out``: the share of the sequences that are not learnt from, the last ones.
    ``seconds``: in which it is to be done; the rate of learning has then fallen to 0, whatever was seen.
    """

    shape: T5Shape = field(default_factory=T5Shape)
    epochs: int = 20
    batch: int = 16
    piece: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    dropout: float = 0.1
    unknown: float = 0.1
    believed_after: float = 4.0
    held_out: float = 0.1
    seed: int = 0
    seconds: float | None = None


def fit_t5(
    trace: RoutingTrace,
    prompts: Sequence[NDArray[np.integer]] | None = None,
    options: T5Options | None = None,
    *,
    on_progress: Progress = lambda _: None,
    now: Callable[[], float] = time.monotonic,
) -> PathsFile:
    """``prompts``: of each sequence, in the trace's token ids, where the trace has no rows of them.

    The same routing, seed and number of threads give the same network on the same machine, where ``seconds`` suffice.
    Raises InvalidConfig where there is too little to learn from.
    """
    began, options = now(), options or T5Options()
    options.shape.check()
    learnt = sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS)
    samples = _Samples.of(trace, prompts, options.shape, learnt)
    random = np.random.default_rng(options.seed)
    before = torch.get_rng_state()
    torch.manual_seed(options.seed)
    try:
        network = T5PathNetwork(options.shape, len(samples.tokens), samples.size, dropout=options.dropout)
        network.begin_with(samples.start(learnt, options, random))
        recalls = _learn(network, samples, learnt, options, random, on_progress, now)
    finally:
        torch.set_rng_state(before)
    shape = np.array(options.shape, dtype=np.uint16)
    return PathsFile(
        model=trace.model,
        experts_per_layer=tuple(trace.experts_per_layer.tolist()),
        sequences=trace.sequences,
        form=T5,
        vocabulary=samples.vocabulary,
        tensors={"shape": shape, "tokens": samples.tokens.astype(np.uint32), **network.tensors()},
        report={
            "epochs": len(recalls) - 1,
            "parameters": sum(one.numel() for one in network.parameters()),
            "known_tokens": len(samples.tokens),
            "learnt_tokens": int(trace.seq_starts[learnt]),
            "held_out_recall": round(recalls[-1], 4),
            "recall_by_epoch": [round(one, 4) for one in recalls],
            "seconds": round(now() - began, 1),
        },
    )


class _Samples:
    """The trace's tokens and prompts as rows of the embedding, and its picks as keys."""

    def __init__(
        self, trace: RoutingTrace, tokens: NDArray[np.int64], rows: NDArray[np.int64], prompts: list[NDArray[np.int64]]
    ) -> None:
        self.tokens = tokens
        self.vocabulary = int(tokens[-1]) + 1
        self._rows, self._prompts, self._starts = rows, prompts, trace.seq_starts
        self._experts, self._widths = trace.experts, trace.experts_per_layer
        self._first = np.concatenate(([0], np.cumsum(self._widths)[:-1]))
        self.size = int(self._widths.sum())
        self.sequences = trace.sequences

    @classmethod
    def of(
        cls, trace: RoutingTrace, prompts: Sequence[NDArray[np.integer]] | None, shape: T5Shape, learnt: int
    ) -> _Samples:
        """Raises InvalidConfig where the trace has no tokens, or other prompts than sequences."""
        if trace.token is None:
            raise InvalidConfig("trace", "no array token", "one that was recorded with its tokens")
        if prompts is not None and len(prompts) != trace.sequences:
            raise InvalidConfig("prompts", len(prompts), f"one for each of {trace.sequences} sequences")
        tokens = _known(trace.token[: int(trace.seq_starts[learnt])], int(trace.experts_per_layer.sum()))
        found = [] if prompts is None else [np.asarray(one, dtype=np.int64) for one in prompts]
        if prompts is None:
            asked = np.zeros(trace.tokens, bool) if trace.phase is None else trace.phase != Phase.DECODE
            for begin, end in zip(trace.seq_starts[:-1].tolist(), trace.seq_starts[1:].tolist(), strict=True):
                found.append(trace.token[begin:end][asked[begin:end]])
        read = [embedding_rows(tokens, one[-shape.prompt :]) for one in found]
        read = [one if len(one) else np.array([UNKNOWN]) for one in read]
        return cls(trace, tokens, embedding_rows(tokens, trace.token), read)

    def start(self, sequences: int, options: T5Options, random: np.random.Generator) -> Start:
        """What the first sequences' tokens picked."""
        rows = self._rows[: int(self._starts[sequences])]
        picks = np.zeros((len(self.tokens) + FIRST_TOKEN, self.size), dtype=np.float32)
        for begin in range(0, len(rows), _CHUNK):
            some = rows[begin : begin + _CHUNK]
            token, key = self._picked(begin, begin + len(some))
            np.add.at(picks, (some[token], key), 1)
        count = np.bincount(rows, minlength=len(picks))
        return counted_start(count, picks, options.shape.width, options.believed_after, random)

    def pieces(self, sequences: range, length: int, random: np.random.Generator | None) -> list[tuple[int, int, int]]:
        """Sequence, first row and row behind the last. With ``random`` the first of each is shorter by chance."""
        found = []
        for sequence in sequences:
            begin, end = int(self._starts[sequence]), int(self._starts[sequence + 1])
            cut = begin - (0 if random is None else int(random.integers(length)))
            found += [(sequence, max(begin, at), min(end, at + length)) for at in range(cut, end, length)]
        return [one for one in found if one[1] < one[2]]

    def batch(self, pieces: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts ``[B, P]``, tokens ``[B, T]`` and what was picked, ``[B, T, N]`` of 0 and 1."""
        length = max(end - begin for _, begin, end in pieces)
        longest = max(len(self._prompts[sequence]) for sequence, _, _ in pieces)
        prompts = np.zeros((len(pieces), longest), dtype=np.int64)
        tokens = np.zeros((len(pieces), length), dtype=np.int64)
        picked = np.zeros((len(pieces), length, self.size), dtype=np.float32)
        for place, (sequence, begin, end) in enumerate(pieces):
            prompt = self._prompts[sequence]
            prompts[place, : len(prompt)] = prompt
            tokens[place, : end - begin] = self._rows[begin:end]
            picked[place][self._picked(begin, end)] = 1
        return torch.from_numpy(prompts), torch.from_numpy(tokens), torch.from_numpy(picked)

    def _picked(self, begin: int, end: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Each pick of these rows: which of them, and the expert's key."""
        experts = self._experts[begin:end].astype(np.int64)
        rows, layers, slots = np.nonzero(experts < self._widths[:, None])
        return rows, experts[rows, layers, slots] + self._first[layers]

    def hits(self, scores: NDArray[np.float32], picked: NDArray[np.float32]) -> tuple[int, int]:
        """Of the picks ``picked[rows, N]`` those among the likeliest of their layer, as many as were picked; and all."""
        hits = 0
        for first, width in zip(self._first.tolist(), self._widths.tolist(), strict=True):
            layer, truth = scores[:, first : first + width], picked[:, first : first + width]
            order = np.argsort(-layer, axis=1, kind="stable")
            among = np.arange(width) < truth.sum(axis=1, keepdims=True)
            hits += int((np.take_along_axis(truth, order, axis=1) * among).sum())
        return hits, int(picked.sum())


def _known(tokens: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """The ids that are seen, ascending. Where they are too many for what is counted of each, the ones most seen."""
    found, count = np.unique(tokens, return_counts=True)
    most = max(1, _MOST_COUNTED // experts - FIRST_TOKEN)
    if len(found) > most:
        found = np.sort(found[np.argsort(-count, kind="stable")[:most]])
    return found


def embedding_rows(known: NDArray[np.integer], tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each of ``tokens`` lies in the embedding; ``known`` ascends."""
    place = np.searchsorted(known, tokens)
    place[place == len(known)] = 0
    found = known[place] == tokens if len(known) else np.zeros(len(tokens), bool)
    return np.where(found, place + FIRST_TOKEN, UNKNOWN).astype(np.int64)


class _Schedule:
    """How much of the training is done: by steps, or by time where that ends sooner."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self._seconds, self._now, self._began = seconds, now, now()

    def share(self, by_steps: float) -> float:
        by_time = 0.0 if self._seconds is None else (self._now() - self._began) / max(self._seconds, 1e-9)
        return min(1.0, max(by_steps, by_time))


def _learn(
    network: T5PathNetwork,
    samples: _Samples,
    learnt: int,
    options: T5Options,
    random: np.random.Generator,
    on_progress: Progress,
    now: Callable[[], float],
) -> list[float]:
    """Held-out recall after each epoch, at least one. The rate of learning falls to 0 along a cosine."""
    optimiser = torch.optim.AdamW(network.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    schedule, done = _Schedule(options.seconds, now), 0.0
    recalls = [held_out_recall(network, samples, learnt, options, most=_MEASURED)]
    for epoch in range(options.epochs):
        network.train()
        batches = list(_batches(samples.pieces(range(learnt), options.piece, random), options.batch, random))
        for number, pieces in enumerate(batches):
            for group in optimiser.param_groups:
                group["lr"] = options.learning_rate * (1 + math.cos(math.pi * done)) / 2
            _step(network, optimiser, samples.batch(pieces), options.unknown)
            done = schedule.share((epoch + (number + 1) / len(batches)) / options.epochs)
            on_progress(done)
            if done >= 1:
                break
        recalls.append(held_out_recall(network, samples, learnt, options, most=None if done >= 1 else _MEASURED))
        if done >= 1:
            break
    return recalls


def _batches(
    pieces: list[tuple[int, int, int]], size: int, random: np.random.Generator
) -> Iterator[list[tuple[int, int, int]]]:
    order = random.permutation(len(pieces))
    for start in range(0, len(pieces), size):
        yield [pieces[place] for place in order[start : start + size]]


def _step(
    network: T5PathNetwork,
    optimiser: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    unknown: float,
) -> None:
    prompts, tokens, picked = batch
    real = tokens != 0
    hidden = real & (torch.rand(tokens.shape) < unknown)
    logits = network(prompts, torch.where(hidden, UNKNOWN, tokens))[real]
    # A sum over layers, as Eq. 3 has it, is the same but for a factor, which Adam does not feel.
    loss = nn.functional.binary_cross_entropy_with_logits(logits, picked[real])
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()


def held_out_recall(
    network: T5PathNetwork, samples: _Samples, learnt: int, options: T5Options, *, most: int | None = None
) -> float:
    """Of the held-out tokens' picks the share that is among the likeliest of its layer, as many as were picked."""
    network.eval()
    hits = total = rows = 0
    length = max(options.piece, 8 * options.shape.window)
    pieces = samples.pieces(range(learnt, samples.sequences), length, None)
    with torch.inference_mode():
        for one in pieces:
            prompts, tokens, picked = samples.batch([one])
            found = network(prompts, tokens)[0].numpy()
            hit, count = samples.hits(found, picked[0].numpy())
            hits, total, rows = hits + hit, total + count, rows + len(found)
            if most is not None and rows >= most:
                break
    return hits / max(1, total)
