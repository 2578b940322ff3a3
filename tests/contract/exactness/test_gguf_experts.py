"""Experts that stay in GGUF's blocks give the same logits at any budget and policy, and mean what the file means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import Checkpoint, resolve
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.rows import NativeRows, RowLimits
from greenroom.text import TextProcessor
from tests.compiled import native as native
from tests.contract.exactness.models import TOP_K, Model, batch_logits, logits_of
from tests.random_checkpoints import save_random

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")
Kind = gguf.GGMLQuantizationType

KINDS = {
    "Q8_0": lambda name: Kind.Q8_0,
    "Q4_K": lambda name: Kind.Q4_K,
    "Q6_K": lambda name: Kind.Q6_K,
    "MXFP4": lambda name: Kind.MXFP4 if "_exps." in name else Kind.Q8_0,
    "Q4_K_M": lambda name: Kind.Q6_K if name in ("blk.0.ffn_down_exps.weight", "output.weight") else Kind.Q4_K,
}
FORMATS = {
    "Q8_0": {"int8"}, "Q4_K": {"q4_k"}, "Q6_K": {"q6_k"}, "MXFP4": {"fp4"}, "Q4_K_M": {"q4_k", "q4_k-q6_k"},
}  # fmt: skip
NATIVE, TORCH = "native", "torch"
WIDTHS: dict[str, Any] = {
    "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3,
    "num_experts_per_tok": TOP_K,
}  # fmt: skip


class Models:
    """One random checkpoint as files of several types, each packed and loaded as it is stored and expanded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = save_random("qwen3_moe", root / "model", dtype=torch.bfloat16, **WIDTHS)
        self._files: dict[str, Checkpoint] = {}
        self._made: dict[tuple[str, str, str], Model] = {}

    def checkpoint(self, kind: str) -> Checkpoint:
        if kind not in self._files:
            path = checkpoints.save_gguf(self.folder, self.root / f"{kind}.gguf", KINDS[kind])
            self._files[kind] = resolve(str(path))
        return self._files[kind]

    def get(self, kind: str, experts_as: str, products: str) -> Model:
        key = kind, experts_as, products
        if key not in self._made:
            checkpoint = self.checkpoint(kind)
            self._made[key] = made(checkpoint, kept_format(checkpoint, "auto", experts_as), products, self.root)
        return self._made[key]

    def close(self) -> None:
        for model in self._made.values():
            model.pack.close()


def made(checkpoint: Checkpoint, kept: ExpertFormat, products: str, root: Path) -> Model:
    pack = PackFile.open(ensure_pack(checkpoint, cache_dir=root / "cache", expert_format=kept))
    loaded = load(checkpoint, products=products, expert_format=kept)
    if loaded.native is not None:
        loaded.native.limits = RowLimits(512, 512, 512)
    return Model(checkpoint.folder, loaded, RaggedModel(loaded.model, native=loaded.native), pack)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("gguf"))
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_files_bytes(models: Models, kind: str) -> None:
    manifest = models.get(kind, "stored", TORCH).pack.manifest
    assert set(manifest.formats) == FORMATS[kind]
    checkpoint = models.checkpoint(kind)
    shipped = sum(stored.nbytes for name, stored in checkpoint.tensors.items() if ".experts." in name)
    own = sum(layer.experts * layer.layout.weight_bytes for layer in manifest.layers)
    assert shipped <= own <= 1.02 * shipped, f"stored_bytes_ratio {own / shipped:.4f}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["100%", "33%"])
def test_torch_computes_the_expanded_experts(models: Models, kind: str, budget: str) -> None:
    stored, expanded = (models.get(kind, kept, TORCH) for kept in ("stored", "expanded"))
    assert expanded.pack.manifest.formats == (PLAIN_FORMAT.name,)
    with expanded.experts("100%", "lru"):
        expected = batch_logits(expanded.ragged)
    with stored.experts(budget, "lru"):
        logits = batch_logits(stored.ragged)
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))


@pytest.mark.parametrize("policy", ["lru", "look-ahead", "duoserve"])
@pytest.mark.parametrize("budget", ["33%", "smallest"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_at_any_budget(
    native: NativeRows, models: Models, kind: str, budget: str, policy: str
) -> None:
    model = models.get(kind, "auto", NATIVE)
    assert set(model.pack.manifest.formats) == FORMATS[kind], "where the products are, they stay as they are stored"
    assert model.loaded.native is not None
    with model.experts("100%", "lru"):
        expected = batch_logits(model.ragged)
    with model.experts(budget, policy) as engine:
        logits = batch_logits(model.ragged)
        assert engine.counters.evictions > 0
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))


@pytest.mark.parametrize("products", [NATIVE, TORCH])
def test_gpt_oss_in_mxfp4_is_that_in_bfloat16(native: NativeRows, tmp_path: Path, products: str) -> None:
    """To the bit, as of its own checkpoints: its scales are powers of two."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_experts_per_tok": TOP_K}
    folder = save_random("gpt_oss", tmp_path / "model", dtype=torch.bfloat16, **sizes)
    path = checkpoints.save_gguf(
        folder, tmp_path / "a.gguf", lambda name: Kind.MXFP4 if "_exps.weight" in name else Kind.BF16
    )
    checkpoint = resolve(str(path))
    stored, expanded = (
        made(checkpoint, kept_format(checkpoint, "auto", kept), products, tmp_path) for kept in ("stored", "expanded")
    )
    assert [one.pack.manifest.formats for one in (stored, expanded)] == [("mxfp4",), ("plain",)]
    assert kept_format(checkpoint).name == "mxfp4"
    with expanded.experts("100%", "lru"):
        expected = batch_logits(expanded.ragged)
    with stored.experts("33%", "lru"):
        logits = batch_logits(stored.ragged)
    assert all(torch.equal(ours, whole) for ours, whole in zip(logits, expected, strict=True))
    for one in (stored, expanded):
        one.pack.close()


@torch.inference_mode()
def test_the_most_likely_tokens_are_those_of_float32(native: NativeRows, tmp_path: Path) -> None:
    """Of transformers' model of the numbers that the bundled model's file means: all that differs is rounding."""
    reference = tmp_path / "reference"
    path = checkpoints.save_gguf(
        bundled_model_path(), tmp_path / "a.gguf", Kind.Q8_0, pre="smollm", reference=reference
    )
    checkpoint = resolve(str(path))
    model = made(checkpoint, kept_format(checkpoint), NATIVE, tmp_path)
    assert model.pack.manifest.formats == ("int8",)
    eager = model_class(checkpoint.config).from_pretrained(
        reference, dtype=torch.float32, experts_implementation="eager"
    )
    text, same, total, largest = TextProcessor.from_folder(path), 0, 0, 0.0
    with model.experts("100%", "lru"):
        for one in (one for task in TASKS for one in samples(task, 8, seed=77)):
            asked = text.chat.render([{"role": "user", "content": one.prompt}])
            prompt, answer = (text.tokenizer.encode(part, add_special_tokens=False) for part in (asked, one.answer))
            answers = slice(len(prompt) - 1, None)  # in prompts anything may come next
            theirs = eager(torch.tensor([prompt + answer])).logits[0, answers]
            ours = logits_of(model.ragged, prompt + answer)[answers]
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            total += len(ours)
            largest = max(largest, float((ours - theirs).abs().max()))
    model.pack.close()
    told = f"Q8_0: {same} of {total} positions ({same / total:.2%}), logits differ by at most {largest:.3f}"
    print(told)  # noqa: T201 - how near it is
    assert total > 100
    assert same >= 0.99 * total, told
