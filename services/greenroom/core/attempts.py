"""Attempts: the start of a request that a token, a result or a cancel belongs to."""

from __future__ import annotations

import msgspec


class Attempt(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One start of a request on a worker, or its take-over by a new scheduler; ordered.

    ``epoch``: the journal offset of the claim under which it was made. ``n`` rises with every attempt that the
    scheduler of that epoch makes, whatever the request, so no two attempts of one request are equal.
    """

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"
