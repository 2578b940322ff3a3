"""ExpertFlow: experts are fetched by routing paths that were foretold from tokens, before the forward."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.events import ROUTER, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.foresight.blended_reuse import BlendedReuse
from greenroom.policies.foresight.path_weights import PATH
from greenroom.policies.reuse.chances import REUSE

PATHS: Final = "paths"
"""The kind of artifact by which paths are foretold from tokens. Whoever drives the batch uses it (``TokenPaths``)."""


class ExpertFlow(BlendedReuse):
    """Predictive locality-aware expert caching (section 3.2.1): the chances of all layers are known before the first.

    An expert's chance in a step is 1 − Π(1 − p) over its rows, with p as foretold of each row's token. From before
    layer 0 on all that is likely enough is wanted, nearer layers first, and a layer that has run frees room for the
    next. For the next layers what routers run ahead and the token's path so far say is blended in.

    Correction (section 3.2.2): misses overtake everything, wants of passed layers are withdrawn, and who leaves is
    chosen by the expected time to next use, with the foretold chance for layers to come: what was foretold for the
    running layer and is not used is worth what its next step is worth.

    Without foretold paths it is ``BlendedReuse``.
    """

    asks = frozenset({ROUTER, PATH})
    artifacts = frozenset({REUSE, PATH, PATHS})
    reads_tokens = True

    def __init__(self, catalogue: Catalogue, *, layers: int = 2, least: float = 0.5, evict: bool = True) -> None:
        """Raises InvalidConfig for values out of range."""
        super().__init__(catalogue, layers=layers, least=least, evict=evict)
        self._before: Scores = (1 - catalogue.layer_of / (catalogue.layers + 1)).astype(np.float32)
        """The decays of a step that has not reached its first layer."""

    def on_step_started(self, step: Step) -> None:
        super().on_step_started(step)
        if self._from_tokens is None or step.row_paths is None:
            return
        none = np.multiply.reduce(1 - np.fmin(np.fmax(step.row_paths, 0), 1), axis=0)
        chance = 1 - none
        self.reuse.expect(slice(0, self.catalogue.size), chance)
        if self._has_prompts:
            chance = np.where(self.catalogue.layer_of == 0, chance, 0)
        self._want((chance * (chance >= self._least) * self._before).astype(np.float32))
