"""A system under measurement that only does as it is told."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class Scripted:
    """``run`` answers a turn; ``fail`` says where it goes wrong instead."""

    def __init__(self, fail: str = "") -> None:
        self._fail = fail
        if fail == "open":
            raise ValueError("can not be opened")

    def describe(self) -> dict[str, Any]:
        sys.stdout.write("what libraries print is no reply\n")
        return {"pid": os.getpid()}

    def run(self, prompts: list[list[int]], lengths: list[int], **_: Any) -> dict[str, Any]:
        if self._fail == "run":
            raise RuntimeError("the run failed")
        if self._fail == "die":
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os._exit(3)
        if self._fail == "hang":
            signal.pause()
        return {"seconds": 1.0, "tokens": sum(lengths), "ids": prompts, "trace": None}

    def close(self) -> None:
        pass
