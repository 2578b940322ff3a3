"""The ids of the sequences that were counted last, as digests."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16


class CountedIds:
    """The last ``size`` request ids that were added; older ones are forgotten."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return _digest(request_id) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, request_id: str) -> None:
        digest = _digest(request_id)
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._size:
            self._digests.popitem(last=False)

    def to_array(self) -> npt.NDArray[np.uint8]:
        """uint8[n, 16], oldest first."""
        return np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, DIGEST_BYTES).copy()

    @classmethod
    def from_array(cls, digests: npt.NDArray[Any], size: int) -> CountedIds:
        window = cls(size)
        for row in digests[-size:]:
            window._digests[row.tobytes()] = None
        return window


def _digest(request_id: str) -> bytes:
    return blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
