"""What a format of experts' records is, and the one whose records hold the numbers themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from greenroom.core.errors import CorruptCheckpoint, GreenroomError
from greenroom.experts.pack.layout import PLAIN, ExpertWeights, RecordLayout
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer


class BadCodes(CorruptCheckpoint):
    """Codes or scales of a checkpoint that mean no numbers. ``part``: which of the stored tensors it is."""

    def __init__(self, part: int, why: str) -> None:
        super().__init__(why)
        self.part = part


class DoesNotFit(GreenroomError):
    """An expert's numbers can not be encoded within its record. The message says why."""


class ExpertFormat(Protocol):
    """Of a record: which tensors it consists of, how a checkpoint's become these, and what numbers they mean.

    Weights are laid out anew and never quantised anew: a record means the numbers that the checkpoint means.
    A format is a subclass. What it inherits holds where experts are stored as numbers, or a ``MatrixStorage`` says how
    they are stored.
    """

    name: str
    """In packs and to people."""
    version: int
    """Increased when the same tensors are to give other records."""

    def of(self, layer: str) -> ExpertFormat:
        """That of the layer with this name: itself, unless the layers' differ."""
        return self

    def record(self, layer: MoeLayer) -> RecordLayout:
        """Of each expert of the layer. Raises InvalidConfig or CorruptCheckpoint for experts that it does not take."""
        ...

    def stored_shapes(self, tensor: ExpertTensor) -> tuple[tuple[int, ...], ...]:
        """Of the stored tensors (uint8) that one expert's ``tensor`` is made of, in the order of ``make``. Empty: it is
        stored as numbers, or a ``MatrixStorage`` knows.

        Raises CorruptCheckpoint for widths that the format does not have.
        """
        return ()

    def check(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> None:
        """Raises BadCodes if some of one expert's weights are no numbers, or none of the tensor's dtype. What a
        ``MatrixStorage`` has read it has checked (``MatrixStorage.check``)."""
        return

    def make(self, tensor: ExpertTensor, stored: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The record's tensors by name, of what was stored of one expert in the ``stored_shapes``, or of what a
        ``MatrixStorage`` made of it (``codes``)."""
        raise TypeError(f"{tensor.name} is not made of codes in {self.name}")

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        """Write the numbers of a record's ``weights`` into tensors like the layer's, on the same device."""
        ...

    def expanding_bytes(self, layer: MoeLayer) -> int:
        """What ``expand`` takes meanwhile, beside ``into``."""
        ...


@runtime_checkable
class EncodesNumbers(ExpertFormat, Protocol):
    """A format whose codes are made of numbers, whatever a checkpoint stores."""

    def encode(self, tensor: ExpertTensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """The record's tensors by name, of one expert's numbers of the tensor's shape and dtype, in RAM.

        Raises DoesNotFit if the record has no room for them. The layer of such an expert stays plain.
        """
        ...


def plain_record(tensor: ExpertTensor) -> tuple[str, tuple[int, ...], str]:
    """A tensor of a record that holds numbers."""
    return tensor.name, tensor.shape, str(tensor.dtype).removeprefix("torch.")


class Plain(ExpertFormat):
    """The numbers themselves, in the model's dtype. No tensor is stored otherwise, so nothing is made or expanded."""

    name = PLAIN
    version = 1

    def record(self, layer: MoeLayer) -> RecordLayout:
        return RecordLayout.of(map(plain_record, layer.tensors))

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        for target, tensor in zip(into, weights, strict=True):
            target[:] = tensor

    def expanding_bytes(self, layer: MoeLayer) -> int:
        return 0


PLAIN_FORMAT: ExpertFormat = Plain()


class LayerFormats(ExpertFormat):
    """One that is another one in each layer. A layer's own makes its records: ``of(layer)``."""

    version = 1

    def __init__(self, by_layer: Mapping[str, ExpertFormat]) -> None:
        self._by_layer = dict(by_layer)
        self.name = "+".join(sorted({one.name for one in by_layer.values()}))

    def of(self, layer: str) -> ExpertFormat:
        return self._by_layer[layer]

    def record(self, layer: MoeLayer) -> RecordLayout:
        return self.of(layer.name).record(layer)

    def expand(self, layer: MoeLayer, weights: ExpertWeights, into: ExpertWeights) -> None:
        self.of(layer.name).expand(layer, weights, into)

    def expanding_bytes(self, layer: MoeLayer) -> int:
        return self.of(layer.name).expanding_bytes(layer)


def of_layers(by_layer: Mapping[str, ExpertFormat]) -> ExpertFormat:
    """Of these layers: the one that all have, where they have one."""
    own = set(by_layer.values())
    return own.pop() if len(own) == 1 else LayerFormats(by_layer)


Expand = Callable[[ExpertWeights], ExpertWeights]
"""From a record to its expert's tensors as numbers, in the order of ``MoeLayer.tensors``; valid until the next call."""


class Expands(Protocol):
    """Makes numbers of the records of layers that are built alike, in memory of its own."""

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        """See ``Expand``."""
        ...

    def for_layer(self, coming: Callable[[], Sequence[ExpertWeights]]) -> Expand:
        """For the experts of a layer, each once. ``coming()``: the records of those whose turn is next, in this order,
        as far as they have arrived; they stay until they have run. They may be expanded ahead.
        """
        ...

    def release(self) -> None:
        """Give the memory back until the next call."""
        ...

    @property
    def nbytes(self) -> int:
        """What a call takes."""
        ...


class Expander:
    """An ``Expands`` by torch, one expert at a time.

    Each expert overwrites the one before. On a device that is safe too: all of it is in one queue of work.
    """

    def __init__(self, expert_format: ExpertFormat, layer: MoeLayer) -> None:
        self._format = expert_format
        self._layer = layer
        self._into: ExpertWeights | None = None

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        into = self._into
        # Tensors of inference mode can not be written to outside of it.
        if into is None or (into[0].is_inference() and not torch.is_inference_mode_enabled()):
            into = self._into = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=weights[0].device)
                for tensor in self._layer.tensors
            )
        with torch.no_grad():
            self._format.expand(self._layer, weights, into)
        return into

    def for_layer(self, coming: Callable[[], Sequence[ExpertWeights]]) -> Expand:
        return self

    def release(self) -> None:
        self._into = None

    @property
    def nbytes(self) -> int:
        own = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self._layer.tensors)
        return own + self._format.expanding_bytes(self._layer)
