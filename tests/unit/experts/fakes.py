"""A store in memory whose reads can be held up, counted and made to fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from greenroom.core.errors import PackError
from greenroom.experts.pack.layout import PackLayer, PackManifest, RecordLayout

LAYOUT = RecordLayout.of([("w", (8, 4), "float32")])


def manifest(layers: int = 3, experts: int = 6, top_k: int = 2) -> PackManifest:
    return PackManifest(
        "fake",
        "float32",
        "digest",
        tuple(PackLayer(f"layers.{n}.experts", experts, top_k, LAYOUT) for n in range(layers)),
    )


class FakeStore:
    """Expert ``e`` of layer ``l`` is filled with ``100 l + e``. ``before_read`` may wait, count or raise.

    ``reads`` counts whole records, by their first part.
    """

    def __init__(self, manifest: PackManifest, before_read: Callable[[int, int], None] | None = None) -> None:
        self.manifest = manifest
        self.reads: Counter[tuple[int, int]] = Counter()
        self.checked: Counter[tuple[int, int]] = Counter()
        self._before_read = before_read
        self._lock = threading.Lock()

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        if self._before_read is not None:
            self._before_read(layer, expert)
        if start == 0:
            with self._lock:
                self.reads[layer, expert] += 1
        np.frombuffer(buffer, dtype=np.float32)[:] = 100 * layer + expert

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        if not (np.frombuffer(record, dtype=np.float32) == 100 * layer + expert).all():
            raise PackError(f"expert {expert} of layer {layer} is not whole")
        with self._lock:
            self.checked[layer, expert] += 1
