"""MXFP4 as a format of records: laid out anew, expanded as transformers does, refused where it is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, BadCodes, Expander, ExpertFormat
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows
from greenroom.worker.model.checkpoint_summary import summarise
from tests.examples import examples
from tests.mxfp4_checkpoints import rewrite, save_mxfp4
from tests.random_checkpoints import edit_json, save_random
from tests.unit.kernels.mxfp4_weights import coded_expert, layer_of

Tensors = dict[str, torch.Tensor]
FORMATS: dict[str, ExpertFormat] = {one.name: one for one in (PLAIN_FORMAT, MXFP4)}
"""That its experts can be kept in."""
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))

KEPT: dict[str, ExpertFormat] = {one.name: one for one in (PLAIN_FORMAT, MXFP4)}
"""What a checkpoint in MXFP4 can be kept as."""

widths = st.integers(1, 4).map(lambda blocks: 32 * blocks)


@given(widths, widths, st.sampled_from([torch.bfloat16, torch.float32, torch.float16]), st.integers(0, 2**31))
@settings(max_examples=examples(30), deadline=None)
def test_a_record_expands_to_what_transformers_makes(hidden: int, inner: int, dtype: torch.dtype, seed: int) -> None:
    scales = (110, 135) if dtype is torch.float16 else (0, 252)
    expert = coded_expert(seed, hidden, inner, scales, dtype)
    for tensor, made in zip(expert.layer.tensors, expert.expanded, strict=True):
        if len(tensor.shape) == 2:
            blocks, own = expert.stored[tensor.name]
            theirs = convert_moe_packed_tensors(blocks[None], own[None], dtype=dtype)[0]
            assert torch.equal(made.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_every_code_with_every_scale() -> None:
    """Two codes a byte, all 256 of them, under each scale that bf16 has all numbers for."""
    (tensor, *_) = layer_of(32, 32 * 16).tensors
    for scale in range(253):
        blocks = torch.arange(256, dtype=torch.uint8).repeat(64).view(1024, 1, 16)
        stored = blocks, torch.full((1024, 1), scale, dtype=torch.uint8)
        MXFP4.check(tensor, stored)
        record = tuple(MXFP4.make(tensor, stored).values())
        layer = layer_of(32, 32 * 16)
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        MXFP4.expand(_only(layer), record, (made,))
        theirs = convert_moe_packed_tensors(stored[0][None], stored[1][None])[0]
        assert torch.equal(made.view(torch.int16), theirs.contiguous().view(torch.int16)), scale


def _only(layer: Any) -> Any:
    return dataclasses.replace(layer, tensors=layer.tensors[:1])


def test_an_expander_takes_its_memory_once_and_gives_it_back() -> None:
    first, second = coded_expert(1, 64, 32), coded_expert(2, 64, 32)
    expander = Expander(MXFP4, first.layer)
    with torch.inference_mode():
        one = expander(first.record)
        assert all(map(torch.equal, one, first.expanded))
    with torch.no_grad():  # as transformers' own generate runs
        other = expander(second.record)
    assert all(map(torch.equal, other, second.expanded))
    with torch.inference_mode():
        again = expander(first.record)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in other]
    assert expander.nbytes >= sum(tensor.nbytes for tensor in one)
    expander.release()
    assert all(map(torch.equal, expander(first.record), first.expanded))


def test_gpt_oss_takes_hardly_more_than_it_ships(tmp_path: Path) -> None:
    """The larger one of both, whose shapes are the configuration's defaults."""
    GptOssConfig(dtype="bfloat16", quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    stored, expanded = (summarise(resolve_config(str(tmp_path)), experts_as=kept) for kept in ("stored", "expanded"))
    shipped = 3 * 2880 * 2880 * (4 + 8 / 32) / 8 + 3 * 2880 * 2
    assert shipped <= stored.mean_expert_bytes <= 1.001 * shipped
    assert stored.expert_format == "mxfp4"
    assert expanded.mean_expert_bytes > 3.7 * stored.mean_expert_bytes
    assert expanded.expert_format == "plain"


def test_a_pack_names_its_format(tmp_path: Path) -> None:
    checkpoint = resolve(str(save_mxfp4(tmp_path / "model", hidden_size=256, intermediate_size=512)))
    paths: dict[str, Path] = {
        name: ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept) for name, kept in KEPT.items()
    }
    assert paths == {name: ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=KEPT[name]) for name in paths}
    packs = {name: PackFile.open(path) for name, path in paths.items()}
    assert {name: pack.manifest.formats for name, pack in packs.items()} == {name: (name,) for name in KEPT}
    for pack in packs.values():
        pack.verify()
        pack.close()
    shipped = sum(stored.nbytes for name, stored in checkpoint.tensors.items() if ".experts." in name)
    assert packs["mxfp4"].manifest.record_bytes <= 1.02 * shipped
    assert packs["plain"].manifest.record_bytes > 3.5 * shipped


def test_a_pack_without_a_format_is_plain(tmp_path: Path) -> None:
    """As packs were before there were formats."""
    import msgspec

    from greenroom.experts.pack.layout import PackLayer, RecordLayout

    layer = PackLayer("experts", 2, 1, RecordLayout.of([("up", (4, 4), "float32")]))
    older = {key: value for key, value in msgspec.to_builtins(layer).items() if key != "format"}
    assert msgspec.json.decode(msgspec.json.encode(older), type=PackLayer) == layer


