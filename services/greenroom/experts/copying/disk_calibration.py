"""How fast the disk link is here, and how it is best read: measured once for a pack, kept beside it.

A few settings are tried on records of the pack itself, taken at random, past the page cache, by the same mover that
serves the engine. They take turns, so that whatever else the machine does falls on all alike. The simplest wins
unless another is clearly better: a second thread is not worth noise.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import torch

from greenroom.core.errors import InvalidConfig, PackError
from greenroom.core.units import MIB, format_bytes
from greenroom.experts.copying.arena import Arena
from greenroom.experts.copying.carriers import DiskReads
from greenroom.experts.copying.mover import Job, Mover, Outbox
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.file_lock import file_lock
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_keys import Catalogue

FORMAT_VERSION = 2

SMALL_PACK_BYTES = 128 * MIB
"""Below this a pack is read in a moment however it is read, and nothing is measured."""

BUDGET_S = 1.5
QUEUED = 4
"""Records queued at once when throughput is measured."""

CLEARLY = 1.08
"""How many times as fast another setting has to be before it replaces a simpler one."""

LEAST_ROUNDS = 3
_LOCK_WAIT_S = 2 * BUDGET_S
_READ_TIMEOUT_S = 30.0

SIMPLEST = ReadSettings()
CANDIDATES = (
    SIMPLEST,
    ReadSettings(read_bytes=4 * MIB, threads=2, depth=1),
    ReadSettings(threads=2, depth=2),
    ReadSettings(read_bytes=1 * MIB, threads=4, depth=2),
)
"""The simpler first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a setting: seconds a record takes when it is fetched alone, and when several are queued and those
    that have landed are computed with.
    """

    alone_s: float
    queued_s: float


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The disk link of one pack on one machine, as measured with ``reads``, the settings chosen.

    ``bytes_per_s``: with several records queued. ``latency_s``: what a record fetched alone takes beyond its bytes
    at that rate. ``record_bytes``: the size of the records measured. The rest says what was measured where and when;
    ``tried`` has the median seconds a record, alone and queued, of every setting.
    """

    reads: ReadSettings
    bytes_per_s: float
    latency_s: float
    record_bytes: int
    pack: str
    host: str
    filesystem: str
    measured_at: str
    tried: tuple[tuple[str, float, float], ...] = ()
    version: int = FORMAT_VERSION

    def seconds(self, nbytes: int) -> float:
        """One record of ``nbytes``, fetched alone."""
        return self.latency_s + nbytes / self.bytes_per_s

    def describe(self) -> str:
        return f"{self.reads.describe()}, {format_bytes(self.bytes_per_s)}/s"


def choose(samples: Mapping[ReadSettings, Sequence[Sample]]) -> ReadSettings:
    """The first setting that no other beats clearly; ``samples`` are in order of simplicity and taken in turns.

    A setting is compared with the first one turn by turn, so what slows a whole turn down counts for nothing: by the
    median over the turns of the geometric mean of both ratios. Raises ValueError where there are no samples.
    """
    first, *_ = samples.values()
    speeds = {}
    for settings, own in samples.items():
        ratios = [
            ((base.alone_s * base.queued_s) / (sample.alone_s * sample.queued_s)) ** 0.5
            for base, sample in zip(first, own, strict=True)
        ]
        speeds[settings] = statistics.median(ratios)
    best = max(speeds.values())
    return next(settings for settings, speed in speeds.items() if speed * CLEARLY >= best)


def profile_path(pack: Path) -> Path:
    return pack.with_suffix(".link.json")


def load_or_measure(
    pack: PackFile,
    *,
    on_measure: Callable[[str], object] | None = None,
    budget_s: float = BUDGET_S,
    anew: bool = False,
) -> MeasuredLink | None:
    """The profile kept beside the pack, measured first where there is none for this pack, host and file system.

    ``anew``: measured whatever is kept, for instance because the machine was busy then.

    None for a small pack: it is not worth the time. ``on_measure`` is told once, before the measurement begins; this
    takes about ``budget_s``. Of processes that start together one measures and the others take what it found. A
    folder that can not be written to is no error: the profile then serves this process alone. Raises PackError where
    the pack can not be read.
    """
    if pack.manifest.record_bytes < SMALL_PACK_BYTES:
        return None
    path, here = profile_path(pack.path), _identity(pack)
    if not anew and (kept := _load(path, here)) is not None:
        return kept
    with _alone(path):
        if not anew and (kept := _load(path, here)) is not None:
            return kept
        if on_measure is not None:
            on_measure(f"measuring how {pack.path.name} is read best, about {budget_s:.1f} s")
        try:
            profile = measure(pack, budget_s=budget_s)
        except OSError as error:  # a TimeoutError is one
            raise PackError(f"the expert pack {pack.path} can not be read: {error}") from error
        _save(path, profile)
        return profile


def load(pack: PackFile) -> MeasuredLink | None:
    """The profile kept beside the pack; None where there is none for this pack, host and file system."""
    return _load(profile_path(pack.path), _identity(pack))


