"""ExpertFlow: experts are fetched by routing paths that were foretold from tokens, before the forward."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    layer 0 on all that is likely enough is wanted, by chance times how near its layer is, and a layer that has run
    frees room for the next. For the next layers what routers run ahead and the token's path so far say is blended in.

    Correction (section 3.2.2): misses overtake everything, wants of passed layers are withdrawn, and who leaves is
    chosen by the expected time to next use, with the foretold chance for layers to come: what was foretold for the
    running layer and is not used is worth what its next step is worth.

    Without foretold paths it is ``BlendedReuse``.
    """

    asks = frozenset({ROUTER, PATH})
    artifacts = frozenset({REUSE, PATH, PATHS})
    reads_tokens = True

    def __init__(self, catalogue: Catalogue, *, layers: int = 2, least: float = 0.35, evict: bool = True) -> None:
        """Raises InvalidConfig for values out of range."""
        super().__init__(catalogue, layers=layers, least=least, evict=evict)
        count = catalogue.layers
        self._before: Scores = (1 - catalogue.layer_of / (count + 1)).astype(np.float32)
        """The decays of a step that has not reached its first layer."""
        turns = (catalogue.layer_of - np.arange(count)[:, None] - 1) % count + 1
        self._round: Scores = (1 - turns / (count + 1)).astype(np.float32)
        """By layer: the decays where the next step is planned too."""
        self._planned: tuple[int, NDArray[np.floating]] | None = None
        """The number of the step that follows the running one, and its experts' chances."""

    def on_step_planned(self, step: Step) -> None:
        self._planned = None if step.row_paths is None else (step.number, _chance(step.row_paths))

    def on_step_started(self, step: Step) -> None:
        super().on_step_started(step)
        if self._planned is not None and self._planned[0] <= step.number:
            self._planned = None
        if self._from_tokens is None or step.row_paths is None:
            return
        chance = _chance(step.row_paths)
        self.reuse.expect(slice(0, self.catalogue.size), chance)
        if self._has_prompts:
            first = self.catalogue.layer_of[self._part.start]  # in an encoder-decoder prompts run through one part
            chance = np.where(self.catalogue.layer_of == first, chance, 0)
        self._want((chance * (chance >= self._least) * self._before).astype(np.float32))

    def _want_later(self, layer: int) -> None:
        """Where the next forward is planned its layers follow this one's: wants cross the border (section 4.2)."""
        if self._planned is None or self._has_prompts:
            super()._want_later(layer)
            return
        done = slice(0, self.catalogue.spans[layer].stop)
        self.reuse.expect(done, self._planned[1][done])
        chance = self.reuse.expected()
        likely = chance >= self._least
        if self._wants_any or likely.any():
            self._want((chance * likely * self._round[layer]).astype(np.float32))


def _chance(row_paths: Scores) -> NDArray[np.floating]:
    """``[N]``: that any row picks the expert. NaN counts as 0."""
    none: NDArray[np.floating] = np.multiply.reduce(1 - np.fmin(np.fmax(row_paths, 0), 1), axis=0)
    return 1 - none
