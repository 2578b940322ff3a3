"""The models of the benchmark: for each format a checkpoint whose experts can stay as they are or become bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness.inputs.gguf_models import GGUF_KINDS, made_of_mixtral, random_gguf, small_or_large_mixtral
from benchmarks.harness.inputs.mxfp4_checkpoint import RandomGptOss, random_gpt_oss
from benchmarks.harness.reporting.aims import Aim
from greenroom.moe.native.rows import native_rows_or_none
from tests import int4_checkpoints
from tests.fp8_checkpoints import to_fp8
from tests.int4_checkpoints import save_int4

STORED, EXPANDED, LOSSLESS = "stored", "expanded", "lossless"
"""Of ``--experts-as``."""


@dataclass(frozen=True, slots=True)
class FormatModel:
    """``make``: of a small model or of one as large as experts really are. ``kept_as``: the ``--experts-as`` that keeps
    the format. ``third_gain``, ``resident_gain``: what tokens/s over bf16's should be, where that was said.
    ``bytes_ratio``: what a record's bytes over bf16's should be. ``of_numbers``: the checkpoint has bf16, of which the
    format is made."""

    make: Callable[[bool], Path]
    kept_as: str = STORED
    third_gain: Aim | None = None
    resident_gain: Aim | None = None
    bytes_ratio: Aim | None = None
    of_numbers: bool = False


def _gpt_oss(small: bool) -> Path:
    return random_gpt_oss(RandomGptOss(layers=2, hidden=256, intermediate=896, heads=4, kv_heads=4) if small else None)


def _lossless_bytes() -> Aim:
    """Planes are kept where the processor multiplies them as they are (docs/decisions/0054)."""
    native = native_rows_or_none()
    return Aim(0.72 if native is not None and native.is_for_planes else 0.76, at_least=False)


_AWQ = int4_checkpoints.Kind("awq", group=128)

MODELS: Final[Mapping[str, FormatModel]] = {
    "mxfp4": FormatModel(_gpt_oss, third_gain=Aim(3.5, True), resident_gain=Aim(2.0, True)),
    "lossless": FormatModel(
        small_or_large_mixtral,
        LOSSLESS,
        third_gain=Aim(1.25, True),
        resident_gain=Aim(1.2, True),
        bytes_ratio=_lossless_bytes(),
        of_numbers=True,
    ),
    "fp8": FormatModel(
        partial(made_of_mixtral, "fp8", to_fp8), third_gain=Aim(1.8, True), resident_gain=Aim(1.4, True)
    ),
    "int4": FormatModel(partial(made_of_mixtral, "awq", lambda plain, folder: save_int4(plain, folder, _AWQ))),
    **{kind: FormatModel(partial(random_gguf, kind)) for kind in GGUF_KINDS},
}
