"""FP8 experts give the same logits at any budget and policy, and the tokens of transformers' model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from greenroom.demo import bundled_model_path
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.fp8 import FP8_BLOCKS, FP8_ROWS
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.rows import NativeRows, RowLimits
from tests.compiled import native as native
from tests.contract.exactness.models import Model, batch_logits
from tests.contract.exactness.most_likely import agreement
from tests.fp8_checkpoints import save_dequantized, to_fp8

KINDS = {"blocks": FP8_BLOCKS, "compressed-channels": FP8_ROWS}
NATIVE, TORCH = "native", "torch"


class Models:
    """The bundled model in FP8, packed and loaded as it is stored and expanded, by each kind of products."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = {kind: to_fp8(bundled_model_path(), root / kind, kind) for kind in KINDS}
        self._made: dict[tuple[str, str, str], Model] = {}

    def get(self, kind: str, kept: ExpertFormat, products: str) -> Model:
        key = kind, kept.name, products
        if key not in self._made:
            checkpoint = resolve(str(self.folders[kind]))
            pack = PackFile.open(ensure_pack(checkpoint, cache_dir=self.root / "cache", expert_format=kept))
            loaded = load(checkpoint, products=products, expert_format=kept)
            if loaded.native is not None:
                loaded.native.limits = RowLimits(512, 512, 512)
            ragged = RaggedModel(loaded.model, native=loaded.native)
            self._made[key] = Model(checkpoint.folder, loaded, ragged, pack)
        return self._made[key]

    def close(self) -> None:
        for model in self._made.values():
            model.pack.close()


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("fp8"))
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["lru", "look-ahead", "duoserve", "next-use"])
@pytest.mark.parametrize("budget", ["33%", "smallest"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_at_any_budget(
    native: NativeRows, fp8: Models, kind: str, budget: str, policy: str
) -> None:
    model = fp8.get(kind, KINDS[kind], NATIVE)
    assert model.loaded.native is not None
    assert model.ragged.lean is not None, "the lean decoder takes these experts"
    with model.experts("100%", "lru"):
        expected = batch_logits(model.ragged)
    with model.experts(budget, policy) as engine:
        logits = batch_logits(model.ragged)
        assert engine.counters.evictions > 0
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["100%", "33%"])
def test_torch_computes_the_expanded_experts(fp8: Models, kind: str, budget: str) -> None:
    stored, expanded = (fp8.get(kind, kept, TORCH) for kept in (KINDS[kind], PLAIN_FORMAT))
    with expanded.experts("100%", "lru"):
        expected = batch_logits(expanded.ragged)
    with stored.experts(budget, "lru"):
        logits = batch_logits(stored.ragged)
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_likely_tokens_are_those_of_float32(
    native: NativeRows, fp8: Models, kind: str, tmp_path: Path
) -> None:
    """Of transformers' model of the same numbers in float32, attention and all: all that differs is rounding. Where an
    answer is generated, since prompts have words that nobody can foretell.
    """
    model = fp8.get(kind, KINDS[kind], NATIVE)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        save_dequantized(fp8.folders[kind], tmp_path / kind), dtype=torch.float32, experts_implementation="eager"
    )
    with model.experts("100%", "lru"):
        found = agreement(model.ragged, reference, model.folder)
    print(f"{kind}: {found}")  # noqa: T201 - how near it is
    assert found.positions > 300
    assert found.same >= 0.99 * found.positions, str(found)
