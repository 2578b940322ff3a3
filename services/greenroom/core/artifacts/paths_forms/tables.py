"""The form ``tables``: what each token, pair of tokens and context adds to the logits of all experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig

TABLES: Final = "tables"


def check_tables(tensors: Mapping[str, npt.NDArray[Any]], experts_per_layer: tuple[int, ...], vocabulary: int) -> None:
    """Raises InvalidConfig, naming the tensor."""
    bias = tensors.get("bias")
    size = sum(experts_per_layer)
    if bias is None or bias.shape != (size,) or not np.isfinite(bias).all():
        raise InvalidConfig("bias", None if bias is None else bias.shape, f"({size},), of finite numbers")
