"""The weights of linear layers outside the experts that stay in the codes that a checkpoint has them in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import ShardReader, typed
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.experts.pack.layout import DTYPES, RecordLayout
from greenroom.moe.architecture.moe_layers import MoeLayer, is_kept_wider
from greenroom.moe.formats.expert_format import BadCodes
from greenroom.moe.formats.grouped_format import MatrixFormat
from greenroom.moe.formats.stored_matrix import MatrixStorage
from greenroom.moe.loading.gguf_checkpoint import GgufLayout
from greenroom.moe.native.rows import GroupedMatrix
from greenroom.moe.routing.routers import find_router


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """``module``: the path of the linear layer in the model. ``name``: of its weight in the checkpoint. ``stored``: the
    weight's parts, as ``storage`` has them."""

    module: str
    name: str
    outputs: int
    inputs: int
    format: MatrixFormat
    storage: MatrixStorage
    stored: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        """In memory."""
        return RecordLayout.of(self.format.parts_alone(self.outputs, self.inputs)).weight_bytes

    def room(self) -> GroupedMatrix:
        """The memory for it. Nothing has been written there yet."""
        parts = self.format.parts_alone(self.outputs, self.inputs)
        tensors = tuple(torch.empty(shape, dtype=DTYPES[dtype]) for _, shape, dtype in parts)
        return GroupedMatrix(self.format.products[1], self.outputs, tensors)

    def read(self, reader: ShardReader, dtype: torch.dtype, gguf: GgufLayout | None, into: GroupedMatrix) -> None:
        """Read it and lay it out for the compiled products. ``dtype``: the model's. ``gguf``: of a file that is such.

        Raises CorruptCheckpoint for codes that mean no numbers, and for another shape than the model's, and
        UnsupportedModel where they can only be expanded.
        """
        weights = read_parts(reader, self.storage, self.stored, dtype)
        if gguf is not None:
            weights = [gguf.restored(self.name, weight) for weight in weights]
        try:
            codes = self.storage.codes(weights)
        except UnsupportedModel as error:
            names = ", ".join(one.name for one in self.stored)
            raise UnsupportedModel(f"{names} in {self.stored[0].shard}: {error}") from error
        del weights
        if (shape := tuple(codes[0].shape)) != (self.outputs, self.inputs):
            raise CorruptCheckpoint(
                f"{self.stored[0].name} in {self.stored[0].shard} has codes of {shape}, and by the configuration "
                f"{self.module} is {(self.outputs, self.inputs)}"
            )
        self.format.lay_out_alone(codes, into.tensors)


def read_parts(
    reader: ShardReader, storage: MatrixStorage, stored: Sequence[StoredTensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The parts of one matrix. Raises CorruptCheckpoint, with file and tensor, if they mean no numbers of ``dtype``."""
    weights = [typed(reader.read(one), one, codes=True) for one in stored]
    try:
        storage.check(weights, dtype)
    except BadCodes as error:
        raise CorruptCheckpoint(f"{stored[error.part].name} in {stored[error.part].shard} {error}") from error
    return weights


def linear_layers(model: Any, layers: Sequence[MoeLayer], dtype: torch.dtype) -> Mapping[str, nn.Linear]:
    """Those of a model, by path, that compiled products of codes can compute. ``layers``: its MoE layers. ``dtype``:
    what it is loaded in; transformers keeps some layers of some models wider, and gives them wider rows.

    Routers are not among them: what picks experts stays numbers. Nor is a layer that shares its weight, as a head
    does with an embedding: rows of that are looked up.
    """
    routers = [find_router(model, layer) for layer in layers]
    of_routers = {part for router in routers if router is not None for part in router.module.modules()}
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module not in of_routers
        and owners[id(module.weight)] == 1
        and module.weight.dtype is dtype
        and not is_kept_wider(model, f"{name}.weight", dtype)
        and module.in_features % 2 == 0
        and module.out_features % 2 == 0
    }
