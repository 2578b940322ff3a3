"""Sizes as people write them."""

from __future__ import annotations

import re

from greenroom.core.errors import InvalidConfig

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SUFFIXES = {
    "": 1,
    "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1024 * GIB, "tib": 1024 * GIB, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*")


def parse_bytes(text: str, *, field: str, whole: int | None = None) -> int:
    """Bytes in a size such as ``2GiB``, ``1500MB``, ``4096`` or, of a known ``whole``, ``25%``.

    Raises InvalidConfig, naming ``field``, for anything else.
    """
    allowed = "write a size such as 2GiB or 1500MB" + (", or a share such as 25%" if whole is not None else "")
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidConfig(field, text, allowed)
    number, suffix = float(match[1]), match[2].lower()
    if suffix == "%":
        if whole is None or number > 100:
            raise InvalidConfig(field, text, allowed)
        return int(whole * number / 100)
    if suffix not in _SUFFIXES:
        raise InvalidConfig(field, text, allowed)
    return int(number * _SUFFIXES[suffix])


def format_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"
