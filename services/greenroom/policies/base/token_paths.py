"""Routing paths foretold from tokens: which experts a row picks in all layers, before its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Ids, Scores


class TokenPaths(ABC):
    """Foretells routing paths from the tokens that go into a forward (ExpertFlow, section 3.1).

    It remembers each sequence's tokens as far as it needs them. All calls come from one thread. ``version``: of the
    artifact that it foretells by.
    """

    version: str = ""

    def begin(self, sequence: int, prompt: Ids) -> None:  # noqa: B027 - most need no prompt ahead of its rows
        """A sequence starts, with these tokens given."""

    @abstractmethod
    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        """``[T, N]``: the chance that each row picks each expert of the catalogue. A new array, not written to again.

        ``positions[T]``: each token's place in its sequence. Rows of one sequence rise, and are asked for in the order
        of the sequence. A row that is asked for again, since its forward failed, gets the same answer where nothing
        else was learnt since.
        """

    def picked(self, sequences: Ids, positions: Ids, picks: NDArray[np.integer]) -> None:  # noqa: B027 - some need none
        """Rows that were asked for have run: ``picks[T, layers, k]``, expert indices within the layer.

        One at or above the layer's number of experts is none. The call is optional: where it does not come, paths are
        foretold without.
        """

    @abstractmethod
    def end(self, sequence: int) -> None:
        """Forget an ended sequence."""
