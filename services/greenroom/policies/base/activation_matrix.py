"""Expert activation matrices: which experts the tokens of each running sequence were routed to (MoE-Infinity, §4)."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_keys import Catalogue

Matrix = NDArray[np.float32]
Rows = NDArray[np.intp]
TINY: Final = np.finfo(np.float32).tiny
"""Divisor in place of 0: nothing divided by it stays nothing."""
_FIRST_ROOM = 4


class ActivationMatrices:
    """An EAM for each running sequence: tokens by expert, prefill and decode together, never reset between steps.

    A sequence has a row in every array from its first token to ``end``; ``rows`` says which. ``counts[row, N]``: the
    EAM over all keys, a layer's part of which sums to k times its tokens. ``ratios[row, N]``: the same, each layer's
    divided by its sum (0 where the layer has had no token yet).
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.rows: dict[int, int] = {}
        self._free = list(range(_FIRST_ROOM))
        self.counts: Matrix = np.zeros((_FIRST_ROOM, catalogue.size), dtype=np.float32)
        self.ratios: Matrix = np.zeros((_FIRST_ROOM, catalogue.size), dtype=np.float32)

    @property
    def room(self) -> int:
        """Sequences that the arrays have rows for."""
        return len(self.counts)

    def rows_of(self, sequences: Counts) -> Rows:
        """The row of each sequence. A new sequence gets one, which may make the arrays longer."""
        known = self.rows
        return np.array([known[one] if one in known else self._begin(one) for one in sequences.tolist()], dtype=np.intp)

    def add(self, routing: LayerRouting, rows: Rows) -> None:
        """Count a routed layer. ``rows``: those of the step's sequences."""
        span = self.catalogue.spans[routing.layer]
        if len(rows) == 1:  # all tokens are its own
            row = rows.item()
            self.counts[row, routing.experts] += routing.rows
            counts = self.counts[row, span]
            np.multiply(counts, 1 / max(float(counts.sum()), float(TINY)), out=self.ratios[row, span])
            return
        counts = self.counts[rows, span] + tokens_by_sequence(routing)
        self.counts[rows, span] = counts
        self.ratios[rows, span] = counts / np.maximum(counts.sum(axis=1, keepdims=True), TINY)

    def end(self, sequence: int) -> int | None:
        """Free the sequence's row and return it; None for a sequence that never had a token."""
        row = self.rows.pop(sequence, None)
        if row is not None:
            self.counts[row] = 0
            self.ratios[row] = 0
            self._free.append(row)
        return row

    def _begin(self, sequence: int) -> int:
        if not self._free:
            self._free = list(range(self.room, 2 * self.room))
            self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.ratios = np.concatenate((self.ratios, np.zeros_like(self.ratios)))
        row = self._free.pop(0)
        self.rows[sequence] = row
        return row


class Tokens(NamedTuple):
    """Of one layer: ``tokens[m]`` of the sequence ``owners[m]`` went to ``experts[m]``, an index within the layer.

    Owners are places among the step's sequences. They ascend; a sequence without tokens is left out.
    """

    owners: Rows
    experts: Rows
    tokens: Matrix


def tokens_by_expert(routing: LayerRouting) -> Tokens:
    """The entries of ``tokens_by_sequence`` that are not 0."""
    if len(routing.step.sequences) == 1:
        experts = routing.experts - routing.catalogue.spans[routing.layer].start
        return Tokens(np.zeros(len(experts), dtype=np.intp), experts, routing.rows.astype(np.float32))
    layer = tokens_by_sequence(routing)
    owners, experts = layer.nonzero()
    return Tokens(owners, experts, layer[owners, experts])


def tokens_by_sequence(routing: LayerRouting) -> NDArray[np.float32]:
    """``[S, experts of the layer]``: tokens of each of the step's sequences.

    Where the router's picks were not recorded for every row, each sequence gets a share of each expert's rows, in
    proportion to its own rows in the step.
    """
    if routing.picks is not None and len(routing.picks) == routing.step.rows:
        return routing.by_sequence().astype(np.float32)
    step, span = routing.step, routing.catalogue.spans[routing.layer]
    layer = np.zeros(span.stop - span.start, dtype=np.float32)
    layer[routing.experts - span.start] = routing.rows
    share = np.bincount(step.sequence_of_row, minlength=len(step.sequences)) / max(step.rows, 1)
    return np.outer(share, layer).astype(np.float32)
