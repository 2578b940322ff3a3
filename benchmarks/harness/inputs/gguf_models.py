"""The random Mixtral in other formats, among them GGUF files as llama.cpp's own quantising makes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gguf import GGMLQuantizationType as Kind

from benchmarks.harness.inputs.checkpoints import RandomMixtral, copy_tokenizer, kept, random_mixtral
from benchmarks.harness.inputs.spelled_tokens import vocabulary_keys
from tests.gguf_checkpoints import save_gguf

_ROUTER: Final = "ffn_gate_inp"


def small_or_large_mixtral(small: bool) -> Path:
    """``small``: to see that a benchmark works. Widths are multiples of 256 in both."""
    return random_mixtral(
        RandomMixtral(layers=2, hidden=256, intermediate=1024, heads=4, kv_heads=4) if small else None
    )


def made_of_mixtral(kind: str, write: Callable[[Path, Path], object], small: bool) -> Path:
    """The same model as ``kind``, by ``write(checkpoint, folder)``: its folder."""
    plain = small_or_large_mixtral(small)
    return kept("random-mixtral-as", f"1 {kind} {plain.name}", lambda folder: write(plain, folder))


def _q8_0(tensor: str) -> Kind:
    return Kind.F32 if _ROUTER in tensor else Kind.Q8_0


def _q4_k_m(tensor: str) -> Kind:
    """The down projections of half the layers have more bits."""
    if "ffn_down" in tensor and int(tensor.split(".")[1]) % 2 == 0:
        return Kind.Q6_K
    return Kind.F32 if _ROUTER in tensor else Kind.Q4_K


def _mxfp4_moe(tensor: str) -> Kind:
    return Kind.MXFP4 if "_exps" in tensor else _q8_0(tensor)


GGUF_KINDS: Final[Mapping[str, Callable[[str], Kind]]] = {
    "q8_0": _q8_0,
    "q4_k_m": _q4_k_m,
    "mxfp4_moe": _mxfp4_moe,
}
"""As llama.cpp calls its mixtures, the type of each tensor."""


def random_gguf(kind: str, small: bool) -> Path:
    """The file. Its vocabulary spells token ids, for arms that take text; greenroom finds a tokenizer beside it."""

    def write(plain: Path, folder: Path) -> None:
        config = json.loads((plain / "config.json").read_text())
        spelled = vocabulary_keys(config["vocab_size"], end=config["eos_token_id"])
        save_gguf(plain, folder / "model.gguf", GGUF_KINDS[kind], metadata=spelled)
        copy_tokenizer(folder)

    return made_of_mixtral(f"gguf-{kind}-spelled", write, small) / "model.gguf"
