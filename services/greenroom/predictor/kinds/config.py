"""What can be set of the kinds that are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from greenroom.core.artifacts.paths_forms.t5 import T5
from greenroom.core.artifacts.paths_forms.tables import TABLES
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.predictor.making.config import MakingConfig

BEST: Final = "best"
PATHS_FORMS: Final = (TABLES, T5, BEST)
BACKBONES: Final = ("xlnet", "gpt2", "bert")
LEAST_SEQUENCES: Final = 10
"""From fewer nothing is learnt."""
SHARED_BY: Final = 5
"""Sequences. What fewer have of their tokens in common is not told to who reads the artifact."""
CAPACITY: Final = 100
"""Members of an EAMC that suffice (MoE-Infinity, Fig. 12: 100 to 110)."""


@dataclass(frozen=True, kw_only=True)
class LearningConfig(MakingConfig):
    """Kinds that forecasts are made from. Raises InvalidConfig or UnknownName.

    ``backbone``: what emoe-a and emoe-l learn with. ``after``: sequences of a model from which on a kind is learnt, or
    as many as ``max_bytes`` holds. ``again``: so many more, and it is learnt anew. ``tolerance``: by how much overlap a
    version may be worse than popularity, and than what is served, to be served itself. ``forecast_s``: how long one
    forecast may take or wait, and ``max_waiting``: how many wait; beyond either statistics answer.
    """

    WORD: ClassVar[str] = "learn"

    backbone: str = "xlnet"
    after: int = 200
    again: int = 1000
    max_sequences: int = 2000
    timeout_s: float = 900.0
    retry_s: float = 0.0
    max_retry_s: float = 0.0
    tolerance: float = 0.01
    forecast_s: float = 0.5
    max_waiting: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in BACKBONES:
            raise UnknownName("backbone", self.backbone, BACKBONES)
        if self.after < LEAST_SEQUENCES:
            self._refuse("after", self.after, f"at least {LEAST_SEQUENCES} sequences")
        self._check_numbers("again", "max_waiting")
        if self.max_sequences < self.after:
            self._refuse("max_sequences", self.max_sequences, "it is at least learn_after")
        self._check_seconds("forecast_s", called="forecast_timeout")
        if not 0 <= self.tolerance <= 1:
            self._refuse("tolerance", self.tolerance, "it is a share of overlap, 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftConfig:
    """When an EAMC is rebuilt. Raises InvalidConfig, naming the field.

    ``share``: a sequence was foreseen too badly if its prefetch recall is below this share of what is usual under the
    collection in use: the median of the first ``settle`` sequences, since what is good is another number for each
    model. ``least``: or if it is below this, whatever is usual. ``after``: so many of those, and the collection is
    rebuilt. ``again``: so many sequences of any kind, and it is too.
    """

    share: float = 0.9
    least: float = 0.0
    after: int = 100
    again: int = 1000
    settle: int = 50

    def __post_init__(self) -> None:
        for name in ("share", "least"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidConfig(f"eamc_{name}", getattr(self, name), "a share, 0 to 1")
        for name in ("after", "again", "settle"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"eamc_{name}", getattr(self, name), "a number of sequences from 1")


@dataclass(frozen=True, kw_only=True)
class BuildingConfig(MakingConfig):
    """Kinds that the expert policies of workers take. Raises InvalidConfig or UnknownName.

    ``drift``: when an EAMC is rebuilt, of at most ``capacity`` members. ``reuse_after``: sequences of a model from
    which on the coefficients of `reuse` are fitted. ``reuse_again``: so many more, and they are fitted anew.
    ``paths_form``: how paths are foretold from tokens, by tables, by a T5, or by the better of both.
    ``paths_shared_by``: tokens, and pairs and triples of them, are in what foretells paths only where so many sequences
    have them, since those of fewer are somebody's text.
    """

    WORD: ClassVar[str] = "build"

    drift: DriftConfig = field(default_factory=DriftConfig)
    capacity: int = CAPACITY
    reuse_after: int = 100
    reuse_again: int = 1000
    paths_form: str = TABLES
    paths_shared_by: int = SHARED_BY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.paths_form not in PATHS_FORMS:
            raise UnknownName("paths_form", self.paths_form, PATHS_FORMS)
        self._check_numbers("capacity", "reuse_after", "reuse_again", "paths_shared_by")
        if self.max_sequences < max(self.drift.after, self.reuse_after):
            self._refuse("max_sequences", self.max_sequences, "it is at least eamc_after and reuse_after")
