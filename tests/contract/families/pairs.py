"""One random checkpoint twice: as transformers runs it, and as greenroom does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.load_model import LoadedMoE, attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.families.sources import ScriptedExperts
from tests.random_checkpoints import VOCAB_SIZE, save_random


@dataclass
class Pair:
    """One random checkpoint, as transformers runs it and as greenroom does."""

    checkpoint: Checkpoint
    eager: Any
    loaded: LoadedMoE
    source: ScriptedExperts


class Pairs:
    """Makes each pair once a session; ``get`` gives it with nothing scripted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Pair] = {}

    def get(self, family: str, dtype: str = "float32", *, products: str = "torch", **changes: Any) -> Pair:
        key = f"{family}-{dtype}-{products}" + "".join(f"-{name}={value}" for name, value in sorted(changes.items()))
        if key not in self._made:
            with torch.inference_mode(False):  # a test's own mode is not to mark weights that others use
                folder = save_random(family, self._root / key, dtype=getattr(torch, dtype), **changes)
                self._made[key] = make_pair(folder, self._root / "cache", products=products)
        pair = self._made[key]
        pair.source.reset()
        attach(pair.loaded, pair.source)
        return pair

    def forget(self, family: str) -> None:
        """For a test that spoiled its pair."""
        self._made = {key: pair for key, pair in self._made.items() if not key.startswith(f"{family}-")}


def align(model: torch.nn.Module) -> None:
    """Bring its weights to where torch would allocate them. Read from a file they lie as they do in there, and on some
    processors a product of weights that lie at no multiple of 16 bytes is summed in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def make_pair(folder: Path, cache: Path, dtype: str = "auto", products: str = "torch") -> Pair:
    checkpoint = resolve(str(folder))
    source = ScriptedExperts.at(ensure_pack(checkpoint, dtype, cache))
    loaded = load(checkpoint, dtype, products=products)
    attach(loaded, source)
    eager = model_class(checkpoint.config).from_pretrained(folder, dtype=loaded.dtype, experts_implementation="eager")
    align(eager)
    return Pair(checkpoint, eager.eval(), loaded, source)


def prompts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(pair: Pair, model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {} if pair.loaded.decoder_only else {"decoder_input_ids": ids.flip(0)}
    result: torch.Tensor = model(input_ids=ids, **inputs).logits
    return result
