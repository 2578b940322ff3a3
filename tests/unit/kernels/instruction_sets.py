"""For tests of the compiled products: everything in such a file holds of each instruction set that this processor has.

A file that imports it is skipped with the reason where there are no compiled products.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import NativeRows, native_rows

try:
    native: NativeRows = native_rows()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture(params=native.instruction_sets, scope="module", autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use(request.param)
    yield request.param
    native.use(native.instruction_sets[0])


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
