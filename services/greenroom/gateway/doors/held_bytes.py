"""How many bytes of inputs all calls together hold, counted as they come."""

from __future__ import annotations

from greenroom.gateway.errors import saturated


class HeldBytes:
    """At most ``most`` are held, but a call that is alone may hold as many as it has."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most

    def of_call(self) -> CallBytes:
        """Of a new call, which holds none yet. Whoever has asked for it releases it."""
        return CallBytes(self)

    def take(self, size: int, own: int) -> None:
        """``own``: what of the total is held by whoever takes more. Raises ApiError (429); then nothing was taken."""
        if self.total > own and self.total + size > self._most:
            raise saturated(f"inputs of {self.total} bytes are being answered, as many as are allowed", 1.0)
        self.total += size

    def give_back(self, size: int) -> None:
        self.total -= size


class CallBytes:
    """What one call holds."""

    def __init__(self, held: HeldBytes) -> None:
        self.size = 0
        self._held = held

    def add(self, size: int) -> None:
        """So many bytes have come. Call this before they are kept. Raises ApiError (429) where they are too many."""
        self._held.take(size, self.size)
        self.size += size

    def part(self, size: int) -> CallBytes:
        """So many of its bytes, to be released by themselves."""
        own = CallBytes(self._held)
        own.size, self.size = size, self.size - size
        return own

    def release(self) -> None:
        self._held.give_back(self.size)
        self.size = 0
