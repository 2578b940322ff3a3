"""Tensors of the datatype BYTES in their binary form: each element behind its length, 4 bytes, little-endian. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable

_LENGTH = struct.Struct("<I")


def split(raw: bytes, most: int | None = None) -> list[bytes]:
    """The elements. Raises ValueError where the bytes do not end with one, or there are more than ``most``."""
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        if len(elements) == most:
            raise ValueError(f"{len(raw) - at} bytes are left behind {most} elements")
        begin = at + _LENGTH.size
        if begin > len(raw):
            raise ValueError(f"{len(raw) - at} bytes are left behind element {len(elements)}, too few for a length")
        at = begin + _LENGTH.unpack_from(raw, begin - _LENGTH.size)[0]
        if at > len(raw):
            raise ValueError(
                f"element {len(elements)} has {at - begin} bytes by its length; {len(raw) - begin} are there"
            )
        elements.append(raw[begin:at])
    return elements


def join(elements: Iterable[bytes]) -> bytes:
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))
