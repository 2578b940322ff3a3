"""Experts in MXFP4, or in lossless codes or planes, give the logits of the same experts in bf16, to the bit, at any
budget and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.formats.registry import FORMATS
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import RowLimits, native_rows
from tests.contract.exactness.models import TOP_K, Model, batch_logits
from tests.matrices import matrix
from tests.mxfp4_checkpoints import save_mxfp4
from tests.random_checkpoints import save_random

NATIVE, TORCH, MIXED = "native", "torch", "mixed"
"""By which products. Mixed: torch where an expert has more than a row."""


def _mxfp4(folder: Path) -> Path:
    return save_mxfp4(folder, hidden_size=128, head_dim=32, num_experts_per_tok=TOP_K)


def _bf16(folder: Path) -> Path:
    """Of which the lean decoder runs the layers."""
    return save_random(
        "qwen3_moe", folder, dtype=torch.bfloat16, max_shard_size="1GB",
        hidden_size=96, head_dim=32, moe_intermediate_size=72, num_experts_per_tok=TOP_K,
    )  # fmt: skip


def _bf16_without_room(folder: Path) -> Path:
    """One layer stays plain beside the others."""
    tensors = load_file(_bf16(folder) / "model.safetensors")
    weight = tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    weight *= torch.exp2(-(torch.arange(weight.numel()).view_as(weight) % 100.0))
    save_file(tensors, folder / "model.safetensors")
    return folder


CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], ExpertFormat, tuple[str, ...]]] = {
    "mxfp4": (_mxfp4, MXFP4, ("mxfp4",)),
    "lossless": (_bf16, LOSSLESS, ("lossless",)),
    "lossless planes": (_bf16, LOSSLESS_PLANES, ("lossless-planes",)),
    "partly lossless": (_bf16_without_room, LOSSLESS, ("lossless", "plain")),
}
"""A checkpoint, what its experts are kept as, and the formats of its layers."""


class Models:
    """One checkpoint, packed and loaded in each format by each kind of products; each is made once."""

    def __init__(self, root: Path, kind: str) -> None:
        save, self.kept, self.formats = CHECKPOINTS[kind]
        self._checkpoint: Checkpoint = resolve(str(save(root / "model")))
        self._root = root
        self._made: dict[tuple[str, str], Model] = {}
        self._resident: dict[str, list[torch.Tensor]] = {}

    def get(self, kept: ExpertFormat, products: str) -> Model:
        key = kept.name, products
        if key not in self._made:
            pack = PackFile.open(ensure_pack(self._checkpoint, cache_dir=self._root / "cache", expert_format=kept))
            torchs = "torch" if products == TORCH else "native"
            formats = [FORMATS[layer.format] for layer in pack.manifest.layers]
            loaded = load(self._checkpoint, products=torchs, expert_format=formats)
            if loaded.native is not None:
                loaded.native.limits = RowLimits(1, 0, 0) if products == MIXED else RowLimits(512, 512, 512)
            ragged = RaggedModel(loaded.model, native=loaded.native)
            self._made[key] = Model(self._checkpoint.folder, loaded, ragged, pack)
        return self._made[key]

    def expanded_and_resident(self, products: str) -> list[torch.Tensor]:
        """The logits of all experts in memory, in bf16."""
        if products not in self._resident:
            model = self.get(PLAIN_FORMAT, products)
            with model.experts("100%", "lru"):
                self._resident[products] = batch_logits(model.ragged)
        return self._resident[products]

    def close(self) -> None:
        for model in self._made.values():
            model.pack.close()


@pytest.fixture(scope="module", params=CHECKPOINTS)
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Models]:
    if request.param != "mxfp4":
        need_compiled()  # which encodes
    made = Models(tmp_path_factory.mktemp("stored"), request.param)
    yield made
    made.close()


@matrix(
    2,
    products=(NATIVE, TORCH, MIXED),
    budget=("100%", "33%", "smallest"),
    policy=("lru", "look-ahead", "duoserve", "next-use"),
)
def test_logits_are_those_of_expanded_experts(stored: Models, products: str, budget: str, policy: str) -> None:
    if products != TORCH:
        need_compiled()
    expected = stored.expanded_and_resident(products)
    model = stored.get(stored.kept, products)
    assert model.pack.manifest.formats == stored.formats
    assert (model.loaded.native is not None) == (products != TORCH)
    with model.experts(budget, policy) as engine:
        logits = batch_logits(model.ragged)
        assert budget == "100%" or engine.counters.evictions > 0
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))
    assert len({row.argmax().item() for row in torch.cat(logits)}) > 3, "a model that says one thing proves little"


def test_records_are_smaller_than_the_expanded_ones(stored: Models) -> None:
    own, expanded = (stored.get(kept, TORCH).pack.manifest for kept in (stored.kept, PLAIN_FORMAT))
    assert own.dtype == expanded.dtype == "bfloat16"
    weights = [manifest.layers[0].layout.weight_bytes for manifest in (own, expanded)]
    least, most = (3.4, 16 / 4.25) if stored.kept is MXFP4 else (1.25, 16 / 11)
    assert least < weights[1] / weights[0] < most


def test_logits_are_the_same_whoever_runs_the_layers(stored: Models) -> None:
    """The lean decoder takes what is resident in one call, the modules one expert after the other."""
    need_compiled()
    found = []
    for kept in (stored.kept, PLAIN_FORMAT):
        model = stored.get(kept, NATIVE)
        assert model.loaded.native is not None
        with model.experts("100%", "lru"):
            found.append(batch_logits(model.ragged))
        lean, model.ragged.lean = model.ragged.lean, None
        try:
            with model.experts("100%", "lru"):
                found.append(batch_logits(model.ragged))
        finally:
            model.ragged.lean = lean
        assert (lean is None) == (stored.kept is MXFP4)
    assert all(torch.equal(*rows) for rows in zip(found[0], found[2], strict=True))
    assert all(torch.equal(*rows) for rows in zip(found[1], found[3], strict=True))


def need_compiled() -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
