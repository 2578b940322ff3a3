"""Linear layers outside the experts that stay as they are stored: which, what they mean, and what they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from greenroom.moe.architecture.families import PROVEN
from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.forward.batch_invariance import require
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.forward.ragged_probe import experts_bypassed
from greenroom.moe.kernels.stored_linear import StoredLinear
from greenroom.moe.loading import kept_format
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import keeps_dense
from greenroom.moe.loading.load_model import LoadedMoE, load
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import LinearWeights, NativeRows
from greenroom.worker.model.checkpoint_summary import summarise
from greenroom.worker.model.memory_needs import dense_bytes
from tests.compiled import native as native
from tests.contract.exactness.models import batch_logits
from tests.fp8_checkpoints import rewrite, to_fp8
from tests.int4_checkpoints import KINDS, save_int4
from tests.matrices import matrix
from tests.random_checkpoints import FAMILIES, Family, edit_json, save_random

SIZES: dict[str, Any] = {"hidden_size": 160, "moe_intermediate_size": 144, "head_dim": 32}
"""Of which neither is a multiple of a block, and the heads are as wide as lean steps need."""
LATENT: dict[str, Any] = {"hidden_size": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
SPARSE = {**FAMILIES["deepseek_v3"].config, **LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16}
UNPROVEN = {
    "deepseek_v32": Family("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", SPARSE),
    "glm_moe_dsa": Family("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", SPARSE),
}
"""Families that ask a linear layer for its weight, one of whose layers transformers has a say on the dtype of."""
STACKED = {"gpt_oss": "re:.*experts", "granitemoe": "re:.*block_sparse_moe"}
"""Whose experts are stacked on disk, and so stay numbers beside codes, which FP8 has no words for: what is left out."""
LLAMA_CPP: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    "qwen2_moe": {
        "hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "mlp_only_layers": [],
    },
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
}  # fmt: skip


def fp8(root: Path, family: str = "qwen3_moe", kind: str = "blocks", **sizes: Any) -> Path:
    return to_fp8(save_random(family, root / "plain", dtype=torch.bfloat16, **(sizes or SIZES)), root / "model", kind)


def int4(root: Path, kind: str) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    return save_int4(
        save_random("qwen3_moe", root / "plain", dtype=torch.bfloat16, **sizes), root / "model", KINDS[kind]
    )


def gguf(root: Path, family: str, *kinds: str) -> Path:
    """Matrices of these types in turns; the head of the last one."""
    written = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
    checkpoints = pytest.importorskip("tests.gguf_checkpoints")
    types = [written.GGMLQuantizationType[kind] for kind in kinds]
    return checkpoints.save_gguf(  # type: ignore[no-any-return]
        save_random(family, root / "plain", dtype=torch.bfloat16, **LLAMA_CPP[family]), root / "model.gguf",
        lambda name: types[-1] if name == "output.weight" else types[len(name) % len(types)],
    )  # fmt: skip


MADE: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "fp8 blocks": (fp8, {"fp8-blocks"}),
    "fp8 channels": (lambda root: fp8(root, kind="compressed-channels"), {"fp8-rows"}),
    "fp8 with shared experts": (lambda root: fp8(root, "qwen2_moe", hidden_size=128), {"fp8-blocks"}),
    "fp8 with latent attention": (lambda root: fp8(root, "deepseek_v3", **LATENT), {"fp8-blocks"}),
    "gptq with an order": (lambda root: int4(root, "gptq-act-order"), {"int4"}),
    "awq": (lambda root: int4(root, "awq-bf16"), {"int4"}),
    "packed": (lambda root: int4(root, "packed"), {"int4"}),
    "packed, scales in float32": (lambda root: int4(root, "packed-float-scales"), set()),
    "packed, small groups": (lambda root: int4(root, "packed-small-groups"), set()),
    "Q8_0": (lambda root: gguf(root, "qwen2_moe", "Q8_0"), {"int8"}),
    "MXFP4 and Q8_0": (lambda root: gguf(root, "qwen3_moe", "MXFP4", "Q8_0"), {"fp4", "int8"}),
    "Q4_K and Q6_K": (lambda root: gguf(root, "qwen3_moe", "Q4_K", "Q6_K"), {"q4_k", "q6_k"}),
    "neighbours paired": (lambda root: gguf(root, "mixtral", "Q8_0"), {"int8"}),
    "Q5_K, which no product knows, and Q8_0": (lambda root: gguf(root, "qwen3_moe", "Q5_K", "Q8_0"), {"int8"}),
}
"""A checkpoint, and the formats of what stays."""


class Models:
    """Each checkpoint, loaded as it is stored and expanded; each is made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], LoadedMoE] = {}
        self._paths: dict[str, Path] = {}

    def path(self, what: str) -> Path:
        if what not in self._paths:
            folder = self._root / str(len(self._paths))
            folder.mkdir()
            self._paths[what] = MADE[what][0](folder)
        return self._paths[what]

    def get(self, what: str, dense_as: str) -> LoadedMoE:
        if (what, dense_as) not in self._made:
            self._made[what, dense_as] = load(resolve(str(self.path(what))), dense_as=dense_as)
        return self._made[what, dense_as]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("what", MADE)
