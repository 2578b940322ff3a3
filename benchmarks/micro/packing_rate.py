"""How fast an expert pack is made, beside what the disk gives a plain copy of the same bytes.

    python -m benchmarks.packing_rate [--layers 12] [--experts 48] [--rounds 3]

A Mixtral of random weights, nothing of its files in the page cache. Turns: *pack* is what ``greenroom pack`` does, from
the first read to the rename. *copy* reads the checkpoint's files and writes them beside it, and *write* only writes as
many bytes: both past the page cache, 8 MiB at a time in four threads, into space that is claimed first, with a sync at
the end. ``packing_share`` is the rate of *pack* over that of *copy*, round by round, ``write_share`` that over *write*.
The disk is to have room for the checkpoint twice; what a turn has written is removed after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import click

from benchmarks.harness.disk import drop_cache
from benchmarks.harness.inputs.checkpoints import RandomMixtral, random_mixtral
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.checkpoints.pack_cache import PackSource, find_or_make
from greenroom.core.units import MIB
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.packing import MoePackSource, resolve_dtype

ARMS: Final = ("pack", "copy", "write")
PIECE_BYTES: Final = 8 * MIB
THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """``cpu_s``: of all threads, those in the kernel included."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_s_gb(self) -> float:
        return self.cpu_s / self.nbytes * 1e9


def pack(source: PackSource, folder: Path) -> int:
    """Returns the pack's bytes."""
    return find_or_make(source, folder, progress=False, force=True).stat().st_size


class Pieces:
    """Memory that the threads of a copy take in turns, touched before."""

    def __init__(self) -> None:
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(THREADS):
            piece = page_aligned(PIECE_BYTES)
            piece[:] = os.urandom(PIECE_BYTES)
            self._free.put(piece)

    def copy(self, files: Sequence[Path], folder: Path) -> int:
        """All whole pages of the files. Returns their bytes."""
        return sum(
            self._write(folder / file.name, file.stat().st_size // PAGE_BYTES * PAGE_BYTES, file) for file in files
        )

    def write(self, nbytes: int, folder: Path) -> int:
        """Whole pages of what memory holds. Returns their bytes."""
        return self._write(folder / "written", nbytes // PAGE_BYTES * PAGE_BYTES)

    def _write(self, path: Path, nbytes: int, source: Path | None = None) -> int:
        with contextlib.ExitStack() as opened:

            def open_direct(file: Path, flags: int) -> int:
                fd = os.open(file, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
                opened.callback(os.close, fd)
                return fd

            to = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            of = None if source is None else open_direct(source, os.O_RDONLY)

            def move(offset: int) -> None:
                whole = self._free.get()
                piece = whole[: min(PIECE_BYTES, nbytes - offset)]
                try:
                    if of is not None and os.preadv(of, [piece], offset) != len(piece):
                        raise OSError(f"{source} is shorter than it was")
                    if os.pwrite(to, piece, offset) != len(piece):
                        raise OSError(f"{path} was not written whole")
                finally:
                    self._free.put(whole)

            os.posix_fallocate(to, 0, nbytes)
            with ThreadPoolExecutor(THREADS) as pool:
                for _ in pool.map(move, range(0, nbytes, PIECE_BYTES)):
                    pass
            os.fsync(to)
        return nbytes


def measured(work: Callable[[Path], int], cold: Sequence[Path], beside: Path) -> Turn:
    """``work`` writes into the folder that it is given, and returns how many bytes. ``cold``: not in the page cache."""
    folder = Path(tempfile.mkdtemp(prefix="packing-rate.", dir=beside))
    try:
        drop_cache(cold)
        began, cpu = time.perf_counter(), time.process_time()
        nbytes = work(folder)
        return Turn(nbytes, time.perf_counter() - began, time.process_time() - cpu)
    finally:
        shutil.rmtree(folder)
        os.sync()  # the next turn is not to wait for what this one has freed


def summary(turns: dict[str, list[Turn]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row an arm, and the shares."""
    rows = [
        {
            "arm": arm,
            "gb_s": spread_json(Spread.of([turn.gb_s for turn in own]), 3),
            "cpu_s_gb": spread_json(Spread.of([turn.cpu_s_gb for turn in own]), 3),
        }
        for arm, own in turns.items()
    ]
    shares = {
        name: spread_json(
            Spread.of([ours.gb_s / theirs.gb_s for ours, theirs in zip(turns["pack"], turns[arm], strict=True)]), 3
        )
        for name, arm in (("packing_share", "copy"), ("write_share", "write"))
    }
    return rows, shares


def table(rows: Sequence[dict[str, Any]], shares: dict[str, Any]) -> str:
    lines = [f"{'':<6}{'GB/s':>20}{'CPU s/GB':>20}"]
    lines += [f"{row['arm']:<6}{median_range(row['gb_s']):>20}{median_range(row['cpu_s_gb']):>20}" for row in rows]
    return "\n".join(lines + [f"{name} {median_range(share)}" for name, share in shares.items()])


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--experts", type=click.IntRange(min=4), default=48, show_default=True, help="A layer, of 9 MiB each.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def main(layers: int, experts: int, rounds: int) -> None:
    model = RandomMixtral(layers=layers, experts=experts, top_k=4, intermediate=1536)
    checkpoint = resolve(str(random_mixtral(model)))
    source = MoePackSource(ExpertPlan(checkpoint, resolve_dtype(checkpoint)))
    files, pieces = source.files, Pieces()
    works: dict[str, Callable[[Path], int]] = {
        "pack": lambda folder: pack(source, folder),
        "copy": lambda folder: pieces.copy(files, folder),
        "write": lambda folder: pieces.write(source.stored_bytes, folder),
    }
    turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    with progress(rounds * len(ARMS), "turns", "turn") as bar:
        for _, arm in in_turns(ARMS, rounds, float("inf"), warm_up=False):
            turns[arm].append(measured(works[arm], files, cache_folder()))
            bar.update()
    rows, shares = summary(turns)
    click.echo(table(rows, shares))
    machine = describe_machine(cache_folder())
    click.echo(json.dumps({"stored_bytes": source.stored_bytes, "rows": rows, **shares, "machine": machine}))


if __name__ == "__main__":
    main()
