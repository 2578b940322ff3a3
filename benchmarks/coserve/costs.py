"""What experts cost on this machine, measured once and kept.

Batches and loading are measured as `greenroom coe profile` does, and what `from_pretrained` takes beside them.

python -m benchmarks.coserve.costs FILE type=FOLDER half=FOLDER equal=FOLDER [resnet-101=FOLDER]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import click
import msgspec
from msgspec import Meta

from benchmarks.coserve.random_experts import CROP_PIXELS, SHAPES, save_expert
from benchmarks.harness.disk import drop_cache
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.reporting.progress import progress
from greenroom.core.coe_profile import ArchitectureCosts, BatchTimes
from greenroom.core.machine import machine_name
from greenroom.core.units import GIB, MIB

FILE: Final = "costs.json"
EXECUTORS: Final = 4
FOLDERS_OF_A_MODEL: Final = 2
_LOADINGS: Final = 9

Above = Annotated[float, Meta(gt=0)]


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """``record_bytes``: in memory. ``torch_ms``: for `from_pretrained`, up to weights that a forward finds in memory,
    beyond what that forward takes; the file is on disk and not in the page cache."""

    record_bytes: Annotated[int, Meta(ge=1)]
    torch_ms: Above
    batches: ArchitectureCosts


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """``models``: by the role that experts have on a board. They hold for ``machine`` alone."""

    machine: str
    models: dict[str, ModelCosts]
    made: str = "measured"


def kept_or_measured(folders: Mapping[str, Sequence[Path]] | None = None, folder: Path | None = None) -> Costs:
    """Those of this machine in the cache folder; measured now where there are none. ``folders``: by role, checkpoints;
    None: random ones are made for it, and removed again."""
    file = (folder or cache_folder() / "bench-coserve") / FILE
    with suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode(file.read_bytes(), type=Costs)
        if found.machine == machine_name():
            return found
    if folders is not None:
        found = measured(folders)
    else:
        with tempfile.TemporaryDirectory(prefix="coserve-models-", dir=_made(cache_folder())) as made:
            found = measured(random_models(Path(made)))
    _made(file.parent)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return found


def measured(folders: Mapping[str, Sequence[Path]], *, rounds: int = 5, largest: int = 32) -> Costs:
    """``folders``: by role, checkpoints of one architecture. Leave the machine alone meanwhile."""
    from greenroom.coe.loading.architecture import build_architectures
    from greenroom.coe.loading.collaboration import read_collaboration
    from greenroom.coe.loading.packing import ensure_pack
    from greenroom.experts.pack.pack_file import PackFile
    from greenroom.profiling.coe.batch_timing import TimingPlan
    from greenroom.profiling.coe.config import CoeProfileConfig
    from greenroom.profiling.coe.profiler import Here, measure_costs
    from greenroom.profiling.coe.sample_inputs import DISTINCT, Samples, random_images

    torch_ms = {role: pretrained_ms(own[0]) for role, own in folders.items()}
    crops = Samples(images=tuple(random_images(CROP_PIXELS, CROP_PIXELS, DISTINCT, 0)))
    config = CoeProfileConfig(4 * GIB, EXECUTORS, timing=TimingPlan(largest=largest, rounds=rounds, repeats=1))
    with tempfile.TemporaryDirectory(prefix="coserve-costs-", dir=_made(cache_folder())) as made:
        file = Path(made) / "costs.toml"
        file.write_text(_definition(folders))
        collaboration = read_collaboration(file)
        architectures = build_architectures(collaboration, "auto")
        with (
            closing(PackFile.open(ensure_pack(collaboration, architectures, Path(made)))) as pack,
            progress(None, "costs", "turn") as bar,
        ):
            here = Here(machine_name(), _cores())

            def on_progress(*_: object) -> None:
                bar.update()

            found = measure_costs(collaboration, architectures, pack, config, here, crops, on_progress)
    roles = {expert.architecture: name.rpartition("-")[0]
             for name, expert in zip(collaboration.graph.names, collaboration.experts, strict=True)}  # fmt: skip
    return Costs(
        machine=machine_name(),
        models={
            roles[key]: ModelCosts(
                record_bytes=architectures[key].layout.nbytes, torch_ms=torch_ms[roles[key]], batches=own
            )
            for key, own in found.items()
        },
    )


def pretrained_ms(folder: Path, rounds: int = _LOADINGS) -> float:
    """Median of ``from_pretrained`` and a first forward, less a second one: weights are read where they are used."""
    import torch
    from transformers import AutoModelForImageClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    spent = []
    image = torch.rand(1, 3, CROP_PIXELS, CROP_PIXELS)
    for _ in range(rounds + 1):
        drop_cache([folder])
        began = time.perf_counter()
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        with torch.inference_mode():
            model(image)
            loaded = time.perf_counter()
            model(image)
        spent.append(1000 * (2 * loaded - began - time.perf_counter()))
        del model  # what it maps can not be dropped
    return statistics.median(spent[1:])


def random_models(folder: Path) -> dict[str, list[Path]]:
    """Two random checkpoints of each shape."""
    found = {role: [folder / f"{role}-{number}" for number in range(FOLDERS_OF_A_MODEL)] for role in SHAPES}
    for role, own in found.items():
        for each in own:
            save_expert(each, role)
    return found


def documented() -> Costs:
    """Round figures of a machine with two cores, for runs that only show that it works: a batch of n ResNet-18 takes
    2 + 4 n ms on a thread, the disk gives 2 GB/s."""
    return Costs(
        machine="two cores, documented", made="documented",
        models={role: _round_figures(nbytes, work) for role, nbytes, work in (
            ("type", 45 * MIB, 1.0), ("half", 22 * MIB, 0.6), ("equal", 45 * MIB, 1.0), ("resnet-101", 170 * MIB, 4.0)
        )},
    )  # fmt: skip


def _round_figures(nbytes: int, work: float) -> ModelCosts:
    sizes = (1, 2, 4, 8, 16)
    side_by_side = {1: 0.55, 2: 1.0, 3: 1.5, 4: 2.0}
    times = {
        count: BatchTimes(
            ms_by_batch={size: work * shares * (2 + 4 * size) for size in sizes},
            request_ms=4 * work * shares, batch_ms=2 * work * shares, most=8,
        )
        for count, shares in side_by_side.items()
    }  # fmt: skip
    own = ArchitectureCosts(
        load_ms=nbytes / 2e6, bytes_by_batch={size: (8 + 2 * size) * MIB for size in sizes}, by_executors=times
    )
    return ModelCosts(record_bytes=nbytes, torch_ms=nbytes / 2e6 + 40, batches=own)


def _definition(folders: Mapping[str, Sequence[Path]]) -> str:
    lines = ['name = "costs"', "[router]", 'parameter = "part"']
    for role, own in folders.items():
        for number, folder in enumerate(own):
            lines += [f'[experts."{role}-{number}"]', f'model = "{folder.resolve()}"']
    return "\n".join(lines)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _named(_: Any, __: Any, given: Sequence[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for one in given:
        role, _, folder = one.partition("=")
        if role not in SHAPES or not Path(folder).is_dir():
            raise click.BadParameter(
                f"{one}: ROLE=FOLDER, with a role of {', '.join(SHAPES)} and a checkpoint's folder"
            )
        found.setdefault(role, []).append(Path(folder))
    return found


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("folders", nargs=-1, callback=_named)
def main(file: Path, folders: dict[str, list[Path]]) -> None:
    """Measure what these checkpoints cost. Without folders: random ones, made for it."""
    if folders:
        found = measured(folders)
    else:
        with tempfile.TemporaryDirectory(prefix="coserve-models-", dir=_made(cache_folder())) as made:
            found = measured(random_models(Path(made)))
    file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


if __name__ == "__main__":
    main()
