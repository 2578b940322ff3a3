"""Board A with real experts: checkpoints, pack, what they cost, and the requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from transformers.utils import logging as transformers_logging

from benchmarks.coserve.boards import definition, role_of
from benchmarks.coserve.checkpoints import checkpoints, smaller, write_definition
from benchmarks.coserve.costs import FOLDERS_OF_A_MODEL, Costs, documented, measured
from benchmarks.coserve.random_experts import CROP_PIXELS, weight_bytes
from benchmarks.coserve.real.scale import Scale
from benchmarks.harness.machine import cache_folder
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import Collaboration, read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.coe.serving.costs import KIND
from greenroom.coe.serving.serve_calls import Call
from greenroom.coe.simulation.simulate import Way
from greenroom.core.coe_profile import (
    FORMAT,
    ArchitectureProfile,
    CoeProfile,
    ExecutorsProfile,
    MemoryTrial,
    dump_coe_profile,
)
from greenroom.core.machine import machine_name
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.pack_file import PackFile
from greenroom.profiling.coe.batch_timing import threads_of
from greenroom.profiling.coe.replayed_throughput import Board, drawn_paths
from greenroom.profiling.coe.sample_inputs import DISTINCT, random_images

_READS: Final = 24


@dataclass(frozen=True, slots=True)
class Link:
    """Of the pack. ``ms_a_byte``: direct reads, one after the other. ``check_ms_a_byte``: more the first time, when a
    record's checksum is compared. ``cpu_ms_a_byte``: what a core does of it then, which executors do without."""

    ms_a_byte: float
    check_ms_a_byte: float
    cpu_ms_a_byte: float


@dataclass(frozen=True, slots=True)
class RealBoard:
    """``file``: its definition. ``board``: as it is replayed, with ``paths`` of the burst's requests.

    ``memory``: bytes, of experts and intermediates. ``profile``: what the engine is told of costs. ``torch_ms``: for
    `from_pretrained` of a type's expert; see ``loading_ms``.
    """

    file: Path
    cache: Path
    collaboration: Collaboration
    folders: Sequence[Path]
    costs: Costs
    link: Link
    board: Board
    memory: int
    profile: Path
    torch_ms: float

    @property
    def graph(self) -> ExpertGraph:
        return self.collaboration.graph

    def calls(self, ways: Sequence[Way]) -> list[Call]:
        """Crops to the experts of these ways. A type's request goes on where its expert does, whatever the label."""
        crops = random_images(CROP_PIXELS, CROP_PIXELS, DISTINCT, 0)
        return [
            Call(way.arrives_ms, crops[number % len(crops)], self.graph.names[way.experts[0]])
            for number, way in enumerate(ways)
        ]


def prepare(scale: Scale) -> RealBoard:
    """Made once in the cache folder. Raises NoRoom.

    Costs are those of this hour, not the ones that are kept: a machine may be a fifth faster in another one.
    """
    cache = cache_folder() / "bench-coserve"
    made = definition("A", scale.seed)
    if scale.types is not None:
        made = smaller(made, scale.types)
    names = list(made.experts)
    file = cache / f"{made.name}-{scale.seed}.toml"
    pack_bytes = 0 if file.exists() else sum(weight_bytes(role_of(name)) for name in names)
    folders = checkpoints(cache / "experts", names, others=pack_bytes)
    write_definition(file, made, folders)
    collaboration = read_collaboration(file)
    architectures = build_architectures(collaboration)
    costs = measured(_of_each_role(folders)) if scale.measured else documented()
    path = ensure_pack(collaboration, architectures, cache)
    with closing(PackFile.open(path)) as pack:
        sizes = pack.manifest.sizes()
    link = link_of(path)
    memory = int(scale.resident * sum(sizes))
    graph = collaboration.graph
    board = Board(
        graph,
        sizes,
        [costs.models[role_of(name)].batches for name in names],
        graph.usage(),
        drawn_paths(graph, scale.requests, scale.seed),
    )
    profile = cache / f"{made.name}-{scale.seed}.profile.json"
    profile.write_bytes(dump_coe_profile(profile_of(collaboration, costs, link, sizes, memory)))
    own = [folders[name] for name in names]
    return RealBoard(
        file, cache, collaboration, own, costs, link, board, memory, profile, torch_ms=costs.models["type"].torch_ms
    )


def _of_each_role(folders: Mapping[str, Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for name, folder in folders.items():
        found.setdefault(role_of(name), []).append(folder)
    return {role: own[:FOLDERS_OF_A_MODEL] for role, own in found.items()}


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers would show one for each expert."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def link_of(path: Path, reads: int = _READS) -> Link:
    """Records drawn from all over the pack, each read with its check, and once more.

    A pack opened before has read them: a virtual disk may be faster the second time, and the systems take rounds.
    """
    spent, worked, nbytes = [], [], 0
    for passes in (1, 2):
        with closing(PackFile.open(path)) as pack:
            chosen = np.random.default_rng(0).permutation(len(pack.manifest.layers))[:reads].tolist()
            record = page_aligned(max(pack.manifest.sizes()))
            record[:] = bytes(len(record))  # fresh pages cost as much as reading them
            for _ in range(passes):
                began, works = time.perf_counter(), time.thread_time()
                nbytes = sum(pack.read_into(layer, 0, record) for layer in chosen)
                spent.append(1000 * (time.perf_counter() - began))
                worked.append(1000 * (time.thread_time() - works))
    _, first, again = spent
    return Link(again / nbytes, max(0.0, first - again) / nbytes, worked[1] / nbytes)


def profile_of(collaboration: Collaboration, costs: Costs, link: Link, sizes: Sequence[int], memory: int) -> CoeProfile:
    """The costs as a service loads them: so the engine predicts with what the replay is made of."""
    experts = collaboration.experts
    keys = {name: one.architecture for name, one in zip(collaboration.graph.names, experts, strict=True)}
    roles = {key: role_of(name) for name, key in keys.items()}
    bytes_of = {one.architecture: size for one, size in zip(experts, sizes, strict=True)}
    classes = {one.architecture: one.model_class for one in experts}
    trial = MemoryTrial(
        residents=1, expert_bytes=memory, per_s=1.0, window=(0, 1), drawn=1, per_s_by_residents={1: 1.0}
    )
    counts = {count for own in costs.models.values() for count in own.batches.by_executors}
    return CoeProfile(
        format=FORMAT,
        version=1,
        collaboration=collaboration.name,
        machine=machine_name(),
        architectures={
            key: ArchitectureProfile(model_class=classes[key], record_bytes=size) for key, size in bytes_of.items()
        },
        experts=keys,
        usage={name: float(share) for name, share in zip(keys, collaboration.graph.usage(), strict=True)},
        kinds={
            KIND: ExecutorsProfile(
                executors=1,
                memory_bytes=memory,
                scheduling="coserve",
                threads_by_executors={count: threads_of(cores(), count) for count in counts},
                architectures={
                    key: msgspec.structs.replace(costs.models[role].batches, load_ms=link.ms_a_byte * bytes_of[key])
                    for key, role in roles.items()
                },
                trials=dict.fromkeys(counts, trial),
            )
        },
        notes={"made": "by the benchmark's costs"},
    )


def cores() -> int:
    import os

    return len(os.sched_getaffinity(0))
