"""§8.6: an expert read from disk as one record, or tensor by tensor, past the page cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns
from greenroom.checkpoints.safetensors_headers import read_header
from greenroom.experts.pack.direct_io import DirectFile, page_aligned
from greenroom.experts.pack.layout import PAGE_BYTES, align
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.packing import ensure_pack

RECORD, TENSORS, SHARDS = "one record", "a tensor at a time", "a tensor at a time, from the checkpoint"
WAYS = (RECORD, TENSORS, SHARDS)
SEED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Whole pages that hold what is wanted, as direct reads have to. ``read`` fills a buffer of ``nbytes``."""

    read: Callable[[memoryview], None]
    nbytes: int


Parts = Mapping[str, Sequence[Part]]
"""By way, in which parts an expert is read."""


def run(folder: Path, *, experts: int, rounds: int, seconds: float) -> dict[str, Any]:
    """``experts`` are drawn at random and each is read in every way. The ways take turns in being first."""
    with _opened(folder) as (pack, every):
        random = Random(SEED)
        chosen = [random.choice(every) for _ in range(experts)]
        longest = max(sum(part.nbytes for part in parts) for one in every for parts in one.values())
        buffer = page_aligned(longest)
        buffer[:] = bytes(len(buffer))  # the first touch of a page is not the disk's doing
        micros: dict[int, dict[str, float]] = {}
        for round_, place in in_turns(range(experts), rounds, seconds):
            spent = micros.setdefault(round_, dict.fromkeys(WAYS, 0.0))
            for number in range(len(WAYS)):
                way = WAYS[(place + number) % len(WAYS)]
                spent[way] += 1e6 * _read(chosen[place][way], buffer) / experts
        measured = [own for round_, own in micros.items() if round_]
        return {
            "record_bytes": pack.manifest.record_bytes // pack.manifest.experts,
            "direct": pack.direct,
            "ways": {way: _figures(way, measured, chosen) for way in WAYS},
        }


def _read(parts: Sequence[Part], buffer: memoryview) -> float:
    """Seconds."""
    began = time.perf_counter()
    at = 0
    for part in parts:
        part.read(buffer[at : at + part.nbytes])
        at += part.nbytes
    return time.perf_counter() - began


def _figures(way: str, measured: Sequence[Mapping[str, float]], chosen: Sequence[Parts]) -> dict[str, Any]:
    """``over_record``: round by round."""
    return {
        "us": spread_json(Spread.of([own[way] for own in measured])),
        "over_record": spread_json(Spread.of([own[way] / own[RECORD] for own in measured])),
        "reads": statistics.fmean(len(one[way]) for one in chosen),
    }


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[PackFile, list[Parts]]]:
    """The parts of every expert but those that lie at a file's end."""
    with ExitStack() as stack:
        pack = stack.enter_context(closing(PackFile.open(ensure_pack(resolve(str(folder))))))
        stored: dict[str, Part | None] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(closing(DirectFile(shard)))
            for name, tensor in read_header(shard).items():
                begin, nbytes = _pages(tensor.offset, tensor.nbytes)
                whole = begin + nbytes <= file.size
                stored[name] = Part(partial(file.read_into, begin), nbytes) if whole else None
        yield pack, [
            {RECORD: [_of_record(pack, layer, expert, 0, spec.layout.nbytes)],
             TENSORS: [_of_record(pack, layer, expert, one.offset, one.nbytes) for one in spec.layout.tensors],
             SHARDS: own}
            for layer, spec in enumerate(pack.manifest.layers)
            for expert in range(spec.experts)
            if (own := _of_checkpoint(stored, f"{spec.name}.{expert}."))
        ]  # fmt: skip


def _of_record(pack: PackFile, layer: int, expert: int, offset: int, nbytes: int) -> Part:
    begin, length = _pages(offset, nbytes)
    return Part(partial(pack.read_part, layer, expert, begin), length)


def _of_checkpoint(stored: Mapping[str, Part | None], prefix: str) -> list[Part]:
    own = [part for name, part in stored.items() if name.startswith(prefix)]
    return [part for part in own if part is not None] if None not in own else []


def _pages(offset: int, nbytes: int) -> tuple[int, int]:
    """Begin and length of the pages around these bytes."""
    begin = offset // PAGE_BYTES * PAGE_BYTES
    return begin, align(offset + nbytes, PAGE_BYTES) - begin