BROKEN: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a scale that is no number": (
        lambda t: t[SCALES][3, 7].fill_(255),
        rf"{SCALES} in .*model\.safetensors: expert 3 has a scale of 255, which is no number",
    ),
    "a scale beyond bf16": (
        lambda t: (t[SCALES][5, 9].fill_(253), t[BLOCKS][5, 9].fill_(0x77)),
        rf"{SCALES} in .*model\.safetensors: expert 5 has a scale of 253, whose weights torch\.bfloat16 lacks",
    ),
    "other blocks": (
        lambda t: t.update({BLOCKS: t[BLOCKS][:, :32].contiguous()}),
        rf"{BLOCKS} in .*\.safetensors has the shape \(8, 32, 1, 16\) of U8, and by the configuration \(8, 64, 1, 16\)",
    ),
    "other scales": (
        lambda t: t.update({SCALES: t[SCALES].repeat(1, 1, 2)}),
        rf"{SCALES} in .* has the shape \(8, 64, 2\) of U8, and by the configuration \(8, 64, 1\)",
    ),
    "scales of another dtype": (
        lambda t: t.update({SCALES: t[SCALES].bfloat16()}),
        rf"{SCALES} in .* has the shape \(8, 64, 1\) of BF16, and by the configuration \(8, 64, 1\) of U8",
    ),
    "numbers in the place of codes": (
        lambda t: t.update(
            {
                SCALES.removesuffix("_scales"): torch.zeros(8, 32, 64).bfloat16(),
                "gone": t.pop(SCALES),
                "too": t.pop(BLOCKS),
            }
        ),
        r"experts\.down_proj in .* is stored as BF16, and the configuration's quantization_config says",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
def test_what_is_broken_is_refused_by_file_and_tensor(what: str, kept: ExpertFormat, tmp_path: Path) -> None:
    change, message = BROKEN[what]
    folder = rewrite(save_mxfp4(tmp_path / "model"), change)
    with pytest.raises(CorruptCheckpoint, match=message):
        ensure_pack(resolve(str(folder)), cache_dir=tmp_path, expert_format=kept)
    assert not list(tmp_path.glob("packs/*"))


def test_the_largest_numbers_of_bf16_are_none_too_many() -> None:
    (tensor, *_) = layer_of(32, 32).tensors
    shapes = MXFP4.stored_shapes(tensor)
    for code, scale in ((0x77, 252), (0x44, 254), (0x33, 254), (0xBB, 254), (0x00, 254)):
        blocks = torch.full(shapes[0], code, dtype=torch.uint8)
        stored = blocks, torch.full(shapes[1], scale, dtype=torch.uint8)
        fits = convert_moe_packed_tensors(blocks[None], stored[1][None]).isfinite().all()
        if fits:
            MXFP4.check(tensor, stored)
        else:
            with pytest.raises(BadCodes):
                MXFP4.check(tensor, stored)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = save_mxfp4(tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 100)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors has .* bytes where its header says"):
        resolve(str(folder))


def test_widths_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = save_mxfp4(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(intermediate_size=40))
    with pytest.raises(CorruptCheckpoint, match="is 40 by 64 by the configuration, and MXFP4 needs multiples of 32"):
        ensure_pack(resolve(str(folder)), cache_dir=tmp_path)


def test_widths_are_refused_by_the_configuration_alone(tmp_path: Path) -> None:
    """No weights are here to compare it with, and a size that is none must not be told."""
    folder = save_mxfp4(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(intermediate_size=40))
    (folder / "model.safetensors").unlink()
    for kept in ("stored", "expanded"):
        with pytest.raises(
            CorruptCheckpoint, match="is 64 by 80 by the configuration, and MXFP4 needs multiples of 32"
        ):
            summarise(resolve_config(str(folder)), experts_as=kept)


def test_codes_that_the_configuration_does_not_know_are_refused(tmp_path: Path) -> None:
    folder = save_mxfp4(tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={}))
    with pytest.raises(CorruptCheckpoint, match=r"the checkpoint lacks model\.layers\.0\.mlp\.experts\."):
        ensure_pack(resolve(str(folder)), cache_dir=tmp_path)


def test_what_experts_are_kept_as(tmp_path: Path) -> None:
    shipped = resolve(str(save_mxfp4(tmp_path / "mxfp4")))
    numbers = resolve(str(save_random("gpt_oss", tmp_path / "numbers", dtype=torch.bfloat16)))
    for kept in ("auto", "stored", "expanded"):
        assert kept_format(numbers, experts_as=kept) is PLAIN_FORMAT
    assert kept_format(shipped, experts_as="stored", dtype="float32") is MXFP4
    assert kept_format(shipped, experts_as="expanded") is PLAIN_FORMAT
    for options in ({"dtype": "float32"}, {"products": "torch"}, {"device": "cuda"}):
        assert kept_format(shipped, **options) is PLAIN_FORMAT, "torch would expand at each use"
    try:
        native_rows()
    except NativeUnavailable:
        assert kept_format(shipped) is PLAIN_FORMAT
    else:
        assert kept_format(shipped) is MXFP4
    with pytest.raises(InvalidConfig, match="experts_as: 'int4' is not allowed; allowed: auto, stored, expanded"):
        kept_format(shipped, experts_as="int4")


def test_expanding_is_planned_for_where_it_is_done(tmp_path: Path) -> None:
    checkpoint = resolve(str(save_mxfp4(tmp_path)))
    by_torch = load(checkpoint, products="torch", expert_format=MXFP4)
    (expander,) = by_torch.hooks.expanders.values()
    assert by_torch.expanding_bytes == expander.nbytes
    assert load(checkpoint, products="torch").expanding_bytes == 0
    compiled = load(checkpoint, expert_format=MXFP4)
    if compiled.native is not None:
        with compiled.native.without_limits():
            assert compiled.expanding_bytes == 0
