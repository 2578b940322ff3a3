"""Which artifacts of expert policies are made, when, and within which bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.units import MIB
from greenroom.predictor.eamc.drift import DriftConfig
from greenroom.predictor.eamc.members import CAPACITY
from greenroom.predictor.wanted import kinds_of

EAMC = EamcFile.KIND
REUSE = ReuseFile.KIND
BUILT_KINDS = (EAMC, REUSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildingConfig:
    """What a predictor service makes for the expert policies of workers. Raises InvalidConfig or UnknownName.

    ``kinds``: always; ``when_asked``: also those that someone asked for within the last ``asked_within_s``. ``drift``:
    when an EAMC is rebuilt, of at most ``capacity`` members. ``reuse_after``: sequences of a model from which on the
    coefficients of `reuse` are fitted, and ``reuse_again``: so many more, and they are fitted anew. ``max_bytes``: of
    the sequences kept for that, over all models and kinds, and ``max_sequences`` of one; the oldest go. ``timeout_s``:
    of one build, a process of its own that is killed then. ``retry_s``, ``max_retry_s``: the first and the longest
    wait before one that failed is tried again.
    """

    kinds: tuple[str, ...] = ()
    when_asked: bool = True
    drift: DriftConfig = field(default_factory=DriftConfig)
    capacity: int = CAPACITY
    reuse_after: int = 100
    reuse_again: int = 1000
    max_bytes: int = 64 * MIB
    max_sequences: int = 1000
    timeout_s: float = 600.0
    asked_within_s: float = 6 * 3600.0
    retry_s: float = 10.0
    max_retry_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in BUILT_KINDS:
                raise UnknownName("kind to build", kind, BUILT_KINDS)
        for name, least in (("capacity", 1), ("reuse_after", 1), ("reuse_again", 1), ("max_bytes", 1)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"build_{name}", getattr(self, name), f"it is a number from {least}")
        if self.max_sequences < max(self.drift.after, self.reuse_after):
            allowed = "it is at least eamc_after and reuse_after"
            raise InvalidConfig("build_max_sequences", self.max_sequences, allowed)
        for name in ("timeout_s", "asked_within_s", "retry_s", "max_retry_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(f"build_{name[:-2]}", getattr(self, name), "it is a number of seconds above 0")

    @property
    def off(self) -> bool:
        return not self.kinds and not self.when_asked


def building_of(build: str, **others: object) -> BuildingConfig:
    """From a command line's word: kinds separated by commas, ``asked``, or ``none``; ``others``: further fields. Raises
    InvalidConfig, UnknownName."""
    kinds, when_asked = kinds_of("build", build, BUILT_KINDS)
    return BuildingConfig(kinds=kinds, when_asked=when_asked, **others)  # type: ignore[arg-type]
