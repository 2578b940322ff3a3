"""Checkpoints in codes of 4 bits: their layouts are read, and what is broken or of another kind is refused by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from greenroom.checkpoints.safetensors_headers import read_header
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from greenroom.moe.formats.expert_format import PLAIN_FORMAT
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.registry import shipped_of
from greenroom.moe.formats.stored_matrix import MatrixStorage
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.worker.model.checkpoint_summary import summarise
from tests.contract.families.sources import ScriptedExperts
from tests.int4_checkpoints import (
    KINDS,
    Kind,
    Tensors,
    as_numbers,
    decode,
    encode,
    groups_for,
    rewrite,
    save_int4,
    set_quantization,
    settings_of,
)
from tests.random_checkpoints import EXPERTS, edit_json, save_random


def storage_of(kind: Kind) -> MatrixStorage:
    found = shipped_of({"quantization_config": kind.settings})
    assert found is not None
    assert found.storage is not None
    return found.storage


def numbers_of(stored: Tensors, kind: Kind, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """What the loader reads of a file with these tensors."""
    save_file({f"layer.{part}": tensor for part, tensor in stored.items()}, folder / "one.safetensors")
    storage, headers = storage_of(kind), read_header(folder / "one.safetensors")
    storage.check_headers({part: headers[f"layer.{part}"] for part in storage.parts})
    parts = [stored[part] for part in storage.parts]
    storage.check(parts, dtype)
    return storage.numbers(parts, dtype)


@pytest.mark.parametrize("name", KINDS)
@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15, deadline=None)
def test_a_matrix_is_read_as_its_layout_says(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = KINDS[name]
    weight = torch.randn(8 * outputs, 64 * inputs, generator=torch.Generator().manual_seed(seed))
    stored = encode(weight, kind, groups_for(str(seed), 64 * inputs, kind))
    numbers = numbers_of(stored, kind, dtype, tmp_path_factory.mktemp("one"))
    assert torch.equal(numbers, decode(stored, kind, dtype))
    assert (numbers.float() - weight).abs().max() < 0.6, "codes to the nearest are near"


def test_every_code_with_every_zero_point(tmp_path: Path) -> None:
    kind = KINDS["gptq-asymmetric-v2"]
    words = torch.randint(-(2**31), 2**31, (12, 64), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    stored = {
        "qweight": words,
        "qzeros": torch.randint(-(2**31), 2**31, (3, 8)).to(torch.int32),
        "scales": torch.rand(3, 64).half() - 0.5,
        "g_idx": (torch.arange(96) // 32).int(),
    }
    assert torch.equal(numbers_of(stored, kind, torch.float16, tmp_path), decode(stored, kind, torch.float16))


@pytest.mark.parametrize("name", ["packed", "packed-asymmetric", "packed-channel"])
def test_numbers_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    """In the scales' dtype, in which the library multiplies."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import PackedQuantizationCompressor

    kind = KINDS[name]
    stored = encode(torch.randn(64, 128), kind, groups_for(name, 128, kind))
    weights = kind.settings["config_groups"]["group_0"]["weights"]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs.model_validate(weights)
    )
    theirs = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    assert torch.equal(numbers_of(stored, kind, kind.scales, tmp_path), theirs.to(kind.scales))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return save_random("qwen3_moe", folder, dtype=torch.bfloat16, hidden_size=64, moe_intermediate_size=64)


DOWN = "model.layers.1.mlp.experts.{}.down_proj"
OWN = DOWN.format(3)

