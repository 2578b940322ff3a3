"""What an expert engine has done since it started."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.experts.bookkeeping.prefetch_use import PrefetchUse


@dataclass(slots=True)
class Counters:
    """Written by the thread that owns the engine. A reader elsewhere may see values from different moments.

    A *look-up* is one distinct expert that one layer of one step needs. A *hit* is a look-up whose expert was resident.
    A prefetch counts once it begins, or waits and is not taken back. It is *used* when a look-up meets it, arrived or
    still on its way. It is *wasted* when the expert is evicted unused.

    ``host_prefetches`` go no further than the host tier; ``prefetches`` are all others. A host prefetch is used when
    the expert goes on to the device, arrived or still on its way. It is wasted when the expert leaves the host before.
    """

    device_use: PrefetchUse
    host_use: PrefetchUse
    steps: int = 0
    lookups: int = 0
    hits: int = 0
    on_demand_fetches: int = 0
    evictions: int = 0
    failed_transfers: int = 0
    stall_seconds: float = 0.0
    bytes_by_link: dict[str, int] = field(default_factory=dict)

    @property
    def prefetches(self) -> int:
        return self.device_use.begun

    @property
    def prefetches_used(self) -> int:
        return self.device_use.used

    @property
    def prefetches_wasted(self) -> int:
        return self.device_use.wasted

    @property
    def host_prefetches(self) -> int:
        return self.host_use.begun

    @property
    def host_prefetches_used(self) -> int:
        return self.host_use.used

    @property
    def host_prefetches_wasted(self) -> int:
        return self.host_use.wasted
