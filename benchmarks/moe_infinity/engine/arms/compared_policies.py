"""What is compared: policies by the names that they have in tables."""

from __future__ import annotations

from typing import Final

from benchmarks.harness.arms.policy_kind import Kind

ON_DEMAND: Final = "lru"
PAPER: Final = "moe-infinity"
LITERAL: Final = "moe-infinity literal"
REUSE: Final = "reuse"
ORACLE: Final = "belady"
ORACLE_AHEAD: Final = "belady-ahead"
DISK_OFFLOAD: Final = "disk_offload"
"""accelerate's: it has no policy and no budget of experts."""

AHEAD_LAYERS: Final = 12
"""How far the oracle that prefetches looks: two steps of the bundled model."""


KINDS: Final = (
    Kind(PAPER, "moe-infinity"),
    Kind(LITERAL, "moe-infinity", {"literal": True}),
    Kind(REUSE, "reuse"),
    Kind("look-ahead", "look-ahead"),
    Kind("next-layer", "next-layer"),
    Kind(ON_DEMAND, "lru"),
)
SERVED: Final = tuple(kind for kind in KINDS if kind.name != LITERAL)
"""Those that are run at other rates, batch sizes and budgets too."""

ORACLES: Final = (Kind(ORACLE, "belady"), Kind(ORACLE_AHEAD, "belady", {"ahead": AHEAD_LAYERS}))
"""They are told what will be routed. The second prefetches too: nothing has less to wait for."""


def kind_of(name: str) -> Kind:
    """Raises LookupError for one that is not known."""
    for kind in (*KINDS, *ORACLES):
        if kind.name == name:
            return kind
    raise LookupError(f"no arm {name!r}; there are {', '.join(kind.name for kind in (*KINDS, *ORACLES))}")
