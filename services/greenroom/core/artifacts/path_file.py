"""The weights of a token's path through the layers as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig

LAYERS_AHEAD: Final = 2
"""A token's picks are foreseen this many layers ahead, at most."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PathFile(ArtifactFile):
    """How probable it is that a token is routed to an expert, from the same token's picks in earlier layers.

    Foreseen ``a`` = 1 or 2 layers ahead, the logit of expert j of layer t is ``bias[a - 1, j]``, plus for each pick i
    of layers t − a back to t − a − ``window`` + 1 the weight from i to j, plus ``sequence[a - 1, t]`` times the logit
    of the chance that the policy ``reuse`` gives this expert for the token's sequence.

    ``window[1]``. ``bias[A, N]``. ``sequence[A, layers]``. ``weights``, half precision: layer by layer ``[E_s, M_s]``,
    the weights from each expert of layer s to all that ``targets_of`` names.
    """

    KIND: ClassVar[str] = "path"
    MADE_BY: ClassVar[str] = "greenroom path fit"

    window: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float16]
    bias: npt.NDArray[np.float32]
    sequence: npt.NDArray[np.float32]

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return {"window": self.window, "weights": self.weights, "bias": self.bias, "sequence": self.sequence}

    def _check(self) -> None:
        layers = len(self.experts_per_layer)
        if self.window.shape != (1,) or not 1 <= (window := float(self.window[0])) <= layers or window % 1:
            raise InvalidConfig("window", self.window.tolist(), f"one whole number from 1 to {layers}")
        for name, shape in (
            ("weights", (weights_of(self.experts_per_layer, int(window)),)),
            ("bias", (LAYERS_AHEAD, self.size)),
            ("sequence", (LAYERS_AHEAD, layers)),
        ):
            array = self.arrays[name]
            if array.shape != shape:
                raise InvalidConfig(name, array.shape, str(shape))
            if not np.isfinite(array).all():
                raise InvalidConfig(name, "numbers that are none", "finite numbers")


def targets_of(layer: int, ahead: int, window: int, layers: int) -> range:
    """The layers whose picks are foreseen, ``ahead`` layers before they are routed, from what ``layer`` picked."""
    return range(layer + ahead, min(layer + ahead + window, layers))


def weights_of(experts_per_layer: Sequence[int], window: int) -> int:
    """How many weights a file of this window has."""
    layers = len(experts_per_layer)
    return sum(
        width * sum(experts_per_layer[target] for target in targets_of(layer, ahead, window, layers))
        for layer, width in enumerate(experts_per_layer)
        for ahead in range(1, LAYERS_AHEAD + 1)
    )
