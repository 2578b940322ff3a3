"""Experts that stay in codes of 4 bits: the same logits at any budget, and the tokens of their numbers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from greenroom.demo import bundled_model_path
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.rows import NativeRows, RowLimits
from tests.compiled import native as native
from tests.contract.exactness.models import TOP_K, Model, batch_logits
from tests.contract.exactness.most_likely import agreement
from tests.int4_checkpoints import KINDS, Kind, save_decoded, save_int4
from tests.random_checkpoints import save_random

STAYING = ("gptq-act-order", "awq-bf16", "packed")
NATIVE, TORCH = "native", "torch"


class Models:
    """A checkpoint of each kind, packed and loaded in each format by each kind of products; each is made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "head_dim": 32,
            "moe_intermediate_size": 64,
            "num_experts_per_tok": TOP_K,
        }
        self._plain = save_random("qwen3_moe", root / "plain", dtype=torch.bfloat16, **sizes)
        self._checkpoints: dict[str, Checkpoint] = {}
        self._made: dict[tuple[str, str, str], Model] = {}
        self._resident: dict[tuple[str, str, str], list[torch.Tensor]] = {}

    def checkpoint(self, name: str) -> Checkpoint:
        if name not in self._checkpoints:
            self._checkpoints[name] = resolve(str(save_int4(self._plain, self._root / name, KINDS[name])))
        return self._checkpoints[name]

    def get(self, name: str, kept: ExpertFormat, products: str) -> Model:
        key = name, kept.name, products
        if key not in self._made:
            checkpoint = self.checkpoint(name)
            pack = PackFile.open(ensure_pack(checkpoint, cache_dir=self._root / "cache", expert_format=kept))
            loaded = load(checkpoint, products=products, expert_format=kept)
            if loaded.native is not None:
                loaded.native.limits = RowLimits(512, 512, 512)
            ragged = RaggedModel(loaded.model, native=loaded.native)
            self._made[key] = Model(checkpoint.folder, loaded, ragged, pack)
        return self._made[key]

    def resident(self, name: str, kept: ExpertFormat, products: str) -> list[torch.Tensor]:
        """The logits of all experts in memory."""
        key = name, kept.name, products
        if key not in self._resident:
            model = self.get(name, kept, products)
            with model.experts("100%", "lru"):
                self._resident[key] = batch_logits(model.ragged)
        return self._resident[key]

    def close(self) -> None:
        for model in self._made.values():
            model.pack.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("int4"))
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["lru", "look-ahead"])
@pytest.mark.parametrize("budget", ["33%", "smallest"])
@pytest.mark.parametrize("name", STAYING)
def test_a_budget_changes_no_bit(models: Models, native: NativeRows, name: str, budget: str, policy: str) -> None:
    kept = kept_format(models.checkpoint(name))
    assert isinstance(kept, Int4)
    expected = models.resident(name, kept, NATIVE)
    model = models.get(name, kept, NATIVE)
    assert model.loaded.native is not None
    with model.experts(budget, policy) as engine:
        logits = batch_logits(model.ragged)
        assert engine.counters.evictions > 0
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))
    assert len({row.argmax().item() for row in torch.cat(logits)}) > 3, "a model that says one thing proves little"


@pytest.mark.parametrize("name", STAYING)
def test_torch_computes_what_it_does_of_numbers(models: Models, name: str) -> None:
    kept = kept_format(models.checkpoint(name), experts_as="stored")
    stored, numbers = (models.resident(name, one, TORCH) for one in (kept, PLAIN_FORMAT))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(stored, numbers, strict=True))


BUNDLED = {
    "gptq, 128": Kind("gptq", group=128, symmetric=True),
    "gptq, 64, act-order": Kind("gptq", group=64, ordered=True),
    "awq, 32": Kind("awq", group=32),
    "packed, 128": Kind("compressed-tensors", group=128, symmetric=True, scales=torch.bfloat16),
    "packed, 32, act-order": Kind("compressed-tensors", group=32, ordered=True, scales=torch.bfloat16),
    "packed, channels": Kind("compressed-tensors", group=-1),
}


@pytest.mark.parametrize("name", BUNDLED)
def test_the_bundled_model_says_what_its_numbers_say(name: str, native: NativeRows, tmp_path: Path) -> None:
    """The reference has the codes' numbers and everything else in float32."""
    kind = BUNDLED[name]
    coded = save_int4(bundled_model_path(), tmp_path / "coded", kind)
    decoded = save_decoded(coded, tmp_path / "decoded", kind, torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        decoded, dtype=torch.float32, experts_implementation="eager"
    )
    checkpoint = resolve(str(coded))
    kept = kept_format(checkpoint)
    assert isinstance(kept, Int4)
    pack = ensure_pack(checkpoint, cache_dir=tmp_path / "cache", expert_format=kept)
    loaded = load(checkpoint, expert_format=kept)
    assert loaded.native is not None
    loaded.native.limits = RowLimits(512, 512, 512)
    model = Model(coded, loaded, RaggedModel(loaded.model, native=loaded.native), PackFile.open(pack))
    assert model.ragged.lean is not None, "the lean decoder takes these experts"
    with model.experts("100%", "lru"):
        found = agreement(model.ragged, reference, coded)
    model.pack.close()
    print(f"{name}: {found}")  # noqa: T201 - how near it is
    assert found.positions > 300
    assert found.same >= 0.99 * found.positions, str(found)
