"""Limits the cache of oneDNN, which multiplies bf16 for torch.

For every new shape oneDNN makes code and buffers of 0.2 to 0.6 MiB, and it caches 1,024 shapes. Hardly two prompts have
the same number of rows, so a server grew by some hundred MiB in hours, beyond its plan of memory.
"""

from __future__ import annotations

import os
from typing import Final

CAPACITY_VARIABLES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The cache sizes of oneDNN and of torch's layer above it, which keeps as many shapes alive. Each is read once, at the
first shape.
"""

CAPACITY: Final = 64
"""Steps of few rows recur and profit from the cache. Prompts rarely do, at any size. Making one shape takes about a
millisecond. With 16 shapes even steps missed the cache: a quarter more CPU time under many streams.
"""


def bound_primitives() -> None:
    """Have oneDNN cache few shapes in this process and its children. Variables that are already set stay.

    To be called before torch's first product.
    """
    for variable in CAPACITY_VARIABLES:
        os.environ.setdefault(variable, str(CAPACITY))
