"""Bytes/s of the engine's disk link beside plain sequential direct reads of the same records.

    python -m benchmarks.transfers [--pack FILE] [--rounds 15] [--queued 8] [--every-setting]

Every round takes records at random and reads them in four ways, in changing order. Plain: one after the other with
``preadv``. Queued: through the link, all at once. Computing: the same, with a row multiplied by each record that has
landed, on all cores, as a token does. One by one: each is asked for when the one before was collected, as by a layer
that misses one expert at a time. The difference to plain reads is the cost of the hand-over between queue, mover and
owner. ``--every-setting`` shows all candidates of calibration. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.harness.reporting.progress import each
from greenroom.checkpoints.pack_cache import default_cache_dir
from greenroom.core.units import format_bytes
from greenroom.experts.bookkeeping.ledger import Ledger
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.disk_calibration import CANDIDATES, load_or_measure
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings, page_aligned
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.base.events import Reason
from greenroom.policies.base.slot_sizes import SlotSizes

READ_TIMEOUT_S = 60.0


@dataclass
class Arm:
    """One way of reading; ``run(keys)`` reads these records. ``bytes_per_s`` and ``cpu_s`` have one entry a round."""

    name: str
    run: Callable[[list[int]], None]
    bytes_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def measure(self, keys: list[int], nbytes: int) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        self.run(keys)
        self.bytes_per_s.append(nbytes * len(keys) / (time.perf_counter() - begin))
        self.cpu_s.append((time.process_time() - cpu) / len(keys))


class Link:
    """The engine's tiers over a pack, without a model: what is fetched is evicted again."""

    def __init__(self, pack: PackFile, slots: int, reads: ReadSettings) -> None:
        catalogue = catalogue_of(pack.manifest)
        self._layer_of = catalogue.layer_of
        self.ledger = Ledger(SlotSizes(catalogue), slots)
        self.tiers = Tiers(
            pack,
            catalogue,
            self.ledger,
            None,
            make_host_room=lambda _: False,
            hardware=RealHardware(reads),
        )

    def queued(self, keys: list[int]) -> None:
        for key in keys:
            self.tiers.fetch(key, Reason.ON_DEMAND)
        self._collect(len(keys))
        for key in keys:
            self.ledger.evict(key)

    def computing(self, keys: list[int]) -> None:
        for key in keys:
            self.tiers.fetch(key, Reason.ON_DEMAND)
        self._collect(len(keys), compute=True)
        for key in keys:
            self.ledger.evict(key)

    def one_by_one(self, keys: list[int]) -> None:
        for key in keys:
            self.tiers.fetch(key, Reason.ON_DEMAND)
            self._collect(1)
            self.ledger.evict(key)

    def _collect(self, count: int, *, compute: bool = False) -> None:
        while count:
            if not self.tiers.wait(READ_TIMEOUT_S):
                raise TimeoutError("nothing has landed")
            for transfer in self.tiers.collect():
                if transfer.error is not None:
                    raise OSError(transfer.error)
                count -= 1
                if compute and count:
                    layer = int(self._layer_of[transfer.expert])
                    (weights,) = self.tiers.weights([transfer.expert], layer)
                    for tensor in weights:
                        if tensor.ndim == 2:
                            torch.mv(tensor, torch.ones(tensor.shape[1], dtype=tensor.dtype))


@click.command()
@click.option("--pack", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Default: largest.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--queued", default=8, show_default=True, help="Records a round.")
@click.option("--every-setting", is_flag=True, help="All that calibration chooses from, beside what it chose.")
def main(path: Path | None, rounds: int, queued: int, every_setting: bool) -> None:
    """Measure and print."""
    path = path or max(default_cache_dir().glob("packs/*.pack"), key=lambda p: p.stat().st_size, default=None)
    if path is None:
        raise click.UsageError("there is no expert pack in the cache; make one with `greenroom pack MODEL`")
    with closing(PackFile.open(path)) as pack:
        link = load_or_measure(pack, on_measure=lambda line: click.echo(line, err=True))
        reads = ReadSettings() if link is None else link.reads
        report = _measure(pack, list(dict.fromkeys([reads, *(CANDIDATES if every_setting else ())])), rounds, queued)
    print(json.dumps(report))


def _measure(pack: PackFile, settings: list[ReadSettings], rounds: int, queued: int) -> dict[str, object]:
    catalogue = catalogue_of(pack.manifest)
    nbytes = max(layer.layout.nbytes for layer in pack.manifest.layers)
    keys = np.flatnonzero(np.array(pack.manifest.sizes()) == nbytes).tolist()
    queued = min(queued, len(keys))
    buffers = [page_aligned(nbytes)[:nbytes] for _ in range(queued)]

    def plain(keys: list[int]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            pack.read_part(int(catalogue.layer_of[key]), int(catalogue.index_of[key]), 0, buffer)

    chooser = random.Random(3)
    links = [Link(pack, queued, reads) for reads in settings]
    try:
        arms = [Arm("plain reads", plain)]
        for reads, link in zip(settings, links, strict=True):
            name = reads.describe()
            arms += [
                Arm(f"{name}: queued", link.queued),
                Arm(f"{name}: computing", link.computing),
                Arm(f"{name}: one by one", link.one_by_one),
            ]
            link.queued(keys[:queued])  # every slot's pages exist from here on
        plain(keys[:queued])
        for _ in each(range(rounds), "rounds"):
            chosen = chooser.sample(keys, queued)
            for arm in chooser.sample(arms, len(arms)):
                arm.measure(chosen, nbytes)
    finally:
        for link in links:
            link.tiers.close()
    print(f"{queued} records of {format_bytes(nbytes)} a round, {rounds} rounds; chosen: {settings[0].describe()}")
    print(f"{'':<52}{'median':>12}{'ratio':>8}{'(quartiles)':>16}{'CPU a record':>15}")
    rows = []
    for arm in arms:
        ratios = sorted(own / base for own, base in zip(arm.bytes_per_s, arms[0].bytes_per_s, strict=True))
        low, middle, high = (ratios[int(share * (len(ratios) - 1))] for share in (0.25, 0.5, 0.75))
        median = statistics.median(arm.bytes_per_s)
        cpu = statistics.median(arm.cpu_s)
        print(
            f"{arm.name:<52}{format_bytes(median) + '/s':>12}{middle:>8.3f}"
            f"{f'({low:.3f}-{high:.3f})':>16}{f'{1e6 * cpu:.0f} us':>15}"
        )
        rows.append({"arm": arm.name, "bytes_per_s": median, "ratio": middle, "quartiles": [low, high], "cpu_s": cpu})
    return {"record_bytes": nbytes, "queued": queued, "rounds": rounds, "reads": settings[0].describe(), "rows": rows}


if __name__ == "__main__":
    main()