# kind, what was done to its tensors, what the refusal must say
BROKEN: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a scale that is no number": (
        "gptq",
        lambda t: t[f"{OWN}.scales"][1, 7].fill_(float("nan")),
        rf"{OWN}\.scales in .*model\.safetensors: expert 3 has a scale that is no finite number",
    ),
    "an infinite scale": (
        "awq",
        lambda t: t[f"{OWN}.scales"][0, 0].fill_(float("inf")),
        rf"{OWN}\.scales in .*: expert 3 has a scale that is no finite number",
    ),
    "an infinite scale of packed ones": (
        "packed",
        lambda t: t[f"{OWN}.weight_scale"][0, 0].fill_(float("-inf")),
        rf"{OWN}\.weight_scale in .*: expert 3 has a scale that is no finite number",
    ),
    "a scale of a dense layer": (
        "awq",
        lambda t: t["model.layers.0.self_attn.q_proj.scales"][0, 0].fill_(float("inf")),
        r"self_attn\.q_proj\.scales in .* has a scale that is no finite number",
    ),
    "a zero point beyond the codes": (
        "gptq",
        lambda t: t[f"{OWN}.qzeros"][1, 2].fill_(0x7777F777),
        rf"{OWN}\.qzeros in .*: expert 3 has a zero point of 16, and codes end at 15",
    ),
    "a zero point beyond the signed codes": (
        "packed-int8-zeros",
        lambda t: t[f"{OWN}.weight_zero_point"][5, 1].fill_(9),
        rf"{OWN}\.weight_zero_point in .*: expert 3 has a zero point of 9, and codes are -8 to 7",
    ),
    "an order that is none": (
        "gptq-act-order",
        lambda t: t[f"{OWN}.g_idx"][0].copy_(1 - t[f"{OWN}.g_idx"][0]),
        rf"{OWN}\.g_idx in .*: expert 3 is no order of the inputs: it puts 3[13] into group 0, and each has 32",
    ),
    "an order with an input outside": (
        "gptq-act-order",
        lambda t: t[f"{OWN}.g_idx"][9].fill_(2),
        rf"{OWN}\.g_idx in .*: expert 3 puts an input into group 2, and there are 2",
    ),
    "an order that is half there": (
        "packed-act-order",
        lambda t: t[f"{OWN}.weight_g_idx"][:5].fill_(-1),
        rf"{OWN}\.weight_g_idx in .*: expert 3 puts an input into group -1, and there are 2",
    ),
    "a shape that contradicts the codes": (
        "packed",
        lambda t: t[f"{OWN}.weight_shape"].copy_(torch.tensor([64, 60])),
        rf"{OWN}\.weight_shape in .*: expert 3 is \(64, 60\), and the codes beside it are \(64, 64\)",
    ),
    "scales of other groups": (
        "awq",
        lambda t: t.update({f"{OWN}.scales": t[f"{OWN}.scales"][:1].clone()}),
        rf"{OWN}\.scales in .* has the shape \(1, 64\) of F16, and by quantization_config .* \(2, 64\)",
    ),
    "zero points of other groups": (
        "packed-asymmetric",
        lambda t: t.update({f"{OWN}.weight_zero_point": t[f"{OWN}.weight_zero_point"][:4].clone()}),
        rf"{OWN}\.weight_zero_point in .* has the shape \(4, 2\) of I32, .* \(8, 2\)",
    ),
    "outputs that are no whole words": (
        "gptq",
        lambda t: [
            t.update({f"{OWN}.{part}": t[f"{OWN}.{part}"][:, :width].contiguous()})
            for part, width in (("qweight", 60), ("qzeros", 7), ("scales", 60))
        ],
        rf"{OWN}\.qweight in .*model\.safetensors has 60 outputs, and words of zero points have 8 each",
    ),
    "codes of another dtype": (
        "gptq",
        lambda t: t.update({f"{OWN}.qweight": t[f"{OWN}.qweight"].long()}),
        rf"{OWN}\.qweight in .* has the shape \(8, 64\) of I64, .* two dimensions of I32",
    ),
    "codes of eight bits": (
        "gptq",
        lambda t: t.update({f"{OWN}.qweight": t[f"{OWN}.qweight"].repeat(2, 1)}),
        rf"{OWN}\.scales in .* has the shape \(2, 64\) of F16, .* \(4, 64\)",
    ),
    "scales that are missing": (
        "gptq",
        lambda t: t.pop(f"{OWN}.scales"),
        rf"{OWN}\.[gq].* in .*model\.safetensors has no scales beside it",
    ),
    "an order that is missing": (
        "gptq-act-order",
        lambda t: t.pop(f"{OWN}.g_idx"),
        rf"{OWN}\.[qs].* in .*model\.safetensors has no g_idx beside it",
    ),
    "codes that are missing": (
        "packed",
        lambda t: t.pop(f"{OWN}.weight_packed"),
        rf"{OWN}\.weight_s.* in .*model\.safetensors has no weight_packed beside it",
    ),
    "stored twice": (
        "awq",
        lambda t: t.update({f"{OWN}.weight": torch.zeros(64, 64)}),
        rf"{OWN}\.weight is stored twice: as numbers, and in qweight, qzeros, scales",
    ),
    "numbers in the place of codes": (
        "gptq",
        lambda t: [
            t.pop(f"{OWN}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
        ] and t.update({f"{OWN}.weight": torch.zeros(64, 64)}),
        rf"{OWN}\.weight in .* is stored as F32, and the configuration's quantization_config says",
    ),
    "one expert less": (
        "awq",
        lambda t: [t.pop(f"{OWN}.{part}") for part in ("qweight", "qzeros", "scales")],
        r"layers\.1\.mlp\.experts\.down_proj \(qweight\) has 7 of 8 experts in the checkpoint; missing: 3",
    ),
    "a bias that the model lacks": (
        "gptq",
        lambda t: t.update({f"{OWN}.bias": torch.ones(64).half()}),
        rf"{OWN}\.bias in .* is not zero, and the model has no such bias",
    ),
    "a bias of a dense layer that the model lacks": (
        "gptq",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32).half()}),
        r"self_attn\.q_proj\.bias in .* is not zero, and the model has no such bias",
    ),
    "zero points of symmetric codes": (
        "packed",
        lambda t: t.update({f"{OWN}.weight_zero_point": torch.ones(64, 2, dtype=torch.int8)}),
        rf"{OWN}\.weight_zero_point in .* is not zero, and by quantization_config codes are symmetric",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_by_file_and_tensor(what: str, plain: Path, tmp_path: Path) -> None:
    kind, change, message = BROKEN[what]
    folder = rewrite(save_int4(plain, tmp_path / "model", KINDS[kind]), change)
    with pytest.raises(CorruptCheckpoint, match=message):
        packed_and_loaded(folder, tmp_path)


def packed_and_loaded(folder: Path, cache: Path) -> None:
    checkpoint = resolve(str(folder))
    ensure_pack(checkpoint, cache_dir=cache)
    load(checkpoint)


def test_biases_of_zeros_are_left_out(plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ wrote one for each layer that it quantised."""
    folder = rewrite(
        save_int4(plain, tmp_path / "model", KINDS["gptq"]),
        lambda t: t.update(
            {f"{OWN}.bias": torch.zeros(64).half(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
        ),
    )
    load(resolve(str(folder)))


def test_zero_points_of_zeros_are_left_out(plain: Path, tmp_path: Path) -> None:
    """compressed-tensors once wrote them for symmetric codes, too."""
    folder = rewrite(
        save_int4(plain, tmp_path / "model", KINDS["packed"]),
        lambda t: t.update({f"{OWN}.weight_zero_point": torch.zeros(64, 2, dtype=torch.int8)}),
    )
    load(resolve(str(folder)))


def test_groups_that_do_not_divide_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = set_quantization(save_int4(plain, tmp_path / "model", KINDS["awq"]), group_size=48)
    with pytest.raises(CorruptCheckpoint, match=r"qweight in .* has 64 inputs, which are no whole groups of 48"):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)


def test_a_configuration_without_its_tensors_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = save_random("qwen3_moe", tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=KINDS["gptq"].settings))
    with pytest.raises(CorruptCheckpoint, match=r"is stored as F32, and the configuration's quantization_config says"):
        ExpertPlan(resolve(str(folder)), torch.float32)


def test_tensors_without_their_configuration_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = save_int4(plain, tmp_path / "model", KINDS["gptq"])
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(CorruptCheckpoint, match="the checkpoint lacks"):
        ExpertPlan(resolve(str(folder)), torch.float32)


def test_a_scale_that_the_dtype_lacks_is_refused(plain: Path, tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors[f"{OWN}.scales"][1, 7] = 60_000.0
        tensors[f"{OWN}.qweight"][:, 7] = 0x0F0F0F0F

    folder = rewrite(save_int4(plain, tmp_path / "model", KINDS["gptq"]), enlarge)
    with pytest.raises(
        CorruptCheckpoint,
        match=rf"{OWN}\.scales in .*: expert 3 has a scale of 6e\+04, whose weights torch\.float16 lacks",
    ):
        ensure_pack(resolve(str(folder)), "float16", cache_dir=tmp_path)
    ensure_pack(resolve(str(folder)), "bfloat16", cache_dir=tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "eight bits": ("gptq", {"bits": 8}, r"quantised \(gptq\), and its codes have 8 bits: what is served .* has 4"),
    "three bits": ("awq", {"bits": 3}, r"quantised \(awq\), and its codes have 3 bits"),
    "no bits": ("awq", {"bits": None}, r"quantised \(awq\), and its settings have no bits: what is served .* has 4"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, r"laid out for one product .*\(marlin\).*gptq or gptq_v2"),
    "older marlin": ("gptq", {"is_marlin_format": True}, r"\(marlin\)"),
    "gemv": ("awq", {"version": "gemv"}, r"\(gemv\): what is served is the version gemm"),
    "gemv_fast": ("awq", {"version": "GEMV_FAST"}, r"\(gemv_fast\)"),
    "llm-awq": ("awq", {"backend": "llm-awq"}, "another product"),
    "no group size": ("gptq", {"group_size": "many"}, r"its group_size is 'many'"),
    "groups of none": ("awq", {"group_size": 0}, r"its group_size is 0"),
    "floats": ("packed", {"format": "float-quantized"}, r"its format is float-quantized"),
    "marlin of compressed-tensors": ("packed", {"format": "marlin-24"}, "its format is marlin-24"),
    "keys and values": ("packed", {"kv_cache_scheme": {"num_bits": 8}}, r"its keys and values are quantised"),
    "sparse": ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
    "transformed": ("packed", {"transform_config": {"config_groups": {"a": 1}}}, "its activations are turned"),
    "no groups": ("packed", {"config_groups": {}}, "say nothing of weights"),
    "a list for a map": ("packed", {"config_groups": [1]}, "say nothing of weights"),
    "no rule": ("packed", {"ignore": ["re:("]}, "can not be read"),
}
"""Kind, what was changed in quantization_config, what the refusal must say."""

WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "activations": ({"input_activations": {"num_bits": 8}}, "its activations are quantised"),
    "eight bits": ({"weights": {"num_bits": 8, "type": "int"}}, "its weights are int of 8 bits"),
    "floats": ({"weights": {"num_bits": 4, "type": "float"}}, "its weights are float of 4 bits"),
    "tensors": ({"weights": {"num_bits": 4, "type": "int", "strategy": "tensor"}}, "its scales are by tensor"),
    "blocks": ({"weights": {"num_bits": 4, "type": "int", "strategy": "block"}}, "its scales are by block"),
    "an unknown order": (
        {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "some"}},
        "its actorder is 'some'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_kinds_are_refused_by_name(what: str, plain: Path, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[what]
    folder = set_quantization(save_int4(plain, tmp_path / "model", KINDS[kind]), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        resolve(str(folder))


@pytest.mark.parametrize("what", WEIGHTS)
def test_other_weights_of_compressed_tensors_are_refused_by_name(what: str, plain: Path, tmp_path: Path) -> None:
    changes, message = WEIGHTS[what]
    folder = save_int4(plain, tmp_path / "model", KINDS["packed"])
    groups = settings_of(folder)["config_groups"]
    groups["group_0"] |= changes
    with pytest.raises(UnsupportedModel, match=message):
        resolve(str(set_quantization(folder, config_groups=groups)))


@pytest.mark.parametrize("said", ["dynamic", "GROUP", True])
def test_an_order_by_another_name_is_the_same(said: object, plain: Path, tmp_path: Path) -> None:
    """compressed-tensors has two names of each kind, in letters of any case, and takes true for one of them."""
    folder = save_int4(plain, tmp_path / "model", KINDS["packed-act-order"])
    as_usual = ScriptedExperts.at(ensure_pack(resolve(str(folder)), cache_dir=tmp_path))._weights
    groups = settings_of(folder)["config_groups"]
    groups["group_0"]["weights"]["actorder"] = said
    set_quantization(folder, config_groups=groups)
    found = ScriptedExperts.at(ensure_pack(resolve(str(folder)), cache_dir=tmp_path / "anew"))._weights
    for record, expected in zip(found[1], as_usual[1], strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(record, expected, strict=True))


def test_several_ways_in_one_checkpoint_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = save_int4(plain, tmp_path / "model", KINDS["packed"])
    groups = settings_of(folder)["config_groups"]
    other = groups["group_0"] | {"weights": groups["group_0"]["weights"] | {"group_size": 64}}
    with pytest.raises(UnsupportedModel, match="several schemes of weights"):
        resolve(str(set_quantization(folder, config_groups=groups | {"group_1": other})))
    resolve(str(set_quantization(folder, config_groups=groups | {"group_1": groups["group_0"]})))


@pytest.mark.parametrize(("kind", "part"), [("gptq", "qweight"), ("awq", "qweight"), ("packed", "weight_packed")])
def test_codes_of_which_the_configuration_says_nothing(kind: str, part: str, plain: Path, tmp_path: Path) -> None:
    """As older tools of GPTQ wrote them, with the settings in a file of their own."""
    folder = save_int4(plain, tmp_path / "model", KINDS[kind])
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    hint = rf"; it has .*\.{part}, as .* config\.json has no quantization_config: add it\. .* quantize_config\.json"
    with pytest.raises(CorruptCheckpoint, match=rf"the checkpoint lacks .*\.experts\.gate_up_proj{hint}"):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)


LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "by GPTQModel": ("gptq", {"dynamic": {r"-:.*layers\.1\.mlp\.experts\.": {}}}),
    "by optimum": ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts.0.up_proj"]]}),
    "by AutoAWQ": ("awq", {"modules_to_not_convert": ["layers.1.mlp"]}),
    "by llm-compressor": ("packed", {"ignore": [r"re:.*layers\.1\..*proj$"]}),
    "by llm-compressor, by name": ("packed", {"ignore": [DOWN.format(expert) for expert in range(EXPERTS)]}),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_experts_that_are_left_out_are_taken_as_numbers(what: str, plain: Path, tmp_path: Path) -> None:
    kind, changes = LEFT_OUT[what]
    numbers = torch.randn(EXPERTS, 64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def leave_out(tensors: Tensors) -> None:
        for expert, own in enumerate(numbers):
            as_numbers(tensors, DOWN.format(expert), own.clone())

    folder = rewrite(save_int4(plain, tmp_path / "model", KINDS[kind]), leave_out)
    with pytest.raises(CorruptCheckpoint, match=re.escape(f"{DOWN.format(0)}.weight in ")):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)
    checkpoint = resolve(str(set_quantization(folder, **changes)))
    assert kept_format(checkpoint) is PLAIN_FORMAT
    for asked, hint in (("stored", "; allowed: auto, expanded"), ("lossless", ": use auto or expanded")):
        why = rf"experts_as: '{asked}' .* is stored as numbers, and others are not{hint}"
        with pytest.raises(InvalidConfig, match=why):
            kept_format(checkpoint, experts_as=asked)
    records = ScriptedExperts.at(ensure_pack(checkpoint, cache_dir=tmp_path))._weights
    assert all(torch.equal(record[1], own) for record, own in zip(records[1], numbers, strict=True))


def test_numbers_of_a_layer_behind_the_last_do_not_expand_the_others(plain: Path, tmp_path: Path) -> None:
    """As where the layer that predicts several tokens ahead was not quantised."""
    ahead = {f"model.layers.3.{name}.weight": torch.zeros(64, 64) for name in ("mlp.experts.0.up_proj", "eh_proj")}
    folder = rewrite(save_int4(plain, tmp_path / "model", KINDS["awq"]), lambda tensors: tensors.update(ahead))
    assert kept_format(resolve(str(folder)), experts_as="stored").name == "int4"


STORED = [name for name in KINDS if name not in ("packed-small-groups", "packed-float-scales")]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_records_mean_what_the_codes_mean(name: str, dtype: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(save_int4(plain, tmp_path / "model", KINDS[name])))
    kept = kept_format(checkpoint, dtype, experts_as="stored")
    assert isinstance(kept, Int4)
    plan = ExpertPlan(checkpoint, getattr(torch, dtype), kept)
    stored, expanded = (
        ScriptedExperts.at(ensure_pack(checkpoint, dtype, tmp_path, expert_format=one))._weights
        for one in (kept, PLAIN_FORMAT)
    )
    for layer, *both in zip(plan.layers, stored, expanded, strict=True):
        for record, numbers in zip(*both, strict=True):
            made = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
            kept.expand(layer, record, made)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, numbers, strict=True))


@pytest.mark.parametrize("name", STORED)
def test_a_record_has_hardly_more_than_the_checkpoint(name: str, plain: Path, tmp_path: Path) -> None:
    """By the sizes of Qwen3-30B-A3B, and as its configuration alone tells them."""
    kind, hidden, inner = KINDS[name], 2048, 768
    edit = {"hidden_size": hidden, "moe_intermediate_size": inner, "quantization_config": kind.settings}
    shutil.copy(plain / "config.json", tmp_path / "config.json")
    edit_json(tmp_path / "config.json", lambda config: config.update(edit))
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    shipped = sum(
        tensor.nbytes
        for outputs, inputs in shapes
        for tensor in encode(torch.ones(outputs, inputs), kind, groups_for("a", inputs, kind)).values()
    )
    summary = summarise(resolve_config(str(tmp_path)), experts_as="stored")
    assert summary.expert_format == "int4"
    assert 0.97 * shipped <= summary.mean_expert_bytes <= 1.02 * shipped


@pytest.mark.parametrize(
    ("name", "why"),
    [("packed-small-groups", "its groups of 16 inputs are no whole units of 32"), ("packed-float-scales", "float32")],
)
def test_what_no_record_is_for_is_expanded(name: str, why: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(save_int4(plain, tmp_path / "model", KINDS[name])))
    assert kept_format(checkpoint) is PLAIN_FORMAT
    with pytest.raises(InvalidConfig, match=why):
        kept_format(checkpoint, experts_as="stored")


ORDERED = r"layers\.0\.mlp\.experts\.0\.\w+_proj\.qweight in .*model\.safetensors: expert 0: "
"""The first one that can not stay as it is."""


def test_orders_of_gate_and_up_that_differ_are_expanded(tmp_path: Path, plain: Path) -> None:
    checkpoint = resolve(str(save_int4(plain, tmp_path / "model", KINDS["gptq-act-order"], same=False)))
    with pytest.raises(UnsupportedModel, match=ORDERED + ".* in orders of their own, .* use --experts-as exp"):
        ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept_format(checkpoint, experts_as="stored"))
    assert kept_format(checkpoint) is PLAIN_FORMAT
    ensure_pack(checkpoint, cache_dir=tmp_path)


def test_an_order_that_the_configuration_does_not_know_is_expanded(plain: Path, tmp_path: Path) -> None:
    folder = save_int4(plain, tmp_path / "model", KINDS["gptq-act-order"])
    expected = ensure_pack(resolve(str(folder)), cache_dir=tmp_path)
    checkpoint = resolve(str(set_quantization(folder, desc_act=False)))
    with pytest.raises(UnsupportedModel, match=ORDERED + "a matrix.s inputs are in an order, and by .*config"):
        ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept_format(checkpoint, experts_as="stored"))
    both = (ScriptedExperts.at(path)._weights for path in (expected, ensure_pack(checkpoint, cache_dir=tmp_path)))
    for ours, theirs in zip(*both, strict=True):
        assert all(map(torch.equal, ours[3], theirs[3]))


def test_versions_of_one_shape_have_packs_of_their_own(plain: Path, tmp_path: Path) -> None:
    """The same bytes mean other zero points."""
    folder = save_int4(plain, tmp_path / "model", KINDS["gptq"])
    first = ensure_pack(resolve(str(folder)), cache_dir=tmp_path)
    set_quantization(folder, checkpoint_format="gptq_v2")
    second = ensure_pack(resolve(str(folder)), cache_dir=tmp_path)
    assert first != second
