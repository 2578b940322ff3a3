"""Experts that stay in MXFP4 give the logits of the same experts in bf16, to the bit, at any budget and policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.kernels.native.library import NativeUnavailable
from greenroom.moe.kernels.native.rows import RowLimits, native_rows
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.exactness.models import TOP_K, Model, batch_logits
from tests.matrices import matrix
from tests.mxfp4_checkpoints import save_mxfp4

NATIVE, TORCH, MIXED = "native", "torch", "mixed"
"""By which products. Mixed: torch where an expert has more than a row."""


class Models:
    """One checkpoint, packed and loaded in each format by each kind of products; each is made once."""

    def __init__(self, root: Path) -> None:
        folder = save_mxfp4(root / "model", hidden_size=128, head_dim=32, num_experts_per_tok=TOP_K)
        self._checkpoint: Checkpoint = resolve(str(folder))
        self._root = root
        self._made: dict[tuple[str, str], Model] = {}
        self._resident: dict[str, list[torch.Tensor]] = {}

    def get(self, kept: ExpertFormat, products: str) -> Model:
        key = kept.name, products
        if key not in self._made:
            pack = PackFile.open(ensure_pack(self._checkpoint, cache_dir=self._root / "cache", expert_format=kept))
            torchs = "torch" if products == TORCH else "native"
            loaded = load(self._checkpoint, products=torchs, expert_format=kept)
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


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("mxfp4"))
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
    model = stored.get(MXFP4, products)
    assert (model.loaded.native is not None) == (products != TORCH)
    with model.experts(budget, policy) as engine:
        logits = batch_logits(model.ragged)
        assert budget == "100%" or engine.counters.evictions > 0
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))
    assert len({row.argmax().item() for row in torch.cat(logits)}) > 3, "a model that says one thing proves little"


def test_records_are_a_quarter_of_the_expanded_ones(stored: Models) -> None:
    own, expanded = (stored.get(kept, TORCH).pack.manifest for kept in (MXFP4, PLAIN_FORMAT))
    assert own.dtype == expanded.dtype == "bfloat16"
    weights = [manifest.layers[0].layout.weight_bytes for manifest in (own, expanded)]
    assert 3.4 < weights[1] / weights[0] < 16 / 4.25


def need_compiled() -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
