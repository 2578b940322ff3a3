"""One expert of a family as its own collaboration, its weights in one record, and transformers' own model of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from greenroom.checkpoints.shard_reader import ShardReader
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Preparations
from greenroom.coe.loading.architecture import Architecture, build_architectures, read_stored
from greenroom.coe.loading.collaboration import Collaboration, read_collaboration
from greenroom.experts.pack.layout import ExpertWeights
from tests.random_experts import FAMILIES

ONE = """
name = "one"
[router]
parameter = "kind"
"""


@dataclass(frozen=True)
class Experts:
    collaboration: Collaboration
    architectures: dict[str, Architecture]
    computer: ExpertComputer


def collaborate(file: Path, folders: list[Path], dtype: str = "auto") -> Experts:
    """A collaboration of experts of which each is a request's only one."""
    experts = "".join(f'[experts.{folder.name}]\nmodel = "{folder}"\n' for folder in folders)
    file.write_text(ONE + experts)
    collaboration = read_collaboration(file)
    architectures = build_architectures(collaboration, dtype)
    return Experts(collaboration, architectures, ExpertComputer(collaboration, architectures, Preparations()))


def record_of(experts: Experts, expert: int) -> ExpertWeights:
    """The expert's weights as views of one record."""
    checkpoint = experts.collaboration.experts[expert]
    architecture = experts.architectures[checkpoint.architecture]
    with ShardReader() as reader:
        made = architecture.weights_of(checkpoint, read_stored(checkpoint, reader))
    views = architecture.layout.views(torch.zeros(architecture.layout.nbytes, dtype=torch.uint8))
    for view, tensor in zip(views, made, strict=True):
        view.copy_(tensor)
    return views


def own_model(family: str, folder: Path, dtype: torch.dtype) -> Any:
    """Its weights in torch's own memory. As ``from_pretrained`` leaves them they are the mapped file's, and begin
    anywhere. Products of few rows round by where weights begin, so the library's model then differs from its own copy.
    """
    model_class = getattr(transformers, FAMILIES[family].model_class)
    return copy.deepcopy(model_class.from_pretrained(folder, dtype=dtype).eval())


def tensors_of(outputs: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
