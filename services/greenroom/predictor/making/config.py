"""Which kinds are made, when, and within which bounds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.units import MIB


@dataclass(frozen=True, kw_only=True)
class MakingConfig:
    """Of kinds that are made together, one at a time. Raises InvalidConfig, naming the field.

    ``kinds``: are always made. ``when_asked``: so are those that were asked for within the last ``asked_within_s``.
    ``max_bytes``: of the sequences kept for that, over all models and kinds. ``max_sequences``: of one model and kind.
    The oldest go. ``timeout_s``: of one making, a process of its own that is killed then. ``retry_s``,
    ``max_retry_s``: the first and the longest wait before one that failed is tried again.
    """

    WORD: ClassVar[str] = "make"
    """What the command line calls it; fields are named after it in errors."""

    kinds: tuple[str, ...] = ()
    when_asked: bool = True
    max_bytes: int = 64 * MIB
    max_sequences: int = 1000
    timeout_s: float = 600.0
    asked_within_s: float = 6 * 3600.0
    retry_s: float = 10.0
    max_retry_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_numbers("max_bytes", "max_sequences")
        self._check_seconds("timeout_s")
        self._check_seconds("asked_within_s")
        for name in ("retry_s", "max_retry_s"):
            if not 0 <= getattr(self, name) < math.inf:
                self._refuse(name[:-2], getattr(self, name), "it is a number of seconds from 0")

    def _check_numbers(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                self._refuse(name, getattr(self, name), "it is a number from 1")

    def _check_seconds(self, name: str, *, called: str = "") -> None:
        if not 0 < getattr(self, name) < math.inf:
            self._refuse(called or name[:-2], getattr(self, name), "it is a number of seconds above 0")

    def _refuse(self, name: str, value: object, allowed: str) -> None:
        raise InvalidConfig(f"{self.WORD}_{name}", value, allowed)

    @property
    def off(self) -> bool:
        return not self.kinds and not self.when_asked

    @classmethod
    def said(cls, words: str, known: Collection[str], **others: Any) -> Self:
        """From what a command line says: kinds separated by commas, ``asked``, or ``none``. ``known``: the names of all
        kinds. ``others``: further fields. Raises InvalidConfig, UnknownName."""
        said = [word.strip() for word in words.split(",") if word.strip()]
        if not said or ("none" in said and len(said) > 1):
            allowed = f"asked, none, or some of {', '.join(known)} separated by commas"
            raise InvalidConfig(cls.WORD, words, allowed)
        kinds = tuple(dict.fromkeys(word for word in said if word not in ("asked", "none")))
        made = cls(kinds=kinds, when_asked="asked" in said, **others)
        made.check_kinds(known)
        return made

    def check_kinds(self, known: Collection[str]) -> None:
        """Raises UnknownName."""
        for kind in self.kinds:
            if kind not in known:
                raise UnknownName(f"kind to {self.WORD}", kind, tuple(known))
