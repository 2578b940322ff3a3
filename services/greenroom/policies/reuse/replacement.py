"""Retention by the expected time to next use, by a regression on what each running sequence used before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact, LayerRouting, SequenceEnd, SequenceInfo
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.replacement.next_use import NextUse
from greenroom.policies.reuse.chances import REUSE, Coefficients, ReuseChances


class ReuseRetention(NextUse):
    """``NextUse`` with a better chance for each layer's next turn: that of the running sequences, each by its own
    routing (``ReuseChances``). Later turns count by the chance over all sequences, as in ``NextUse``.

    Coefficients come as the artifact ``reuse``; until then those of another model are used.
    """

    def __init__(self, catalogue: Catalogue, *, horizon: float = 0.5) -> None:
        """Raises InvalidConfig for a horizon that is not above 0."""
        super().__init__(catalogue, horizon=horizon)
        self.chances = ReuseChances(catalogue, Coefficients.untraced(catalogue))
        self.version = ""
        """The version of the coefficients in use."""
        self._encoding: NDArray[np.bool_] | None = None
        if catalogue.decoder_start:
            self._encoding = catalogue.layer_of < catalogue.decoder_start

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        """Ignores an artifact of another kind or shape, which its sender has reported."""
        if artifact.kind != REUSE:
            return
        try:
            coefficients = Coefficients.of_artifact(self.catalogue, artifact)
        except InvalidConfig:
            return
        self.version = artifact.version
        self.chances.swap(coefficients)
        self._worth = None

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        self.chances.add(routing)

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self.on_sequence_ended(sequence.sequence, SequenceEnd.CANCELLED)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self.chances.end(sequence)
        self._worth = None

    def next_turn(self) -> Worth:
        soon = self.chances.soon
        if self._encoding is None:
            return soon
        # The encoder's next turn is for sequences that have not come yet.
        return np.where(self._encoding, super().next_turn(), soon)
