"""Where an expert's tensors lie within its record, and what a pack holds.

A *record* holds all tensors of one expert, each at a multiple of 64 bytes. It is padded to 4 KiB, so that direct I/O
can read it straight into a slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

PAGE_BYTES = 4096
TENSOR_ALIGNMENT = 64  # a cache line, and enough for every vector load

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


ExpertWeights = tuple[torch.Tensor, ...]
"""One expert's tensors, in the order of its record's layout: views of the memory that holds the record."""


def align(count: int, to: int) -> int:
    return -(-count // to) * to


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert. ``offset`` and ``nbytes`` are within the record."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """All tensors of one expert. ``nbytes`` is a multiple of 4 KiB."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @staticmethod
    def of(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> RecordLayout:
        """The layout of ``(name, shape, dtype)`` in this order."""
        specs = []
        offset = 0
        for name, shape, dtype in tensors:
            nbytes = math.prod(shape) * DTYPES[dtype].itemsize
            specs.append(TensorSpec(name, tuple(shape), dtype, offset, nbytes))
            offset = align(offset + nbytes, TENSOR_ALIGNMENT)
        return RecordLayout(tuple(specs), align(max(offset, 1), PAGE_BYTES))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    def views(self, record: torch.Tensor) -> ExpertWeights:
        """The expert's tensors as views of ``record`` (uint8, at least ``nbytes`` long)."""
        return tuple(
            record[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
            for spec in self.tensors
        )


@dataclass(frozen=True, slots=True)
class PackLayer:
    """One MoE layer: ``name`` is the dotted path of its experts module, ``top_k`` its router's picks a row."""

    name: str
    experts: int
    top_k: int
    layout: RecordLayout


@dataclass(frozen=True, slots=True)
class PackManifest:
    """What a pack holds. Two packs with equal manifests hold the same weights.

    ``source_digest`` identifies the checkpoint's content. ``dtype``: what the weights were converted to.
    """

    model_type: str
    dtype: str
    source_digest: str
    layers: tuple[PackLayer, ...]

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return sum(layer.experts for layer in self.layers)

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.experts * layer.layout.nbytes for layer in self.layers)

    def sizes(self) -> list[int]:
        """Bytes of every expert's record, layer after layer."""
        return [layer.layout.nbytes for layer in self.layers for _ in range(layer.experts)]
