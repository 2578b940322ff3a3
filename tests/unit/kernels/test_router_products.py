"""A router's linear map by the compiled products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from greenroom.moe.kernels.router_products import use_native_linear
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import NativeRows, RowLimits, native_rows

try:
    shared: NativeRows = native_rows()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

EXPERTS, HIDDEN, ROWS = 64, 2048, 100


class Router(nn.Module):
    """Computes its logits as some families do: in bf16, or in fp32 whatever its weights are; with or without a bias."""

    def __init__(self, dtype: torch.dtype, *, biased: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16())
        self.bias = nn.Parameter(torch.randn(EXPERTS, generator=generator).to(dtype)) if biased else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.to(self.dtype), self.weight.to(self.dtype), self.bias)


@pytest.fixture
def native() -> NativeRows:
    found = shared.for_a_model()
    found.remove_limits()
    return found


def rows_of(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_logits_are_the_routers_and_alike_in_any_company(native: NativeRows, dtype: torch.dtype, biased: bool) -> None:
    router, rows = Router(dtype, biased=biased), rows_of()
    expected = router(rows)
    use_native_linear(router, native)
    found = router(rows)
    assert found.dtype is dtype
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-7 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)
    for some in (slice(0, 1), slice(3, 20), slice(99, 100)):
        assert torch.equal(router(rows[some]), found[some])
    assert torch.equal(router(rows.view(2, ROWS // 2, HIDDEN)), found.view(2, ROWS // 2, EXPERTS))


@torch.inference_mode()
def test_what_the_compiled_products_are_not_for_stays_torchs(native: NativeRows) -> None:
    router, rows = Router(torch.bfloat16, biased=False), rows_of()
    expected = router(rows)
    use_native_linear(router, native)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(native), "linear", None)  # called, it fails
        native.limits = RowLimits(ROWS - 1, 0, 0)
        assert torch.equal(router(rows), expected)
    native.remove_limits()
    router.dtype = torch.float64
    assert router(rows[:2]).dtype is torch.float64
    router.dtype = torch.bfloat16
    apart = rows.repeat(1, 2)[:, ::2]
    assert torch.equal(router(apart), router(apart.contiguous()))


@pytest.mark.parametrize("spelling", [torch.sigmoid, torch.Tensor.sigmoid, nn.functional.sigmoid])
@pytest.mark.parametrize("experts", [24, 256])
@torch.inference_mode()
def test_scores_are_alike_in_any_company(
    native: NativeRows, experts: int, spelling: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """torch's sigmoid of floats differs by an ulp between whole vectors and what a thread's share leaves."""
    router = nn.Module()
    router.forward = spelling
    use_native_linear(router, native)
    logits = 4 * torch.randn(301, experts, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = router(logits)
        alone = torch.cat([router(row[None]) for row in logits])
        few = torch.cat([router(some) for some in torch.split(logits, 7)])
        across = router(logits.t().contiguous().t())
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(found, logits.sigmoid())
    assert torch.equal(found, alone)
    assert torch.equal(found, few)
    assert torch.equal(found, across)