def test_what_stays_means_what_it_is_expanded_to(native: NativeRows, models: Models, what: str) -> None:
    """A row of the unit matrix gives a column of the weight, rounded once: to the bit."""
    stored, expanded = (models.get(what, kept) for kept in ("auto", "expanded"))
    assert set(stored.dense_formats) == MADE[what][1]
    assert expanded.dense_formats == ()
    kept = {name: one for name, one in stored.model.named_modules() if isinstance(one, StoredLinear)}
    assert bool(kept) == bool(stored.dense_formats)
    for name, linear in expanded.model.named_modules():
        if (own := kept.get(name)) is not None:
            columns = native.linear_layer(torch.eye(own.in_features).bfloat16(), without_bias(own.weights))
            assert torch.equal(columns, linear.weight.T), name
    others = dict(stored.model.named_parameters())
    for name, value in expanded.model.named_parameters():
        if name.removesuffix(".weight") not in kept:
            assert torch.equal(others[name], value), name


def without_bias(weights: LinearWeights) -> LinearWeights:
    own = LinearWeights.from_buffer_copy(weights)
    own.bias = None
    return own


@pytest.mark.parametrize("what", MADE)
def test_headers_tell_what_dense_weights_take(native: NativeRows, models: Models, what: str) -> None:
    for kept in ("auto", "expanded"):
        told, loaded = summarise(resolve_config(str(models.path(what))), dense_as=kept), models.get(what, kept)
        assert told.dense_bytes == dense_bytes(loaded.model)
        assert told.dense_formats == loaded.dense_formats


@pytest.mark.parametrize("what", [what for what in MADE if "shared" not in what and "latent" not in what])
def test_lean_steps_are_those_of_the_modules(native: NativeRows, models: Models, what: str) -> None:
    """To the bit, of prompts and of single rows, whichever projections stay."""
    loaded = models.get(what, "auto")
    assert loaded.native is not None
    loaded.native.remove_limits()
    ragged = RaggedModel(loaded.model, native=loaded.native)
    try:
        assert ragged.lean is not None
        with torch.inference_mode(), experts_bypassed(loaded.model):
            lean = batch_logits(ragged)
            ragged.lean = None
            modules = batch_logits(ragged)
    finally:
        ragged.restore()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(lean, modules, strict=True))


@pytest.mark.parametrize("what", ["fp8 with shared experts", "fp8 with latent attention"])
def test_company_changes_no_row_of_modules(native: NativeRows, models: Models, what: str) -> None:
    """Which compute the layers around other attention, and shared experts."""
    loaded = models.get(what, "auto")
    ragged = RaggedModel(loaded.model, native=loaded.native)
    try:
        require(loaded, ragged)
    finally:
        ragged.restore()


def test_codes_take_the_checkpoints_bytes(native: NativeRows, tmp_path: Path) -> None:
    path = fp8(tmp_path, hidden_size=256, moe_intermediate_size=32, head_dim=64)
    plan = ExpertPlan(resolve(str(path)), torch.bfloat16, dense_as_stored=True)
    stored = sum(one.nbytes for matrix in plan.dense_stored.values() for one in matrix.stored)
    assert stored <= sum(matrix.nbytes for matrix in plan.dense_stored.values()) <= 1.02 * stored


