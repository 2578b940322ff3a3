"""Systems under measurement that only do as they are told."""

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


class Decoding:
    """Repeats what it was told. ``settings["fail"]`` says where it goes wrong instead."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        if settings.get("fail") == "open":
            raise OSError("no such weights")
        self._model, self._settings = model, settings

    def describe(self) -> dict[str, Any]:
        return {"opened": [self._model, self._settings], "pid": os.getpid()}

    def decode(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        if self._settings.get("fail") == "hang":
            signal.pause()
        return {"told": batches}

    def close(self) -> None:
        pass
