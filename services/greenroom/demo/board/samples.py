"""Crops to send: parts that no expert was trained on, with what should be found of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.demo.board.component_types import GOOD, ComponentType
from greenroom.demo.board.crops import Crop, Wanted, any_orientation, crop, rng_for
from greenroom.demo.board.encode import write_png

FOLDER: Final = "samples"
LIST: Final = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """``component``: the request's parameter. ``path``: the experts that see it, ``labels``: what each should say."""

    component: str
    path: tuple[str, ...]
    labels: tuple[str, ...]
    crop: Crop


def samples(types: Sequence[ComponentType], many: int, seed: int) -> Iterator[Sample]:
    """The types in turn; of each a good one first, then its other labels."""
    for index in range(many):
        type_, turn = types[index % len(types)], index // len(types)
        label = type_.labels[turn % len(type_.labels)]
        rng = rng_for(type_, label, seed, "samples", turn)
        orientation = any_orientation(type_, rng)
        values = list(type_.values)
        component = values[int(rng.integers(len(values)))]
        path, labels = [type_.name], [label]
        if label == GOOD and type_.orientation is not None:
            path.append(type_.orientation)
            labels.append(orientation)
        yield Sample(
            component, tuple(path), tuple(labels), crop(Wanted(type_, label, orientation), seed, "samples", turn)
        )


def write_samples(directory: Path, types: Sequence[ComponentType], many: int, seed: int) -> None:
    """``samples/*.png`` and ``samples.jsonl``, a line a crop: file, component, experts, labels. Raises OSError."""
    folder = directory / FOLDER
    folder.mkdir()
    lines = []
    for number, sample in enumerate(samples(types, many, seed), start=1):
        name = f"{FOLDER}/{number:03}-{'-'.join((sample.path[0], *sample.labels))}.png"
        write_png(directory / name, sample.crop)
        lines.append(
            json.dumps({"file": name, "component": sample.component, "experts": sample.path, "labels": sample.labels})
        )
    (directory / LIST).write_text("\n".join(lines) + "\n", encoding="utf-8")
