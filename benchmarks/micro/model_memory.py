"""How fast records of whole models come through a ModelMemory, beside the disk alone, and what deciding costs.

    python -m benchmarks.model_memory [--rounds N] [--folder PATH]

Loads: ResNet-18 records in fp32 out of a pack written for the run, into room for six. *File*: direct reads of the same
records, one after the other into one buffer whose pages exist. *Memory*: fetched one ahead, records lying whole or cut
into pieces of at least 1 MiB. Arms take turns within a round. A round 0 warms up, in which checksums are compared.

Deciding: a board of 376 experts of three architectures, a tenth of their bytes resident, requests by Zipf's law, three
experts held. No bytes are read or moved: the time is that of ``fetch``, which chooses who leaves and finds places.
Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import each, progress
from benchmarks.harness.reporting.statistics import Spread, percentile, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from benchmarks.harness.turn import timed
from greenroom.coe.simulation.simulated_memory import SimulatedLink, SimulatedMemory
from greenroom.core.units import MIB
from greenroom.experts.copying.byte_region import PiecedRecord
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.model_memory import ModelMemory, catalogue_of_models
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import PackLayer, PackManifest
from greenroom.experts.pack.pack_file import PackFile, PackWriter
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.placement.placement_policy import PendingRequest
from greenroom.policies.registry import create_policy

MODELS: Final = 16
ROOM: Final = 6
LOADS: Final = 12
"""A turn."""
WIDTHS: Final = {"full": (64, 128, 256, 512), "half": (44, 90, 180, 362), "equal": (60, 134, 250, 516)}
"""Of ResNet-18, and of detectors of half and of equal size."""
POLICIES: Final = ("coserve", "pull", "lru")
_DEADLINE_S = 30.0


def layer_of(name: str, widths: Sequence[int]) -> PackLayer:
    config = ResNetConfig(hidden_sizes=list(widths), depths=[2, 2, 2, 2], layer_type="basic", embedding_size=widths[0])
    with torch.device("meta"):
        state = ResNetForImageClassification(config).state_dict()
    tensors = [(key, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for key, one in state.items()]
    return PackLayer.of_model(name, tensors)


@contextmanager
def pack_of_models(folder: Path) -> Iterator[PackFile]:
    layer = layer_of("m", WIDTHS["full"])
    manifest = PackManifest("resnet", "float32", "random", (layer,) * MODELS)
    with tempfile.TemporaryDirectory(prefix="model-memory-", dir=folder) as made:
        path = Path(made) / "models.pack"
        with PackWriter(path, manifest) as writer, progress(MODELS, "experts", "record") as bar:
            for number in range(MODELS):
                random = torch.Generator().manual_seed(number)
                writer.write(number, 0, [_drawn(spec.shape, spec.dtype, random) for spec in layer.layout.tensors])
                bar.update()
        pack = PackFile.open(path)
        try:
            yield pack
        finally:
            pack.close()


def _drawn(shape: tuple[int, ...], dtype: str, random: torch.Generator) -> torch.Tensor:
    if dtype == "int64":
        return torch.zeros(shape, dtype=torch.int64)
    return torch.rand(shape, generator=random)


def order_of(turn: int) -> list[int]:
    """Each is read before any comes again, so that none is resident when it is asked for."""
    order = np.random.default_rng(turn).permutation(MODELS)
    return [*map(int, order[:LOADS])]


class FileArm:
    """Reads alone."""

    def __init__(self, pack: PackFile) -> None:
        self._pack = pack
        self._buffer = page_aligned(pack.manifest.layers[0].layout.nbytes)
        self._buffer[:] = bytes(len(self._buffer))

    def load(self, order: Sequence[int]) -> int:
        for expert in order:
            self._pack.read_part(expert, 0, 0, self._buffer)
        return len(order)

    def close(self) -> None:
        pass


class MemoryArm:
    """What a worker does: the next is fetched while one is on its way; each is held once, and its weights are made."""

    def __init__(self, pack: PackFile, piece_bytes: int) -> None:
        self._link = ModelLink(pack, piece_bytes=piece_bytes)
        policy = create_policy("lru", catalogue=catalogue_of_models(pack.manifest))
        self.memory = ModelMemory(self._link, policy, ROOM * pack.manifest.layers[0].layout.nbytes)

    def load(self, order: Sequence[int]) -> int:
        """Returns how many were loaded: what was left of the turn before is there."""
        memory = self.memory
        before, left, open_ = memory.counters.loads, deque(order), set[int]()
        while left or open_:
            while left and len(open_) < 2:
                expert = left.popleft()
                assert memory.fetch(expert)
                if not memory.has(expert):
                    open_.add(expert)
            if open_:
                assert memory.wait(_DEADLINE_S)
            for one in memory.collect():
                assert one.error is None
                open_.remove(one.expert)
                memory.hold(one.expert, [])
                memory.weights(one.expert)
                memory.release(one.expert)
        return memory.counters.loads - before

    def close(self) -> None:
        self._link.close()
        self.memory.close()


def loads(pack: PackFile, rounds: int, seconds: float) -> dict[str, Any]:
    nbytes = pack.manifest.layers[0].layout.nbytes
    arms: dict[str, FileArm | MemoryArm] = {
        "file": FileArm(pack),
        "memory, whole records": MemoryArm(pack, nbytes),
        "memory, 1 MiB pieces": MemoryArm(pack, MIB),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    shares: dict[str, list[float]] = {name: [] for name in arms if name != "file"}
    for round_, name in in_turns(list(arms), rounds, seconds):
        # In the first round every record is read by every arm, and so checked.
        order = order_of(round_) if round_ else list(range(MODELS))
        with timed() as took:
            loaded = arms[name].load(order)
        if round_:
            found[name].append(loaded / took[0])
    for arm in arms.values():
        arm.close()
    for name in shares:
        shares[name] = [own / alone for own, alone in zip(found[name], found["file"], strict=True)]
    return {
        "record_bytes": nbytes,
        "pieces": len(PiecedRecord(pack.manifest.layers[0].layout).pieces),
        "loads_per_s": {name: spread_json(Spread.of(rates)) for name, rates in found.items()},
        "over_file": {name: spread_json(Spread.of(own)) for name, own in shares.items()},
    }


def deciding(policy: str, uses: int, seeds: int) -> dict[str, Any]:
    layers = {name: layer_of(name, widths) for name, widths in WIDTHS.items()}
    kinds = ["full"] * 352 + ["half"] * 12 + ["equal"] * 12
    pieces = [PiecedRecord(layers[kind].layout).pieces for kind in kinds]
    catalogue = Catalogue.of_models("board", [sum(own) for own in pieces])
    spent: list[float] = []
    moved = loaded = evictions = 0
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        chances = random.permutation(np.arange(1, len(kinds) + 1) ** -1.2)
        chances /= chances.sum()
        graph = Dependencies(chances, (frozenset(),) * 352 + (frozenset(range(352)),) * 24)
        options = {} if policy == "lru" else {"dependencies": graph}
        link = SimulatedLink(lambda _: 0.0)
        memory = SimulatedMemory(
            create_policy(policy, catalogue=catalogue, options=options),
            int(catalogue.bytes_of.sum()) // 10, link, pieces,
        )  # fmt: skip
        held: deque[int] = deque()
        for number, expert in enumerate(random.choice(len(kinds), uses, p=chances).tolist()):
            request = PendingRequest(str(number), 0.0, 1, 1, 1, 9e9, expert=expert)
            memory.waits(request)
            if not memory.has(expert):
                began = time.perf_counter()
                assert memory.fetch(expert)
                spent.append(1e6 * (time.perf_counter() - began))
                link.deliver(0.0)
            memory.hold(expert, [request])
            held.append(expert)
            if len(held) > 3:
                memory.release(held.popleft())
        counted = memory.counters
        moved, loaded = moved + counted.bytes_moved, loaded + counted.bytes_loaded
        evictions += counted.evictions
    return {
        "fetches": len(spent),
        "us_mean": sum(spent) / len(spent),
        "us_median": percentile(spent, 0.5),
        "us_p95": percentile(spent, 0.95),
        "evictions_a_fetch": evictions / len(spent),
        "moved_share": moved / loaded,
    }


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="For all rounds of loads.")
@click.option("--uses", type=click.IntRange(1), default=1500, show_default=True, help="Of the board, a seed.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=None, help="For the pack of 0.7 GB; default: the cache."
)
def main(rounds: int, seconds: float, uses: int, seeds: int, folder: Path | None) -> None:
    """Loads a second through a ModelMemory and of the file alone; microseconds of a decision."""
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with pack_of_models(folder) as pack:
        found = loads(pack, rounds, seconds)
    decided = {name: deciding(name, uses, seeds) for name in each(POLICIES, "decisions", "policy")}
    _print(found, decided, click.echo)
    click.echo(json.dumps({"loads": found, "deciding": decided, "machine": describe_machine(folder)}))


def _print(found: dict[str, Any], decided: dict[str, dict[str, float]], say: Callable[[str], object]) -> None:
    size = found["record_bytes"]
    say(f"records of {size / MIB:.1f} MiB, {found['pieces']} pieces; median (least-most) of rounds")
    for name, rate in found["loads_per_s"].items():
        gb = {key: value * size / 1e9 for key, value in rate.items()}
        over = median_range(found["over_file"].get(name)) if name in found["over_file"] else ""
        say(f"{name:<24}{median_range(rate, 1):>20} loads/s {median_range(gb):>22} GB/s   {over}")
    say(f"{'deciding':<12}{'fetches':>9}{'us, mean':>10}{'median':>8}{'p95':>8}{'leave':>8}{'moved / loaded':>16}")
    for name, one in decided.items():
        say(
            f"{name:<12}{one['fetches']:>9}{one['us_mean']:>10.0f}{one['us_median']:>8.0f}{one['us_p95']:>8.0f}"
            f"{one['evictions_a_fetch']:>8.2f}{one['moved_share']:>16.3f}"
        )


if __name__ == "__main__":
    main()
