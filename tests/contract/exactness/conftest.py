"""Models of a module's tests, each made when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.exactness.models import TOP_K, Model
from tests.random_checkpoints import save_random, wide_heads


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Model]]:
    made: dict[tuple[str, str], Model] = {}

    class Made(dict[tuple[str, str], Model]):
        def __missing__(self, key: tuple[str, str]) -> Model:
            family, dtype = key
            root = tmp_path_factory.mktemp(f"{family}-{dtype}")
            changes = wide_heads(family) if dtype == "bfloat16" else {}  # so that all that is compiled takes part
            if family != "phimoe":  # which picks two, whatever its configuration says
                changes["num_experts_per_tok"] = TOP_K
            checkpoint = resolve(str(save_random(family, root / "model", dtype=getattr(torch, dtype), **changes)))
            pack = PackFile.open(ensure_pack(checkpoint, dtype, root / "cache"))
            loaded = load(checkpoint, dtype)
            ragged = RaggedModel(loaded.model, native=loaded.native)
            made[key] = self[key] = Model(checkpoint.folder, loaded, ragged, pack)
            return made[key]

    yield Made()
    for model in made.values():
        model.pack.close()
