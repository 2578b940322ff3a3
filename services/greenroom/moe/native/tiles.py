"""A workaround for virtual machines that announce AMX without the shape of its tiles.

oneDNN 3.x, which multiplies bf16 for torch, checks only that there are tiles (CPUID leaf 7). It then makes code for a
shape of zero bytes (leaf 0x1D), and the process dies of SIGILL in its first bf16 product.
"""

from __future__ import annotations

import os
from typing import Final

from greenroom.moe.native.library import NativeUnavailable, native_library

MOST_INSTRUCTIONS: Final = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's variable for the newest instructions that it may use."""
_ALL_BUT_TILES: Final = "AVX512_CORE_FP16"


def avoid_tiles_without_shape() -> None:
    """Have torch avoid tiles in this process and its children, if they would make it fail.

    A variable that is already set stays. To be called before torch's first product. Does nothing without the compiled
    library.
    """
    try:
        lack_shape = getattr(native_library(), "greenroom_tiles_lack_shape", None)
    except NativeUnavailable:
        return
    if lack_shape is not None and lack_shape():  # None: the library is older than this function
        os.environ.setdefault(MOST_INSTRUCTIONS, _ALL_BUT_TILES)
