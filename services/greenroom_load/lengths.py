"""Lengths in tokens: fixed, from a distribution, or as a trace has recorded them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from greenroom.core.errors import InvalidConfig

LONGEST = 1_000_000
_FORMS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1, "trace": 0}
_ALLOWED = (
    "fixed:N, uniform:LEAST,MOST, normal:MEAN,STD, lognormal:MEDIAN,SIGMA, exponential:MEAN or trace, "
    "with numbers above 0"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """``kind`` with its numbers; what is drawn is multiplied by ``scale`` and lies from 1 to ``most``.

    ``kind`` trace takes the recorded length of each arrival.
    """

    kind: str
    numbers: tuple[float, ...]
    scale: float = 1.0
    most: int = LONGEST

    def __post_init__(self) -> None:
        if not 1 <= self.most <= LONGEST:
            raise InvalidConfig("longest", self.most, f"a number of tokens from 1 to {LONGEST}")

    @classmethod
    def parse(cls, text: str, *, field: str, scale: float = 1.0, most: int = LONGEST) -> Lengths:
        """``fixed:64``, or just ``64``. ``scale`` applies to recorded lengths alone. Raises InvalidConfig."""
        if not 0 < scale < math.inf:
            raise InvalidConfig("length_scale", scale, "a number above 0")
        kind, colon, rest = text.strip().lower().partition(":")
        if not colon and kind not in _FORMS:
            kind, rest = "fixed", kind
        try:
            numbers = tuple(float(part) for part in rest.split(",")) if rest else ()
        except ValueError:
            raise InvalidConfig(field, text, _ALLOWED) from None
        fits = kind in _FORMS and len(numbers) == _FORMS[kind] and all(0 < number <= LONGEST for number in numbers)
        if not fits or (kind == "uniform" and numbers[0] > numbers[1]):
            raise InvalidConfig(field, text, _ALLOWED)
        return cls(kind, numbers, scale if kind == "trace" else 1.0, most)

    def draw(self, rng: Random, recorded: int | None) -> int:
        """One length. ``recorded``: what the trace says of this request. Raises InvalidConfig where it is needed and
        the trace says nothing."""
        length: float
        match self.kind, self.numbers:
            case "fixed", (number,):
                length = number
            case "uniform", (least, most):
                length = rng.randint(round(least), round(most))
            case "normal", (mean, std):
                length = rng.gauss(mean, std)
            case "lognormal", (median, sigma):
                length = rng.lognormvariate(math.log(median), sigma)
            case "exponential", (mean,):
                length = rng.expovariate(1 / mean)
            case _:
                if recorded is None:
                    raise InvalidConfig("lengths", "trace", "used with a --trace that has a column of lengths")
                length = recorded
        return max(1, min(self.most, round(length * self.scale)))

    def __str__(self) -> str:
        numbers = ",".join(f"{number:g}" for number in self.numbers)
        text = f"{self.kind}:{numbers}" if numbers else self.kind
        if self.scale != 1:
            text += f" × {self.scale:g}"
        return text if self.most == LONGEST else f"{text}, at most {self.most}"
