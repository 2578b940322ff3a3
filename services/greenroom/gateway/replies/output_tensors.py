"""From what experts found for each element of a batch to the tensors of the reply. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from greenroom.core.bytes_tensors import join
from greenroom.core.collaboration import CollaborationCard, OutputKind
from greenroom.core.errors import InvalidRequest
from greenroom.core.inference_outputs import Box, InferenceOutputs


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """``values``: row by row. ``datatype``: BYTES (strings), FP32 or INT32."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[str | float]

    def raw(self) -> bytes:
        """In binary form: little-endian; of BYTES each element behind its length in 4 bytes."""
        if self.datatype == "BYTES":
            return join(str(value).encode() for value in self.values)
        return struct.pack(f"<{len(self.values)}{'f' if self.datatype == 'FP32' else 'i'}", *self.values)


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A tensor that replies may have. ``shape``: -1 where it depends on the batch or on what was found."""

    name: str
    datatype: str
    shape: tuple[int, ...]


TENSORS: Mapping[OutputKind, tuple[TensorKind, ...]] = {
    OutputKind.PATH: (TensorKind("path", "BYTES", (-1, -1)),),
    OutputKind.LABEL: (TensorKind("label", "BYTES", (-1,)),),
    OutputKind.SCORE: (TensorKind("score", "FP32", (-1,)),),
    OutputKind.SCORES: (TensorKind("labels", "BYTES", (-1, -1)), TensorKind("scores", "FP32", (-1, -1))),
    OutputKind.BOXES: (
        TensorKind("boxes", "FP32", (-1, -1, 4)),
        TensorKind("box_labels", "BYTES", (-1, -1)),
        TensorKind("box_scores", "FP32", (-1, -1)),
        TensorKind("box_counts", "INT32", (-1,)),
    ),
    OutputKind.EMBEDDING: (TensorKind("embedding", "FP32", (-1, -1)),),
}
_KINDS = {kind.name: kind for kinds in TENSORS.values() for kind in kinds}
_NO_BOX = Box("", 0.0, 0.0, 0.0, 0.0, 0.0)


def tensors_of(card: CollaborationCard) -> list[TensorKind]:
    """All that its replies may have."""
    return [kind for gives in card.gives for kind in TENSORS[gives]]


def chosen(names: Sequence[str], card: CollaborationCard) -> tuple[str, ...]:
    """The tensors of the reply, in order: those asked for, or all. Raises InvalidRequest for one that is not known."""
    known = [kind.name for kind in tensors_of(card)]
    for place, name in enumerate(names):
        if name not in known:
            message = f"no output is called {name!r:.80} here; known: {', '.join(known)}"
            raise InvalidRequest(message, param="outputs", code="unknown_field")
        if name in names[:place]:
            raise InvalidRequest(f"the output {name!r} was asked for twice", param="outputs")
    return tuple(names) or tuple(known)


def output_tensors(names: Sequence[str], found: Sequence[InferenceOutputs]) -> list[OutputTensor]:
    """``found``: for each element of the batch. Rows of unequal length are filled up with "" and 0."""
    makers: Mapping[str, Callable[[], OutputTensor]] = {
        "path": lambda: _rows("path", [one.path for one in found], ""),
        "label": lambda: _column("label", [one.label or "" for one in found]),
        "score": lambda: _column("score", [one.score or 0.0 for one in found]),
        "labels": lambda: _rows("labels", [[label for label, _ in one.scores] for one in found], ""),
        "scores": lambda: _rows("scores", [[score for _, score in one.scores] for one in found], 0.0),
        "boxes": lambda: _boxes([one.boxes for one in found]),
        "box_labels": lambda: _rows("box_labels", [[box.label for box in one.boxes] for one in found], ""),
        "box_scores": lambda: _rows("box_scores", [[box.score for box in one.boxes] for one in found], 0.0),
        "box_counts": lambda: _column("box_counts", [len(one.boxes) for one in found]),
        "embedding": lambda: _rows("embedding", [_floats(one.embedding) for one in found], 0.0),
    }
    return [makers[name]() for name in names]


def _column(name: str, values: Sequence[str | float]) -> OutputTensor:
    return OutputTensor(name, _KINDS[name].datatype, (len(values),), values)


def _rows(name: str, rows: Sequence[Sequence[str | float]], fill: str | float) -> OutputTensor:
    width = max(map(len, rows), default=0)
    values = [value for row in rows for value in (*row, *[fill] * (width - len(row)))]
    return OutputTensor(name, _KINDS[name].datatype, (len(rows), width), values)


def _boxes(found: Sequence[Sequence[Box]]) -> OutputTensor:
    most = max(map(len, found), default=0)
    values = [
        corner
        for boxes in found
        for box in (*boxes, *[_NO_BOX] * (most - len(boxes)))
        for corner in (box.left, box.top, box.right, box.bottom)
    ]
    return OutputTensor("boxes", "FP32", (len(found), most, 4), values)


def _floats(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 4}f", packed[: len(packed) // 4 * 4])
