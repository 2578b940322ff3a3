"""A trace's tokens, prompts and picks, as the training of the form ``t5`` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenroom.core.artifacts.paths_forms.t5 import FIRST_TOKEN, UNKNOWN
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.predictor.kinds.paths.counts import in_sequences
from greenroom.predictor.kinds.paths.t5_past import foreseen
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import tokens_of

_CHUNK: Final = 8192
"""Tokens that are counted together."""
_MOST_COUNTED: Final = 2**26
"""Known tokens × experts: what each token picked is counted before training."""


class Piece(NamedTuple):
    """Rows ``begin`` to ``end`` of a sequence."""

    sequence: int
    begin: int
    end: int


class Batch(NamedTuple):
    """``prompts[B, P]`` and ``tokens[B, T]``, rows of the embedding, filled up by 0; ``picked[B, T, N]``: 0 and 1."""

    prompts: Tensor
    tokens: Tensor
    picked: Tensor


class TokenSamples:
    """The trace's tokens and prompts as rows of the embedding, and its picks as keys."""

    def __init__(
        self, trace: RoutingTrace, tokens: NDArray[np.int64], rows: NDArray[np.int64], prompts: list[NDArray[np.int64]]
    ) -> None:
        self.tokens = tokens
        self.vocabulary = int(tokens.max(initial=0)) + 1
        self._rows, self._prompts, self._starts = rows, prompts, trace.seq_starts
        self._experts, self._widths = trace.experts, trace.experts_per_layer
        self._first = np.concatenate(([0], np.cumsum(self._widths)[:-1]))
        self.size = int(self._widths.sum())
        self.sequences = trace.sequences

    @classmethod
    def of(
        cls,
        trace: RoutingTrace,
        prompts: Sequence[NDArray[np.integer]] | None,
        longest_prompt: int,
        learnt: int,
        least_sequences: int = 1,
    ) -> TokenSamples:
        """Tokens that fewer than ``least_sequences`` of the ``learnt`` sequences have are not known. Raises
        TraceError where the trace has no tokens, InvalidConfig for other prompts than sequences.
        """
        ids = tokens_of(trace)
        if prompts is not None and len(prompts) != trace.sequences:
            raise InvalidConfig("prompts", len(prompts), f"one for each of {trace.sequences} sequences")
        some = ids[: int(trace.seq_starts[learnt])]
        shared_by = in_sequences(some, np.repeat(np.arange(learnt), np.diff(trace.seq_starts[: learnt + 1])))
        tokens = _known(some[shared_by >= least_sequences], int(trace.experts_per_layer.sum()))
        found = [] if prompts is None else [np.asarray(one, dtype=np.int64) for one in prompts]
        if prompts is None:
            asked = np.zeros(trace.tokens, bool) if trace.phase is None else trace.phase != Phase.DECODE
            for begin, end in zip(trace.seq_starts[:-1].tolist(), trace.seq_starts[1:].tolist(), strict=True):
                found.append(ids[begin:end][asked[begin:end]])
        read = [embedding_rows(tokens, one[-longest_prompt:]) for one in found]
        read = [one if len(one) else np.array([UNKNOWN]) for one in read]
        return cls(trace, tokens, embedding_rows(tokens, ids), read)

    def counted(self, sequences: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """``[V]``: how often the first sequences have each row of the embedding; ``[V, N]``: what it picked."""
        rows = self._rows[: int(self._starts[sequences])]
        picks = np.zeros((len(self.tokens) + FIRST_TOKEN, self.size), dtype=np.float32)
        for begin in range(0, len(rows), _CHUNK):
            some = rows[begin : begin + _CHUNK]
            token, key = self._picked(begin, begin + len(some))
            np.add.at(picks.reshape(-1), some[token] * self.size + key, 1)
        return np.bincount(rows, minlength=len(picks)), picks

    def pieces(self, sequences: range, length: int, random: np.random.Generator | None) -> list[Piece]:
        """Sequence, first row and row behind the last. With ``random`` the first of each is shorter by chance."""
        found = []
        for sequence in sequences:
            begin, end = int(self._starts[sequence]), int(self._starts[sequence + 1])
            cut = begin - (0 if random is None else int(random.integers(length)))
            found += [Piece(sequence, max(begin, at), min(end, at + length)) for at in range(cut, end, length)]
        return [one for one in found if one.begin < one.end]

    def batch(self, pieces: Sequence[Piece]) -> Batch:
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
        return Batch(torch.from_numpy(prompts), torch.from_numpy(tokens), torch.from_numpy(picked))

    def _picked(self, begin: int, end: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Each pick of these rows: which of them, and the expert's key."""
        experts = self._experts[begin:end].astype(np.int64)
        rows, layers, slots = np.nonzero(experts < self._widths[:, None])
        return rows, experts[rows, layers, slots] + self._first[layers]

    def unknown(self, rows: slice) -> NDArray[np.bool_]:
        """Which rows' tokens were not learnt from."""
        found: NDArray[np.bool_] = self._rows[rows] == UNKNOWN
        return found

    def hits(self, scores: NDArray[np.float32], picked: NDArray[np.float32]) -> tuple[float, float]:
        """Of the picks ``picked[rows, N]`` those among the likeliest of their layer, as many as were picked; and how
        many there are."""
        hits, ends = 0.0, np.cumsum(self._widths)[:-1]
        for layer, truth in zip(np.split(scores, ends, axis=1), np.split(picked, ends, axis=1), strict=True):
            hits += foreseen(layer, truth)
        return hits, float(picked.sum())


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
