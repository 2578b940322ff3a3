"""Lossless codes and planes as formats of records: every bit comes back, or the layer stays plain."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import greenroom.demo
from greenroom.core.errors import InvalidConfig
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, DoesNotFit, Expander
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.lossless.record import LosslessFormat
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows
from greenroom.worker.model.checkpoint_summary import summarise
from tests.examples import examples
from tests.mxfp4_checkpoints import save_mxfp4
from tests.random_checkpoints import save_random
from tests.unit.kernels.lossless_weights import LOSSLESS_FORMATS, codes_of, lossless_record, matrix, swiglu_layer

try:
    native_rows()  # which encode
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ALL_BITS = torch.arange(1 << 16, dtype=torch.int32).short()


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int16)


@pytest.fixture(params=LOSSLESS_FORMATS.values(), ids=list(LOSSLESS_FORMATS), scope="module")
def kept(request: pytest.FixtureRequest) -> LosslessFormat:
    own: LosslessFormat = request.param
    return own


def there_and_back(kept: LosslessFormat, numbers: torch.Tensor, *, joined: bool = False) -> None:
    """By torch, as on a device. The compiled way is compared beside its products."""
    into = torch.full_like(numbers, 7.0)
    kept.expand_by_torch(*codes_of(kept, numbers, joined=joined), into, joined=joined)
    assert torch.equal(bits_of(into), bits_of(numbers))


@given(
    st.integers(1, 40), st.integers(1, 60).map(lambda n: 2 * n), st.booleans(), st.integers(1, 15), st.integers(0, 64),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_any_bits_come_back(
    kept: LosslessFormat, outputs: int, inputs: int, joined: bool, exponents: int, rare: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 16, (outputs * (2 if joined else 1), inputs))
    exponents = min(exponents, kept.listed)
    bits = bits & 0x807F | random.permutation(256)[random.integers(0, exponents, bits.shape)] << 7
    places = random.integers(0, bits.size, rare)
    bits.flat[places] = random.integers(0, 1 << 16, rare)
    there_and_back(kept, torch.from_numpy(bits.astype(np.int32)).short().view(torch.bfloat16), joined=joined)


@given(st.integers(1, 20), st.integers(1, 40).map(lambda n: 2 * n), st.integers(0, 2**31))
@settings(max_examples=examples(50), deadline=None)
def test_what_comes_not_back_is_refused(kept: LosslessFormat, outputs: int, inputs: int, seed: int) -> None:
    """Noise has all exponents alike."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (outputs, inputs)).astype(np.int32)
    numbers = torch.from_numpy(bits).short().view(torch.bfloat16)
    counts = np.sort(np.bincount((bits >> 7 & 0xFF).ravel(), minlength=256))
    there = kept.room(outputs, inputs)
    if counts[: -kept.listed].sum() > there:
        with pytest.raises(
            DoesNotFit, match=f"other exponents than the {kept.listed} commonest, and there is room for {there}"
        ):
            codes_of(kept, numbers)
    else:
        there_and_back(kept, numbers)


def test_every_number_of_bf16_comes_back(kept: LosslessFormat) -> None:
    """NaN, infinities, denormal numbers, zeros of both signs: as common ones, and as rare ones."""
    by_exponent = ALL_BITS.view(2, 256, 128)
    for first in range(0, 256, kept.listed):
        numbers = by_exponent[:, first : first + kept.listed].reshape(2, -1).contiguous()
        there_and_back(kept, numbers.view(torch.bfloat16))
    common = torch.exp2(-(torch.arange(8 * 1024) % kept.listed).float()).bfloat16().view(8, 1024)
    for first in range(1 << 10):
        rare = common.clone()
        bits_of(rare).view(-1)[first % 61 :: 127][:64] = ALL_BITS[first :: 1 << 10]
        there_and_back(kept, rare)


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (1024, 3584), (4096, 14336), (2048, 1408), (2880, 2880)])
def test_a_record_has_fewer_bytes(kept: LosslessFormat, hidden: int, inner: int) -> None:
    layer = swiglu_layer(hidden, inner)
    most = {LOSSLESS: 0.76, LOSSLESS_PLANES: 0.72}[kept]
    assert most - 0.01 < kept.record(layer).nbytes / PLAIN_FORMAT.record(layer).nbytes <= most


