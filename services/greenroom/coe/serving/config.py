"""How a collaboration is to be served, as command line and Python API give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from greenroom.coe.serving.selection import Selection
from greenroom.core.errors import InvalidConfig

AUTO = "auto"
MOST_EXECUTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """``file``: the definition. ``expert_memory``: for experts, of all memories: a size, a share of all experts, or
    ``auto``. ``expert_share``: the experts' part of what they and intermediates get; None: intermediates get what the
    largest batch takes. ``executors``: None: by cores. ``threads``: cores for one executor's operations; None: by
    cores. ``most_batch``: requests in a batch at most, beside what was profiled. ``profile``: what was measured of the
    collaboration; None: it is measured quickly at the start. ``max_pixels``: of an image; None: the usual limit.
    ``progress``: bars on stderr (None: on a terminal only).

    Raises InvalidConfig.
    """

    file: Path
    selection: Selection = field(default_factory=Selection)
    expert_memory: str = AUTO
    expert_share: float | None = None
    executors: int | None = None
    threads: int | None = None
    most_batch: int | None = None
    profile: Path | None = None
    dtype: str = "auto"
    cache_dir: Path | None = None
    offline: bool = False
    max_pixels: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, most in (("executors", MOST_EXECUTORS), ("threads", 1024), ("most_batch", 4096)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidConfig(name, value, f"a number from 1 to {most}")
        if self.expert_share is not None and not 0 < self.expert_share < 1:
            raise InvalidConfig("expert_share", self.expert_share, "a number between 0 and 1")
