"""Whole models in memory, whose reads come one at a time, when they are let through, and fail when told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from greenroom.core.errors import PackDamaged
from greenroom.experts.pack.layout import PAGE_BYTES, ExpertWeights, PackLayer, PackManifest, RecordLayout

DEADLINE_S = 20.0
Described = tuple[str, tuple[int, ...], str]


def model_layer(name: str, tensors: Sequence[Described], piece_bytes: int = PAGE_BYTES) -> PackLayer:
    """As ``PackLayer.of_model``, cut into small pieces."""
    return PackLayer(name, 1, 0, RecordLayout.of(tensors, piece_bytes=piece_bytes))


def manifest_of(layers: Sequence[PackLayer]) -> PackManifest:
    return PackManifest("models", "float32", "digest", tuple(layers))


class ModelStore:
    """Expert i's record is random bytes, other ones for each i.

    ``let`` lets one read through, ``open`` all. Reads of ``broken`` experts raise. Those of ``altered`` ones bring
    other bytes than were stored.
    """

    def __init__(self, manifest: PackManifest) -> None:
        self.manifest = manifest
        self.records = [
            np.random.default_rng(number).integers(0, 256, layer.layout.nbytes, dtype=np.uint8)
            for number, layer in enumerate(manifest.layers)
        ]
        self.broken: set[int] = set()
        self.altered: set[int] = set()
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def let(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)

    def weights(self, expert: int) -> ExpertWeights:
        """As they were stored."""
        return self.manifest.layers[expert].layout.views(torch.from_numpy(self.records[expert]))

    def read_pieces(self, layer: int, expert: int, start: int, pieces: Sequence[memoryview]) -> None:
        assert expert == 0
        if not self._is_open:
            assert self._permits.acquire(timeout=DEADLINE_S)
        if layer in self.broken:
            raise OSError(5, "broken")
        for piece in pieces:
            assert start % PAGE_BYTES == 0
            assert len(piece) % PAGE_BYTES == 0
            own = np.frombuffer(piece, dtype=np.uint8)
            assert own.ctypes.data % PAGE_BYTES == 0, "direct reads need it"
            own[:] = self.records[layer][start : start + len(piece)] ^ (layer in self.altered)
            start += len(piece)

    def is_checked(self, layer: int, expert: int) -> bool:
        return False

    def check_pieces(self, layer: int, expert: int, pieces: Sequence[memoryview]) -> None:
        if b"".join(pieces) != self.records[layer].tobytes():
            raise PackDamaged(f"expert {layer} was altered")
