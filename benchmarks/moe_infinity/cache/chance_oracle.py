"""How far a synthetic trace can be predicted: a policy that knows what picks are drawn from, but not the draws.

Nothing that learns from the past can know more. It is no bound as Belady's is, because its eviction rule is a plain
one. What it misses against Belady is chance.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.moe_infinity.synthetic_routing import Mix
from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, Step, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.victim_selection import lowest

NEVER: Final = 1e-6
"""The least chance of a use in a step."""

Chances = NDArray[np.float64]


class Informed(ExpertPolicy):
    """Evicts the expert whose next use is expected latest: 1 / chance steps, less one, and the layers until its turn.

    The chance is the true one that a step uses the expert. ``shares[sequences, N]``: what each sequence's picks are
    drawn from. Running sequences use a decoder's expert; the next sequence to come, which may be any, uses an
    encoder's.
    """

    def __init__(self, catalogue: Catalogue, shares: NDArray[np.float32], mix: Mix) -> None:
        super().__init__(catalogue)
        self._picks = shares.astype(np.float64) * catalogue.top_k[catalogue.layer_of] * (1 - mix.locality)
        self._locality = mix.locality
        self._running: dict[int, Keys] = {}
        """By sequence the keys that its last token picked."""
        self._step: Step | None = None
        self._layer = 0
        self._in_encoder = catalogue.layer_of < catalogue.decoder_start
        comes = mix.at_once / (1 + mix.output_tokens)  # sequences a step
        of_one = (1 - np.exp(-self._picks * mix.prompt_tokens)).mean(axis=0)
        self._encoded: Chances = 1 - np.exp(-comes * of_one)
        self._chance: Chances = np.where(self._in_encoder, self._encoded, 0.0)

    def on_sequence_started(self, sequence: SequenceInfo) -> None:
        self._running[sequence.sequence] = NO_KEYS

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        del self._running[sequence]

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._layer = routing.layer
        if routing.step is not self._step:
            self._step = routing.step
            self._reckon(slice(0, self.catalogue.size))
        if routing.layer >= self.catalogue.decoder_start:
            self._note(routing)
            self._reckon(self.catalogue.spans[routing.layer])

    def _note(self, routing: LayerRouting) -> None:
        assert routing.picks is not None, "a trace has the picks"
        span = self.catalogue.spans[routing.layer]
        for sequence, picks in zip(routing.step.row_sequences.tolist(), routing.picks, strict=True):
            before = self._running[sequence]
            others = before[(before < span.start) | (before >= span.stop)]
            keys = picks.astype(np.int64) + span.start
            self._running[sequence] = np.concatenate((others, keys[keys < span.stop]))

    def _reckon(self, span: slice) -> None:
        """The chances of the keys of ``span``. A pick may be repeated by the next token: that adds ``locality``."""
        misses = 1 - self._picks[list(self._running), span]
        for row, last in enumerate(self._running.values()):
            own = last[(last >= span.start) & (last < span.stop)] - span.start
            misses[row, own] -= self._locality
        used = 1 - np.maximum(misses, NEVER).prod(axis=0)
        self._chance[span] = np.where(self._in_encoder[span], self._encoded[span], used)

    def victims(self, request: VictimRequest) -> Keys:
        layers = self.catalogue.layers
        ahead = ((self.catalogue.layer_of - self._layer - 1) % layers + 1) / layers
        return lowest(self.catalogue, request, 1 - ahead - 1 / np.maximum(self._chance, NEVER))
