"""What a request should keep to: TTFT, TPOT and end-to-end time, for all requests or by task type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from greenroom.core.errors import InvalidConfig

_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}
_FORM = "write it as ttft:200,tpot:50,e2e:2000, in milliseconds above 0 and each once; what is left out is not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Milliseconds that must not be exceeded; None: not judged. At least one is given."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in self._all().items():
            if value is not None and not 0 < value < math.inf:
                raise InvalidConfig(name, value, "a number of milliseconds above 0")
        if not self.given:
            raise InvalidConfig("targets", "", _FORM)

    @classmethod
    def parse(cls, text: str, *, field: str) -> Targets:
        """The targets in ``ttft:200,tpot:50,e2e:2000``; ``e2el`` is another name for ``e2e``. Raises InvalidConfig."""
        found: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, _, value = part.partition(":")
            try:
                number = float(value)
            except ValueError:
                raise InvalidConfig(field, text, _FORM) from None
            if name not in _NAMES or _NAMES[name] in found or not 0 < number < math.inf:
                raise InvalidConfig(field, text, _FORM)
            found[_NAMES[name]] = number
        if not found:
            raise InvalidConfig(field, text, _FORM)
        return cls(**found)

    @property
    def given(self) -> dict[str, float]:
        """Those that are given, by the names of the fields."""
        return {name: value for name, value in self._all().items() if value is not None}

    def met(self, ttft_s: float | None, tpot_s: float, e2e_s: float) -> bool:
        """Whether a reply kept to all of them. ``tpot_s`` is 0 for a reply of one token, as in vLLM."""
        if self.ttft_ms is not None and (ttft_s is None or ttft_s * 1e3 > self.ttft_ms):
            return False
        if self.tpot_ms is not None and tpot_s * 1e3 > self.tpot_ms:
            return False
        return self.e2e_ms is None or e2e_s * 1e3 <= self.e2e_ms

    def _all(self) -> dict[str, float | None]:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}

    def __str__(self) -> str:
        return ", ".join(f"{name.removesuffix('_ms')} ≤ {value:g} ms" for name, value in self.given.items())


@dataclass(frozen=True, slots=True)
class TargetsByTask:
    """SLOs by task type; ``others`` is for every task type that is not named."""

    by_task: Mapping[str, Targets] = field(default_factory=dict)
    others: Targets | None = None

    @classmethod
    def parse(cls, texts: Iterable[str], *, field: str = "slo") -> TargetsByTask:
        """From ``question=ttft:200,e2e:2000`` (one task type) and ``ttft:500`` (all others). Raises InvalidConfig."""
        by_task: dict[str, Targets] = {}
        others: Targets | None = None
        for text in texts:
            task, equals, targets = text.rpartition("=")
            if equals and (not task or task in by_task):
                raise InvalidConfig(field, text, "name each task type once, as in question=ttft:200,e2e:2000")
            if not equals and others is not None:
                raise InvalidConfig(field, text, "give the targets of all other task types once")
            parsed = Targets.parse(targets, field=field)
            if equals:
                by_task[task] = parsed
            else:
                others = parsed
        return cls(by_task, others)

    def of(self, task: str | None) -> Targets | None:
        return self.by_task.get(task or "", self.others)

    def as_json(self) -> dict[str, dict[str, float]]:
        named = {task: targets.given for task, targets in self.by_task.items()}
        return named if self.others is None else {**named, "*": self.others.given}
