"""What the pack of a collaboration is made of: a layer an expert. ``checkpoints/pack_cache.py`` makes and finds it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import transformers

from greenroom.checkpoints.pack_cache import LOCK_WAIT_S, Digest, OnBytes, find_or_make
from greenroom.checkpoints.shard_reader import ShardReader
from greenroom.coe.loading.architecture import Architecture, read_stored
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.experts.pack.layout import PackLayer, PackManifest
from greenroom.experts.pack.pack_file import PackWriter

CONVERSION_VERSION: Final = 1  # increased when the same tensors are to give another pack
MODEL_TYPE: Final = "coe"


def ensure_pack(
    collaboration: Collaboration,
    architectures: Mapping[str, Architecture],
    cache_dir: Path | None = None,
    *,
    progress: bool | None = None,
    force: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
) -> Path:
    """The pack of all experts, found or made as ``find_or_make`` says. Layer i is expert i of the collaboration.

    While it is made, one expert at a time is in memory. Raises CorruptCheckpoint if an expert can not be made,
    PackError if the pack can not be.
    """
    source = CoePackSource(collaboration, architectures)
    return find_or_make(source, cache_dir, progress=progress, force=force, lock_wait_s=lock_wait_s)


class CoePackSource:
    """All experts of a collaboration; a ``PackSource``."""

    command = "greenroom coe pack"
    stem = MODEL_TYPE

    def __init__(self, collaboration: Collaboration, architectures: Mapping[str, Architecture]) -> None:
        self._collaboration = collaboration
        self._experts = collaboration.experts
        self._architectures = [architectures[expert.architecture] for expert in self._experts]
        self.name = str(collaboration.file)

    @property
    def files(self) -> Sequence[Path]:
        return sorted({tensor.shard for expert in self._experts for tensor in expert.tensors.values()})

    @property
    def stored_bytes(self) -> int:
        return sum(expert.weight_bytes for expert in self._experts)

    def description(self) -> str:
        # transformers' own conversions may change from one version to the next
        library = "" if all(one.stored_as_is for one in self._architectures) else transformers.__version__
        layouts = {one.key: repr(one.layout) for one in self._architectures}
        experts = [
            (name, architecture.key)
            for name, architecture in zip(self._collaboration.graph.names, self._architectures, strict=True)
        ]
        return json.dumps([CONVERSION_VERSION, library, layouts, experts], sort_keys=True)

    def manifest(self, digest: str, like: PackManifest | None = None) -> PackManifest:
        names = self._collaboration.graph.names
        layers = tuple(
            PackLayer(name, experts=1, top_k=0, layout=architecture.layout)
            for name, architecture in zip(names, self._architectures, strict=True)
        )
        dtypes = {str(one.dtype).removeprefix("torch.") for one in self._architectures}
        return PackManifest(MODEL_TYPE, "+".join(sorted(dtypes)), digest, layers)

    def digest(self, total: Digest, on_bytes: OnBytes) -> None:
        for expert in self._experts:
            with ShardReader() as reader:  # one a checkpoint: there may be more files than a process may open
                read_stored(expert, reader, total)
            on_bytes(expert.weight_bytes)

    def write(self, writer: PackWriter, total: Digest, on_bytes: OnBytes) -> None:
        for number, (expert, architecture) in enumerate(zip(self._experts, self._architectures, strict=True)):
            with ShardReader() as reader, torch.no_grad():
                weights = architecture.weights_of(expert, read_stored(expert, reader, total))
            writer.write(number, 0, weights)
            on_bytes(architecture.layout.nbytes)
