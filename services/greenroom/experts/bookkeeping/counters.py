"""What an expert engine has done since it started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Written by the engine's owner alone; a reader elsewhere may see them a moment apart.

    A *look-up* is one distinct expert that one layer of one step needs; a *hit* is one that was resident then. A
    prefetch counts once it begins, or waits and is not taken back; it is *used* when a look-up meets it, arrived or
    still on its way, and *wasted* when it leaves unused.

    ``host_prefetches``: those that go no further than the host tier; the others are counted in ``prefetches`` alone.
    They are used when the expert goes on to the device, there already or on its way, and wasted when it leaves the
    host without.
    """

    steps: int = 0
    lookups: int = 0
    hits: int = 0
    on_demand_fetches: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    host_prefetches: int = 0
    host_prefetches_used: int = 0
    host_prefetches_wasted: int = 0
    evictions: int = 0
    failed_transfers: int = 0
    stall_seconds: float = 0.0
    bytes_by_link: dict[str, int] = field(default_factory=dict)
