"""A layer's experts, expanded together on a GPU: several in one launch, into places that all layers share.

torch (``Expander``) takes dozens of small launches for one expert. Here those whose bytes have arrived share one, up to
the number of places. An expert that is still on its way gets a launch of its own, queued behind its copy, so the others
are computed meanwhile. A launch overwrites what the one before has made. That is safe without a mark: expansion and
products are in one queue, and an expert is computed before the next one is asked for.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch

from greenroom.core.units import MIB
from greenroom.experts.pack.layout import ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import Expand, Expander, Expands, ExpertFormat
from greenroom.moe.formats.grouped_format import GroupedFormat, is_joined, is_matrix
from greenroom.moe.formats.invented import invented_record
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.formats.panels import panels_of

MOST_PLACES: Final = 8
"""The kernel takes the addresses of so many records."""

MOST_BYTES: Final = 512 * MIB
"""Of all places, unless one alone has more. A place is memory that experts' slots could have, and saves a launch."""

_KERNELS: Final = "greenroom.moe.kernels.triton_expansion"
_ALIGNED: Final = 256
"""Bytes to which matrices are aligned, as torch's own are: libraries choose their products by alignment."""
_INPUTS_AT_ONCE, _STRIP, _COLUMNS_AT_ONCE = 128, 8, 512
"""Of a tile, as in the kernel."""
_WARPS: Final = 4
"""Threads of a program are 32 times as many: a tile has 32 numbers for each."""
_LARGEST: Final = 2**31
"""What the kernel counts in 32 bits is smaller: the numbers of a matrix and the bytes of a record."""

log = logging.getLogger(__name__)


