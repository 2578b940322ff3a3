"""The profile of a collaboration, as ``greenroom coe profile`` measures it: one JSON file that services load.

docs/architecture/coe.md describes the file. CoServe (ASPLOS 2025, doi 10.1145/3676641.3715986), sections 4.4 and 4.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from greenroom.core.errors import InvalidConfig
from greenroom.core.straight_lines import between
from greenroom.core.units import MIB

FORMAT: Final = "greenroom-coe-profile"
PROFILE_FILE: Final = "profile.json"
"""Its name beside the definition."""
MAX_FILE_BYTES: Final = 64 * MIB
_MADE_BY: Final = "a file made by `greenroom coe profile`"
_ANEW: Final = "run `greenroom coe profile` on this definition"

Above = Annotated[float, Meta(gt=0, le=1e15)]
NotBelow = Annotated[float, Meta(ge=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]


class BatchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What batches of an architecture take on one executor, in ms, while as many others compute as it is filed under.

    ``request_ms``, ``batch_ms``: the paper's K and B, so that a batch of n takes B + K · n. ``most``: the smallest
    measured batch whose time a request is within 5 % of the best; larger ones are not worth their memory.
    """

    ms_by_batch: Annotated[dict[Count, Above], Meta(min_length=1)]
    request_ms: NotBelow
    batch_ms: NotBelow
    most: Count

    def ms_of(self, requests: int) -> float:
        """As measured, on straight lines between measured sizes; beyond the largest as many ms a request as there."""
        largest = max(self.ms_by_batch)
        if requests > largest:
            return self.ms_by_batch[largest] * requests / largest
        return between(self.ms_by_batch, requests)


class ArchitectureCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one architecture on one kind of executor.

    ``load_ms``: to bring one of its experts into memory. ``bytes_by_batch``: of intermediates, beside the weights.
    ``peak_by_batch``: what the process's own peak grew by, where the system tells. ``by_executors[n]``: with n
    executors side by side.
    """

    load_ms: NotBelow
    bytes_by_batch: Annotated[dict[Count, Bytes], Meta(min_length=1)]
    peak_by_batch: dict[Count, Bytes] = {}
    by_executors: Annotated[dict[Count, BatchTimes], Meta(min_length=1)]


class MemoryTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What so many executors do with the memory, by how much of it experts get (section 4.4).

    ``residents``: the number of experts chosen, the most probable ones. ``expert_bytes``: of all executors together.
    ``per_s``: requests a second with them. ``window``: where the paper's method stops, as (lower, upper) experts.
    ``drawn``: what its draw in that window gives. ``per_s_by_residents``: all that was tried, replayed.
    ``served_per_s``: of these, what was really served, where that was tried.
    """

    residents: Count
    expert_bytes: Bytes
    per_s: Above
    window: tuple[Annotated[int, Meta(ge=0)], Count]
    drawn: Count
    per_s_by_residents: Annotated[dict[Count, NotBelow], Meta(min_length=1)]
    served_per_s: dict[Count, NotBelow] = {}


class ExecutorsProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of executor. ``executors``: how many of them serve most. ``memory_bytes``: for experts and
    intermediates of all of them. ``threads_by_executors[n]``: of each while n compute.

    ``scheduling``: what the trials were replayed with. ``trials[n]``: with n executors.
    """

    executors: Count
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 60)]
    scheduling: str
    threads_by_executors: dict[Count, Count]
    architectures: Annotated[dict[str, ArchitectureCosts], Meta(min_length=1)]
    trials: Annotated[dict[Count, MemoryTrial], Meta(min_length=1)]

    @property
    def expert_share(self) -> float:
        """Of the memory, for experts; the rest is for intermediates."""
        return self.trials[self.executors].expert_bytes / self.memory_bytes

    def times(self, architecture: str, executors: int) -> BatchTimes:
        """With so many executors; of a number that was not measured, those of the next larger one, else the largest."""
        measured = self.architectures[architecture].by_executors
        return measured[min((count for count in measured if count >= executors), default=max(measured))]


class ArchitectureProfile(msgspec.Struct, frozen=True, kw_only=True):
    """``model_class``: transformers' class. ``record_bytes``: of one expert in memory. ``dtype``: what it was computed
    in; empty: an older profile does not say.
    """

    model_class: str
    record_bytes: Bytes
    dtype: str = ""


class CoeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """``experts``: by name, the key of its architecture. ``usage``: by name, the share of requests that need it.

    ``kinds``: by kind of executor, such as cpu. ``machine``: where it was measured; costs hold there alone.
    """

    format: Literal["greenroom-coe-profile"]
    version: Literal[1]
    collaboration: str
    machine: str
    architectures: dict[str, ArchitectureProfile]
    experts: Annotated[dict[str, str], Meta(min_length=1)]
    usage: dict[str, Share]
    kinds: Annotated[dict[str, ExecutorsProfile], Meta(min_length=1)]
    notes: Mapping[str, str] = {}
    """How it was made; for people."""

    def check_of(
        self, collaboration: str, experts: Mapping[str, str], file: str, dtypes: Mapping[str, str] | None = None
    ) -> None:
        """Raises InvalidConfig, naming ``file`` and what differs, unless it is the profile of this collaboration with
        these experts. ``experts``: by name, the key of its architecture. ``dtypes``: by that key, what it is to be
        computed in (None: any): in another one, times and memory are others.
        """
        if self.collaboration != collaboration:
            raise _wrong(file, f"it is the profile of {self.collaboration!r}, and this is {collaboration!r}: {_ANEW}")
        for name, architecture in experts.items():
            if name not in self.experts:
                raise _wrong(file, f"it knows no expert {name!r}: {_ANEW}")
            if self.experts[name] != architecture:
                raise _wrong(file, f"expert {name!r} had another architecture when it was measured: {_ANEW}")
            measured, dtype = self.architectures[architecture].dtype, (dtypes or {}).get(architecture, "")
            if measured and dtype and measured != dtype:
                raise _wrong(
                    file,
                    f"expert {name!r} was measured in {measured}, and is to compute in {dtype}: {_ANEW} and --dtype",
                )

    def said_of_machine(self, here: str) -> str | None:
        """What to tell a user whose machine is not the one that was measured; None: it is."""
        if here == self.machine:
            return None
        return f"the profile was measured on {self.machine}, and this is {here}: its times may be wrong here, {_ANEW}"

    def of_kind(self, kind: str) -> ExecutorsProfile:
        """Raises InvalidConfig, listing the kinds that were measured."""
        if kind not in self.kinds:
            raise InvalidConfig("executors", kind, f"the profile has {', '.join(sorted(self.kinds))}: {_ANEW}")
        return self.kinds[kind]


def load_coe_profile(path: Path) -> CoeProfile:
    """Raises InvalidConfig, naming the file and the place in it."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise _wrong(str(path), f"it has {size} bytes, and may have {MAX_FILE_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(str(path), f"{_MADE_BY} ({error.strerror or error})") from error
    return parse_coe_profile(data, str(path))


def parse_coe_profile(data: bytes, name: str) -> CoeProfile:
    """``name``: the file's name in messages. Raises InvalidConfig."""
    try:
        profile = msgspec.json.decode(data, type=CoeProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong(name, f"{_MADE_BY}: {error}") from error
    for expert, architecture in profile.experts.items():
        if architecture not in profile.architectures:
            raise _wrong(name, f"$.architectures has no {architecture!r}, which expert {expert!r} is of")
    for kind, one in profile.kinds.items():
        _check_kind(one, profile, f"{name}, at $.kinds[{kind!r}]")
    return profile


def dump_coe_profile(profile: CoeProfile) -> bytes:
    """As JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def _check_kind(kind: ExecutorsProfile, profile: CoeProfile, place: str) -> None:
    """Raises InvalidConfig."""
    if missing := sorted(profile.architectures.keys() - kind.architectures.keys()):
        raise _wrong(place, f"architectures lacks {missing[0]!r}")
    if kind.executors not in kind.trials:
        raise _wrong(place, f"trials has none of {kind.executors} executors, the number that was chosen")
    for count, trial in kind.trials.items():
        if trial.expert_bytes > kind.memory_bytes:
            raise _wrong(f"{place}.trials[{count}]", f"experts have at most all {kind.memory_bytes} bytes")
        if not trial.window[0] < trial.window[1]:
            raise _wrong(f"{place}.trials[{count}]", "a window's upper bound is above its lower one")
        if not {trial.residents, trial.drawn} <= trial.per_s_by_residents.keys():
            raise _wrong(f"{place}.trials[{count}]", "per_s_by_residents has the numbers that were chosen and drawn")
    for key, costs in kind.architectures.items():
        if missing_counts := sorted(kind.trials.keys() - costs.by_executors.keys()):
            raise _wrong(f"{place}.architectures[{key!r}]", f"by_executors lacks {missing_counts[0]}")
        for smaller, larger in itertools.pairwise(sorted(costs.bytes_by_batch)):
            if costs.bytes_by_batch[smaller] > costs.bytes_by_batch[larger]:
                raise _wrong(
                    f"{place}.architectures[{key!r}]", f"a batch of {larger} takes no fewer bytes than one of {smaller}"
                )


def _wrong(name: str, allowed: str) -> InvalidConfig:
    return InvalidConfig("coe profile", name, allowed)
