"""A store in memory whose reads can be held up, counted and made to fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from greenroom.core.errors import PackError
from greenroom.experts.pack.layout import PAGE_BYTES, PackLayer, PackManifest, RecordLayout

DEADLINE_S = 20.0
LAYOUT = RecordLayout.of([("w", (8, 4), "float32")])


def manifest(layers: int = 3, experts: int = 6, top_k: int = 2, pages: Sequence[int] = ()) -> PackManifest:
    """``pages``: how many of a page's 4 KiB the records of each layer have; one, where it is empty."""
    layouts = [RecordLayout.of([("w", (count, PAGE_BYTES // 4), "float32")]) for count in pages] or [LAYOUT] * layers
    return PackManifest(
        "fake",
        "float32",
        "digest",
        tuple(PackLayer(f"layers.{n}.experts", experts, top_k, layout) for n, layout in enumerate(layouts)),
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

    def is_checked(self, layer: int, expert: int) -> bool:
        with self._lock:
            return self.checked[layer, expert] > 0

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        if not (np.frombuffer(record, dtype=np.float32) == 100 * layer + expert).all():
            raise PackError(f"expert {expert} of layer {layer} is not whole")
        with self._lock:
            self.checked[layer, expert] += 1


class GatedReads:
    """What is done before each read of a ``FakeStore``, or before another move. Experts go by their keys, ``experts``
    of them to a layer.

    Reads of ``held`` experts wait until they are let through. ``failures``: how many reads of an expert will fail.
    ``begun``: the reads so far, in order.
    """

    def __init__(self, *held: int, experts: int = 6) -> None:
        self.held = set(held)
        self.failures: Counter[int] = Counter()
        self.begun: list[int] = []
        self._experts = experts
        self._changed = threading.Condition()

    def __call__(self, layer: int, expert: int) -> None:
        key = layer * self._experts + expert
        with self._changed:
            self.begun.append(key)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: key not in self.held, DEADLINE_S)
            if self.failures[key]:
                self.failures[key] -= 1
                raise OSError(5, "broken")

    def let(self, *keys: int) -> None:
        with self._changed:
            self.held -= set(keys)
            self._changed.notify_all()

    def wait_begun(self, key: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.begun, DEADLINE_S), self.begun
