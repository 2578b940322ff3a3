"""What is known of the experts of a collaboration before any request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.expert_keys import Catalogue


@dataclass(frozen=True, slots=True, eq=False)
class Dependencies:
    """``usage[N]``: the probability that a request uses each. ``predecessors[i]``: the experts whose results lead to
    expert i.
    """

    usage: NDArray[np.float64]
    predecessors: tuple[frozenset[int], ...]

    def check(self, catalogue: Catalogue) -> None:
        """Raises InvalidConfig where they are those of other experts."""
        if self.usage.shape != (catalogue.size,) or len(self.predecessors) != catalogue.size:
            raise InvalidConfig("dependencies", f"of {len(self.predecessors)} experts", f"those of {catalogue!r}")