@pytest.mark.parametrize("spread", [0.02, 0.0173, 0.0141, 1.0])
def test_normal_weights_leave_room(kept: LosslessFormat, spread: float) -> None:
    """For the exponents of heavier tails."""
    numbers = torch.empty(1024, 2048).normal_(0.0, spread, generator=torch.Generator().manual_seed(0)).bfloat16()
    exponents = (bits_of(numbers) >> 7 & 0xFF).flatten()
    counts = torch.bincount(exponents.long(), minlength=256).sort().values
    share = int(counts[: -kept.listed].sum()) / kept.room(1024, 2048)
    assert 0 < share < {LOSSLESS: 1 / 8, LOSSLESS_PLANES: 1 / 1.9}[kept]
    there_and_back(kept, numbers)


def test_trained_experts_leave_room() -> None:
    model = Path(greenroom.demo.__file__).parent / "model" / "model.safetensors"
    with safe_open(model, framework="pt") as file:
        experts = {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}  # noqa: SIM118 - no mapping
    assert len(experts) > 100
    for numbers in experts.values():
        counts = torch.bincount((bits_of(numbers) >> 7 & 0xFF).flatten().long(), minlength=256).sort().values
        rare = int(counts[: -LOSSLESS_PLANES.listed].sum())
        assert 0 < rare < LOSSLESS_PLANES.room(*numbers.shape) / 1.8


def test_an_expander_makes_an_expert(kept: LosslessFormat) -> None:
    layer, numbers = swiglu_layer(70, 34), (matrix(1, 68, 70), matrix(2, 70, 34))
    expander = Expander(kept, layer)
    assert all(map(torch.equal, expander(lossless_record(kept, numbers)), numbers))
    assert expander.nbytes > sum(tensor.nbytes for tensor in numbers)


def saved(folder: Path, **changes: Any) -> Path:
    return save_random("qwen3_moe", folder, dtype=torch.bfloat16, max_shard_size="1GB", **changes)


def records(path: Path) -> list[list[tuple[torch.Tensor, ...]]]:
    """Of a pack, as numbers would be copied."""
    pack = PackFile.open(path)
    found: list[list[tuple[torch.Tensor, ...]]] = []
    for number, layer in enumerate(pack.manifest.layers):
        found.append([])
        for expert in range(layer.experts):
            buffer = page_aligned(layer.layout.nbytes)
            pack.read_into(number, expert, buffer)
            found[-1].append(layer.layout.views(torch.frombuffer(buffer, dtype=torch.uint8)))
    pack.close()
    return found


def test_a_pack_means_what_the_plain_one_has(kept: LosslessFormat, tmp_path: Path) -> None:
    checkpoint = resolve(str(saved(tmp_path / "model")))
    plain, lossless = (ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=own) for own in (PLAIN_FORMAT, kept))
    assert lossless.name.startswith(f"qwen3_moe-{kept.name}-bfloat16-")
    assert lossless == ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept)
    layer = MoeLayer("experts", 8, 2, swiglu_layer(32, 24).tensors, stacked=True)
    expander = Expander(kept, layer)
    for codes, numbers in zip(records(lossless), records(plain), strict=True):
        for coded, expected in zip(codes, numbers, strict=True):
            assert all(map(torch.equal, expander(coded), expected))


