"""The bundled board: its samples, and what all of its experts in memory say of them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.coe.computing.all_resident import AllResident
from greenroom.coe.computing.expert_result import Stage
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.demo.board.make import copy_board
from tests.contract.coe.single_expert import own_model
from tests.plain_picture import plain_picture


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
    """``own[N]``: transformers' own model of each expert, its weights in torch's memory."""

    file: Path
    cache: Path
    oracle: AllResident
    own: tuple[Any, ...]
    samples: tuple[Sample, ...]


@functools.cache
def make_board(folder: Path) -> Board:
    """Once a process, however many test files ask for it: name the same folder, and write nothing to it."""
    with pytest.MonkeyPatch.context() as patch:
        plain_picture(patch)
        copy_board(folder / "board", 0, lambda *steps: None)
    file = folder / "board" / "board.toml"
    oracle = AllResident.load(read_collaboration(file), cache_dir=folder / "cache")
    samples = []
    for line in (file.parent / "samples.jsonl").read_text().splitlines():
        told = json.loads(line)
        image = (file.parent / told["file"]).read_bytes()
        said = tuple(oracle.run(image, told["component"]))
        samples.append(Sample(image, told["component"], tuple(told["experts"]), tuple(told["labels"]), said))
    own = tuple(own_model("resnet", expert.folder, torch.float32) for expert in oracle.collaboration.experts)
    return Board(file, folder / "cache", oracle, own, tuple(samples))
