"""An expert activation matrix collection as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EamcFile(ArtifactFile):
    """``matrices[P, N]``: for each of P members the number of tokens by expert, over all experts of all layers, the
    first layer's first. ``sequences``: how many sequences the members were chosen from.
    """

    KIND: ClassVar[str] = "eamc"
    MADE_BY: ClassVar[str] = "greenroom eamc build"

    matrices: npt.NDArray[np.float32]

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {"matrices": self.matrices}

    def _check(self) -> None:
        if self.matrices.ndim != 2 or self.matrices.shape[1] != self.size or not len(self.matrices):
            raise InvalidConfig("matrices", self.matrices.shape, f"[members, {self.size}]")
        if self.matrices.dtype != np.float32 or not np.isfinite(self.matrices).all() or (self.matrices < 0).any():
            raise InvalidConfig("matrices", str(self.matrices.dtype), "float32 that counts tokens")
