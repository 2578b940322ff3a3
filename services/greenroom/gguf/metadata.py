"""The key-value pairs of a GGUF file, asked for by key and kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from greenroom.core.errors import CorruptCheckpoint

_NEEDED: Final = object()

_MOST: Final = 2**31 - 1
"""Of a count: no model has more of anything, and sizes made of counts stay far from what memory has."""


class Metadata(Mapping[str, Any]):
    """What a file says, checked when it is asked for. Without a default a key is needed.

    Raises CorruptCheckpoint, naming file and key, for one that is missing or of another kind.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: Any = _NEEDED) -> Any:
        return self._asked(key, default, (str,), "a text")

    def flag(self, key: str, default: Any = _NEEDED) -> Any:
        return self._asked(key, default, (bool,), "true or false")

    def number(self, key: str, default: Any = _NEEDED, *, above: float = -math.inf) -> Any:
        value = self._asked(key, default, (int, float), "a number")
        if key in self and not above < value < math.inf:
            raise self.wrong(key, "a finite number" if above == -math.inf else f"a finite number above {above}")
        return value if key not in self else float(value)

    def count(self, key: str, default: Any = _NEEDED, *, least: int = 1) -> Any:
        """A whole number. One for each layer will do where they are all the same."""
        value = self._values.get(key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None and key not in self:
            return self._asked(key, default, (int,), "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self.wrong(key, f"a whole number from {least}, the same for all layers")
        return value

    def texts(self, key: str, default: Any = _NEEDED) -> Any:
        return self._list(key, default, str, "texts")

    def numbers(self, key: str, default: Any = _NEEDED) -> Any:
        return self._list(key, default, (int, float), "numbers")

    def wrong(self, key: str, should_be: str) -> CorruptCheckpoint:
        """The error for a value that can not be."""
        value = self._values.get(key)
        shown = f"a list of {len(value)}" if isinstance(value, list) and len(value) > 9 else f"{value!r:.80}"
        return CorruptCheckpoint(f"{key} in {self.path} is {shown}, and should be {should_be}")

    def _list(self, key: str, default: Any, kinds: type | tuple[type, ...], should_be: str) -> Any:
        value = self._asked(key, default, (list,), f"a list of {should_be}")
        if key in self and not all(isinstance(one, kinds) and not isinstance(one, bool) for one in value):
            raise self.wrong(key, f"a list of {should_be}")
        return value

    def _asked(self, key: str, default: Any, kinds: tuple[type, ...], should_be: str) -> Any:
        if key not in self._values:
            if default is _NEEDED:
                raise CorruptCheckpoint(f"{self.path} has no {key}")
            return default
        value = self._values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(key, should_be)
        return value
