"""How fast an expert pack is made, beside what the disk gives a plain copy of the same bytes.

    python -m benchmarks.packing_rate [--format bf16 --format fp8-blocks …] [--layers 12] [--experts 48] [--rounds 3]

A Mixtral of random weights (for mxfp4 a gpt-oss), nothing of its files in the page cache, whose experts stay in the
format. Turns: *pack* is what ``greenroom pack`` does, from the first read to the rename. *copy* reads the checkpoint's
files and writes them beside it, and *write* only writes as many bytes as the pack has: both past the page cache, 8 MiB
at a time in four threads, into space that is claimed first, with a sync at the end. ``packing_share`` is the rate of
*pack* over that of *copy*, round by round, ``write_share`` that over *write*. The disk is to have room for the
checkpoint twice; what a turn has written is removed after it.
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
from benchmarks.harness.inputs.checkpoints import RandomMixtral, kept, random_mixtral
from benchmarks.harness.inputs.mxfp4_checkpoint import RandomGptOss, random_gpt_oss
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.checkpoints.pack_cache import PackSource, find_or_make
from greenroom.core.units import MIB
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.experts.pack.pack_file import pack_bytes
from greenroom.moe.formats.expert_format import PLAIN_FORMAT
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.packing import MoePackSource, resolve_dtype
from tests.stored_checkpoints import KINDS, Size

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


def checkpoint_in(name: str, layers: int, experts: int) -> Path:
    """Experts of 9 MiB in bf16. Those in codes are copies of few: what codes are does not matter here."""
    if name in ("bf16", "lossless"):
        return random_mixtral(RandomMixtral(layers=layers, experts=experts, top_k=4, intermediate=1536))
    if name == "mxfp4":
        return random_gpt_oss(RandomGptOss(layers=layers, experts=experts, top_k=4, intermediate=1536))
    few = random_mixtral(RandomMixtral(layers=2, experts=2, top_k=2, intermediate=1536))
    folder = kept(
        "packing-rate",
        f"1 {name} {layers} {experts} {few.name}",
        lambda draft: KINDS[name].write(few, draft, Size(layers, experts)),
    )
    file = folder / "model.gguf"
    return file if file.exists() else folder / "model"


def source_in(name: str, layers: int, experts: int) -> MoePackSource:
    checkpoint = resolve(str(checkpoint_in(name, layers, experts)))
    expert_format = PLAIN_FORMAT if name == "bf16" else KINDS[name].kept(checkpoint)
    return MoePackSource(ExpertPlan(checkpoint, resolve_dtype(checkpoint), expert_format))


def measure(source: MoePackSource, rounds: int, name: str) -> dict[str, list[Turn]]:
    """By arm."""
    files, pieces, nbytes = source.files, Pieces(), pack_bytes(source.manifest("0" * 32))
    works: dict[str, Callable[[Path], int]] = {
        "pack": lambda folder: pack(source, folder),
        "copy": lambda folder: pieces.copy(files, folder),
        "write": lambda folder: pieces.write(nbytes, folder),
    }
    turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    with progress(rounds * len(ARMS), name, "turn") as bar:
        for _, arm in in_turns(ARMS, rounds, float("inf"), warm_up=False):
            turns[arm].append(measured(works[arm], files, cache_folder()))
            bar.update()
    return turns


@click.command(help=__doc__)
@click.option("--format", "names", type=click.Choice(("bf16", *KINDS)), multiple=True, default=("bf16",))
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--experts", type=click.IntRange(min=4), default=48, show_default=True, help="A layer, of 9 MiB in bf16.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def main(names: Sequence[str], layers: int, experts: int, rounds: int) -> None:
    found = {}
    for name in names:
        source = source_in(name, layers, experts)
        rows, shares = summary(measure(source, rounds, name))
        click.echo(f"{name}\n{table(rows, shares)}")
        found[name] = {"stored_bytes": source.stored_bytes, "rows": rows, **shares}
    click.echo(json.dumps({"formats": found, "machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
