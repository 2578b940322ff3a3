"""The models of the benchmark: for each format a checkpoint whose experts can stay as they are or become bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.inputs.mxfp4_checkpoint import RandomGptOss, random_gpt_oss
from benchmarks.harness.reporting.aims import Aim

STORED: Final = "stored"
EXPANDED: Final = "expanded"


@dataclass(frozen=True, slots=True)
class FormatModel:
    """``make``: of a small model or of one as large as experts really are. ``kept_as``: the ``--experts-as`` that keeps
    the format. ``third_gain``, ``resident_gain``: what tokens/s over bf16's should be. ``bytes_ratio``: what a record's
    bytes over bf16's should be. ``of_numbers``: the checkpoint has bf16, of which the format is made."""

    make: Callable[[bool], Path]
    kept_as: str
    third_gain: Aim
    resident_gain: Aim
    bytes_ratio: Aim | None = None
    of_numbers: bool = False


def _gpt_oss(small: bool) -> Path:
    return random_gpt_oss(RandomGptOss(layers=2, hidden=256, intermediate=896, heads=4, kv_heads=4) if small else None)


MODELS: Final[Mapping[str, FormatModel]] = {
    "mxfp4": FormatModel(_gpt_oss, STORED, Aim(3.5, True), Aim(2.0, True)),
}
