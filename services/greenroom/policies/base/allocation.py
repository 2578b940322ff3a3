"""Which experts are worth a place, by the tokens that each is expected to get (eMoE, section 3.4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Counts, Mask
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes

Shares = NDArray[np.float64]
"""``[N]``: each expert's share of its layer's tokens. A layer's shares sum to 1, or to 0 where nothing is known."""

_STAYS = 1e-6
"""To replace a resident expert, another must expect more tokens by this share. So equals do not change places."""


def shares_of(catalogue: Catalogue, weights: NDArray[np.floating]) -> Shares:
    """``weights[N]`` made to sum to 1 in each layer. NaN, infinite and negative weights count as 0."""
    shares: Shares = np.nan_to_num(weights.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    np.maximum(shares, 0.0, out=shares)
    sums = np.add.reduceat(shares, catalogue.first[:-1])
    shares /= np.where(sums > 0, sums, 1.0)[catalogue.layer_of]
    return shares


class Allocation:
    """Gives the places of a tier to the experts of one catalogue.

    Every layer has at least as many places as its router's k, for its experts with the most tokens. All other places
    go to the experts with the most tokens of all layers: so the most tokens find their expert. An expert that expects
    no tokens gets a place only among its layer's k, and only where the layer expects some. A layer that expects none
    loads nothing, and keeps k of its resident experts.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.sizes = SlotSizes(catalogue)
        """Whose size classes the places are of."""
        self._layer_of = catalogue.layer_of.astype(np.int16)  # whose stable sort is linear
        self._place: Counts = np.arange(catalogue.size) - catalogue.first[catalogue.layer_of]
        self._of_its_k: Mask = self._place < catalogue.top_k[catalogue.layer_of]

    def choose(
        self, tokens: NDArray[np.float64], places: Counts, *, here: Mask, popularity: NDArray[np.float64]
    ) -> Mask:
        """``[N]``: which experts are to be in the tier, never more of a size class than it has places.

        ``tokens[N]``: how many each expects. ``places[classes]``: see SlotSizes. Among equals an expert that is
        ``here`` goes first, then the one of higher ``popularity``, from 0 to 1, then the lower key. Where a class has
        fewer places than k of each of its layers, those of these with the most tokens are chosen.
        """
        catalogue = self._catalogue
        expects = tokens > 0
        rank = np.where(expects, tokens * (1.0 + _STAYS * here), here + 0.5 * popularity - 2.0)
        order = np.argsort(-rank, kind="stable")
        by_layer = order[np.argsort(self._layer_of[order], kind="stable")]
        least: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        least[by_layer[self._of_its_k]] = True
        speaks = np.add.reduceat(expects.astype(np.int64), catalogue.first[:-1]) > 0
        least &= speaks[catalogue.layer_of] | here
        chosen: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        ranked = np.concatenate((order[least[order]], order[(expects & ~least)[order]]))
        chosen[self.sizes.placed(ranked, places)] = True
        return chosen