def without_room(folder: Path, layer: int = 1) -> Path:
    """One expert of the layer is noise, whose exponents are all equally rare."""
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.{layer}.mlp.experts.3.up_proj.weight"
    noise = np.random.default_rng(0).integers(0, 1 << 16, tensors[name].numel()) & 0xBFFF
    tensors[name] = torch.from_numpy(noise.astype(np.int32)).short().view(torch.bfloat16).view(tensors[name].shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_layer_without_room_stays_plain(
    kept: LosslessFormat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = resolve(str(without_room(saved(tmp_path / "model"))))
    with caplog.at_level(logging.WARNING):
        path = ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept)
    assert "expert 3 of model.layers.1.mlp.experts: " in caplog.text
    assert "all experts of its layer stay as numbers" in caplog.text
    pack = PackFile.open(path)
    assert [layer.format for layer in pack.manifest.layers] == [kept.name, "plain", kept.name]
    assert pack.manifest.formats == (kept.name, "plain")
    pack.verify()
    pack.close()
    made = path.stat()
    caplog.clear()
    assert ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert not caplog.text, "it is found, not made anew"
    plain = records(ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=PLAIN_FORMAT))
    assert all(
        torch.equal(bits_of(one), bits_of(other))
        for expert, expected in zip(records(path)[1], plain[1], strict=True)
        for one, other in zip(expert, expected, strict=True)
    )


def test_a_copy_of_the_checkpoint_finds_its_pack_too(tmp_path: Path) -> None:
    paths = {
        ensure_pack(resolve(str(without_room(saved(tmp_path / name)))), cache_dir=tmp_path, expert_format=LOSSLESS)
        for name in ("model", "copy")
    }
    assert len(paths) == 1


def _pack_lossless(folder: Path, cache: Path, **options: str) -> None:
    """As ``greenroom pack`` does."""
    checkpoint = resolve(str(folder))
    kept = kept_format(checkpoint, experts_as="lossless", **options)
    ensure_pack(checkpoint, cache_dir=cache, expert_format=kept)


def test_what_can_not_be_kept_so_is_refused_by_name(tmp_path: Path) -> None:
    refusals: dict[str, tuple[Path, dict[str, str], str]] = {
        "quantised": (save_mxfp4(tmp_path / "mxfp4"), {}, r"these experts are quantised \(mxfp4\): use stored"),
        "biased": (
            save_random("gpt_oss", tmp_path / "gpt_oss", dtype=torch.bfloat16), {},
            r"model\.layers\.0\.mlp\.experts has other experts than two matrices without biases",
        ),
        "floats": (
            saved(tmp_path / "floats"), {"dtype": "float32"},
            "these experts are float32: use auto, or the dtype bfloat16",
        ),
    }  # fmt: skip
    for folder, options, why in refusals.values():
        with pytest.raises(InvalidConfig, match=f"experts_as: 'lossless' is not allowed; .*{why}"):
            summarise(resolve(str(folder)), experts_as="lossless", **options)
        with pytest.raises(InvalidConfig, match=why):
            _pack_lossless(folder, tmp_path, **options)
    assert not list(tmp_path.glob("packs/*"))
    odd = MoeLayer("experts", 1, 1, (ExpertTensor("a", (4, 3), torch.bfloat16),) * 2, stacked=True)
    with pytest.raises(InvalidConfig, match="an expert's a has 3 inputs, and it takes even numbers up to 65536"):
        LOSSLESS.record(odd)


@pytest.mark.parametrize(("instructions", "own"), [("avx2", LOSSLESS), (None, None)], ids=["avx2", "here"])
def test_it_is_said_what_they_take(instructions: str | None, own: LosslessFormat | None, tmp_path: Path) -> None:
    """Planes are for processors that expand bytes and multiply bf16."""
    native = native_rows()
    if instructions not in (None, *native.instruction_sets):
        pytest.skip("another architecture")
    checkpoint = resolve(str(saved(tmp_path / "model", hidden_size=256, moe_intermediate_size=512)))
    before = native.instruction_set
    native.use(instructions or before)
    try:
        own = own or (LOSSLESS_PLANES if native.is_for_planes else LOSSLESS)
        assert kept_format(checkpoint, experts_as="lossless") is own
        for elsewhere in ({"device": "cuda"}, {"products": "torch"}):
            assert kept_format(checkpoint, experts_as="lossless", **elsewhere) is LOSSLESS
        kept, plain = (summarise(checkpoint, experts_as=asked) for asked in ("lossless", "expanded"))
    finally:
        native.use(before)
    assert (kept.expert_format, plain.expert_format) == (own.name, "plain")
    assert kept.mean_expert_bytes < 0.77 * plain.mean_expert_bytes
