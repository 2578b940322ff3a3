"""compose.yaml as the tests see it: parsed, with every variable at its default."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}")


def at_defaults(text: str) -> str:
    return _VARIABLE.sub(lambda found: found["default"] or "", text).replace("$$", "$")


def variables(text: str) -> dict[str, str | None]:
    """Names and defaults."""
    return {found["name"]: found["default"] for found in _VARIABLE.finditer(text)}


@cache
def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(at_defaults(COMPOSE.read_text(encoding="utf-8")))
    return parsed


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def seconds(text: str) -> float:
    """``90s``, ``2m``."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}[text[-1]]
    return float(text[:-1]) * unit
