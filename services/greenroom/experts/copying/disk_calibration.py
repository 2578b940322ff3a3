"""How fast the disk link is, and by which settings it is read best: measured once for a pack, and kept beside it.

A few settings are tried on random records of the pack itself, past the page cache, with the engine's own mover. They
take turns, so that other load on the machine slows them alike. The simplest wins unless another is clearly faster: a
second thread is not worth a difference within the noise.
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
from greenroom.core.files import write_whole
from greenroom.core.units import MIB, format_bytes
from greenroom.experts.copying.arena import Arena
from greenroom.experts.copying.mover import Job, Mover, Outbox
from greenroom.experts.copying.transfers import DiskReads
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.file_lock import file_lock
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.base.events import Reason, Tier
from greenroom.policies.base.expert_keys import Catalogue

FORMAT_VERSION = 2

SMALL_PACK_BYTES = 128 * MIB
"""A smaller pack is read in a moment by any settings, so nothing is measured."""

BUDGET_S = 1.5
QUEUED = 4
"""Records queued at once when throughput is measured."""

CLEARLY = 1.08
"""How many times as fast a setting has to be to replace a simpler one."""

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
"""The simplest first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a setting, in seconds a record: fetched alone, and with several queued while the processor computes
    with those that have landed.
    """

    alone_s: float
    queued_s: float


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The disk link of one pack on one machine, with ``reads``, the settings that were chosen.

    ``bytes_per_s``: with several records queued. ``latency_s``: what a record that is fetched alone takes in addition
    to its bytes at that rate. ``record_bytes``: the size of the records measured. ``tried``: of each setting the median
    seconds a record, alone and queued. The rest identifies the pack, the machine and the time.
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
        """Of one record of ``nbytes`` that is fetched alone."""
        return self.latency_s + nbytes / self.bytes_per_s

    def describe(self) -> str:
        return f"{self.reads.describe()}, {format_bytes(self.bytes_per_s)}/s"


def choose(samples: Mapping[ReadSettings, Sequence[Sample]]) -> ReadSettings:
    """The first setting that no other clearly beats. ``samples``: the simplest setting first, one sample a turn.

    A setting's speed is the median over turns of the geometric mean of two ratios to the first setting, alone and
    queued. Load that slows a whole turn cancels out. Raises ValueError if there are no samples.
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
    """The profile kept beside the pack. It is measured first if there is none for this pack, host and file system.

    ``anew``: measure in any case, for instance because the machine was busy the last time. ``on_measure`` is told once
    before a measurement, which takes about ``budget_s``. Returns None for a small pack, which is not worth the time.

    Of several processes that start together one measures, and the others take its result. If the folder can not be
    written to, the profile serves this process alone. Raises PackError if the pack can not be read.
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
    """The profile kept beside the pack. None: there is none for this pack, host and file system."""
    return _load(profile_path(pack.path), _identity(pack))


def measure(
    pack: PackFile,
    candidates: Sequence[ReadSettings] = CANDIDATES,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredLink:
    """Measure now. On a slow disk only the first few ``candidates`` are tried, at least one."""
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
    """Movers over one pack, one for each setting. All read into the same slot, because the bytes are not used."""

    def __init__(self, pack: PackFile, clock: Callable[[], float]) -> None:
        layouts = [layer.layout for layer in pack.manifest.layers]
        largest = max(layout.nbytes for layout in layouts)
        self._pack = pack
        self._clock = clock
        self._arena = Arena([largest], layouts)
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
        """What a token computes with an expert: a pass over its bytes on all cores, while others are read."""
        self._arena.record(0).view(torch.float32).sum()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for mover in self._movers.values():
            mover.close()


class _Landing(DiskReads):
    """Notes when records have landed. Does not check them, because several land in one slot."""

    landed: Callable[[], object]

    def ends_at_once(self, job: Job) -> bool:
        return True  # as the records of a pack that is in use

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
    """Its numbers, type and source, as far as they are known."""
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
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.format(msgspec.json.encode(profile), indent=2))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process measure at a time. One that has waited too long, or that can not lock, measures as well."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(file_lock(path.with_suffix(".lock"), _LOCK_WAIT_S))
        yield
