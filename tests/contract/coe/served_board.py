"""The bundled board: its samples, and what all of its experts in memory say of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from greenroom.coe.computing.all_resident import AllResident
from greenroom.coe.computing.expert_result import Stage
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.demo.board.make import copy_board


@dataclass(frozen=True)
class Sample:
    """``said``: what the oracle says of it, alone. ``labels``: those that its experts should give."""

    image: bytes
    component: str
    experts: tuple[str, ...]
    labels: tuple[str, ...]
    said: tuple[Stage, ...]


@dataclass(frozen=True)
class Board:
    file: Path
    cache: Path
    oracle: AllResident
    samples: tuple[Sample, ...]


def make_board(folder: Path) -> Board:
    copy_board(folder / "board", 0, lambda *steps: None)
    file = folder / "board" / "board.toml"
    oracle = AllResident.load(read_collaboration(file), cache_dir=folder / "cache")
    samples = []
    for line in (file.parent / "samples.jsonl").read_text().splitlines():
        told = json.loads(line)
        image = (file.parent / told["file"]).read_bytes()
        said = tuple(oracle.run(image, told["component"]))
        samples.append(Sample(image, told["component"], tuple(told["experts"]), tuple(told["labels"]), said))
    return Board(file, folder / "cache", oracle, tuple(samples))
