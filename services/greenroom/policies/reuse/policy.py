"""Reuse: what each running sequence used before predicts what it uses next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Counts, Ids, Keys, Scores
from greenroom.policies.base.events import Artifact, LayerRouting, SequenceEnd, SequenceInfo
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.prefetching.look_ahead import LookAhead
from greenroom.policies.reuse.chances import REUSE
from greenroom.policies.reuse.replacement import ReuseRetention

_MARGIN = 2.0
"""A prefetch must be worth this many times its victim: a slot is taken early, and for a guess."""


class Reuse(LookAhead):
    """Keeps what is expected to be used soonest, and prefetches for all later layers of the step what is likely enough.

    ``ReuseRetention`` chooses the victims, by the expected time to next use: a regression on moving averages of the
    routing of each running sequence and of all. Prefetching uses the same chances; for the next ``layers`` layers it
    uses what their routers say of the running rows instead (``LookAhead``). After every layer's router each expert of a
    later layer whose chance is at least ``least`` has the priority chance · (1 − (fl − l) / L), as in MoE-Infinity's
    Algorithm 1.

    Wanted experts are not spared: their chance is in their worth already, and with many sequences nearly every later
    expert is wanted. A prefetch displaces only experts worth less than half as much.

    Coefficients come as the artifact ``reuse``; until then those of another model are used.
    """

    artifacts = frozenset({REUSE})
    only_ahead = False

    def __init__(self, catalogue: Catalogue, *, layers: int = 2, least: float = 0.7, evict: bool = True) -> None:
        """Raises InvalidConfig for values out of range."""
        self.reuse = ReuseRetention(catalogue)
        super().__init__(catalogue, layers=layers, least=least, evict=evict)
        after = catalogue.layer_of - np.arange(catalogue.layers)[:, None]
        self._decays: Scores = np.where(after > 0, 1 - after / catalogue.layers, 0).astype(np.float32)

    def _rule(self, name: str) -> RankingPolicy:
        return self.reuse

    @property
    def version(self) -> str:
        """The version of the coefficients in use."""
        return self.reuse.version

    def past_logits(self, sequences: Ids) -> Scores:
        return self.reuse.chances.past_logits(sequences)

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        self.reuse.on_artifact_swapped(artifact)

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self.reuse.on_sequence_preempted(sequence)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self.reuse.on_sequence_ended(sequence, end)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        self._want_later(routing.layer)

    def _kept(self, worth: Worth) -> Worth:
        return worth

    def _worthier(self, incoming: Keys, worth: Worth, victim: float) -> bool:
        return bool((worth[incoming] > _MARGIN * victim).all())

    def _passed(self, layer: int) -> None:
        """Nothing: ``_want_later`` follows at every layer."""

    def _foreseen_chance(self, span: slice, ahead: Counts, chance: NDArray[np.float64]) -> None:
        self._want_foreseen(span, chance)

    def _want_foreseen(self, span: slice, chance: NDArray[np.floating]) -> None:
        """Want the keys of ``span`` by this ``chance[M]``, all others as before."""
        likely = chance >= self._least
        if self._wants_any or likely.any():
            priority = self._priority.copy()
            priority[span] = chance * likely * self._decays[self._layer, span]
            self._want(priority)

    def _want_later(self, layer: int) -> None:
        later = slice(self.catalogue.spans[layer].stop, None)
        chance = self.reuse.expected()[later]
        likely = chance >= self._least
        if self._wants_any or likely.any():
            priority = np.zeros_like(self._priority)
            priority[later] = chance * likely * self._decays[layer, later]
            self._want(priority)
