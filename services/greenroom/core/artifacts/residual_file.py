"""Maps from the residual stream to the picks of later layers as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig


class ResidualForm(NamedTuple):
    """``hidden``: numbers in a row. ``rank``: of the inner layer; 0: there is none, the map is one full matrix.
    ``ahead``: picks are foreseen up to so many layers ahead. ``silu``: whether x · σ(x) follows the inner layer.
    """

    hidden: int
    rank: int
    ahead: int
    silu: bool

    def targets(self, layer: int, layers: int) -> range:
        """The layers that are foreseen on the rows of ``layer``."""
        return range(layer + 1, min(layer + 1 + self.ahead, layers))


class LayerMaps(NamedTuple):
    """Of one layer: logits = up · inner(rows · down + offset) + bias. Without ``down`` the inner layer is the rows."""

    down: npt.NDArray[np.float16] | None
    offset: npt.NDArray[np.float32]
    up: npt.NDArray[np.float16]
    bias: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ResidualFile(ArtifactFile):
    """Logits of later layers' picks, from the rows that a layer's router and experts get.

    ``form[4]``: ``ResidualForm``. For every layer l but the last: ``down [H, r]`` and ``offset[r]``, none where the
    rank is 0, and ``up [r, M]``, ``[H, M]`` where it is 0, with ``bias[M]``, for the M experts of ``targets``. Each is
    flat, layer by layer. Matrices are of half precision.
    """

    KIND: ClassVar[str] = "residual"
    MADE_BY: ClassVar[str] = "greenroom residual fit"

    form: npt.NDArray[np.uint16]
    down: npt.NDArray[np.float16]
    offset: npt.NDArray[np.float32]
    up: npt.NDArray[np.float16]
    bias: npt.NDArray[np.float32]

    @classmethod
    def of_layers(cls, form: ResidualForm, layers: Sequence[LayerMaps], **about: Any) -> ResidualFile:
        """``about``: the fields of every ArtifactFile."""

        def flat(parts: list[Any], kind: type) -> Any:
            return np.concatenate([np.zeros(0, kind), *(part.ravel() for part in parts)]).astype(kind)

        return cls(
            form=np.array(form, dtype=np.uint16),
            down=flat([one.down for one in layers if one.down is not None], np.float16),
            offset=flat([one.offset for one in layers], np.float32),
            up=flat([one.up for one in layers], np.float16),
            bias=flat([one.bias for one in layers], np.float32),
            **about,
        )

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in ("form", "down", "offset", "up", "bias")}

    @property
    def of(self) -> ResidualForm:
        hidden, rank, ahead, silu = self.form.tolist()
        return ResidualForm(hidden, rank, ahead, bool(silu))

    @property
    def layers(self) -> list[LayerMaps]:
        """Of every layer but the last."""
        form, widths = self.of, self._widths
        columns = [0, *accumulate(widths)]
        inner, found = form.rank or form.hidden, []
        for layer, width in enumerate(widths):
            down = None
            if form.rank:
                size = form.hidden * form.rank
                down = self.down[layer * size : (layer + 1) * size].reshape(form.hidden, form.rank)
            up = self.up[inner * columns[layer] : inner * columns[layer + 1]].reshape(inner, width)
            offset = self.offset[layer * form.rank : (layer + 1) * form.rank]
            found.append(LayerMaps(down, offset, up, self.bias[columns[layer] : columns[layer + 1]]))
        return found

    @property
    def _widths(self) -> list[int]:
        """Experts that are foreseen at each layer but the last."""
        form, widths = self.of, self.experts_per_layer
        return [sum(widths[one] for one in form.targets(layer, len(widths))) for layer in range(len(widths) - 1)]

    def _check(self) -> None:
        layers = len(self.experts_per_layer)
        if self.form.shape != (4,) or self.form.dtype != np.uint16:
            raise InvalidConfig(
                "form", self.form.tolist(), "four whole numbers: width, rank, layers ahead, SiLU or not"
            )
        hidden, rank, ahead, silu = self.form.tolist()
        if hidden < 1 or not 1 <= ahead < layers or silu > 1 or (silu and not rank):
            allowed = f"a width, a rank, 1 to {layers - 1} layers ahead, and 0, or 1 where there is a rank"
            raise InvalidConfig("form", self.form.tolist(), allowed)
        foreseen = sum(self._widths)
        for name, size, kind in (
            ("down", (layers - 1) * hidden * rank, np.float16),
            ("offset", (layers - 1) * rank, np.float32),
            ("up", (rank or hidden) * foreseen, np.float16),
            ("bias", foreseen, np.float32),
        ):
            array = self.arrays[name]
            if array.shape != (size,) or array.dtype != kind:
                raise InvalidConfig(name, f"{array.shape} of {array.dtype}", f"({size},) of {np.dtype(kind)}")
            if not np.isfinite(array).all():
                raise InvalidConfig(name, "numbers that are none", "finite numbers")