class CodedMatrix(NamedTuple):
    """What the kernel is compiled for.

    ``kind``: of codes. ``outputs``, ``inputs``: the matrix's. ``joined``: of gates and as many ups. ``group``: inputs
    that share a scale; 0: all. ``codes``, ``scales``, ``less`` (zero points or minimums), ``order`` (of the inputs):
    where the record has them, in bytes; -1: it has none. ``at``: where its numbers begin in a place, in numbers.
    """

    kind: str
    outputs: int
    inputs: int
    joined: bool
    group: int
    codes: int
    scales: int
    less: int
    order: int
    at: int

    @property
    def tiles(self) -> int:
        if self.kind == LOSSLESS.name:
            return -(-self.outputs // _STRIP) * -(-self.inputs // _COLUMNS_AT_ONCE)
        return panels_of(self.outputs, joined=self.joined) * -(-self.inputs // _INPUTS_AT_ONCE)


class Unsuited(Exception):
    """The kernel can not expand experts of this kind here. The message says why."""


def coded_matrices(expert_format: ExpertFormat, layer: MoeLayer) -> tuple[tuple[CodedMatrix, CodedMatrix], int]:
    """An expert's two matrices, and the numbers of a place. Raises Unsuited."""
    layout = expert_format.record(layer)
    tensors = [tensor for tensor in layer.tensors if is_matrix(tensor)]
    if len(tensors) != 2:
        raise Unsuited(f"an expert has {len(tensors)} matrices")
    at, found = 0, []
    for number, tensor in enumerate(tensors):
        found.append(_coded(expert_format, layout, tensor, number, at))
        grain = _ALIGNED // tensor.dtype.itemsize
        at += -(-math.prod(tensor.shape) // grain) * grain
    if max(layout.nbytes, *(math.prod(tensor.shape) for tensor in tensors)) >= _LARGEST:
        raise Unsuited("an expert is larger than 2 GiB")
    return (found[0], found[1]), at


def _coded(
    expert_format: ExpertFormat, layout: RecordLayout, tensor: ExpertTensor, number: int, at: int
) -> CodedMatrix:
    offsets = {spec.name: spec.offset for spec in layout.tensors}
    outputs, inputs = tensor.shape
    joined, group, scales = False, 0, f"{tensor.name}_scales"
    if isinstance(expert_format, GroupedFormat):
        codes = expert_format.products[number]
        kind, joined, group = codes.name.removesuffix("_zeros"), is_joined(tensor), codes.group
    elif expert_format.name == MXFP4.name:
        kind, (inputs, outputs) = MXFP4.name, tensor.shape
    elif expert_format.name == LOSSLESS.name:
        kind, scales = LOSSLESS.name, f"{tensor.name}_exponents"
    else:
        raise Unsuited(f"the kernel does not know {expert_format.name}")
    less = offsets.get(f"{tensor.name}_zeros", offsets.get(f"{tensor.name}_minimums", -1))
    order = offsets.get(f"{tensor.name}_order", -1)
    return CodedMatrix(
        kind, outputs, inputs, joined, group, offsets[f"{tensor.name}_codes"], offsets[scales], less, order, at
    )


def places_for(layer: MoeLayer, place_bytes: int) -> int:
    """As many as a row's picks, within ``MOST_PLACES`` and ``MOST_BYTES``. More picks of a step take more launches."""
    return max(1, min(layer.top_k, MOST_PLACES, MOST_BYTES // place_bytes))


class ExpertRing:
    """An ``Expands`` on a CUDA device. Raises Unsuited; without Triton its first use raises ImportError.

    Tensors of a record that are numbers are handed out where they lie.
    """

    def __init__(self, expert_format: ExpertFormat, layer: MoeLayer, device: torch.device) -> None:
        (up, down), self._place = coded_matrices(expert_format, layer)
        self._dtype, self._device = layer.tensors[0].dtype, device
        self.places = places_for(layer, self._place * self._dtype.itemsize)
        self._tiles = up.tiles + down.tiles
        self._compiled_for: dict[str, Any] = {
            "PLACE": self._place,
            "BFLOAT": self._dtype is torch.bfloat16,
            "UP_TILES": up.tiles,
            **{f"UP_{name.upper()}": value for name, value in up._asdict().items()},
            **{f"DOWN_{name.upper()}": value for name, value in down._asdict().items()},
        }
        starts = iter((up.at, down.at))
        in_record = [spec.name for spec in expert_format.record(layer).tensors]
        self._tensors = [
            (next(starts), tensor.shape) if is_matrix(tensor) else in_record.index(tensor.name)
            for tensor in layer.tensors
        ]
        self._memory: torch.Tensor | None = None
        self._views: list[list[torch.Tensor | int]] = []

    @cached_property
    def _kernel(self) -> Any:
        return importlib.import_module(_KERNELS).expand_experts

    @property
    def nbytes(self) -> int:
        return self.places * self._place * self._dtype.itemsize

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        return self.expand([weights])[0]

    def for_layer(self, coming: Callable[[], Sequence[ExpertWeights]]) -> Expand:
        return _LayerExpansion(self, coming)

    def expand(self, records: Sequence[ExpertWeights]) -> list[ExpertWeights]:
        """The numbers of up to ``places`` experts, valid until the next call."""
        memory = self._taken()
        addresses = [weights[0].data_ptr() for weights in records]  # a record's first tensor lies at its begin
        addresses += addresses[:1] * (MOST_PLACES - len(records))
        into = memory.view(torch.int16) if self._dtype is torch.bfloat16 else memory
        self._kernel[(self._tiles, len(records))](
            *addresses, into, **self._compiled_for, num_warps=_WARPS, enable_fp_fusion=False
        )
        return [
            tuple(weights[part] if isinstance(part, int) else part for part in views)
            for weights, views in zip(records, self._views, strict=False)
        ]

    def release(self) -> None:
        self._memory, self._views = None, []

    def _taken(self) -> torch.Tensor:
        if self._memory is None:
            with torch.inference_mode(False):  # what is made within can not be written to outside of it
                memory = torch.empty(self.places * self._place, dtype=self._dtype, device=self._device)
            self._memory = memory
            self._views = [
                [
                    part if isinstance(part, int) else _view(memory, number * self._place, *part)
                    for part in self._tensors
                ]
                for number in range(self.places)
            ]
        return self._memory


class _LayerExpansion:
    """A layer's experts by an ``ExpertRing``. ``coming``: see ``Expands.for_layer``."""

    def __init__(self, ring: ExpertRing, coming: Callable[[], Sequence[ExpertWeights]]) -> None:
        self._ring, self._coming = ring, coming
        self._asked: set[int] = set()  # records by their identity
        self._ahead: list[tuple[ExpertWeights, ExpertWeights]] = []  # of the last launch, what was not asked for yet

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        self._asked.add(id(weights))
        for number, (record, numbers) in enumerate(self._ahead):
            if record is weights:
                del self._ahead[number]
                return numbers
        others = [record for record in self._coming() if id(record) not in self._asked]
        records = [weights, *others[: self._ring.places - 1]]
        (_, own), *self._ahead = zip(records, self._ring.expand(records), strict=True)
        return own


def expander_for(expert_format: ExpertFormat, layer: MoeLayer, device: torch.device | None) -> Expands:
    """What makes numbers of the layer's records on this device (None: the CPU).

    On a CUDA device it is an ``ExpertRing``, once that has made the same numbers as torch of an expert that is made up.
    Otherwise the log says why it is not.
    """
    by_torch = Expander(expert_format, layer)
    if device is None or device.type != "cuda":
        return by_torch
    try:
        importlib.import_module(_KERNELS)
        ring = ExpertRing(expert_format, layer, device)
        _try(ring, by_torch, expert_format, layer, device)
    except Exception as reason:  # Triton's compiler raises whatever it may
        log.warning(
            "experts in %s are expanded one at a time by torch, which is slow: %s: %s",
            *(expert_format.name, type(reason).__name__, reason),
        )
        return by_torch
    log.info("experts in %s are expanded by Triton, up to %d in a launch", expert_format.name, ring.places)
    return ring


def _try(
    ring: ExpertRing, by_torch: Expander, expert_format: ExpertFormat, layer: MoeLayer, device: torch.device
) -> None:
    """Compiles the kernel, and raises Unsuited if it gives other numbers than torch."""
    layout = expert_format.record(layer)
    record = layout.views(invented_record(expert_format, layer).to(device))
    try:
        for ours, theirs in zip(ring(record), by_torch(record), strict=True):
            if not torch.equal(ours, theirs):
                raise Unsuited("it was tried, and the numbers were not torch's")
    finally:
        ring.release()
        by_torch.release()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the memory plan goes by what the device has free


def _view(memory: torch.Tensor, place: int, at: int, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[place + at : place + at + math.prod(shape)].view(shape)
