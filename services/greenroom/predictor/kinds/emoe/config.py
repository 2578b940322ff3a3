"""What is learnt, with what, and within which bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.units import MIB
from greenroom.predictor.making.config import kinds_of

EMOE_A = "emoe-a"
EMOE_L = "emoe-l"
LEARNED_KINDS = (EMOE_A, EMOE_L)
BACKBONES = ("xlnet", "gpt2", "bert")
LEAST_SEQUENCES = 10
"""From fewer nothing is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How one predictor is trained. Raises InvalidConfig or UnknownName.

    ``kind``: "emoe-a", all layers of the next prompt at once from all of the previous one's; "emoe-l", layer by layer
    from its own prediction of the layer before. ``backbone``: which of transformers' models. ``width`` and ``depth``
    of it; width 0: what suits the number of experts. ``test_share``: of the prompts, the last ones, that it is measured
    on and does not see; ``tail_share``: of the others, the last ones, that say when to stop: after ``patience``
    epochs without gain, or ``epochs``.
    """

    kind: str = EMOE_A
    backbone: str = "xlnet"
    width: int = 0
    depth: int = 2
    seed: int = 0
    epochs: int = 60
    patience: int = 8
    batch: int = 16
    learning_rate: float = 2e-3
    test_share: float = 0.2
    tail_share: float = 0.15

    def __post_init__(self) -> None:
        if self.kind not in LEARNED_KINDS:
            raise UnknownName("kind", self.kind, LEARNED_KINDS)
        if self.backbone not in BACKBONES:
            raise UnknownName("backbone", self.backbone, BACKBONES)
        if self.width < 0 or self.width % 8 or self.width > 4096:
            raise InvalidConfig("width", self.width, "0, or a multiple of 8 up to 4096")
        for name, most in (("depth", 24), ("epochs", 10_000), ("patience", 10_000), ("batch", 4096)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidConfig(name, getattr(self, name), f"1 to {most}")
        if not 0 < self.learning_rate < 1:
            raise InvalidConfig("learning_rate", self.learning_rate, "above 0 and below 1")
        for name in ("test_share", "tail_share"):
            if not 0 < getattr(self, name) <= 0.5:
                raise InvalidConfig(name, getattr(self, name), "above 0, at most 0.5")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """What a predictor service learns beside its statistics. Raises InvalidConfig or UnknownName.

    ``kinds``: always; ``when_asked``: also those that someone asked forecasts of within the last ``asked_within_s``.
    ``after``: sequences of a model from which on it is learnt, and ``again``: so many more, and it is learnt anew.
    ``max_bytes``: of the sequences kept to learn from, over all models, and ``max_sequences`` of one model; the oldest
    go, and where the bytes do not hold ``after`` of them it is learnt from as many as they hold. ``timeout_s``: of one
    training, a process of its own that is killed then. ``tolerance``: by how much overlap what was learnt may be worse
    than popularity, and than what is served, to be served itself. ``forecast_s``: how long one forecast may take or
    wait, and ``max_waiting``: how many wait; beyond either statistics answer.
    """

    kinds: tuple[str, ...] = ()
    when_asked: bool = True
    backbone: str = "xlnet"
    after: int = 200
    again: int = 1000
    max_bytes: int = 64 * MIB
    max_sequences: int = 2000
    timeout_s: float = 900.0
    tolerance: float = 0.01
    asked_within_s: float = 6 * 3600.0
    forecast_s: float = 0.5
    max_waiting: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in LEARNED_KINDS:
                raise UnknownName("kind to learn", kind, LEARNED_KINDS)
        if self.backbone not in BACKBONES:
            raise UnknownName("backbone", self.backbone, BACKBONES)
        if self.after < LEAST_SEQUENCES:
            raise InvalidConfig("learn_after", self.after, f"at least {LEAST_SEQUENCES} sequences")
        for name in ("again", "max_bytes", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"learn_{name}", getattr(self, name), "it is a number from 1")
        if self.max_sequences < self.after:
            raise InvalidConfig("learn_max_sequences", self.max_sequences, "it is at least learn_after")
        for name, seconds in (
            ("learn_timeout", self.timeout_s),
            ("learn_asked_within", self.asked_within_s),
            ("learn_forecast_timeout", self.forecast_s),
        ):
            if not 0 < seconds < math.inf:
                raise InvalidConfig(name, seconds, "it is a number of seconds above 0")
        if not 0 <= self.tolerance <= 1:
            raise InvalidConfig("learn_tolerance", self.tolerance, "it is a share of overlap, 0 to 1")

    @property
    def off(self) -> bool:
        return not self.kinds and not self.when_asked


def learning_of(learn: str, **others: object) -> LearningConfig:
    """From a command line's word: kinds separated by commas, ``asked``, or ``none``; ``others``: further fields. Raises
    InvalidConfig, UnknownName."""
    kinds, when_asked = kinds_of("learn", learn, LEARNED_KINDS)
    return LearningConfig(kinds=kinds, when_asked=when_asked, **others)  # type: ignore[arg-type]
