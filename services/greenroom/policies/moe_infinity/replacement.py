"""MoE-Infinity's replacement rule (§6, Algorithm 2)."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.policies.base.activation_matrix import ActivationMatrices, Matrix, Rows
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import LayerRouting, Phase, SequenceEnd, SequenceInfo, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth

EPSILON: Final = 1e-3
"""The ratio of an expert without tokens. Below any other ratio, so that the layer decides only among such experts."""


class ActivationRetention(RankingPolicy):
    """Evicts the expert of the least (ratio + ε) · (1 − l / L).

    *ratio*: the share of its layer's tokens that the running sequences sent to it, summed over them (Algorithm 2, steps
    6 and 7: of one sequence). *l*: its layer of L, so that the first layers stay, which nothing could predict (step 8).
    Once an encoder-decoder has encoded, l counts from the decoder's first layer, with the encoder's layers after the
    decoder's last. A sequence that decodes no longer counts in the encoder's layers, since it will not use them again.
    ``by_ratio`` and ``by_layer`` switch one of the two factors off (§8.4).
    """

    def __init__(self, catalogue: Catalogue, *, by_ratio: bool = True, by_layer: bool = True) -> None:
        super().__init__(catalogue)
        self.matrices = ActivationMatrices(catalogue)
        self._by_ratio = by_ratio
        self._ratios: Matrix = np.zeros(catalogue.size, dtype=np.float32)
        self._decays = {
            start: _layer_decay(catalogue, start, by_layer=by_layer) for start in (0, catalogue.decoder_start)
        }
        self._decay = self._decays[0]
        self._worth: Matrix | None = None  # [N], until it changes: a layer may ask more than once
        self._step: Step | None = None
        self._rows: Rows = np.empty(0, dtype=np.intp)
        self.encoder = slice(0, int(catalogue.first[catalogue.decoder_start]))
        """The keys of the encoder's layers; empty in a model without an encoder."""
        self.encodes: Mask = np.ones(self.matrices.room, dtype=np.bool_)
        """By row of ``matrices``: whether its sequence may still use the encoder's layers."""

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self.add(routing)

    def add(self, routing: LayerRouting) -> Rows:
        """Count the layer's tokens. Returns the rows of ``matrices`` that they belong to."""
        if routing.step is not self._step:
            self._begin(routing.step)
        rows = self._rows
        if not len(rows):
            return rows
        self.matrices.add(routing, rows)
        self._worth = None
        span = self.catalogue.spans[routing.layer]
        if routing.layer < self.catalogue.decoder_start:
            self._sum_encoder(span)
        elif len(self.matrices.rows) == 1:
            self._ratios[span] = self.matrices.ratios[rows.item(), span]
        else:
            self.matrices.ratios[:, span].sum(axis=0, out=self._ratios[span])  # free rows are 0
        return rows

    def _begin(self, step: Step) -> None:
        """Find what is the same for all layers of the step."""
        self._step = step
        self._worth = None
        self._rows = self.matrices.rows_of(step.sequences)
        self._decay = self._decays[0 if step.phase is Phase.ENCODE else self.catalogue.decoder_start]
        if self.catalogue.decoder_start:
            self.encodes = np.concatenate((self.encodes, np.ones(self.matrices.room - len(self.encodes), np.bool_)))
            self.encodes[self._rows[np.unique(step.sequence_of_row[step.row_phases != Phase.ENCODE])]] = False
            self._sum_encoder(self.encoder)

    def _sum_encoder(self, span: slice) -> None:
        """Sum the ratios of sequences that encode, over the keys of ``span``."""
        self._ratios[span] = self.matrices.ratios[self.encodes, span].sum(axis=0)

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self.end(sequence.sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self.end(sequence)

    def end(self, sequence: int) -> int | None:
        """Free the sequence's row and return it; None where it had none."""
        row = self.matrices.end(sequence)
        if row is not None:
            self._step = self._worth = None  # a known sequence may get another row
            self.matrices.ratios.sum(axis=0, out=self._ratios)
            if self.catalogue.decoder_start:
                self.encodes[row] = True
                self._sum_encoder(self.encoder)
        return row

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        if self._worth is None:
            self._worth = (self._ratios + np.float32(EPSILON)) * self._decay if self._by_ratio else self._decay
        return self._worth, None


def _layer_decay(catalogue: Catalogue, start: int = 0, *, by_layer: bool = True) -> Matrix:
    """``[N]``: 1 − l / L, with l counted from ``start``; 1 everywhere without ``by_layer``."""
    if not by_layer:
        return np.ones(catalogue.size, dtype=np.float32)
    layer = (catalogue.layer_of - start) % catalogue.layers
    decay: Matrix = (1 - layer / catalogue.layers).astype(np.float32)
    return decay
