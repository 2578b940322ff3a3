"""The array types that cross the policy interfaces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
"""Experts, as dense keys 0..N-1 of one pool."""

Counts = NDArray[np.int64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]

NO_KEYS: Keys = np.empty(0, dtype=np.int64)
NO_KEYS.setflags(write=False)
