"""BigMoeOnEdge's settings, and the trials that choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

IO_THREADS = (1, 2, 4, 8)
"""Its own range."""
WHOLE_MODEL_MIB = 16_384
"""A cache that never evicts."""


@dataclass(frozen=True)
class StreamingSettings:
    """Those that change no token. Experts are always read past the page cache.

    ``io_threads``: lanes that read experts. ``overlap``: a layer computes while its own experts are read.
    ``two_waves``: the first matrices are read before room is made for the others. ``cached`` False: no expert is kept.
    ``dense``: how the other weights lie. ``predict``: reads ahead by the next layer's router, ``temporal`` by what the
    token before picked, so many layers.
    """

    threads: int = 2
    io_threads: int = 4
    overlap: bool = False
    two_waves: bool = False
    cached: bool = True
    dense: str = "anon"
    predict: bool = False
    temporal: int = 0

    def flags(self, cache_mib: int, context: int) -> list[str]:
        """Of ``bmoe-cli``, with a cache of so many MiB."""
        found = ["--moe-stream", "--threads", str(self.threads), "--ctx-size", str(context)]
        found += ["--io-threads", str(self.io_threads), "--dense-weights", self.dense]
        found += ["--cache-mb", str(cache_mib if self.cached else 0), "--force-cache"]
        found += ["--overlap"] if self.overlap else []
        found += ["--io-two-wave"] if self.two_waves else []
        found += ["--predict-prefetch"] if self.predict else []
        found += ["--prefetch", str(self.temporal)] if self.temporal else []
        return found

    def describe(self) -> str:
        said = [f"{self.threads} threads", f"{self.io_threads} lanes", f"dense weights {self.dense}"]
        said += ["overlap" + (" in two waves" if self.two_waves else "")] if self.overlap else []
        said += [] if self.cached else ["no cache"]
        said += ["predictive prefetch"] if self.predict else []
        said += [f"temporal prefetch of {self.temporal}"] if self.temporal else []
        return ", ".join(said)


def lane_trials(threads: int) -> list[StreamingSettings]:
    """How many lanes read, with and without overlap."""
    start = StreamingSettings(threads=threads)
    return [replace(start, io_threads=lanes, overlap=overlap) for overlap in (False, True) for lanes in IO_THREADS]


def single_changes(best: StreamingSettings) -> list[StreamingSettings]:
    """The best so far first, then single changes that may better it."""
    changes: Sequence[dict[str, Any]] = (
        {}, {"cached": False}, {"dense": "mmap"}, {"predict": True}, {"temporal": 1},
        {"threads": 2 * best.threads}, *([{"two_waves": True}] if best.overlap else []),
    )  # fmt: skip
    return [replace(best, **change) for change in changes]
