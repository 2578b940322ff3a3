"""From logits to chances."""

from __future__ import annotations

from typing import Final

import numpy as np

from greenroom.policies.base.array_types import Scores

_LARGEST: Final = 80.0
"""Beyond it a chance is 0 or 1 in single precision, and e^x soon too large."""


def chances_of(logits: Scores) -> Scores:
    """1 / (1 + e^−x) of each logit x; one that is no number is no chance. Overwrites ``logits``."""
    np.negative(logits, out=logits)
    np.clip(logits, -_LARGEST, _LARGEST, out=logits)
    np.exp(logits, out=logits)
    logits += 1
    np.reciprocal(logits, out=logits)
    logits[np.isnan(logits)] = 0
    return logits
