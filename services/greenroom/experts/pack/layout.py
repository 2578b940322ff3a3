"""Where an expert's tensors lie within its record, and what a pack holds.

A *record* holds all tensors of one expert, each at a multiple of 64 bytes. It is padded to 4 KiB, so that direct I/O
can read it straight into a slot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from greenroom.core.units import MIB

PAGE_BYTES = 4096
TENSOR_ALIGNMENT = 64  # a cache line, and enough for every vector load

PIECE_BYTES = MIB
"""A whole model's record can be cut into pieces of at least so many bytes (docs/decisions/0031)."""

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""What the experts of an MoE model are converted to."""

DTYPES = FLOATS | {
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""What a record can hold: whole models have counters, positions and masks too."""


PLAIN = "plain"
"""The format of records that hold the numbers themselves. Others are in ``moe/formats``."""

ExpertWeights = tuple[torch.Tensor, ...]
"""One expert's tensors, in the order of its record's layout: views of the memory that holds the record."""


def align(count: int, to: int) -> int:
    return -(-count // to) * to


def cut(sizes: Sequence[int], least: int) -> list[int]:
    """How many of the tensors each piece has: the next ones in order until they have ``least`` bytes together.

    What is left at the end joins the last piece.
    """
    counts: list[int] = []
    begun, nbytes = 0, 0
    for size in sizes:
        begun, nbytes = begun + 1, nbytes + size
        if nbytes >= least:
            counts.append(begun)
            begun = nbytes = 0
    if begun and counts:
        counts[-1] += begun
    elif begun:
        counts.append(begun)
    return counts


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
    def of(tensors: Iterable[tuple[str, tuple[int, ...], str]], *, piece_bytes: int | None = None) -> RecordLayout:
        """The layout of ``(name, shape, dtype)`` in this order.

        ``piece_bytes``: the record can be cut into pieces of at least so many bytes. So the first tensor of each begins
        on a page. None: it lies whole.
        """
        described = [(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, shape, dtype in described]
        counts = [] if piece_bytes is None else cut(sizes, piece_bytes)
        firsts = set(itertools.accumulate(counts))
        specs = []
        offset = 0
        for number, ((name, shape, dtype), nbytes) in enumerate(zip(described, sizes, strict=True)):
            if number in firsts:
                offset = align(offset, PAGE_BYTES)
            specs.append(TensorSpec(name, shape, dtype, offset, nbytes))
            offset = align(offset + nbytes, TENSOR_ALIGNMENT)
        return RecordLayout(tuple(specs), align(max(offset, 1), PAGE_BYTES))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    def pieces(self, least: int) -> tuple[int, ...]:
        """Bytes of the pieces that the record may be cut into: whole pages each, at least ``least`` unless the record
        has less. A tensor lies in one piece.
        """
        starts = [0]
        for spec in self.tensors:
            if spec.offset % PAGE_BYTES == 0 and spec.offset - starts[-1] >= least:
                starts.append(spec.offset)
        if len(starts) > 1 and self.nbytes - starts[-1] < least:
            starts.pop()
        return tuple(stop - start for start, stop in itertools.pairwise([*starts, self.nbytes]))

    def views(self, record: torch.Tensor) -> ExpertWeights:
        """The expert's tensors as views of ``record`` (uint8, at least ``nbytes`` long)."""
        return tuple(
            record[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
            for spec in self.tensors
        )


@dataclass(frozen=True, slots=True)
class PackLayer:
    """One MoE layer: ``name`` is the dotted path of its experts module, ``top_k`` its router's picks a row.

    Or one whole model, ``name`` being the expert's. ``format``: what the tensors of a record mean. Packs that do not
    name it are older, and plain.
    """

    name: str
    experts: int
    top_k: int
    layout: RecordLayout
    format: str = PLAIN

    @staticmethod
    def of_model(name: str, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> PackLayer:
        """A whole model as the only expert of a layer of its own. ``tensors``: see ``RecordLayout.of``."""
        return PackLayer(name, experts=1, top_k=0, layout=RecordLayout.of(tensors, piece_bytes=PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class PackManifest:
    """What a pack holds. Two packs with equal manifests hold the same weights.

    ``source_digest`` identifies the checkpoint's content. ``dtype``: what the weights are computed in, and were
    converted to in plain records.
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
    def formats(self) -> tuple[str, ...]:
        """Of all layers, each once."""
        return tuple(dict.fromkeys(layer.format for layer in self.layers))

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.experts * layer.layout.nbytes for layer in self.layers)

    def sizes(self) -> list[int]:
        """Bytes of every expert's record, layer after layer."""
        return [layer.layout.nbytes for layer in self.layers for _ in range(layer.experts)]
