"""The coefficients of the policy reuse as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReuseFile(ArtifactFile):
    """How probable it is that a sequence's next token is routed to an expert, as a logistic regression.

    ``keep[R]``: the share that each moving average of the sequence's own routing keeps at a token. ``weights[layers, R
    + 1]``: the weights of the logits of these averages, and of the average over all sequences. ``bias[N]``.
    ``followers[sum of 2 E_l E_l]``: layer by layer ``[2, E, E]``, what a pick of expert i at the last token, and at the
    one before, adds to expert j's logit; empty where that was not fitted.
    """

    KIND: ClassVar[str] = "reuse"
    MADE_BY: ClassVar[str] = "greenroom reuse fit"

    keep: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    followers: npt.NDArray[np.float32]

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {"keep": self.keep, "weights": self.weights, "bias": self.bias, "followers": self.followers}

    def _check(self) -> None:
        layers, rates = len(self.experts_per_layer), len(self.keep) if self.keep.ndim == 1 else 0
        pairs = sum(2 * width * width for width in self.experts_per_layer)
        if rates == 0 or not ((self.keep > 0) & (self.keep < 1)).all():
            raise InvalidConfig("keep", self.keep.tolist(), "at least one rate, each between 0 and 1")
        for name, shapes in (
            ("weights", [(layers, rates + 1)]),
            ("bias", [(self.size,)]),
            ("followers", [(0,), (pairs,)]),
        ):
            array = self.arrays[name]
            if array.shape not in shapes:
                raise InvalidConfig(name, array.shape, " or ".join(map(str, shapes)))
            if not np.isfinite(array).all():
                raise InvalidConfig(name, "numbers that are none", "finite numbers")
