"""DuoServe-MoE's trained predictor as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig

HIDDEN: Final = (2048, 1024, 512, 256, 128, 64)
"""The widths between input and output (DuoServe-MoE, §4.2)."""


class MlpForm(NamedTuple):
    """``ahead``: how many layers ahead picks are foreseen. ``top_k``: the most picks of a token in a layer.
    ``many_hot``: whether earlier picks are told as ones among zeros; else as indices, as printed."""

    ahead: int
    top_k: int
    many_hot: bool

    def state_width(self, layers: int, experts: int) -> int:
        """How long the network's input is: earlier picks, popularity, and affinity (Eq. 5)."""
        earlier = (layers - self.ahead) * (experts if self.many_hot else self.top_k)
        return earlier + experts + self.top_k * experts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertMlpFile(ArtifactFile):
    """A network from a token's picks in earlier layers to its picks in a later one, the same for all layers.

    ``form[3]``: ``MlpForm``. ``popularity[L, E]`` and ``affinity[L - ahead, E, E]`` are part of its input (Eqs 2, 3); E
    is the largest number of experts of a layer. ``weights``: of each of its seven linear layers the matrix ``[out,
    in]`` and the bias ``[out]``, one after the other. Each but the last is followed by max(0, x). Batch norm is
    multiplied into them. The outputs are logits. All but ``form`` are of half precision.
    """

    KIND: ClassVar[str] = "expert_mlp"
    MADE_BY: ClassVar[str] = "greenroom expert-mlp fit"

    form: npt.NDArray[np.uint16]
    popularity: npt.NDArray[np.float16]
    affinity: npt.NDArray[np.float16]
    weights: npt.NDArray[np.float16]

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in ("form", "popularity", "affinity", "weights")}

    @property
    def of(self) -> MlpForm:
        ahead, top_k, many_hot = self.form.tolist()
        return MlpForm(ahead, top_k, bool(many_hot))

    @property
    def linear_layers(self) -> list[tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]]:
        """Matrix ``[out, in]`` and bias ``[out]`` of each."""
        found, place = [], 0
        for width, out in pairwise(self._widths):
            matrix = self.weights[place : place + out * width].reshape(out, width)
            place += out * width
            found.append((matrix, self.weights[place : place + out]))
            place += out
        return found

    @property
    def _widths(self) -> tuple[int, ...]:
        experts = max(self.experts_per_layer)
        return (self.of.state_width(len(self.experts_per_layer), experts), *HIDDEN, experts)

    def _check(self) -> None:
        layers, experts = len(self.experts_per_layer), max(self.experts_per_layer)
        if self.form.shape != (3,) or self.form.dtype != np.uint16:
            raise InvalidConfig("form", self.form.tolist(), "three whole numbers: layers ahead, top-k, many-hot")
        ahead, top_k, many_hot = self.form.tolist()
        if not 1 <= ahead < layers or not 1 <= top_k <= experts or many_hot > 1:
            allowed = f"1 to {layers - 1} layers ahead, top-1 to top-{experts}, 0 or 1"
            raise InvalidConfig("form", self.form.tolist(), allowed)
        for name, shape in (
            ("popularity", (layers, experts)),
            ("affinity", (layers - ahead, experts, experts)),
            ("weights", (sum(out * (width + 1) for width, out in pairwise(self._widths)),)),
        ):
            array = self.arrays[name]
            if array.shape != shape or array.dtype != np.float16:
                raise InvalidConfig(name, f"{array.shape} of {array.dtype}", f"{shape} of float16")
            if not np.isfinite(array).all():
                raise InvalidConfig(name, "numbers that are none", "finite numbers")
