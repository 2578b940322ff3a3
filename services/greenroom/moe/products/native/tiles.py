"""Virtual machines that announce AMX and do not say what shape its tiles have.

oneDNN, which multiplies bf16 for torch, asks only whether there are tiles (oneDNN 3.x, CPUID leaf 7), makes its code by
a shape of zero bytes (leaf 0x1D), and the process ends by SIGILL in its first bf16 product.
"""

from __future__ import annotations

import os
from typing import Final

from greenroom.moe.products.native.library import NativeUnavailable, native_library

MOST_INSTRUCTIONS: Final = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's own variable: the newest instructions that it uses."""
_ALL_BUT_TILES: Final = "AVX512_CORE_FP16"


def avoid_tiles_without_shape() -> None:
    """Have torch multiply by other instructions in this process and those it starts, where it would fail by tiles. To
    be called before its first product; what the variable already says stays.

    Where the library was not compiled nothing is known, and nothing done.
    """
    try:
        lack_shape = getattr(native_library(), "greenroom_tiles_lack_shape", None)
    except NativeUnavailable:
        return
    if lack_shape is not None and lack_shape():  # None: compiled before there was this function
        os.environ.setdefault(MOST_INSTRUCTIONS, _ALL_BUT_TILES)
