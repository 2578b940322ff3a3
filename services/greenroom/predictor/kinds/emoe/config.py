"""How one of eMoE's predictors is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.predictor.kinds.config import BACKBONES

EMOE_KINDS: Final = (EMOE_A, EMOE_L)


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
        if self.kind not in EMOE_KINDS:
            raise UnknownName("kind", self.kind, EMOE_KINDS)
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
