"""How the predictor service is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import KIB, MIB
from greenroom.predictor.kinds.config import BuildingConfig, LearningConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """Times in seconds. Raises InvalidConfig, naming the field.

    ``state_dir``: where artifacts are kept; None: in memory, until this process ends. ``group``: the consumer group on
    `traces`. ``half_life_sequences``: a sequence counts half when so many others of its task type have come since.
    ``publish_every``: a new version after so many sequences, and ``publish_after_s``: after so long with at least one.
    ``keep``: versions kept of a model, beside the one that is pinned. ``max_bytes``: of all statistics; what is served
    has about as much again. ``seen_window``: sequences of a model that are known to have been counted.
    ``max_unsaved``: sequences that are in no version yet, from which on no more are read. ``part_bytes``: of an
    artifact's parts on the wire. ``retry_s``, ``max_retry_s``: the first and the longest wait before something that
    failed is tried again. ``revoke_s``: how long a partition that goes to another instance is held for a last version.
    ``append_timeout_s``, ``lag_every_s``: as their names say. ``learning``: what is learnt beside statistics.
    ``building``: what is made for the expert policies of workers.
    """

    state_dir: Path | None = None
    group: str = "predictor"
    half_life_sequences: float = 500.0
    publish_every: int = 256
    publish_after_s: float = 10.0
    keep: int = 5
    max_bytes: int = 256 * MIB
    seen_window: int = 16_384
    max_unsaved: int = 4096
    part_bytes: int = 256 * KIB
    append_timeout_s: float = 10.0
    revoke_s: float = 5.0
    retry_s: float = 0.1
    max_retry_s: float = 5.0
    lag_every_s: float = 5.0
    learning: LearningConfig = field(default_factory=LearningConfig)
    building: BuildingConfig = field(default_factory=BuildingConfig)

    def __post_init__(self) -> None:
        if not self.group:
            raise InvalidConfig("group", self.group, "it is a name of at least one character")
        for name in ("publish_every", "keep", "max_bytes", "seen_window", "max_unsaved", "part_bytes"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "it is a number from 1")
        for name in (
            "half_life_sequences", "publish_after_s", "append_timeout_s", "revoke_s", "retry_s", "max_retry_s",
            "lag_every_s",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number above 0")
        if self.part_bytes > 3 * MIB:
            raise InvalidConfig("part_bytes", self.part_bytes, "it is at most 3 MiB, below gRPC's own limit of 4 MiB")
        if self.max_unsaved < self.publish_every:
            raise InvalidConfig("max_unsaved", self.max_unsaved, "it is at least publish_every")
        if self.seen_window < 2 * self.max_unsaved:
            raise InvalidConfig(
                "seen_window", self.seen_window, "it is at least twice max_unsaved, or a crash counts some twice"
            )
