"""ExpertFlow's expert caching as it is printed: ``expertflow:literal=true``."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.array_types import NO_KEYS, Keys, Mask, Scores
from greenroom.policies.base.events import LayerRouting, Reason, Step, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch
from greenroom.policies.base.victim_selection import Worth, lowest
from greenroom.policies.expertflow.policy import PATHS
from greenroom.policies.replacement.lru import Recency

_ACTIVE = 0.5
"""An expert counts as active for a row from this chance on: the path matrix is binary (section 3.1.2)."""


class LiteralExpertFlow(ExpertPolicy):
    """The experts on the foretold paths are fetched from before the first layer on, nearer layers first, as many as
    there are slots; a layer that has run frees room for the next (section 3.2.1).

    An expert is on a path where its chance is at least ½ for any row. Nothing is compared: whatever the step needs no
    more leaves, the least recently used first. Correction (section 3.2.2): for a miss that expert leaves first which
    was fetched for the running layer and is idle, then those of layers that have run, then others that are idle. What
    later layers are foretold to need leaves last, the farthest first, and no prefetch displaces it.
    """

    artifacts = frozenset({PATHS})
    only_ahead = True

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._recency = Recency(catalogue.size)
        self._layer = -1
        self._foretold: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        """Of the running layer and those to come."""
        self._nearer: Scores = (catalogue.layers - catalogue.layer_of).astype(np.float32)

    def on_step_started(self, step: Step) -> None:
        self._layer = -1
        had = bool(self._foretold.any())
        self._foretold = np.zeros(self.catalogue.size, dtype=np.bool_)
        if step.row_paths is not None:
            active: Mask = np.asarray((step.row_paths >= _ACTIVE).any(axis=0))
            self._foretold = active
        if had or self._foretold.any():
            self._want()

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)
        self._layer = routing.layer
        later = self.catalogue.layer_of > routing.layer
        if (self._foretold & ~later).any():
            self._foretold = self._foretold & later
            self._want()

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def victims(self, request: VictimRequest) -> Keys:
        victims = lowest(self.catalogue, request, self._worth())
        if request.reason is Reason.PREFETCH and request.tier is Tier.DEVICE and self._foretold[victims].any():
            return NO_KEYS
        return victims

    def _worth(self) -> Worth:
        """``[N]``: in the order in which they leave. Experts that the running layer uses can not be asked about."""
        layer_of, last = self.catalogue.layer_of, np.maximum(self._recency.last, 0)  # of never used ones it is below
        latest = int(last.max()) + 1
        group = np.where(layer_of == self._layer, 0, np.where(layer_of < self._layer, 1, 2))
        worth = group * latest + last
        return np.where(self._foretold, 3 * latest + self.catalogue.layers - layer_of, worth)

    def _want(self) -> None:
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        self.prefetch = Prefetch(generation, np.where(self._foretold, self._nearer, 0).astype(np.float32))
