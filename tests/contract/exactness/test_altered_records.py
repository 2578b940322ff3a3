"""A record that was altered on the disk is an error of the rows that need its expert, in every format; no other row
changes, and none is computed with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from greenroom.core.errors import TransferFailed
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.rows import NativeRows
from tests.compiled import native as native
from tests.contract.exactness.models import Model, logits_of
from tests.random_checkpoints import save_random
from tests.stored_checkpoints import KINDS, StoredKind

LAYER, EXPERT = 1, 2
PROMPTS = [[3 * number + 5] for number in range(24)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(
        "qwen3_moe", tmp_path_factory.mktemp("plain") / "model", dtype=torch.bfloat16, hidden_size=256,
        moe_intermediate_size=256, num_hidden_layers=2, num_experts=4, num_experts_per_tok=1, head_dim=64,
    )  # fmt: skip


def packed(kind: StoredKind, plain: Path, root: Path) -> Model:
    checkpoint = resolve(str(kind.write(plain, root / "stored", None)))
    kept = kind.kept(checkpoint)
    pack = PackFile.open(ensure_pack(checkpoint, cache_dir=root / "cache", expert_format=kept))
    loaded = load(checkpoint, expert_format=kept)
    if loaded.native is not None:
        loaded.native.remove_limits()
    return Model(checkpoint.folder, loaded, RaggedModel(loaded.model, native=loaded.native), pack)


def altered(pack: PackFile, tensor: int, copy: Path) -> PackFile:
    """The same pack, one bit of the expert's record being another: in the middle of its ``tensor``."""
    layout = pack.layout(LAYER)
    record, content = page_aligned(layout.nbytes), bytearray(pack.path.read_bytes())
    pack.read_into(LAYER, EXPERT, record)
    assert content.count(bytes(record)) == 1
    spec = layout.tensors[tensor]
    content[content.index(bytes(record)) + spec.offset + spec.nbytes // 2] ^= 4
    copy.write_bytes(content)
    return PackFile.open(copy)


@pytest.mark.parametrize("name", KINDS)
def test_it_fails_the_rows_that_need_it_and_changes_no_other(
    native: NativeRows, name: str, plain: Path, tmp_path: Path
) -> None:
    model = packed(KINDS[name], plain, tmp_path)
    assert set(model.pack.manifest.formats) == KINDS[name].formats
    sound = model.pack
    needing: dict[str, frozenset[int]] = {}
    with model.experts("33%", "lru"):
        expected = [logits_of(model.ragged, prompt) for prompt in PROMPTS]
    for tensor, spec in enumerate(sound.layout(LAYER).tensors):
        model.pack = altered(sound, tensor, tmp_path / f"{tensor}.pack")
        failed: dict[int, str] = {}
        with model.experts("33%", "lru") as engine:
            for number, (prompt, whole) in enumerate(zip(PROMPTS, expected, strict=True)):
                try:
                    logits = logits_of(model.ragged, prompt)
                except TransferFailed as error:
                    failed[number] = str(error)
                else:
                    assert torch.equal(logits, whole), spec.name
            assert engine.counters.evictions > 0, "records are read again and again"
        assert 0 < len(failed) < len(PROMPTS), spec.name
        altered_one = f"{model.pack.path} can not be used: expert {EXPERT} of {model.pack.manifest.layers[LAYER].name}"
        assert all(f"{altered_one} was altered" in said for said in failed.values())
        needing[spec.name] = frozenset(failed)
        model.pack.close()
    assert len(set(needing.values())) == 1, "whatever of the record it is, the same rows need it"
    sound.close()