def test_routers_a_tied_head_and_embeddings_stay_numbers(native: NativeRows, tmp_path: Path) -> None:
    written = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
    checkpoints = pytest.importorskip("tests.gguf_checkpoints")
    folder = save_random(
        "qwen3_moe", tmp_path / "plain", dtype=torch.bfloat16, tie_word_embeddings=True, **LLAMA_CPP["qwen3_moe"]
    )
    model = load(
        resolve(str(checkpoints.save_gguf(folder, tmp_path / "a.gguf", written.GGMLQuantizationType.Q8_0)))
    ).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    kept = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, StoredLinear)}
    assert kept == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_they_stay_where_compiled_products_are(native: NativeRows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeps_dense(torch.bfloat16)
    assert keeps_dense(torch.bfloat16, "stored")
    assert not keeps_dense(torch.bfloat16, "expanded")
    elsewhere: list[tuple[torch.dtype, dict[str, str], str]] = [
        (torch.float32, {}, "computed in float32"),
        (torch.bfloat16, {"products": "torch"}, "torch computes its products"),
        (torch.bfloat16, {"device": "cuda"}, "torch computes its products on cuda"),
    ]
    for dtype, where, why in elsewhere:
        assert not keeps_dense(dtype, **where)
        with pytest.raises(InvalidConfig, match=f"dense_as: 'stored' is not allowed; .*{why}"):
            keeps_dense(dtype, "stored", **where)
    with pytest.raises(InvalidConfig, match="dense_as: 'lossless' is not allowed; allowed: auto, stored, expanded"):
        keeps_dense(torch.bfloat16, "lossless")

    def none() -> NativeRows:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(kept_format, "native_rows", none)
    assert not keeps_dense(torch.bfloat16)
    with pytest.raises(InvalidConfig, match="no compiler"):
        keeps_dense(torch.bfloat16, "stored")


def test_codes_of_another_shape_are_refused(native: NativeRows, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:128].contiguous()
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][:1].contiguous()

    folder = rewrite(fp8(tmp_path), change)
    with pytest.raises(
        CorruptCheckpoint, match=rf"{name} in .*model\.safetensors has codes of \(128, 128\), and by the"
    ):
        load(resolve(str(folder)))


@matrix(1, family=[*FAMILIES, *UNPROVEN])
def test_every_family_says_the_same_with_layers_as_stored(
    native: NativeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Of those that are not proven ``auto`` expands them: their modules may use a weight in ways of their own."""
    if family in UNPROVEN:
        monkeypatch.setitem(FAMILIES, family, UNPROVEN[family])
    plain = save_random(family, tmp_path / "plain", dtype=torch.bfloat16)
    if family not in STACKED:
        folder, stored = to_fp8(plain, tmp_path / "model"), "fp8-blocks"
    else:
        folder, stored = save_int4(plain, tmp_path / "model", KINDS["packed"]), "int4"
        edit_json(folder / "config.json", lambda config: config["quantization_config"].update(ignore=[STACKED[family]]))
    checkpoint = resolve(str(folder))
    logits = {}
    for kept in ("expanded", "auto", "stored"):
        loaded = load(checkpoint, dense_as=kept)
        stays = kept == "stored" or (kept == "auto" and family in PROVEN)
        assert loaded.dense_formats == ((stored,) if stays else ())
        for layer in loaded.layers:
            if not layer.stacked:  # Switch Transformers, whose experts are not bypassed below
                loaded.model.get_submodule(layer.name).forward = lambda rows, *routing: torch.zeros_like(rows)
        tokens = torch.arange(1, 9)[None]
        inputs = {"input_ids": tokens} if loaded.decoder_only else {"input_ids": tokens, "decoder_input_ids": tokens}
        with torch.inference_mode(), experts_bypassed(loaded.model):
            logits[kept] = loaded.model(**inputs, use_cache=False).logits.float()
    assert torch.equal(logits["auto"], logits["stored" if family in PROVEN else "expanded"])
    far = (logits["stored"] - logits["expanded"]).norm() / logits["expanded"].norm()
    assert far < 0.1, "a wrong layer is far off by more than one"


def test_layers_that_are_kept_wider_are_expanded(native: NativeRows, tmp_path: Path) -> None:
    """Their rows are no bf16."""
    path = "model.layers.1.self_attn.o_proj"
    checkpoint = resolve(str(fp8(tmp_path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_class(checkpoint.config), "_keep_in_fp32_modules_strict", [f"{path}.weight"])
        model = load(checkpoint).model
    linear = model.get_submodule(path)
    assert type(linear) is nn.Linear
    assert linear.weight.dtype is torch.float32
    assert type(model.get_submodule(path.replace("1", "2"))) is StoredLinear


def test_inputs_in_no_order_that_the_settings_say_are_expanded_or_refused(native: NativeRows, tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.q_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{path}.g_idx"] = tensors[f"{path}.g_idx"].flip(0).contiguous()

    checkpoint = resolve(str(rewrite(int4(tmp_path, "gptq"), change)))
    own, numbers = (load(checkpoint, dense_as=kept).model for kept in ("auto", "expanded"))
    linear = own.get_submodule(path)
    assert type(linear) is nn.Linear
    assert torch.equal(linear.weight, numbers.get_submodule(path).weight)
    assert type(own.get_submodule(path.replace("q_proj", "k_proj"))) is StoredLinear
    with torch.inference_mode(), experts_bypassed(own):
        assert own(input_ids=torch.arange(1, 9)[None], use_cache=False).logits.isfinite().all()
    with pytest.raises(UnsupportedModel, match=rf"{path}\.g_idx in .*model\.safetensors: a matrix's inputs are in an"):
        load(checkpoint, dense_as="stored")