def measure(
    pack: PackFile,
    candidates: Sequence[ReadSettings] = CANDIDATES,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredLink:
    """Measure now. The slower the disk, the fewer settings are tried; the first of ``candidates`` always is."""
    nbytes = max(layer.layout.nbytes for layer in pack.manifest.layers)
    with _Bench(pack, clock) as bench:
        warm = min(bench.sample(candidates[0]).queued_s for _ in range(2))  # and the buffer's pages exist now
        affordable = int(budget_s / ((1 + QUEUED) * warm * LEAST_ROUNDS))
        candidates = candidates[: max(1, affordable)]
        samples: dict[ReadSettings, list[Sample]] = {settings: [] for settings in candidates}
        until = clock() + budget_s
        turn = random.Random(0)
        while not samples[candidates[0]] or clock() < until:
            for settings in turn.sample(candidates, len(candidates)):
                samples[settings].append(bench.sample(settings))
    chosen = choose(samples)
    tried = tuple(
        (
            settings.describe(),
            statistics.median(sample.alone_s for sample in own),
            statistics.median(sample.queued_s for sample in own),
        )
        for settings, own in samples.items()
    )
    alone_s, queued_s = tried[list(samples).index(chosen)][1:]
    pack_id, host, filesystem = _identity(pack)
    return MeasuredLink(
        reads=chosen,
        bytes_per_s=nbytes / queued_s,
        latency_s=max(0.0, alone_s - queued_s),
        record_bytes=nbytes,
        pack=pack_id,
        host=host,
        filesystem=filesystem,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tried=tried,
    )


class _Bench:
    """Movers over one pack, one for each setting tried. All read into the same slot: nobody looks at what lands."""

    def __init__(self, pack: PackFile, clock: Callable[[], float]) -> None:
        layouts = [layer.layout for layer in pack.manifest.layers]
        largest = max(layout.nbytes for layout in layouts)
        self._pack = pack
        self._clock = clock
        self._arena = Arena(1, largest, layouts)
        self._catalogue = Catalogue(
            "calibration",
            experts_per_layer=[layer.experts for layer in pack.manifest.layers],
            top_k=[layer.top_k for layer in pack.manifest.layers],
            expert_bytes=[largest] * len(layouts),
        )
        sizes = np.array([layout.nbytes for layout in layouts])[self._catalogue.layer_of]
        self._keys = np.flatnonzero(sizes == largest).tolist()
        self._outbox = Outbox()
        self._movers: dict[ReadSettings, Mover] = {}
        self._random = random.Random(1)
        self._last = 0.0

    def sample(self, settings: ReadSettings) -> Sample:
        mover = self._movers.get(settings)
        if mover is None:
            reads = _Landing(self._pack, self._catalogue, {Tier.DEVICE: self._arena}, settings)
            reads.landed = self._landed
            mover = self._movers[settings] = Mover("calibration", reads, self._outbox)
        return Sample(self._time(mover, 1), self._time(mover, QUEUED) / QUEUED)

    def _time(self, mover: Mover, records: int) -> float:
        keys = self._random.sample(self._keys, min(records, len(self._keys)))
        begin = self._clock()
        for key in keys:
            mover.put(Job(key, Tier.DISK, Tier.DEVICE, -1, 0, Reason.ON_DEMAND))
        ended = 0
        while True:
            if not self._outbox.wait(_READ_TIMEOUT_S):
                raise TimeoutError(f"{self._pack.path} gave no record within {_READ_TIMEOUT_S:.0f} s")
            for job in self._outbox.collect():
                if isinstance(job, Job) and job.error is not None:
                    raise job.error
                ended += 1
            if ended == len(keys):
                return (self._last - begin) * records / len(keys)
            self._compute()

    def _landed(self) -> None:
        self._last = self._clock()

    def _compute(self) -> None:
        """What a token costs of an expert that has landed: a pass over its bytes, on all cores, beside the reads."""
        self._arena.record(0).view(torch.float32).sum()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for mover in self._movers.values():
            mover.close()


class _Landing(DiskReads):
    """Notes when records have landed; does not check them, since several land in one slot here."""

    landed: Callable[[], object]

    def finish(self, job: Job) -> None:
        self.landed()


def _identity(pack: PackFile) -> tuple[str, str, str]:
    """Of the pack, the host and the file system."""
    state = pack.path.stat()
    manifest = pack.manifest
    device = f"{os.major(state.st_dev)}:{os.minor(state.st_dev)}"
    return (
        f"{manifest.model_type} {manifest.dtype} {manifest.source_digest} {state.st_size}",
        f"{platform.node()} {platform.machine()} {os.cpu_count()}",
        f"{_filesystem(device)} {'direct' if pack.direct else 'cached'}",
    )


def _filesystem(device: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Its numbers, type and source, as far as they can be learnt."""
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            fields = line.split()
            if fields[2] == device and "-" in fields:
                kind, source = fields[fields.index("-") + 1 :][:2]
                return f"{device} {kind} {source}"
    return device


def _load(path: Path, here: tuple[str, str, str]) -> MeasuredLink | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=MeasuredLink)
    except (OSError, msgspec.MsgspecError, InvalidConfig):
        return None
    same = kept.version == FORMAT_VERSION and (kept.pack, kept.host, kept.filesystem) == here
    usable = kept.bytes_per_s > 0 and kept.latency_s >= 0
    return kept if same and usable else None


def _save(path: Path, profile: MeasuredLink) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process measures; one that waited too long, or can not lock, measures as well and disturbs nobody's result
    but its own.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(file_lock(path.with_suffix(".lock"), _LOCK_WAIT_S))
        yield
