"""How much oneDNN, which multiplies bf16 for torch, keeps of what it has made.

It makes code and lays out buffers for every new shape, 0.2 to 0.6 MiB, and keeps 1,024 of them. Of prompts hardly two
have the same number of rows, so that a server grew by some hundred MiB in hours, which no plan of its memory announced.
"""

from __future__ import annotations

import os
from typing import Final

CAPACITY_VARIABLES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own variable for how many it keeps, and that of torch's layer above it, which keeps as many alive. Each is
read once, when the first is made.
"""

CAPACITY: Final = 64
"""Steps of the same few rows come again and again, and find theirs; prompts rarely do, whatever is kept. To make one
takes about a millisecond. With 16 even steps made theirs anew: a quarter more CPU time under many streams.
"""


def bound_primitives() -> None:
    """Have oneDNN keep few in this process and those it starts. To be called before torch's first product; what the
    variables already say stays.
    """
    for variable in CAPACITY_VARIABLES:
        os.environ.setdefault(variable, str(CAPACITY))
