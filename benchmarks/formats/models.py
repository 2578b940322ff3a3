"""The models of the benchmark: for each format a checkpoint whose experts can stay as they are or become bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Kind

from benchmarks.harness.inputs.checkpoints import RandomMixtral, copy_tokenizer, kept, random_mixtral
from benchmarks.harness.inputs.mxfp4_checkpoint import RandomGptOss, random_gpt_oss
from benchmarks.harness.reporting.aims import Aim
from tests import int4_checkpoints
from tests.fp8_checkpoints import to_fp8
from tests.gguf_checkpoints import save_gguf
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


def _mixtral(small: bool) -> Path:
    return random_mixtral(
        RandomMixtral(layers=2, hidden=256, intermediate=1024, heads=4, kv_heads=4) if small else None
    )


def _made_of_mixtral(kind: str, write: Callable[[Path, Path], object]) -> Callable[[bool], Path]:
    """``write(checkpoint, folder)``: the same model as ``kind``."""

    def make(small: bool) -> Path:
        plain = _mixtral(small)
        return kept("random-mixtral-as", f"1 {kind} {plain.name}", lambda folder: write(plain, folder))

    return make


def _gguf(kind: str, kind_of: Callable[[str], Kind]) -> Callable[[bool], Path]:
    def write(plain: Path, folder: Path) -> None:
        save_gguf(plain, folder / "model.gguf", kind_of)
        copy_tokenizer(folder)  # beside the file, which has none

    make = _made_of_mixtral(kind, write)
    return lambda small: make(small) / "model.gguf"


def _q4_k_m(tensor: str) -> Kind:
    """As llama.cpp's mixture: the down projections of half the layers in more bits."""
    if "ffn_down" in tensor and int(tensor.split(".")[1]) % 2 == 0:
        return Kind.Q6_K
    return Kind.F32 if "ffn_gate_inp" in tensor else Kind.Q4_K


def _q8_0(tensor: str) -> Kind:
    return Kind.F32 if "ffn_gate_inp" in tensor else Kind.Q8_0


_AWQ = int4_checkpoints.Kind("awq", group=128)

MODELS: Final[Mapping[str, FormatModel]] = {
    "mxfp4": FormatModel(_gpt_oss, third_gain=Aim(3.5, True), resident_gain=Aim(2.0, True)),
    "lossless": FormatModel(
        _mixtral,
        LOSSLESS,
        third_gain=Aim(1.25, True),
        resident_gain=Aim(1.2, True),
        bytes_ratio=Aim(0.76, False),
        of_numbers=True,
    ),
    "fp8": FormatModel(_made_of_mixtral("fp8", to_fp8), third_gain=Aim(1.8, True), resident_gain=Aim(1.4, True)),
    "int4": FormatModel(_made_of_mixtral("awq", lambda plain, folder: save_int4(plain, folder, _AWQ))),
    "q8_0": FormatModel(_gguf("q8_0", _q8_0)),
    "q4_k_m": FormatModel(_gguf("q4_k_m", _q4_k_m)),
}
