"""Heads of image files: as much of them as a gateway looks at."""

from __future__ import annotations

import struct
import zlib


def png(width: int = 8, height: int = 8, *, tail: bytes = b"") -> bytes:
    """Its signature and first chunk; ``tail`` stands for the rest."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + tail


def jpeg(width: int = 8, height: int = 8, *, tail: bytes = b"") -> bytes:
    """With an APP0 segment before the frame's head."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes(9)
    app = b"JFIF\x00" + bytes(9)
    return b"".join(
        (b"\xff\xd8", b"\xff\xe0", struct.pack(">H", len(app) + 2), app, b"\xff\xff\xc0",
         struct.pack(">H", len(frame) + 2), frame, tail)
    )  # fmt: skip
