"""The JSON that a benchmark ends with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(found: Mapping[str, Any], file: Path | None) -> str:
    """The result as one line of JSON, to be printed last; written to ``file`` too."""
    line = json.dumps(found)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line + "\n", encoding="utf-8")
    return line
