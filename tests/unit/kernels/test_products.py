"""Which products a model gets: chosen by what its experts are, by the machine, and by the caller."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from greenroom.core.errors import InvalidConfig
from greenroom.moe.kernels import expert_products
from greenroom.moe.kernels.expert_products import (
    Grouped,
    NativeSum,
    PickedExpert,
    TorchSum,
    describe_products,
    native_for,
    use_native,
)
from greenroom.moe.native import library, rows
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import NativeRows, RowLimits, native_rows
from tests.compiled import native as native


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installation without the compiled part."""
    _forget()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    yield
    _forget()


def _forget() -> None:
    native_rows.cache_clear()
    library.native_library.cache_clear()


def experts(**changes: object) -> MixtralExperts:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralExperts(MixtralConfig(**(sizes | changes))).bfloat16()


def test_plain_gated_experts_in_bf16_get_the_compiled_ones(native: NativeRows) -> None:
    assert native_for(experts(), torch.bfloat16, "auto") is native
    assert native_for(experts(), torch.float32, "auto") is None
    assert native_for(experts(), torch.bfloat16, "torch") is None
    assert native_for(experts(hidden_act="gelu"), torch.bfloat16, "auto") is None
    assert native_for(experts(intermediate_size=49), torch.bfloat16, "auto") is None
    assert describe_products(native, torch.bfloat16).startswith(f"compiled ({native.instruction_set}")


def test_gpt_oss_experts_in_bf16_get_them_too(native: NativeRows) -> None:
    def gpt_oss(**changes: object) -> GptOssExperts:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
        return GptOssExperts(GptOssConfig(**(sizes | changes))).bfloat16()

    class Other(GptOssExperts):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up[..., ::2]

    assert native_for(gpt_oss(), torch.bfloat16, "auto") is native
    assert native_for(gpt_oss(), torch.float32, "auto") is None
    assert native_for(gpt_oss(), torch.bfloat16, "torch") is None
    assert native_for(gpt_oss(intermediate_size=49), torch.bfloat16, "auto") is None
    assert native_for(Other(gpt_oss().config), torch.bfloat16, "auto") is None


@pytest.mark.usefixtures("nowhere")
def test_without_them_torch_computes_and_says_why() -> None:
    assert native_for(experts(), torch.bfloat16, "auto") is None
    assert "without a C++ compiler" in describe_products(None, torch.bfloat16)
    assert "bfloat16" in describe_products(None, torch.float32)
    with pytest.raises(NativeUnavailable, match="install one"):
        native_for(experts(), torch.bfloat16, "native")


class Older:
    """A library that was compiled before there was this function."""

    def __init__(self, own: ctypes.CDLL, lacks: str) -> None:
        self._own, self._lacks = own, lacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, f"{name}_of_later" if name == self._lacks else name)


@pytest.mark.parametrize("lacks", ["greenroom_instruction_set", "greenroom_bit_panels", "greenroom_after_attention"])
def test_an_older_library_is_not_used(native: NativeRows, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    older = Older(library.native_library(), lacks)
    monkeypatch.setattr(rows, "native_library", lambda: older)
    native_rows.cache_clear()
    try:
        assert native_for(experts(), torch.bfloat16, "auto") is None
        assert f"undefined symbol: {lacks}_of_later): install greenroom again" in describe_products(
            None, torch.bfloat16
        )
        with pytest.raises(NativeUnavailable, match="is of another version"):
            native_for(experts(), torch.bfloat16, "native")
    finally:
        native_rows.cache_clear()


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidConfig, match="auto, native, torch"):
        native_for(experts(), torch.bfloat16, "fast")


@torch.inference_mode()
def test_more_rows_than_they_are_good_for_go_to_torch(native: NativeRows, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 32, generator=generator).bfloat16()
    weights = torch.randn(96, 32, generator=generator).bfloat16(), torch.randn(32, 48, generator=generator).bfloat16()
    scales = torch.rand(9, 1, generator=generator)
    grouped = Grouped.of(np.zeros((9, 1), dtype=np.int64), 1)

    def compute(some: torch.Tensor, held: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gate, up = nn.functional.linear(some, held[0]).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, held[1])

    reference = TorchSum(hidden, scales, grouped, compute)
    reference.run([PickedExpert(0, 9, weights)])
    monkeypatch.setattr(native, "limits", RowLimits(8, 8, 8))
    beyond = NativeSum(hidden, scales, grouped, compute, native)
    beyond.run([PickedExpert(0, 9, weights)])
    assert torch.equal(beyond.output, reference.output)
    assert torch.equal(
        beyond.contribution(PickedExpert(0, 9, weights)), reference.contribution(PickedExpert(0, 9, weights))
    )


@torch.inference_mode()
def test_a_model_keeps_what_is_not_plain(native: NativeRows) -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            shifted: torch.Tensor = super().forward(hidden) + hidden
            return shifted

    model = nn.ModuleDict(
        {
            "norm": LlamaRMSNorm(32),
            "shifted": ShiftedRMSNorm(32),
            "linear": nn.Linear(32, 8),
            "odd": nn.Linear(31, 8),
            "router": nn.Sequential(nn.Linear(32, 4)),
        }
    ).bfloat16()
    some = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = {name: model[name](some) for name in ("norm", "linear")}
    use_native(model, native, [model["router"]])
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert changed == {"norm", "linear", "router"}, "a router runs as it is, and its linear maps are compiled"
    for name, expected in before.items():
        torch.testing.assert_close(model[name](some), expected, rtol=2**-6, atol=2**-9)
    wide = some.repeat(7, 1)[None]
    torch.testing.assert_close(model["linear"](wide)[0, :3], before["linear"], rtol=2**-6, atol=2**-9)


def test_all_names_are_in_the_workers_configuration() -> None:
    from greenroom.worker.model.config import PRODUCTS

    assert expert_products.PRODUCTS == PRODUCTS
