"""Width and height of a PNG or JPEG file from its head, without decoding it: a few bytes may stand for gigapixels."""

from __future__ import annotations

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers that no length follows."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a frame's head, which has the size."""
_SCAN, _END = 0xDA, 0xD9
_MOST_MARKERS = 4096
"""Before the frame's head. A file of nothing else would be looked through byte by byte."""


def image_size(data: bytes) -> tuple[int, int] | None:
    """Pixels. None where it is neither of the two, or its head is broken."""
    if data.startswith(_PNG):
        size = _png(data)
    elif data.startswith(_JPEG):
        size = _jpeg(data)
    else:
        return None
    return size if size is not None and size[0] > 0 and size[1] > 0 else None


def _png(data: bytes) -> tuple[int, int] | None:
    """Its first chunk is IHDR, with 13 bytes (PNG specification, 11.2.1)."""
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\rIHDR":
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Segments up to the frame's head (ITU-T T.81, B.2). Scans come behind it."""
    at = 2
    for _ in range(_MOST_MARKERS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _STANDALONE:
            at += 2
        elif marker in (_SCAN, _END):
            return None
        elif marker in _FRAMES:
            head = data[at + 5 : at + 9]
            return (int.from_bytes(head[2:4], "big"), int.from_bytes(head[0:2], "big")) if len(head) == 4 else None
        else:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if length < 2:
                return None
            at += 2 + length
    return None
