"""How a collaboration is to be served, as command line and Python API give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from greenroom.coe.serving.selection import Selection
from greenroom.core.errors import InvalidConfig

AUTO = "auto"
MOST_EXECUTORS = 64
MOST_PIXELS = 89_000_000
"""Pillow warns of larger images, and refuses those of twice the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """What is None is as the profile says, and without a profile as below.

    - ``file``: the definition.
    - ``expert_memory``: for experts, of all memories together: a size, a share of all experts, or ``auto``.
    - ``expert_share``: the experts' part of what they and intermediates get (intermediates get what the largest batch
      of every executor takes).
    - ``executors`` (by cores); ``threads``: cores for the operations of all executors together (all).
    - ``most_batch``: requests in a batch at most, beside what was profiled (16).
    - ``profile``: what `greenroom coe profile` made; None: the one beside the definition, if there is one that can be
      used. Without one, costs are measured quickly at the start.
    - ``max_pixels``: of an image (16 million). More are refused before they are decoded.
    - ``progress``: bars on stderr (on a terminal only).

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
        for name, most in (
            ("executors", MOST_EXECUTORS),
            ("threads", 1024),
            ("most_batch", 4096),
            ("max_pixels", MOST_PIXELS),
        ):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidConfig(name, value, f"a number from 1 to {most}")
        if self.expert_share is not None and not 0 < self.expert_share < 1:
            raise InvalidConfig("expert_share", self.expert_share, "a number between 0 and 1")
