"""Experts in bf16 are kept without loss by default where that was measured to be faster, and nothing is refused for it.

The processor's answers are replaced, so that all machines test all kinds. Every instruction set computes both formats.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from greenroom import LLM, SamplingParams
from greenroom.core.errors import PackError
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.kept_format import kept_format, of_same_numbers
from greenroom.moe.loading.kept_pack import kept_pack
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.rows import NativeRows
from greenroom.worker.model.checkpoint_summary import summarise
from tests.compiled import native as native
from tests.fp8_checkpoints import to_fp8
from tests.int4_checkpoints import KINDS, save_int4
from tests.mxfp4_checkpoints import save_mxfp4
from tests.random_checkpoints import save_random

pytestmark = pytest.mark.usefixtures("native")


class Processor(NamedTuple):
    instruction_set: str
    multiplies_bf16: bool = False
    is_for_planes: bool = False
    has_tiles: bool = False


ZEN_5 = Processor("avx512bf16", multiplies_bf16=True, is_for_planes=True)
ICE_LAKE = Processor("avx512")
ZEN_3 = Processor("avx2")

Becomes = Callable[[Processor], None]


@pytest.fixture
def becomes(native: NativeRows, monkeypatch: pytest.MonkeyPatch) -> Becomes:
    def answer(processor: Processor) -> None:
        for name, value in processor._asdict().items():
            monkeypatch.setattr(native, name, value)

    return answer


def saved(folder: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 192} | changes
    return save_random(family, folder, dtype=torch.bfloat16, max_shard_size="1GB", **sizes)


@pytest.mark.parametrize(
    ("processor", "own"),
    [
        (ZEN_5, LOSSLESS_PLANES),
        (ZEN_5._replace(has_tiles=True), PLAIN_FORMAT),  # torch's products by tiles were not measured
        (Processor("avx512bf16", multiplies_bf16=True), PLAIN_FORMAT),  # Cooper Lake, which expands no bytes
        (ICE_LAKE, LOSSLESS),
        (ZEN_5._replace(instruction_set="avx512", is_for_planes=False), PLAIN_FORMAT),  # torch multiplies bf16
        (ZEN_3, PLAIN_FORMAT),
        (Processor("neonbf16", multiplies_bf16=True), PLAIN_FORMAT),
    ],
)
def test_what_is_faster_is_the_default(
    becomes: Becomes, tmp_path: Path, processor: Processor, own: ExpertFormat
) -> None:
    checkpoint = resolve(str(saved(tmp_path / "model")))
    becomes(processor)
    assert kept_format(checkpoint) is own
    assert kept_format(checkpoint, products="native") is own
    assert kept_format(checkpoint, experts_as="expanded") is PLAIN_FORMAT
    assert kept_format(checkpoint, experts_as="stored") is PLAIN_FORMAT
    for elsewhere in ({"device": "cuda"}, {"products": "torch"}, {"dtype": "float32"}, {"dtype": "float16"}):
        assert kept_format(checkpoint, **elsewhere) is PLAIN_FORMAT
    assert kept_format(checkpoint, experts_as="lossless-planes", device="cuda") is LOSSLESS_PLANES
    assert kept_format(checkpoint, experts_as="lossless-codes") is LOSSLESS
    assert summarise(checkpoint).expert_format == own.name


@pytest.mark.parametrize("processor", [ZEN_5, ICE_LAKE])
def test_what_it_does_not_take_stays_as_it_was(becomes: Becomes, tmp_path: Path, processor: Processor) -> None:
    """Experts with biases, of an encoder-decoder, of other dtypes, quantised ones, ones that save no page."""
    floats = save_random("qwen3_moe", tmp_path / "floats", hidden_size=128, moe_intermediate_size=192)
    bf16 = saved(tmp_path / "bf16")
    folders = {
        "biases": (save_random("gpt_oss", tmp_path / "gpt_oss", dtype=torch.bfloat16), "plain"),
        "encoder-decoder": (save_random("switch_transformers", tmp_path / "switch", dtype=torch.bfloat16), "plain"),
        "float32": (floats, "plain"),
        "mxfp4": (save_mxfp4(tmp_path / "mxfp4"), "mxfp4"),
        "fp8": (to_fp8(bf16, tmp_path / "fp8"), "fp8-blocks"),
        "expanded": (save_int4(bf16, tmp_path / "int4", KINDS["packed-float-scales"]), "plain"),
        "small": (save_random("qwen3_moe", tmp_path / "small", dtype=torch.bfloat16), "plain"),
    }
    for folder, before in folders.values():
        checkpoint = resolve(str(folder))
        becomes(ZEN_3)
        assert (kept_format(checkpoint).name, summarise(checkpoint).expert_format) == (before, before)
        becomes(processor)
        path, kept, _ = kept_pack(checkpoint, cache_dir=tmp_path / "cache", progress=False)
        assert (kept.name, summarise(checkpoint).expert_format) == (before, before)
        with contextlib.closing(PackFile.open(path)) as pack:
            assert pack.manifest.formats == (before,)
    own = kept_format(resolve(str(bf16)))
    assert kept_format(resolve(str(floats)), "bfloat16") is own is not PLAIN_FORMAT


def test_a_rest_of_a_block_is_decoded_slowly(becomes: Becomes, tmp_path: Path) -> None:
    """12 bits have blocks of 64 weights. Planes have units of four."""
    checkpoint = resolve(str(saved(tmp_path / "model", hidden_size=160)))
    becomes(ICE_LAKE)
    assert kept_format(checkpoint) is PLAIN_FORMAT
    assert kept_format(checkpoint, experts_as="lossless") is LOSSLESS
    becomes(ZEN_5)
    assert kept_format(checkpoint) is LOSSLESS_PLANES


@pytest.mark.parametrize(
    ("asked", "kept"),
    [("auto", PLAIN_FORMAT), ("lossless-planes", PLAIN_FORMAT), ("lossless", LOSSLESS), ("lossless-codes", LOSSLESS)],
)
def test_what_saves_no_page_is_not_chosen(becomes: Becomes, tmp_path: Path, asked: str, kept: ExpertFormat) -> None:
    """Of 32 by 24: numbers and planes take two pages, and 12 bits one."""
    becomes(ZEN_5)
    small = resolve(str(save_random("qwen3_moe", tmp_path / "small", dtype=torch.bfloat16)))
    assert kept_format(small, experts_as=asked) is kept
    path, *_ = kept_pack(small, experts_as=asked, cache_dir=tmp_path)
    with contextlib.closing(PackFile.open(path)) as pack:
        assert {layer.layout.nbytes for layer in pack.manifest.layers} == {8192 if kept is PLAIN_FORMAT else 4096}
        assert pack.manifest.formats == (kept.name,)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("greenroom.checkpoints.pack_cache.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        yield


@pytest.mark.parametrize(
    ("packed_on", "served_on", "found"),
    [
        (ZEN_3, ZEN_5, PLAIN_FORMAT),
        (ZEN_3, ICE_LAKE, PLAIN_FORMAT),
        (ZEN_5, ZEN_3, LOSSLESS_PLANES),
        (ZEN_5, ICE_LAKE, LOSSLESS_PLANES),
        (ICE_LAKE, ZEN_5, LOSSLESS),
    ],
)
def test_a_pack_of_another_processor_serves_where_none_can_be_made(
    becomes: Becomes,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    packed_on: Processor,
    served_on: Processor,
    found: ExpertFormat,
) -> None:
    folder, cache = saved(tmp_path / "model"), tmp_path / "cache"
    checkpoint = resolve(str(folder))
    becomes(packed_on)
    made, kept, _ = kept_pack(checkpoint, cache_dir=cache)
    assert kept is found
    becomes(served_on)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))  # with other times, as in an image
    with full_disk():
        assert kept_pack(checkpoint, cache_dir=cache) == (made, found, True)
        assert f"experts stay {found.name}, as {made} has them" in caplog.text
        assert "no room for the expert pack" in caplog.text
        assert kept_pack(resolve(str(copy)), cache_dir=cache) == (made, found, True)
        with pytest.raises(PackError, match="no room for the expert pack"):
            kept_pack(checkpoint, experts_as="lossless" if found is PLAIN_FORMAT else "expanded", cache_dir=cache)
        with pytest.raises(PackError, match="no room for the expert pack"):
            kept_pack(checkpoint, cache_dir=cache, force=True)
        with pytest.raises(PackError, match="no room for the expert pack"):
            kept_pack(checkpoint, cache_dir=tmp_path / "empty")


def test_nothing_else_stands_in_for_quantised_experts(becomes: Becomes, tmp_path: Path) -> None:
    checkpoint = resolve(str(to_fp8(saved(tmp_path / "plain"), tmp_path / "fp8")))
    becomes(ZEN_5)
    assert of_same_numbers(checkpoint) == of_same_numbers(resolve(str(tmp_path / "plain")), "float32") == []
    ensure_pack(checkpoint, cache_dir=tmp_path)  # of numbers, which codes are not
    with full_disk(), pytest.raises(PackError, match="no room for the expert pack"):
        kept_pack(checkpoint, cache_dir=tmp_path)


def test_an_old_pack_stays_beside_the_new_one(becomes: Becomes, tmp_path: Path) -> None:
    checkpoint = resolve(str(saved(tmp_path / "model")))
    old = ensure_pack(checkpoint, cache_dir=tmp_path)
    becomes(ZEN_5)
    new, kept, _ = kept_pack(checkpoint, cache_dir=tmp_path)
    assert kept is LOSSLESS_PLANES
    assert sorted(tmp_path.glob("packs/*.pack")) == sorted([old, new])
    becomes(ZEN_3)
    assert kept_pack(checkpoint, cache_dir=tmp_path) == (old, PLAIN_FORMAT, False)


def test_a_start_says_what_it_chose_and_texts_are_the_same(becomes: Becomes, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen2_moe", tokenizer=True)
    prompts = [[(7 * n + 3 * i) % 250 + 4 for i in range(5 + 9 * n)] for n in range(4)]
    why = ": the same bits in fewer bytes, and faster on this processor than bfloat16"
    texts = []
    for processor, experts_as, products, said in (
        (ZEN_5, "auto", "auto", f", as lossless-planes{why})"),
        (ZEN_3, "auto", "auto", ", as lossless-planes)"),  # that of before stands in
        (ICE_LAKE, "auto", "native", f", as lossless{why})"),
        (ZEN_3, "auto", "auto", None),
        (ZEN_5, "expanded", "auto", None),
    ):
        becomes(processor)
        with contextlib.ExitStack() as stack:
            if processor is ZEN_3 and said is not None:
                stack.enter_context(full_disk())
            llm = stack.enter_context(
                LLM(
                    str(folder), cache_dir=tmp_path, expert_memory="50%", experts_as=experts_as, products=products,
                    compiled_rows="512", warm_start=False, progress=False,
                )
            )  # fmt: skip
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            texts.append([one.token_ids for one in found])
            described = llm.worker.describe()
        assert "lossless" not in described if said is None else said in described
    assert all(text == texts[0] for text in texts)
    assert len({token for text in texts[0] for token in text}) > 3, "a model that says one thing"
